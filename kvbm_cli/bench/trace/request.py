"""What a trace consists of: lines, requests and sessions.

A file is plain or compressed with gzip. A line and its memory are limited, the file is not. `TraceFormat` says how it
is written: names of fields, time unit, block length, meaning of a turn.

`Sessions` places each line into its session, and estimates when its request is launched. A line without `session_id` is
a session of its own. The launch of a later turn is estimated as if answers took no time: the later one of its
`timestamp` and of the previous launch plus `delay`. The estimate only orders requests.
"""

from __future__ import annotations

import codecs
import contextlib
import enum
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, cast

from kvbm.config.files import require_file
from kvbm.errors import EnvironmentProblem, ProfileError, UsageError, reason_of
from kvbm.text.outside import shown_json
from kvbm.text.reading import LFS_POINTER, parse_json
from kvbm_cli.bench.workload.files import other_format

DEFAULT_BLOCK_TOKENS = 512
INPUTS = ("input_length", "text_input", "messages", "payload")
FIELDS = (
    *("timestamp", "delay", "session_id", "input_length", "output_length", "hash_ids"),
    *("text_input", "messages", "tools", "payload", "extra"),
)
MAX_LINE_BYTES = 32 << 20  # a prompt of a million tokens takes about 5 MB
GZIP_MAGIC = b"\x1f\x8b"
HEAD_BYTES = 4096
LONGEST_HEAD_BYTES = 64 << 10  # keys of a long line may come late
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CHUNK_BYTES = 1 << 20
MAX_SHOWN = 60
CHARACTERS_PER_TOKEN = 4  # about, of English text
SESSION_BITS = 40  # of a block's id, in formats whose ids are valid in one session: the others are for the session
Fields = Iterator[tuple[int, dict[str, Any]]]


class Turns(enum.StrEnum):
    """What a line of a later turn of a session holds."""

    ADDED = "added"  # what the turn adds to the earlier turns and their answers, as aiperf reads it
    WHOLE = "whole"  # the whole prompt


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """`columns` maps a field to its name in the file. `time_scale` multiplies all times. UsageError for wrong columns.

    Only the first `requests` of the first `sessions` in the file are read, by default all.
    """

    block_tokens: int = DEFAULT_BLOCK_TOKENS
    time_scale: float = 1.0
    columns: Mapping[str, str] = field(default_factory=dict)
    turns: Turns = Turns.ADDED
    requests: int | None = None
    sessions: int | None = None

    def __post_init__(self) -> None:
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

    def texts(self) -> list[str]:
        """Return the text of a prompt that is given as text; a message is one of them, as JSON."""
        if self.text is not None:
            return [self.text]
        payload = self.payload or {}
        prompt = payload.get("prompt")
        if isinstance(prompt, str):
            return [prompt]
        messages = self.messages or payload.get("messages") or ()
        tools = self.tools or payload.get("tools") or ()
        return [json.dumps(one) for one in (prompt, tools, *messages) if one]


