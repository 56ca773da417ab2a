"""A large body stops neither the event loop nor the engine: it is refused at once, or handled in another thread."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from typing import Any

import pytest
from server_rig import CHAT, COMPLETIONS, HELLO, MAX_MODEL_LEN, Client, WrittenEngine, byte_codec, eventually, serve

from kvbm.engines.embedded.http import completion, openai_requests
from kvbm.engines.embedded.http.request_fields import AnyBody, read_body
from kvbm.engines.embedded.http.text_codec import TextCodec

pytest.importorskip("transformers")

MANY = 30_000
NESTED = json.loads("[" * 900 + "]" * 900)  # its values have no commas
TOO_MANY_VALUES = {
    "messages": (CHAT, {"messages": HELLO * MANY}),
    "parts of a message": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * MANY}]}),
    "token ids": (COMPLETIONS, {"prompt": [1] * MANY}),
    "keys": (COMPLETIONS, {"prompt": "a", "metadata": {str(number): 1 for number in range(MANY)}}),
    "empty objects": (COMPLETIONS, {"prompt": "a", "metadata": [{}] * MANY}),
    "nested lists": (COMPLETIONS, {"prompt": "a", "metadata": [NESTED] * (MANY // 500)}),
    "nested objects": (COMPLETIONS, {"prompt": "a", "metadata": [json.loads('{"a":' * 900 + "1" + "}" * 900)] * 200}),
    "tokens to decode": ("/detokenize", {"tokens": [97] * MANY}),
    "messages to tokenize": ("/tokenize", {"messages": HELLO * MANY}),
}


@pytest.mark.parametrize(("path", "body"), TOO_MANY_VALUES.values(), ids=TOO_MANY_VALUES)
def test_body_with_more_values_than_any_prompt_needs_is_not_parsed(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(openai_requests, "read_body", lambda *_: pytest.fail("it was parsed"))

    async def use(client: Client) -> None:
        status, answer = await client.post(path, **body)
        assert (status, "commas" in answer["error"]["message"]) == (413, True)

    serve(WrittenEngine(), use)


def test_prompt_that_fills_the_context_is_never_refused_for_its_values() -> None:
    async def use(client: Client) -> None:
        assert (await client.post(COMPLETIONS, prompt=[97] * (MAX_MODEL_LEN - 1), max_tokens=1))[0] == 200
        assert (await client.post(CHAT, messages=HELLO * (MAX_MODEL_LEN // 64), max_tokens=1))[0] == 200
        status, answer = await client.post(COMPLETIONS, prompt=", " * 20_000)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")  # as a prompt, not as a body

    serve(WrittenEngine(), use)


class WatchedCodec(TextCodec):
    """Records the threads that render and encode."""

    def __init__(self, threads: list[threading.Thread]) -> None:
        self.__dict__.update(byte_codec().__dict__)
        self.threads = threads

    def render(self, conversation: openai_requests.ChatPrompt) -> str:
        self.threads.append(threading.current_thread())
        return super().render(conversation)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.threads.append(threading.current_thread())
        return super().encode(text, **options)


@pytest.mark.parametrize("messages", [[{"role": "user", "content": "x" * 200_000}], HELLO * 5000], ids=["long", "many"])
def test_large_chat_is_handled_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, messages: list[dict[str, str]]
) -> None:
    threads: list[threading.Thread] = []

    def read_watched(model: type[AnyBody], body: bytes) -> AnyBody:
        threads.append(threading.current_thread())
        return read_body(model, body)

    monkeypatch.setattr(openai_requests, "read_body", read_watched)

    async def use(client: Client) -> None:
        status, answer = await client.post(CHAT, messages=messages)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

    serve(WrittenEngine(), use, codec=WatchedCodec(threads))
    assert len(threads) == 3  # parse, render, encode
    assert threading.main_thread() not in threads


def test_nesting_of_any_depth_in_a_large_body_is_a_refusal() -> None:
    async def use(client: Client) -> None:
        for opening in (b"[", b'{"messages":', b'[{"content":'):
            status, answer = await client.send(CHAT, io.BytesIO(opening * 10_000 + b" " * 100_000))
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")

    serve(WrittenEngine(), use)


def test_body_with_more_bytes_than_any_prompt_needs_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_requests, "read_body", lambda *_: pytest.fail("it was parsed"))

    async def use(client: Client) -> None:
        status, answer = await client.post(COMPLETIONS, prompt="a" * (2**20 + 128 * MAX_MODEL_LEN))
        assert (status, "bytes: at most" in answer["error"]["message"]) == (413, True)

    serve(WrittenEngine(), use)


def test_long_bodies_are_parsed_one_at_a_time_also_of_clients_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON parser lets no other thread run. Several in a row, without a turn of the others, stop all streams."""
    began, may_end, seen = threading.Semaphore(0), threading.Event(), []

    def read_watched(model: type[AnyBody], body: bytes) -> AnyBody:
        seen.append(len(body))
        began.release()
        assert may_end.wait(60)
        return read_body(model, body)

    monkeypatch.setattr(openai_requests, "read_body", read_watched)

    async def use(client: Client) -> None:
        sent = [asyncio.create_task(client.post(COMPLETIONS, prompt="x" * 100_000)) for _ in range(2)]
        try:
            assert await asyncio.to_thread(began.acquire, timeout=60)
            sent[0].cancel()  # or sent[1]: either of them may be the one that is parsed
            assert (await client.get("/health"))[0] == 200
            assert not await asyncio.to_thread(began.acquire, timeout=0.5)
            assert len(seen) == 1
        finally:
            may_end.set()
        assert (await sent[1])[0] == 400

    serve(WrittenEngine(), use)


