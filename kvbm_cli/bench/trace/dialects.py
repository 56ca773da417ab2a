"""Formats of public traces, recognised by the beginning of the file and read as if they were Mooncake's.

docs/reference/trace.md has a table: what each format has, what it lacks, and where blocks come from.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvbm.errors import ProfileError
from kvbm.text.outside import shown, shown_json
from kvbm_cli.bench.trace.request import Turns
from kvbm_cli.bench.workload.files import AZURE, BURSTGPT, SESSION_LISTS

Lines = Iterable[tuple[int, bytes]]
Fields = Iterator[tuple[int, dict[str, Any]]]
SESSION_BITS = 40  # of a block's id: the others are for ids in a session
OWN_BLOCK = 1 << (SESSION_BITS - 1)
_BAILIAN = b'"parent_chat_id"'
_SHARED_NAMES = ("input_length", "output_length", "hash_ids")  # of Bailian's fields and Mooncake's
_BLOCK_SIZE = re.compile(rb'"block_size"\s*:\s*(\d{1,5})\b')


@dataclass(frozen=True, slots=True)
class TraceDialect:
    """`read` returns the fields of every request with the number of its line. ProfileError, without the name of the
    file, for a wrong line. `block_tokens` is `None` if the format has no blocks."""

    name: str
    block_tokens: int | None
    read: Callable[[Lines], Fields]
    turns: Turns = Turns.WHOLE


def dialect_of(head: bytes) -> TraceDialect | None:
    """Return the format of a file that begins with `head`; `None` for Mooncake's, and for what is no trace."""
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0].strip()
    if first.lower().startswith(AZURE):
        return TraceDialect("Azure's LLM inference traces", None, _azure)
    if first.lower().startswith(BURSTGPT):
        return TraceDialect("BurstGPT", None, _burstgpt)
    if first.startswith(b"{") and SESSION_LISTS in first:
        size = _BLOCK_SIZE.search(first)
        return TraceDialect(
            "sessions of coding agents, as kv-cache-tester has them", int(size[1]) if size else 64, _agents
        )
    if first.startswith(b"{") and _BAILIAN in first:
        return TraceDialect("Alibaba's Bailian traces", 16, _bailian)
    return None


def _azure(lines: Lines) -> Fields:
    start: datetime | None = None
    for number, row in _rows(lines):
        try:
            launch = datetime.fromisoformat(row["timestamp"])
            start = start or launch
            elapsed_ms = (launch - start).total_seconds() * 1e3
        except (ValueError, TypeError, OverflowError):
            raise ProfileError(
                f"{number}: `TIMESTAMP` must be a date with a time, not `{shown(row['timestamp'])}`"
            ) from None
        yield number, {"timestamp": elapsed_ms, **_lengths(number, row, "contexttokens", "generatedtokens")}


def _burstgpt(lines: Lines) -> Fields:
    for number, row in _rows(lines):
        try:
            launch_ms = float(row["timestamp"]) * 1e3
        except ValueError:
            raise ProfileError(f"{number}: `Timestamp` must be seconds, not `{shown(row['timestamp'])}`") from None
        yield number, {"timestamp": launch_ms, **_lengths(number, row, "request tokens", "response tokens")}


def _rows(lines: Lines) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of CSV after its header, by the names of the columns in lower case."""
    names: list[str] = []
    for number, line in lines:
        try:
            values = next(csv.reader([line.decode(errors="replace")]))
        except csv.Error as error:
            raise ProfileError(f"{number}: not CSV: {error}") from None
        if not names:
            names = [name.strip().lower() for name in values]
        elif len(values) < len(names):
            raise ProfileError(f"{number}: the line has {len(values)} values, and the header {len(names)}")
        else:
            yield number, dict(zip(names, values, strict=False))


def _lengths(number: int, row: Mapping[str, str], prompt: str, answer: str) -> dict[str, int]:
    found = {}
    for name, column in (("input_length", prompt), ("output_length", answer)):
        try:
            found[name] = int(float(row[column]))
        except (KeyError, ValueError, OverflowError):
            given = shown(row.get(column, ""))
            raise ProfileError(f"{number}: `{column}` must be a number of tokens, not `{given}`") from None
    return found


def _bailian(lines: Lines) -> Fields:
    for number, line in lines:
        chat = _object(number, line)
        seconds = _number(number, chat, "timestamp")
        fields: dict[str, Any] = {name: chat[name] for name in _SHARED_NAMES if name in chat}
        yield number, {"timestamp": seconds * 1e3, **fields}


def _agents(lines: Lines) -> Fields:
    """Sessions without a common clock: the first request of each has no time, later ones the pause before them."""
    for position, (number, line) in enumerate(lines):
        session = _object(number, line)
        yield from ((number, one) for one in _session(number, session, str(session.get("id", number)), position))


def _session(number: int, session: Mapping[str, Any], name: str, position: int) -> Iterator[dict[str, Any]]:
    requests = session.get("requests")
    if not isinstance(requests, list) or not all(isinstance(one, dict) for one in requests):
        raise ProfileError(f"{number}: `requests` must be a list of objects, not `{shown_json(requests, 60)}`")
    base = 0 if session.get("hash_id_scope") == "global" else position << SESSION_BITS
    own = (position << SESSION_BITS) + OWN_BLOCK
    ended_s: float | None = None
    for index, one in enumerate(requests):
        if isinstance(one.get("requests"), list):  # a subagent, which has no place in the order of its parent
            yield from _session(number, {**session, **one}, f"{name}/{index}", position)
            continue
        start_s = _number(number, one, "t")
        ids, tokens = one.get("hash_ids"), one.get("in")
        if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < OWN_BLOCK for each in ids):
            raise ProfileError(f"{number}: `hash_ids` of request {index} must be a list of whole numbers")
        block_tokens = session.get("block_size")
        blocks = [base + each for each in ids]
        if type(tokens) is int and type(block_tokens) is int and len(ids) * block_tokens < tokens:
            blocks.append(own + index)  # the last one is not full, and has no id
        delay = {} if ended_s is None else {"delay": max(0.0, start_s - ended_s) * 1e3}
        if tokens and one.get("out"):  # others failed, and are skipped
            ended_s = start_s + _number(number, {"api_time": 0.0, **one}, "api_time")
        yield {"session_id": name, "input_length": tokens, "output_length": one.get("out"), "hash_ids": blocks, **delay}


def _object(number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ProfileError(f"{number}: a line must be a JSON object", hint="the file may be cut: copy it again")
    return found


def _number(number: int, values: Mapping[str, Any], name: str) -> float:
    value: Any = values.get(name)
    if type(value) not in (int, float) or not 0 <= value < 1e12:
        raise ProfileError(f"{number}: `{name}` must be a number of seconds, not `{shown_json(value, 60)}`")
    return float(value)