class TraceLines:
    """Iterates over (number, line) for lines that are not empty. `bytes_read` of `byte_count` is the progress."""

    def __init__(self, path: Path) -> None:
        require_file(path, "trace", hint="a trace is a `.jsonl` or `.jsonl.gz` file")
        self.path = path
        self.byte_count = 0
        self._raw: io.BufferedReader | None = None
        self._place = ""  # up to which the file was read

    @property
    def bytes_read(self) -> int:
        return self.byte_count if self._raw is None else self._raw.tell()

    def head(self) -> bytes:
        """Return the beginning of the text; nothing of a file that cannot be read, which reading it reports."""
        try:
            with open(self.path, "rb") as raw:
                is_compressed = raw.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC)
                return (gzip.GzipFile(fileobj=raw) if is_compressed else raw).read(LONGEST_HEAD_BYTES)
        except (OSError, EOFError, zlib.error):
            return b""

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        with self._reading() as opened:
            number = 0
            while line := opened.readline(MAX_LINE_BYTES + 1):
                number += 1
                self._place = f"line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise ProfileError(
                        f"{self.path}:{number}: the line is longer than {MAX_LINE_BYTES >> 20} MiB",
                        hint="a trace has one request per line",
                    )
                if text := line.removeprefix(BYTE_ORDER_MARK if number == 1 else b"").strip():
                    yield number, text

    def chunks(self) -> Iterator[str]:
        """Yield the text in pieces, for a file that is not made of lines."""
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        with self._reading() as opened:
            byte_count = 0
            while chunk := opened.read(CHUNK_BYTES):
                try:
                    yield decoder.decode(chunk)
                except UnicodeDecodeError:
                    raise ProfileError(f"{self.path}: not UTF-8 text, in the MiB after byte {byte_count:,}") from None
                byte_count += len(chunk)
                self._place = f"byte {byte_count:,}"

    @contextlib.contextmanager
    def _reading(self) -> Iterator[io.BufferedReader[Any]]:
        """Open the file, and translate what can go wrong while it is read."""
        self._place = "line 0"
        try:
            with open(self.path, "rb") as raw:
                self._raw, self.byte_count = raw, os.fstat(raw.fileno()).st_size
                yield self._opened(raw)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ProfileError(
                f"{self.path}: the gzip data is damaged or incomplete after {self._place}: {error}",
                hint="copy or download the file again; `gzip -t` tests it",
            ) from None
        except OSError as error:
            raise EnvironmentProblem(f"cannot read `{self.path}`: {reason_of(error)}") from None
        finally:
            self._raw = None

    def _opened(self, raw: io.BufferedReader) -> io.BufferedReader[Any]:
        is_compressed = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        raw.seek(0)
        if not is_compressed and self.path.suffix == ".gz" and not raw.peek().startswith(LFS_POINTER):
            raise ProfileError(
                f"{self.path}: the name ends in `.gz`, and the file is not compressed with gzip",
                hint="rename a plain file so that its name ends in `.jsonl`",
            )
        opened = io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=raw))) if is_compressed else raw
        if (other := other_format(opened.peek(HEAD_BYTES)[:HEAD_BYTES])) is not None:
            raise ProfileError(f"{self.path} {other.what}", hint=other.hint)
        return opened


def json_object(number: int, line: bytes) -> dict[str, Any]:
    """Return the object of a line. ProfileError, without the name of the file."""
    try:
        value = parse_json(line.decode())
    except UnicodeDecodeError as error:
        raise ProfileError(
            f"{number}: not UTF-8 text (byte {error.start + 1} of the line is 0x{line[error.start]:02x})"
        ) from None
    except json.JSONDecodeError as error:
        near = shown_value(error.doc[max(0, error.pos - 10) : error.pos + 20])
        raise ProfileError(
            f"{number}: not JSON: {error.msg[:1].lower()}{error.msg[1:]} in column {error.colno}, near {near}",
            hint="a trace has one JSON object per line; if the file is cut, copy it again",
        ) from None
    except ValueError as error:
        raise ProfileError(f"{number}: {error}") from None
    if not isinstance(value, dict):
        raise ProfileError(
            f"{number}: a line must be a JSON object, not {shown_value(value)}",
            hint='for example `{"timestamp": 0, "input_length": 700, "output_length": 50, "hash_ids": [1, 2]}`',
        )
    return value


def shown_value(value: object) -> str:
    """Return the beginning of a value of a trace, in backticks."""
    return f"`{shown_json(value, MAX_SHOWN)}`"


