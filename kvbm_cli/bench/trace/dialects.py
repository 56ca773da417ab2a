"""Formats of public traces, recognised by the beginning of the file and read as if they were Mooncake's.

docs/reference/trace.md has a table: what each format has, what it lacks, and where blocks come from.

Data sets of texts are ShareGPT's, and the files that aiperf reads beside Mooncake's. A line of a conversation holds
what the turn adds. The answers in the files of ShareGPT only decide how long an answer is: the engine's own answers are
in later prompts.

Spans are exports of OpenTelemetry: a line is an OTLP export in JSON (`resourceSpans`), as the collector's file exporter
writes it. The semantic conventions for generative AI define the names; token counts may also have their older names.
Texts in the spans are not read. A span has no blocks. In a conversation, a prompt that has room for the previous prompt
and its answer is assumed to begin with both. A shorter one shares nothing, as after a summary. Calls that overlap in
time are sessions of their own, as subagents are.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, count
from typing import Any

from kvbm.errors import ProfileError
from kvbm.text.outside import shown
from kvbm_cli.bench.trace.request import (
    INPUTS,
    MAX_LINE_BYTES,
    SESSION_BITS,
    Fields,
    TraceLines,
    Turns,
    estimated_tokens,
    json_object,
    shown_value,
)
from kvbm_cli.bench.workload.files import AZURE, BURSTGPT, SESSION_LISTS, SHAREGPT

OWN_BLOCK = 1 << (SESSION_BITS - 1)
_BAILIAN = b'"parent_chat_id"'
_SHARED_NAMES = ("input_length", "output_length", "hash_ids")  # of Bailian's fields and Mooncake's
_SPANS = b'"resourceSpans"'
_TURNS, _TEXT = (re.compile(rb'[{,]\s*"%s"\s*:' % name) for name in (b"turns", b"texts?"))
_INPUTS = re.compile(rb'[{,]\s*"(%s)"\s*:' % "|".join(INPUTS).encode())
TEXT_BLOCK_TOKENS = 16
_BLOCK_SIZE = re.compile(rb'"block_size"\s*:\s*(\d{1,5})\b')
_SEPARATORS = re.compile(r"[\s,\[\]]*")
_ANSWERING = ("gpt", "chatgpt", "assistant", "bing", "bard")  # values of `from`
_OWN_FIELDS = ("text", "texts", "role", "type", "session_id")
SPAN_BLOCK_TOKENS = 16
_PROMPT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_ANSWER = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_OPERATIONS = (None, "chat", "text_completion", "generate_content")  # others repeat the counts of these
_VALUES = ("stringValue", "intValue")


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
        return TraceDialect("OpenTelemetry's spans", SPAN_BLOCK_TOKENS, _model_calls)
    if (text[:1] == b"[" or first.startswith(b"{")) and SHAREGPT.search(text):
        return TraceDialect("ShareGPT", TEXT_BLOCK_TOKENS, _sharegpt, Turns.ADDED)
    if first.startswith(b"{") and not _INPUTS.search(first) and not has_text_column:
        return _of_aiperf(first)
    return None


def _of_aiperf(first: bytes) -> TraceDialect | None:
    if _TURNS.search(first):
        return TraceDialect("aiperf's multi_turn", TEXT_BLOCK_TOKENS, _multi_turns, Turns.ADDED)
    if _TEXT.search(first):
        return TraceDialect("aiperf's single_turn", TEXT_BLOCK_TOKENS, _single_turns)
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
    requests = _objects_in(number, {"requests": None, **session}, "requests")
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
        raise ProfileError(f"{number}: `{name}` must be a number of seconds, not {shown_value(value)}")
    return float(value)


def _sharegpt(lines: TraceLines) -> Fields:
    """Yield one request per question and its answer. Its number is the position of the conversation."""
    for number, conversation in _objects(lines):
        messages = conversation.get("conversations", conversation.get("items"))
        if not isinstance(messages, list):
            raise ProfileError(f"{number}: a conversation must have a list `conversations` or `items`")
        question = ""
        for message in messages:
            sender, text = _message(number, message)
            if sender.lower() not in _ANSWERING:
                question += text
            elif question:  # an answer without a question is left out
                fields = {"session_id": number, "text_input": question, "output_length": estimated_tokens(text)}
                yield number, fields
                question = ""


def _message(number: int, message: object) -> tuple[str, str]:
    if isinstance(message, dict):
        sender, text = message.get("from"), message.get("value")
        if isinstance(sender, str) and isinstance(text, str):
            return sender, text
    raise ProfileError(f"{number}: a message must have the texts `from` and `value`, not {shown_value(message)}")


def _objects(lines: TraceLines) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of one JSON list, or of a file with one per line. The list may be larger than the memory."""
    decoder = json.JSONDecoder()
    text, number, enough = "", 0, 0
    for chunk in chain(lines.chunks(), [""]):
        text += chunk
        if chunk and len(text) < enough:
            continue
        start = _after_separators(text, 0)
        while start < len(text):
            try:
                found, end = decoder.raw_decode(text, start)
            except (ValueError, RecursionError):
                break  # it may continue in the next chunk
            number += 1
            if not isinstance(found, dict):
                raise ProfileError(f"{number}: a conversation must be an object, not {shown_value(found)}")
            yield number, found
            start = _after_separators(text, end)
        text = text[start:]
        enough = 2 * len(text)
        if len(text) > MAX_LINE_BYTES:
            break
    if text:
        raise ProfileError(
            f"{number + 1}: this conversation is not JSON, or longer than {MAX_LINE_BYTES >> 20} MiB",
            hint="the file may be cut: copy it again",
        )


