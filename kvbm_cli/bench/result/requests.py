"""One request of one run, as the client saw it. A failed request has a record too, with `error` set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from types import NoneType
from typing import Any

_TYPES_OF_ANNOTATION: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "str | None": (str, NoneType),
    "int | None": (int, NoneType),
    "float | None": (float, int, NoneType),
    "list[int]": (list,),
    "list[float]": (list,),
}

TIERS = ("g1", "g2", "g3", "g4", "computed")  # where prompt tokens came from


@dataclass(slots=True)
class RequestRecord:
    """Times are in milliseconds since the start of the run; `None` if the event never happened.

    `intended_ms` is the planned launch; in a closed loop, the moment at which the request could start. `launched_ms` is
    right before the first byte is written. `first_token_ms` is the first chunk with text, reasoning or token ids,
    `first_text_ms` the first with text of the answer. `first_chunk_tokens` arrived together; `token_gaps_ms` has one
    value per later token.

    `cached_tokens` is the part of the prompt that was not computed. `g1_tokens` to `g4_tokens` split it by tier; they
    are `None` if the engine does not report it per request. `text` is empty if there are token ids.
    """

    run: str
    arm: str
    cell: str
    pair: int
    index: int
    session: int
    turn: int
    phase: str
    intended_ms: float | None = None
    error: str | None = None
    http_status: int | None = None
    launched_ms: float | None = None
    first_token_ms: float | None = None
    first_text_ms: float | None = None
    last_token_ms: float | None = None
    end_ms: float | None = None
    first_chunk_tokens: int = 0
    token_gaps_ms: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    g1_tokens: int | None = None
    g2_tokens: int | None = None
    g3_tokens: int | None = None
    g4_tokens: int | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def key(self) -> tuple[int, int]:
        return self.session, self.turn

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token from the intended launch, which is what the user waits."""
        return _difference(self.first_token_ms, self.intended_ms)

    @property
    def ttft_from_launch_ms(self) -> float | None:
        return _difference(self.first_token_ms, self.launched_ms)

    @property
    def end_to_end_ms(self) -> float | None:
        return _difference(self.end_ms, self.intended_ms)

    @property
    def lateness_ms(self) -> float | None:
        return _difference(self.launched_ms, self.intended_ms)

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first chunk; `None` with fewer than one such token."""
        later = (self.output_tokens or len(self.token_ids)) - self.first_chunk_tokens
        span_ms = _difference(self.last_token_ms, self.first_token_ms)
        return span_ms / later if span_ms is not None and later > 0 else None

    @property
    def computed_tokens(self) -> int | None:
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens

    @property
    def tokens(self) -> dict[str, int]:
        """Prompt tokens by source, without the unknown ones."""
        found = {tier: getattr(self, f"{tier}_tokens") for tier in TIERS}
        return {tier: count for tier, count in found.items() if count is not None}

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "status": "ok" if self.is_ok else "error",
            "ttft_ms": self.ttft_ms,
            "ttft_from_launch_ms": self.ttft_from_launch_ms,
            "end_to_end_ms": self.end_to_end_ms,
            "lateness_ms": self.lateness_ms,
            "tpot_ms": self.tpot_ms,
            "computed_tokens": self.computed_tokens,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RequestRecord:
        """TypeError if a required field is missing or has another type. Derived values are computed again."""
        for name, (types, wanted) in _TYPES.items():
            if name in data and not isinstance(data[name], types):
                raise TypeError(f"`{name}` is {data[name]!r}, not `{wanted}`")
        return cls(**{name: data[name] for name in _TYPES if name in data})


_TYPES = {one.name: (_TYPES_OF_ANNOTATION[str(one.type)], str(one.type)) for one in fields(RequestRecord)}


def _difference(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else later - earlier