def estimated_tokens(text: str) -> int:
    return -(-len(text) // CHARACTERS_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class Placement:
    """`session` counts from 0, `turn` from 1, `index` is the position in the file, `previous` that of the previous
    turn. `launch_ms` is None in a trace without timestamps, which is a closed loop."""

    index: int
    session: int
    turn: int
    previous: int | None
    launch_ms: float | None


@dataclass(frozen=True, slots=True)
class _Session:
    first_line: int
    input_kind: str
    first_hash_id: int | None
    latest: Placement


class Sessions:
    """Call `place` once per request, in the order of the file. ProfileError for a line that contradicts another."""

    def __init__(self, path: Path, form: TraceFormat) -> None:
        self._path = path
        self._form = form
        self._by_id: dict[str, _Session] = {}
        self._first: TraceRequest | None = None
        self.request_count = 0
        self.session_count = 0

    def place(self, request: TraceRequest) -> Placement:
        session = None if request.session_id is None else self._by_id.get(request.session_id)
        placed = self._first_turn(request) if session is None else self._later_turn(request, session)
        self.request_count += 1
        if session is None:
            self.session_count += 1
        if request.session_id is not None:
            if session is None:
                first_hash_id = request.hash_ids[0] if request.hash_ids else None
                session = _Session(request.line, request.input_kind, first_hash_id, placed)
            self._by_id[request.session_id] = replace(session, latest=placed)
        return placed

    def repeats_answers(self, request: TraceRequest) -> bool:
        """Whether the prompt of a later turn holds the answer to this request."""
        is_added = self._form.turns is Turns.ADDED and request.messages is None and request.payload is None
        return is_added and request.session_id is not None

    def _first_turn(self, request: TraceRequest) -> Placement:
        if self._first is None:
            self._first = request
        if (request.timestamp_ms is None) != (self._first.timestamp_ms is None):
            name, first = self._form.name("timestamp"), self._first.line
            has, lacks = ("", "no ") if request.timestamp_ms is not None else ("no ", "")
            self._refuse(
                request,
                f"the first turn of a session has {has}`{name}` here, and {lacks or 'a '}`{name}` in line {first}",
                hint="give either all sessions a timestamp, or none",
            )
        if request.delay_ms:
            name = self._form.name("delay")
            self._refuse(
                request,
                f"`{name}` is {request.delay_ms:g} ms in the first turn of a session, which follows no other turn",
                hint=f"`{self._form.name('session_id')}` joins the turns of a session",
            )
        return Placement(self.request_count, self.session_count, 1, None, request.timestamp_ms)

    def _later_turn(self, request: TraceRequest, session: _Session) -> Placement:
        previous = session.latest
        if request.input_kind != session.input_kind:
            one, another = self._form.name(request.input_kind), self._form.name(session.input_kind)
            self._refuse(request, f"the session has `{one}` here, and `{another}` in line {session.first_line}")
        self._require_added(request, session, previous.turn + 1)
        if previous.launch_ms is None and request.timestamp_ms is not None:
            name = self._form.name("timestamp")
            self._refuse(request, f"the session has `{name}` here, and none in line {session.first_line}")
        launch_ms = previous.launch_ms
        if launch_ms is not None:
            timestamp_ms = launch_ms if request.timestamp_ms is None else request.timestamp_ms
            self._require_order(request, timestamp_ms, launch_ms)
            launch_ms = max(timestamp_ms, launch_ms + (request.delay_ms or 0.0))
        return Placement(self.request_count, previous.session, previous.turn + 1, previous.index, launch_ms)

    def _require_order(self, request: TraceRequest, timestamp_ms: float, previous_ms: float) -> None:
        if timestamp_ms < previous_ms:
            name = self._form.name("timestamp")
            self._refuse(
                request,
                f"`{name}` is {timestamp_ms:g} ms, and the previous turn of the session is launched at "
                f"{previous_ms:g} ms",
                hint="the turns of a session must be in the order of their launches",
            )

    def _require_added(self, request: TraceRequest, session: _Session, turn: int) -> None:
        """Refuse lines that hold whole prompts. The first block of the session in a later turn shows that the lines
        hold whole prompts."""
        if self._form.turns is Turns.ADDED and request.hash_ids and request.hash_ids[0] == session.first_hash_id:
            self._refuse(
                request,
                f"turn {turn} of the session begins with block {session.first_hash_id}, as line {session.first_line} "
                "does, so it seems to hold the whole prompt instead of what the turn adds",
                hint="add `--turns whole` if each line holds the whole prompt",
            )

    def _refuse(self, request: TraceRequest, message: str, *, hint: str | None = None) -> NoReturn:
        raise ProfileError(f"{self._path}:{request.line}: {message}", hint=hint)
