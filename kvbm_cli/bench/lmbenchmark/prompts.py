"""The bytes of LMBenchmark's requests: texts, the joined prompt of completions mode, and the JSON body.

The keys of a body have the order of the `openai` client (3.54), which LMBenchmark uses. Text is not escaped to
ASCII, and there are no spaces between keys and values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

Message = dict[str, str]

COMPLETIONS_PATH = "/completions"
CHAT_PATH = "/chat/completions"
ENGINE_WARM_UP_REQUESTS = 10
ENGINE_WARM_UP_ANSWER_TOKENS = 100


def opening(user: int, *, system_words: int, history_words: int) -> str:
    """Return the start of a user's first message. LMBenchmark has no spaces after the full stops."""
    return (
        f"Hi, here's some system prompt: {_words(system_words)}."
        f"For user {user}, here are some other context: {_words(history_words)}."
    )


def question(number: int) -> str:
    return f"Here's question #{number}: can you tell me a new long story with a happy ending?"


def engine_warm_up(position: int) -> str:
    """Return the text of one of the requests that every run of the multi-round program sends at its start."""
    return f"WARMUP: Hi, I'm user {position}. Here are some text: {'hi ' * 100}."


def joined(messages: Sequence[Message], *, ends_with_assistant: bool = True) -> str:
    """Return the prompt of completions mode. The ShareGPT program leaves out the last line."""
    lines = [f"{message['role'].upper()}: {message['content']}" for message in messages]
    return "\n".join([*lines, "ASSISTANT:"] if ends_with_assistant else lines)


def completions_body(model: str, prompt: str, max_tokens: int, *, temperature: float = 0.0) -> bytes:
    return _body(model, "prompt", prompt, max_tokens, temperature)


def chat_body(model: str, messages: Sequence[Message], max_tokens: int, *, temperature: float = 0.0) -> bytes:
    return _body(model, "messages", list(messages), max_tokens, temperature)


def _words(count: int) -> str:
    return " ".join(["hi"] * count)


def _body(model: str, key: str, value: object, max_tokens: int, temperature: float) -> bytes:
    body = {
        "model": model,
        "stream": True,
        key: value,
        "max_tokens": max_tokens,
        "stream_options": {"include_usage": True},
        "temperature": temperature,
    }
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", errors="replace")
