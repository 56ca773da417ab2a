"""TraceReader: the requests of a trace file, each line validated. It holds one line at a time.

The format is Mooncake's, with the fields that aiperf adds, or one of `dialects.py`: docs/reference/trace.md. A wrong
line ends the reading with a ProfileError that names the file, the line, the field, the value and what is expected.
Unknown fields are counted.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from kvbm.errors import ProfileError, UsageError
from kvbm_cli.bench.trace.dialects import TraceDialect, dialect_of
from kvbm_cli.bench.trace.request import (
    FIELDS,
    INPUTS,
    TraceFormat,
    TraceLines,
    TraceRequest,
    json_object,
    shown_value,
)

MAX_TOKENS = 10_000_000
MAX_MS = 1e13  # of a time stamp since 1970 in milliseconds, in the year 2286
MAX_HASH_ID = 2**64 - 1


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


_COUNT: tuple[Callable[[Any], object], str] = (
    lambda value: type(value) is int and 1 <= value <= MAX_TOKENS,
    f"a whole number of tokens from 1 to {MAX_TOKENS:,}",
)
# What is a right value of a field.
_EXPECTED: Mapping[str, tuple[Callable[[Any], object], str]] = {
    "session_id": (
        lambda value: value if isinstance(value, str) else type(value) is int and abs(value) <= MAX_HASH_ID,
        "text or a whole number",
    ),
    "input_length": _COUNT,
    "output_length": _COUNT,
    "hash_ids": (
        lambda value: isinstance(value, list) and all(type(one) is int and 0 <= one <= MAX_HASH_ID for one in value),
        "a list of whole numbers from 0 to 2^64 - 1",
    ),
    "text_input": (lambda value: isinstance(value, str) and value, "text"),
    "messages": (
        lambda value: _are_objects(value) and all(isinstance(one.get("role"), str) for one in value),
        "a list of at least one object, each with a text `role`",
    ),
    "tools": (_are_objects, "a list of at least one object"),
    "payload": (
        lambda value: isinstance(value, dict) and ("prompt" in value) != ("messages" in value),
        "the body of a request with either `prompt` or `messages`",
    ),
    "extra": (lambda value: isinstance(value, dict) and value, "an object with at least one key"),
}
_LISTS = ("hash_ids", "messages", "tools")
_WITH_TEXT = ("text_input", "messages", "tools", "payload", "extra")


class TraceReader:
    """Iterates over the requests in the order of the file.

    `ignored` counts the lines with each unknown field. `skipped` counts requests that failed where they were recorded:
    lines whose length of the prompt or of the answer is 0.
    """

    def __init__(self, path: Path, form: TraceFormat) -> None:
        self.path = path
        self.ignored: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.lines = TraceLines(path)
        self._dialect = dialect_of(self.lines.head(), has_text_column="text_input" in form.columns)
        self.form = form = form if self._dialect is None else _form_of(self._dialect, form)
        self._known = frozenset(form.name(name) for name in FIELDS)

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests within the limits of the form. A session keeps all its turns."""
        most = self.form.sessions
        if most is None:
            return islice(self._requests(), self.form.requests)
        return islice(_of_first_sessions(self._requests(), most), self.form.requests)

    def _requests(self) -> Iterator[TraceRequest]:
        is_empty = True
        for number, values in self._values():
            line = _Line(self.path, number, self.form, values)
            line.require_fields(self._known)
            self.ignored.update(line.values.keys() - self._known)
            if (zero := line.length_of_zero()) is not None:
                self.skipped[zero] += 1
                continue
            is_empty = False
            yield line.request()
        if is_empty:
            skipped = "".join(f"; {one}" for one in self.skips())
            raise ProfileError(
                f"{self.path}: the file holds no request{skipped}", hint="a trace has one JSON object per line"
            )

    def _values(self) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            if self._dialect is not None:
                yield from self._dialect.read(self.lines)
            else:
                for number, line in self.lines:
                    yield number, json_object(number, line)
        except ProfileError as error:
            if error.message.startswith(f"{self.path}"):  # the file itself cannot be read
                raise
            raise ProfileError(f"{self.path}:{error.message}", hint=error.hint) from None

    def skips(self) -> list[str]:
        return [
            f"{count:,} {'line is' if count == 1 else 'lines are'} skipped: `{name}` is 0"
            for name, count in sorted(self.skipped.items())
        ]


def _of_first_sessions(requests: Iterator[TraceRequest], most: int) -> Iterator[TraceRequest]:
    """Read on after the last of these sessions has begun: later lines may be turns of them."""
    named: set[str] = set()
    count = 0
    for request in requests:
        if request.session_id is not None and request.session_id in named:
            yield request
        elif count < most:
            count += 1
            named.update([request.session_id] if request.session_id is not None else [])
            yield request


def _form_of(dialect: TraceDialect, form: TraceFormat) -> TraceFormat:
    """Return the form of a trace in a format of others. UsageError for options that are for Mooncake's."""
    if form.columns:
        raise UsageError(f"the file has the format of {dialect.name}, whose columns are known: leave out the columns")
    return replace(form, block_tokens=dialect.block_tokens or form.block_tokens, turns=dialect.turns)


