"""Formats of public traces, recognised by the beginning of the file and read as if they were Mooncake's.

docs/reference/trace.md has a table: what each format has, what it lacks, and where blocks come from.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvbm.errors import ProfileError
from kvbm.text.outside import shown, shown_json
from kvbm_cli.bench.trace import spans, texts
from kvbm_cli.bench.trace.request import INPUTS, SESSION_BITS, Fields, TraceLines, Turns, json_object
from kvbm_cli.bench.workload.files import AZURE, BURSTGPT, SESSION_LISTS, SHAREGPT

OWN_BLOCK = 1 << (SESSION_BITS - 1)
_BAILIAN = b'"parent_chat_id"'
_SHARED_NAMES = ("input_length", "output_length", "hash_ids")  # of Bailian's fields and Mooncake's
_SPANS = b'"resourceSpans"'
_TURNS, _TEXT = (re.compile(rb'[{,]\s*"%s"\s*:' % name) for name in (b"turns", b"texts?"))
_INPUTS = re.compile(rb'[{,]\s*"(%s)"\s*:' % "|".join(INPUTS).encode())
TEXT_BLOCK_TOKENS = 16
_BLOCK_SIZE = re.compile(rb'"block_size"\s*:\s*(\d{1,5})\b')


@dataclass(frozen=True, slots=True)
class TraceDialect:
    """`read` returns the fields of every request with the number of its line. ProfileError, without the name of the
    file, for a wrong line. `block_tokens` is `None` if the format has no blocks."""

    name: str
    block_tokens: int | None
    read: Callable[[TraceLines], Fields]
    turns: Turns = Turns.WHOLE


def dialect_of(head: bytes, *, has_text_column: bool = False) -> TraceDialect | None:
    """Return the format of a file that begins with `head`; `None` for Mooncake's, and for what is no trace.

    A file whose column of texts is given is Mooncake's, also if the column has the name that aiperf uses.
    """
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    first = text.partition(b"\n")[0].strip()
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
    if first.startswith(b"{") and _SPANS in first:
        return TraceDialect("OpenTelemetry's spans", spans.BLOCK_TOKENS, spans.model_calls)
    if (text[:1] == b"[" or first.startswith(b"{")) and SHAREGPT.search(text):
        return TraceDialect("ShareGPT", TEXT_BLOCK_TOKENS, texts.sharegpt, Turns.ADDED)
    if first.startswith(b"{") and not _INPUTS.search(first) and not has_text_column:
        return _of_aiperf(first)
    return None


def _of_aiperf(first: bytes) -> TraceDialect | None:
    if _TURNS.search(first):
        return TraceDialect("aiperf's multi_turn", TEXT_BLOCK_TOKENS, texts.multi_turns, Turns.ADDED)
    if _TEXT.search(first):
        return TraceDialect("aiperf's single_turn", TEXT_BLOCK_TOKENS, texts.single_turns)
    return None


def _azure(lines: TraceLines) -> Fields:
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


def _burstgpt(lines: TraceLines) -> Fields:
    for number, row in _rows(lines):
        try:
            launch_ms = float(row["timestamp"]) * 1e3
        except ValueError:
            raise ProfileError(f"{number}: `Timestamp` must be seconds, not `{shown(row['timestamp'])}`") from None
        yield number, {"timestamp": launch_ms, **_lengths(number, row, "request tokens", "response tokens")}


def _rows(lines: TraceLines) -> Iterator[tuple[int, dict[str, str]]]:
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


def _bailian(lines: TraceLines) -> Fields:
    for number, line in lines:
        chat = json_object(number, line)
        seconds = _number(number, chat, "timestamp")
        fields: dict[str, Any] = {name: chat[name] for name in _SHARED_NAMES if name in chat}
        yield number, {"timestamp": seconds * 1e3, **fields}


def _agents(lines: TraceLines) -> Fields:
    """Sessions without a common clock: the first request of each has no time, later ones the pause before them."""
    for position, (number, line) in enumerate(lines):
        session = json_object(number, line)
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


def _number(number: int, values: Mapping[str, Any], name: str) -> float:
    value: Any = values.get(name)
    if type(value) not in (int, float) or not 0 <= value < 1e12:
        raise ProfileError(f"{number}: `{name}` must be a number of seconds, not `{shown_json(value, 60)}`")
    return float(value)
