"""Calls of models in exports of OpenTelemetry, read as if they were a trace.

A line is an OTLP export in JSON (`resourceSpans`), as the collector's file exporter writes it. The semantic conventions
for generative AI define the names; token counts may also have their older names. Texts in the spans are not read.

A span has no blocks. In a conversation, a prompt that has room for the previous prompt and its answer is assumed to
begin with both. A shorter one shares nothing, as after a summary. Calls that overlap in time are sessions of their own,
as subagents are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbm.errors import ProfileError
from kvbm.text.outside import shown_json
from kvbm_cli.bench.trace.request import SESSION_BITS, Fields, TraceLines, json_object

BLOCK_TOKENS = 16
_PROMPT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_ANSWER = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_OPERATIONS = (None, "chat", "text_completion", "generate_content")  # others repeat the counts of these
_VALUES = ("stringValue", "intValue")


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


@dataclass(slots=True)
class _Conversations:
    lanes: dict[str, list[_Lane]] = field(default_factory=dict)
    contexts: int = 0

    def fields(self, call: _Call, name: str) -> dict[str, Any]:
        lanes = self.lanes.setdefault(name, [])
        lane = next((one for one in lanes if one.latest.end_ns <= call.start_ns), None)
        delay = {}
        if lane is None:
            lane = _Lane(f"{name}/{len(lanes)}" if lanes else name, self._new_context(), call)
            lanes.append(lane)
        else:
            delay = {"delay": (call.start_ns - lane.latest.end_ns) / 1e6}
            if call.prompt_tokens < lane.latest.prompt_tokens + lane.latest.answer_tokens:
                lane.first_block = self._new_context()
            lane.latest = call
        blocks = range(lane.first_block, lane.first_block + math.ceil(call.prompt_tokens / BLOCK_TOKENS))
        return {"session_id": lane.name, "hash_ids": list(blocks), **delay}

    def _new_context(self) -> int:
        self.contexts += 1
        return self.contexts << SESSION_BITS


def model_calls(lines: TraceLines) -> Fields:
    """Yield the calls in the order of their starts. Reads the whole file first: a span is exported when it ends."""
    calls = sorted(_calls(lines), key=lambda call: call.start_ns)
    conversations = _Conversations()
    for call in calls:
        fields: dict[str, Any] = {
            "timestamp": (call.start_ns - calls[0].start_ns) / 1e6,
            "input_length": call.prompt_tokens,
            "output_length": call.answer_tokens,
        }
        if call.conversation and call.prompt_tokens > 0 and call.answer_tokens > 0:  # others failed, and are skipped
            fields |= conversations.fields(call, call.conversation)
        yield call.line, fields


def _calls(lines: TraceLines) -> Iterator[_Call]:
    for number, line in lines:
        for group in _list(number, json_object(number, line), "resourceSpans"):
            for scope in _list(number, group, "scopeSpans"):
                for span in _list(number, scope, "spans"):
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
    for one in _list(number, span, "attributes"):
        value = one.get("value")
        if isinstance(value, dict):
            found |= {str(one.get("key")): value[kind] for kind in _VALUES if kind in value}
    return found


def _list(number: int, values: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = values.get(name, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ProfileError(f"{number}: `{name}` must be a list of objects, not `{shown_json(found, 60)}`")
    return found


def _whole(number: int, name: str, value: object) -> int:
    if type(value) is int or (isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20):
        whole = int(value)
        if 0 <= whole < 1 << 63:
            return whole
    raise ProfileError(f"{number}: `{name}` must be a whole number, not `{shown_json(value, 60)}`")