@dataclass(frozen=True, slots=True)
class _Line:
    """The fields of one line and their checks."""

    path: Path
    number: int
    form: TraceFormat
    values: dict[str, Any]

    def require_fields(self, known: frozenset[str]) -> None:
        if self.values and self.values.keys().isdisjoint(known):
            self._refuse(
                f"the line has no field of a trace; its first fields are {self._first_fields()}",
                hint=self._column_hint(),
            )

    def _first_fields(self) -> str:
        return ", ".join(shown_value(name) for name in list(self.values)[:5])

    def _column_hint(self) -> str:
        column = "text_input=prompt" if isinstance(self.values.get("prompt"), str) else "input_length=NAME"
        return f"`--column {column}`, or `columns` in the workload, reads a field with another name"

    def length_of_zero(self) -> str | None:
        """Return the field of a request that failed."""
        names = (self.form.name(name) for name in ("input_length", "output_length"))
        return next((name for name in names if type(self.values.get(name)) is int and self.values[name] == 0), None)

    def request(self) -> TraceRequest:
        given = [name for name in INPUTS if self._get(name) is not None]
        if len(given) != 1:
            names = [f"`{self.form.name(name)}`" for name in given]
            found = f"{' and '.join(names)} are given"
            none = f"there is none; the first fields of the line are {self._first_fields()}"
            self._refuse(
                f"exactly one of {self._names(INPUTS)} is required, and {found if given else none}",
                hint=None if given else self._column_hint(),
            )
        session_id, messages, tools = (self._checked(name) for name in ("session_id", "messages", "tools"))
        input_tokens, hash_ids = self._checked("input_length"), self._checked("hash_ids")
        if hash_ids is not None:
            self._require_blocks(input_tokens, len(hash_ids))
        if tools is not None and messages is None:
            self._refuse(f"`{self.form.name('tools')}` requires `{self.form.name('messages')}`")
        return TraceRequest(
            line=self.number,
            timestamp_ms=self._milliseconds("timestamp"),
            delay_ms=self._milliseconds("delay"),
            session_id=None if session_id is None else str(session_id),
            input_tokens=input_tokens,
            output_tokens=self._checked("output_length"),
            hash_ids=None if hash_ids is None else tuple(hash_ids),
            text=self._checked("text_input"),
            messages=None if messages is None else tuple(messages),
            tools=None if tools is None else tuple(tools),
            payload=self._checked("payload"),
            extra=self._checked("extra"),
        )

    def _get(self, name: str) -> Any:
        return self.values.get(self.form.name(name))

    def _names(self, names: tuple[str, ...]) -> str:
        shown = [f"`{self.form.name(name)}`" for name in names]
        return f"{', '.join(shown[:-1])} and {shown[-1]}"

    def _refuse(self, message: str, *, hint: str | None = None) -> NoReturn:
        raise ProfileError(f"{self.path}:{self.number}: {message}", hint=hint)

    def _checked(self, name: str) -> Any:
        """Return the value of a field, None without one. Of a wrong list, the first wrong element is named."""
        value = self._get(name)
        if value is None:
            return None
        is_right, expected = _EXPECTED[name]
        if not is_right(value):
            parts = value if isinstance(value, list) and name in _LISTS else []
            wrong = next((one for one in parts if not is_right([one])), value)
            self._refuse(f"`{self.form.name(name)}` must be {expected}, not {shown_value(wrong)}")
        if name in _WITH_TEXT:
            self._require_unicode(name, value)
        return value

    def _milliseconds(self, name: str) -> float | None:
        value, most = self._get(name), MAX_MS / self.form.time_scale
        if value is None:
            return None
        is_number = type(value) in (int, float)
        if not is_number or not 0 <= value <= most:
            self._refuse(
                f"`{self.form.name(name)}` must be a number of milliseconds from 0 to {most:.3g}, "
                f"not {shown_value(value)}",
                hint="for microseconds, set the time scale to 0.001" if is_number else None,
            )
        return float(value) * self.form.time_scale

    def _require_blocks(self, input_tokens: int | None, id_count: int) -> None:
        """Refuse hash ids that are not one per block of the prompt."""
        ids, length = self.form.name("hash_ids"), self.form.name("input_length")
        if input_tokens is None:
            self._refuse(f"`{ids}` requires `{length}`")
        block_tokens = self.form.block_tokens
        if id_count != (expected := math.ceil(input_tokens / block_tokens)):
            self._refuse(
                f"`{ids}` has {id_count} ids, and `{length}` {input_tokens} requires {expected} blocks of "
                f"{block_tokens} tokens",
                hint=_other_block(input_tokens, id_count),
            )

    def _require_unicode(self, name: str, value: object) -> None:
        """Half of a surrogate pair is possible in JSON, and in no request."""
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            code = ord(str(error.object)[error.start])
            self._refuse(f"`{self.form.name(name)}` has half of a surrogate pair, U+{code:04X}, not a character")


def _other_block(input_tokens: int, id_count: int) -> str | None:
    """Return a hint with a usual block length that fits, if there is one."""
    for block_tokens in (512, 16, 32, 64, 128, 256, 1024):
        if math.ceil(input_tokens / block_tokens) == id_count:
            return f"{block_tokens} tokens per block would fit this line"
    return None