def _after_separators(text: str, start: int) -> int:
    found = _SEPARATORS.match(text, start)
    assert found is not None, "the pattern matches nothing, too"
    return found.end()


def _single_turns(lines: TraceLines) -> Fields:
    """Yield the lines of aiperf's `single_turn` and `random_pool`. Lines of one session hold whole prompts."""
    for number, line in lines:
        values = json_object(number, line)
        session = {"session_id": values["session_id"]} if "session_id" in values else {}
        yield number, {**session, **_turn(number, values)}


def _multi_turns(lines: TraceLines) -> Fields:
    """Yield the turns of aiperf's `multi_turn`. A system prompt in front is the beginning of the first turn."""
    for number, line in lines:
        values = json_object(number, line)
        turns = _objects_in(number, {"turns": None, **values}, "turns")
        if not turns:
            raise ProfileError(f"{number}: `turns` is empty")
        system = ""
        if turns and turns[0].get("role") == "system" and len(turns) > 1:
            system = _text(number, turns[0])
            turns = turns[1:]
        for index, turn in enumerate(turns):
            fields = _turn(number, turn)
            if index == 0:
                fields["text_input"] = system + fields["text_input"]
            yield number, {"session_id": values.get("session_id", f"line {number}"), **fields}


def _turn(number: int, values: Mapping[str, Any]) -> dict[str, Any]:
    others = {name: value for name, value in values.items() if name not in _OWN_FIELDS}
    return {**others, "text_input": _text(number, values)}


def _text(number: int, values: Mapping[str, Any]) -> str:
    texts = values.get("texts", [values.get("text")])
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts) or not "".join(texts):
        raise ProfileError(f"{number}: a turn must have `text`, or a list of texts `texts`: {shown_value(values)}")
    return "".join(texts)


@dataclass(frozen=True, slots=True)
class _Call:
    line: int
    conversation: str | None
    start_ns: int
    end_ns: int
    prompt_tokens: int
    answer_tokens: int


@dataclass(slots=True)
class _Lane:
    """Calls of one conversation that follow each other. `first_block` names the blocks of its context."""

    name: str
    first_block: int
    latest: _Call