def test_a_usual_body_is_parsed_while_a_long_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    long_began, long_may_end = threading.Event(), threading.Event()

    def read_watched(model: type[AnyBody], body: bytes) -> AnyBody:
        if len(body) > 300_000:
            long_began.set()
            assert long_may_end.wait(60)
        return read_body(model, body)

    monkeypatch.setattr(openai_requests, "read_body", read_watched)

    async def use(client: Client) -> None:
        long = asyncio.create_task(client.post(COMPLETIONS, prompt="x" * 300_000))
        try:
            assert await asyncio.to_thread(long_began.wait, 60)
            assert (await asyncio.wait_for(client.post(COMPLETIONS, prompt="x" * 100_000), 30))[0] == 400
            assert not long.done()
        finally:
            long_may_end.set()
        assert (await long)[0] == 400

    serve(WrittenEngine(), use)


def test_between_two_long_bodies_is_as_much_time_as_the_first_one_took(monkeypatch: pytest.MonkeyPatch) -> None:
    began_s, ended_s = [], []

    def read_watched(model: type[AnyBody], body: bytes) -> AnyBody:
        began_s.append(time.monotonic())
        found = read_body(model, body)
        time.sleep(0.1)
        ended_s.append(time.monotonic())
        return found

    monkeypatch.setattr(openai_requests, "read_body", read_watched)

    async def use(client: Client) -> None:
        sent = [client.post(COMPLETIONS, prompt="x" * 100_000) for _ in range(2)]
        assert [status for status, _ in await asyncio.gather(*sent)] == [400, 400]

    serve(WrittenEngine(), use)
    assert began_s[1] - ended_s[0] >= ended_s[0] - began_s[0]


NUMBERS = ("1e400", "-1e400", "NaN", "Infinity", "-1", "0", "1.5", "1e30", "9" * 5000, '"1"', "true", "[]", "{}")
NUMBER_FIELDS = (
    *("max_tokens", "n", "best_of", "top_k", "top_p", "temperature", "seed", "min_tokens", "logprobs", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "max_completion_tokens", "top_logprobs"),
)


def test_no_number_in_any_field_is_a_server_error() -> None:
    async def use(client: Client) -> None:
        for field in NUMBER_FIELDS:
            for number in NUMBERS:
                for path, prompt in ((COMPLETIONS, '"prompt": "a"'), (CHAT, f'"messages": {json.dumps(HELLO)}')):
                    body = f'{{{prompt}, "{field}": {number}}}'.encode()
                    status, answer = await client.send(path, body)
                    assert status in (200, 400), (body[:200], answer)

    serve(WrittenEngine(), use)


def test_bodies_that_are_not_parsed_yet_have_a_common_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "MAX_BODIES_BYTES", 300_000)
    length = 200_000

    async def begin(client: Client, count: int) -> asyncio.StreamWriter:
        """Send so many bytes of a long body."""
        _, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n".encode())
        writer.write(b" " * count)
        await writer.drain()
        return writer

    async def use(client: Client) -> None:
        room = client.service.ready().room
        silent = [await begin(client, 0) for _ in range(5)]
        assert (await client.post(COMPLETIONS, prompt="a", user="x" * length, max_tokens=1))[0] == 200
        writer = await begin(client, length - 1)
        await eventually(lambda: room.taken_bytes == length - 1)
        status, answer = await client.post(COMPLETIONS, prompt="a", user="x" * length)
        assert (status, "send the request again later" in answer["error"]["message"]) == (503, True)
        assert (await client.post(COMPLETIONS, prompt="a", max_tokens=1))[0] == 200
        for one in (writer, *silent):
            one.close()
        await eventually(lambda: room.taken_bytes == 0)
        assert (await client.post(COMPLETIONS, prompt="a", user="x" * length, max_tokens=1))[0] == 200
        assert room.taken_bytes == 0

    serve(WrittenEngine(), use)
