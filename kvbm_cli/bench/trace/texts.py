"""Data sets of texts, read as if they were traces: ShareGPT, and the files that aiperf reads beside Mooncake's.

A line of a conversation holds what the turn adds. The answers in the files of ShareGPT only decide how long an answer
is: the engine's own answers are in later prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from kvbm.errors import ProfileError
from kvbm.text.outside import shown_json
from kvbm_cli.bench.trace.request import MAX_LINE_BYTES, Fields, TraceLines, estimated_tokens, json_object

_SEPARATORS = re.compile(r"[\s,\[\]]*")
_ANSWERING = ("gpt", "chatgpt", "assistant", "bing", "bard")  # values of `from`
_OWN_FIELDS = ("text", "texts", "role", "type", "session_id")


def sharegpt(lines: TraceLines) -> Fields:
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
    raise ProfileError(f"{number}: a message must have the texts `from` and `value`, not `{shown_json(message, 60)}`")


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
                raise ProfileError(f"{number}: a conversation must be an object, not `{shown_json(found, 60)}`")
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


def single_turns(lines: TraceLines) -> Fields:
    """Yield the lines of aiperf's `single_turn` and `random_pool`. Lines of one session hold whole prompts."""
    for number, line in lines:
        values = json_object(number, line)
        session = {"session_id": values["session_id"]} if "session_id" in values else {}
        yield number, {**session, **_turn(number, values)}


def multi_turns(lines: TraceLines) -> Fields:
    """Yield the turns of aiperf's `multi_turn`. A system prompt in front is the beginning of the first turn."""
    for number, line in lines:
        values = json_object(number, line)
        turns = values.get("turns")
        if not isinstance(turns, list) or not turns or not all(isinstance(one, dict) for one in turns):
            raise ProfileError(f"{number}: `turns` must be a list of objects, not `{shown_json(turns, 60)}`")
        system = ""
        if turns[0].get("role") == "system" and len(turns) > 1:
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
        raise ProfileError(f"{number}: a turn must have `text`, or a list of texts `texts`: `{shown_json(values, 60)}`")
    return "".join(texts)
