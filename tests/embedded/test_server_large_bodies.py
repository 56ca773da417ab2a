"""A large body is refused, or its text is handled in another thread; no value in it is an error of the server."""

from __future__ import annotations

import io
import json
import threading
from typing import Any

import pytest
from server_rig import CHAT, COMPLETIONS, HELLO, MAX_MODEL_LEN, Client, WrittenEngine, byte_codec, serve, served

from kvbm.engines.embedded.http import openai_requests
from kvbm.engines.embedded.http.text_codec import TextCodec

pytest.importorskip("transformers")


@served()
async def test_prompt_that_fills_the_context_is_never_refused_for_its_values(client: Client) -> None:
    assert (await client.post(COMPLETIONS, prompt=[97] * (MAX_MODEL_LEN - 1), max_tokens=1))[0] == 200
    assert (await client.post(CHAT, messages=HELLO * (MAX_MODEL_LEN // 64), max_tokens=1))[0] == 200
    status, answer = await client.post(COMPLETIONS, prompt=", " * 20_000)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")  # as a prompt, not as a body


class WatchedCodec(TextCodec):
    """Records the threads that render and encode."""

    def __init__(self, threads: list[threading.Thread]) -> None:
        self.__dict__.update(byte_codec().__dict__)
        self.threads = threads

    def render(self, conversation: openai_requests.Conversation) -> str:
        self.threads.append(threading.current_thread())
        return super().render(conversation)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.threads.append(threading.current_thread())
        return super().encode(text, **options)


@pytest.mark.parametrize("messages", [[{"role": "user", "content": "x" * 200_000}], HELLO * 5000], ids=["long", "many"])
def test_text_of_a_large_chat_is_handled_off_the_event_loop(messages: list[dict[str, str]]) -> None:
    threads: list[threading.Thread] = []

    async def use(client: Client) -> None:
        status, answer = await client.post(CHAT, messages=messages)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

    serve(WrittenEngine(), use, codec=WatchedCodec(threads))
    assert len(threads) == 2  # render, encode
    assert threading.main_thread() not in threads


@served()
async def test_nesting_of_any_depth_in_a_large_body_is_a_refusal(client: Client) -> None:
    for opening in (b"[", b'{"messages":', b'[{"content":'):
        status, answer = await client.send(CHAT, io.BytesIO(opening * 10_000 + b" " * 100_000))
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


NUMBERS = ("1e400", "-1e400", "NaN", "Infinity", "-1", "0", "1.5", "1e30", "9" * 5000, '"1"', "true", "[]", "{}")
NUMBER_FIELDS = (
    *("max_tokens", "n", "best_of", "top_k", "top_p", "temperature", "seed", "min_tokens", "logprobs", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "max_completion_tokens", "top_logprobs"),
)


@served()
async def test_no_number_in_any_field_is_a_server_error(client: Client) -> None:
    for field in NUMBER_FIELDS:
        for number in NUMBERS:
            for path, prompt in ((COMPLETIONS, '"prompt": "a"'), (CHAT, f'"messages": {json.dumps(HELLO)}')):
                body = f'{{{prompt}, "{field}": {number}}}'.encode()
                status, answer = await client.send(path, body)
                assert status in (200, 400), (body[:200], answer)
