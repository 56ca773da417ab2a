"""One request of one arm, as the client saw it. A failed request has a record too, with `error` set."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestRecord:
    """Times are in milliseconds since the arm's start; `None` if the event never happened.

    `cached_tokens` is the part of the prompt that was not computed. `g1_tokens` and `g2_tokens` split it by tier; they
    are `None` if the engine does not report the tier per request.
    """

    arm: str
    index: int
    user: int
    turn: int
    intended_ms: float
    error: str | None = None
    http_status: int | None = None
    launched_ms: float | None = None
    first_token_ms: float | None = None
    last_token_ms: float | None = None
    end_ms: float | None = None
    token_gaps_ms: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    g1_tokens: int | None = None
    g2_tokens: int | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def key(self) -> tuple[int, int]:
        return self.user, self.turn

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token from the intended launch, which is what the user waits."""
        return None if self.first_token_ms is None else self.first_token_ms - self.intended_ms

    @property
    def ttft_from_launch_ms(self) -> float | None:
        if self.first_token_ms is None or self.launched_ms is None:
            return None
        return self.first_token_ms - self.launched_ms

    @property
    def end_to_end_ms(self) -> float | None:
        return None if self.end_ms is None else self.end_ms - self.intended_ms

    @property
    def lateness_ms(self) -> float | None:
        return None if self.launched_ms is None else self.launched_ms - self.intended_ms

    @property
    def computed_tokens(self) -> int | None:
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "status": "ok" if self.is_ok else "error",
            "ttft_ms": self.ttft_ms,
            "ttft_from_launch_ms": self.ttft_from_launch_ms,
            "end_to_end_ms": self.end_to_end_ms,
            "lateness_ms": self.lateness_ms,
            "computed_tokens": self.computed_tokens,
        }
