"""One request of a trace, and how its file is written: names of fields, time unit, block length, meaning of a turn."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbm.errors import UsageError

DEFAULT_BLOCK_TOKENS = 512
MAX_BLOCK_TOKENS = 65536
MIN_TIME_SCALE, MAX_TIME_SCALE = 1e-6, 1e6
INPUTS = ("input_length", "text_input", "messages", "payload")
FIELDS = (
    *("timestamp", "delay", "session_id", "input_length", "output_length", "hash_ids"),
    *("text_input", "messages", "tools", "payload", "extra"),
)


class Turns(enum.StrEnum):
    """What a line of a later turn of a session holds."""

    ADDED = "added"  # what the turn adds to the earlier turns and their answers, as aiperf reads it
    WHOLE = "whole"  # the whole prompt


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """`columns` maps a field to its name in the file. `time_scale` multiplies all times. UsageError for wrong ones."""

    block_tokens: int = DEFAULT_BLOCK_TOKENS
    time_scale: float = 1.0
    columns: Mapping[str, str] = field(default_factory=dict)
    turns: Turns = Turns.ADDED

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= MAX_BLOCK_TOKENS:
            raise UsageError(
                f"the tokens of a block must be from 1 to {MAX_BLOCK_TOKENS}, not {self.block_tokens}",
                hint="Mooncake's traces have blocks of 512 tokens",
            )
        if not MIN_TIME_SCALE <= self.time_scale <= MAX_TIME_SCALE:
            raise UsageError(f"the time scale must be from 0.000001 to 1000000, not {self.time_scale:g}")
        for name in self.columns:
            if name not in FIELDS:
                raise UsageError(f"a trace has no field `{name}`", hint=f"fields are {', '.join(FIELDS)}")
        names = [self.name(one) for one in FIELDS]
        for name in names:
            if names.count(name) > 1:
                given = [one for one in FIELDS if self.name(one) == name]
                raise UsageError(f"the fields {' and '.join(f'`{one}`' for one in given)} have one column, `{name}`")

    def name(self, field_name: str) -> str:
        """Return the name of a field in the file."""
        return self.columns.get(field_name, field_name)


def parse_columns(texts: list[str]) -> dict[str, str]:
    """Return the `columns` of a TraceFormat from texts such as `input_length=prompt_tokens`."""
    columns: dict[str, str] = {}
    for text in texts:
        name, separator, column = text.partition("=")
        if not separator or not name or not column:
            raise UsageError(
                f"a column must be given as FIELD=NAME, not `{text}`", hint="for example `input_length=prompt_tokens`"
            )
        if name in columns:
            raise UsageError(f"`{name}` has two columns, `{columns[name]}` and `{column}`")
        columns[name] = column
    return columns


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line. Exactly one of `input_tokens`, `text`, `messages` and `payload` is not None.

    `line` counts from 1. Times are in milliseconds, already scaled. `hash_ids` has one id per block of `input_tokens`.
    """

    line: int
    timestamp_ms: float | None
    delay_ms: float | None
    session_id: str | None
    input_tokens: int | None
    output_tokens: int | None
    hash_ids: tuple[int, ...] | None
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    payload: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] | None = None

    @property
    def input_kind(self) -> str:
        """The field that holds the prompt."""
        values = (self.input_tokens, self.text, self.messages, self.payload)
        return next(name for name, value in zip(INPUTS, values, strict=True) if value is not None)