def _model_calls(lines: TraceLines) -> Fields:
    """Yield the calls in the order of their starts. Reads the whole file first: a span is exported when it ends."""
    calls = sorted(_calls(lines), key=lambda call: call.start_ns)
    lanes: dict[str, list[_Lane]] = {}
    contexts = count(1)
    for call in calls:
        fields: dict[str, Any] = {
            "timestamp": (call.start_ns - calls[0].start_ns) / 1e6,
            "input_length": call.prompt_tokens,
            "output_length": call.answer_tokens,
        }
        if call.conversation and call.prompt_tokens > 0 and call.answer_tokens > 0:  # others failed, and are skipped
            fields |= _in_conversation(call, lanes.setdefault(call.conversation, []), contexts)
        yield call.line, fields


def _in_conversation(call: _Call, lanes: list[_Lane], contexts: Iterator[int]) -> dict[str, Any]:
    """Return the session, the blocks and the pause of a call, in the first lane of its conversation that is free."""
    lane = next((one for one in lanes if one.latest.end_ns <= call.start_ns), None)
    delay = {}
    if lane is None:
        name = f"{call.conversation}/{len(lanes)}" if lanes else f"{call.conversation}"
        lane = _Lane(name, next(contexts) << SESSION_BITS, call)
        lanes.append(lane)
    else:
        delay = {"delay": (call.start_ns - lane.latest.end_ns) / 1e6}
        if call.prompt_tokens < lane.latest.prompt_tokens + lane.latest.answer_tokens:
            lane.first_block = next(contexts) << SESSION_BITS
        lane.latest = call
    blocks = range(lane.first_block, lane.first_block + math.ceil(call.prompt_tokens / SPAN_BLOCK_TOKENS))
    return {"session_id": lane.name, "hash_ids": list(blocks), **delay}


def _calls(lines: TraceLines) -> Iterator[_Call]:
    for number, line in lines:
        for group in _objects_in(number, json_object(number, line), "resourceSpans"):
            for scope in _objects_in(number, group, "scopeSpans"):
                for span in _objects_in(number, scope, "spans"):
                    if (call := _call(number, span)) is not None:
                        yield call


def _call(number: int, span: Mapping[str, Any]) -> _Call | None:
    """Return None for a span that is not the call of a model, or has no counts, as after an error."""
    attributes = _attributes(number, span)
    prompt, answer = (
        next((attributes[name] for name in names if name in attributes), None) for names in (_PROMPT, _ANSWER)
    )
    if attributes.get("gen_ai.operation.name") not in _OPERATIONS or prompt is None or answer is None:
        return None
    conversation = attributes.get("gen_ai.conversation.id")
    return _Call(
        number,
        None if conversation is None else str(conversation),
        _whole(number, "startTimeUnixNano", span.get("startTimeUnixNano")),
        _whole(number, "endTimeUnixNano", span.get("endTimeUnixNano")),
        _whole(number, _PROMPT[0], prompt),
        _whole(number, _ANSWER[0], answer),
    )


def _attributes(number: int, span: Mapping[str, Any]) -> dict[str, Any]:
    """Return texts and whole numbers by their names. JSON of OTLP writes 64-bit numbers as text."""
    found: dict[str, Any] = {}
    for one in _objects_in(number, span, "attributes"):
        value = one.get("value")
        if isinstance(value, dict):
            found |= {str(one.get("key")): value[kind] for kind in _VALUES if kind in value}
    return found


def _objects_in(number: int, values: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = values.get(name, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ProfileError(f"{number}: `{name}` must be a list of objects, not {shown_value(found)}")
    return found


def _whole(number: int, name: str, value: object) -> int:
    if type(value) is int or (isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20):
        whole = int(value)
        if 0 <= whole < 1 << 63:
            return whole
    raise ProfileError(f"{number}: `{name}` must be a whole number, not {shown_value(value)}")
