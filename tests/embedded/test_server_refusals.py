"""What the server says to bad requests and to what is no request at all: never a 500, and nothing in its log."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from server_rig import CHAT, COMPLETIONS, HELLO, Client, WrittenEngine, serve, served

from kvbm.engines.embedded.engine.tokenizer import byte_tokenizer
from kvbm.engines.embedded.http import connections
from kvbm.engines.embedded.http.endpoints import MAX_BODY_BYTES
from kvbm.engines.embedded.http.text_codec import TextCodec


@pytest.mark.parametrize(
    ("prompt", "more", "message"),
    [
        ("a " * 300_000, {}, "the prompt has 600000 characters: this is above the limit of 4096 tokens"),
        (
            [1] * 4096,
            {},
            "the prompt has 4096 tokens: with at least one generated token it must fit into 4096 tokens",
        ),
        (
            [1] * 4000,
            {"max_tokens": 97},
            "`max_tokens` is 97: it must be at most 96, because the prompt uses 4000 of 4096 tokens",
        ),
    ],
)
@served()
async def test_a_prompt_beyond_the_context_is_refused(
    client: Client, prompt: Any, more: dict[str, Any], message: str
) -> None:
    status, body = await client.post(COMPLETIONS, prompt=prompt, **more)
    error = body["error"]
    assert (status, error["param"], error["code"]) == (400, next(iter(more), "prompt"), "context_length_exceeded")
    assert error["message"].startswith(message)
    assert error["type"] == "invalid_request_error"
    assert client.service.running == set()


@served()
async def test_a_request_id_that_cannot_be_a_header_is_refused(client: Client) -> None:
    for wrong in ("ü", "a" * 201):
        status, body = await client.post(COMPLETIONS, headers={"X-Request-Id": wrong}, prompt="a")
        assert (status, body["error"]["param"]) == (400, "X-Request-Id")


@served()
async def test_a_body_that_is_too_long_is_refused(client: Client) -> None:
    status, body = await client.send(COMPLETIONS, io.BytesIO(b" " * (MAX_BODY_BYTES + 1)))
    assert (status, body["error"]["message"]) == (413, f"the body is longer than {MAX_BODY_BYTES} bytes")


def test_a_template_that_refuses_the_messages_is_a_400() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"

    async def use(client: Client) -> None:
        status, body = await client.post(CHAT, messages=HELLO)
        assert status == 400
        assert body["error"]["message"] == "the model's chat template rejects the messages: roles must alternate"
        tokenizer.chat_template = "{{ 1 / nothing }}"
        assert (await client.post(CHAT, messages=HELLO))[0] == 400
        tokenizer.chat_template = "{{ 1 % zero }}"
        assert (await client.post(CHAT, messages=HELLO, chat_template_kwargs={"zero": 0}))[0] == 400
        tokenizer.chat_template = None
        status, body = await client.post(CHAT, messages=HELLO)
        assert body["error"]["message"] == "the model has no chat template: use /v1/completions"

    serve(WrittenEngine(), use, codec=TextCodec(tokenizer))


def test_without_a_tokenizer_token_ids_go_in_and_come_out() -> None:
    async def use(client: Client) -> None:
        status, body = await client.post(COMPLETIONS, prompt="a")
        assert status == 400
        message = "the model has no tokenizer: send token ids as `prompt` to /v1/completions"
        assert body["error"]["message"] == message
        status, body = await client.post(COMPLETIONS, prompt=[1], return_token_ids=True, logprobs=1, max_tokens=1)
        assert (status, body["choices"][0]["token_ids"], body["choices"][0]["text"]) == (200, [72], "")
        status, body = await client.post(COMPLETIONS, prompt=[1], stop="x")
        assert (status, body["error"]["param"]) == (400, "stop")

    serve(WrittenEngine(), use, codec=TextCodec(None))


NUMBERS = st.integers(-3, 40) | st.sampled_from([2**63, -(2**70), 10**400]) | st.floats(allow_nan=False)
KEYS = st.sampled_from(["include_usage", "role", "content", "a"])
LISTS = st.lists(st.integers(-1, 300), max_size=4) | st.lists(st.text(max_size=3), max_size=3)
OBJECTS = st.dictionaries(KEYS, st.booleans() | st.text(max_size=3), max_size=2)
VALUES = st.none() | st.booleans() | NUMBERS | st.text(max_size=4) | LISTS | OBJECTS
FIELDS = """
    prompt messages max_tokens max_completion_tokens min_tokens temperature top_p top_k seed stop logprobs top_logprobs
    stream stream_options ignore_eos cache_salt n model user return_token_ids skip_special_tokens kv_transfer_params
    chat_template_kwargs add_special_tokens
"""
NAMES = st.sampled_from(FIELDS.split())


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=20)
@given(bodies=st.lists(st.tuples(st.booleans(), st.dictionaries(NAMES, VALUES, max_size=4)), min_size=10, max_size=10))
@served()
async def test_nothing_that_a_client_sends_is_a_500(client: Client, bodies: list[tuple[bool, dict[str, Any]]]) -> None:
    for is_chat, fields in bodies:
        body = {"max_tokens": 3, **({"messages": HELLO} if is_chat else {"prompt": "a"}), **fields}
        async with client.session.post(CHAT if is_chat else COMPLETIONS, json=body) as response:
            content = await response.read()
            assert response.status in (200, 400, 404), content
            if response.status != 200:
                assert json.loads(content)["error"]["message"]


# -- raw sockets -------------------------------------------------------------------------------------------------------


async def raw(client: Client, *parts: bytes, until: bytes = b"", pause_s: float = 0.001) -> bytes:
    """Sends the parts one by one, and reads until the server closes or `until` has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        if until:
            return await asyncio.wait_for(reader.readuntil(until), 60)
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()
        await writer.wait_closed()


BODY = b'{"prompt": "a", "max_tokens": 2, "stream": true}'
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(BODY)


@served()
async def test_a_request_may_come_byte_by_byte(client: Client) -> None:
    message = REQUEST + b"Connection: close\r\n\r\n" + BODY
    answer = await raw(client, *(message[i : i + 1] for i in range(len(message))))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"data: [DONE]" in answer


@served()
async def test_an_old_client_reads_until_the_connection_closes(client: Client) -> None:
    answer = await raw(client, REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n" + BODY)
    head, body = answer.split(b"\r\n\r\n", 1)
    assert b"Transfer-Encoding" not in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


@served()
async def test_requests_may_be_pipelined_and_sent_in_chunks(client: Client) -> None:
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:9], BODY[9:])) + b"0\r\n\r\n"
    answer = await raw(client, REQUEST + b"\r\n" + BODY + chunked + chunks)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.count(b"data: [DONE]") == 2


@served()
async def test_a_client_may_wait_for_continue(client: Client) -> None:
    answer = await raw(client, REQUEST + b"Expect: 100-continue\r\n\r\n", until=b"\r\n\r\n")
    assert answer == b"HTTP/1.1 100 Continue\r\n\r\n"


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "parts",
    [
        [b"\x16\x03\x01\x00\xa5\x01\r\n\r\n"],
        [b"POST /v1/completions\r\n\r\n"],
        [b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 20_000],
        [CHUNKED + b"zz\r\n"],
    ],
)
def test_what_is_no_http_gets_a_400_and_no_traceback(parts: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    async def use(client: Client) -> None:
        assert (await raw(client, *parts, pause_s=0.05)).split(b" ")[1] == b"400"
        assert (await client.get("/health"))[0] == 200

    serve(WrittenEngine(), use)
    assert caplog.records == []


def test_a_body_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_TIMEOUT_S", 0.05)

    async def use(client: Client) -> None:
        for parts in ([REQUEST + b"Connection: close\r\n\r\n{"], [CHUNKED, b"1\r\n{\r\n", b"zz\r\n"]):
            answer = await raw(client, *parts, until=b"}}")
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"the body did not arrive within 0.05 s" in answer

    serve(WrittenEngine(), use)


def test_a_compressed_body_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    async def use(client: Client) -> None:
        for encoding in ("gzip", "br", "zstd"):
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: %s\r\n" % encoding.encode()
            answer = await raw(client, head + b"Connection: close\r\nContent-Length: 4\r\n\r\nabcd")
            assert answer.startswith(b"HTTP/1.1 415 ")
            assert f"the body has Content-Encoding {encoding}: send it uncompressed".encode() in answer

    serve(WrittenEngine(), use)
    assert caplog.records == []


@served()
async def test_a_client_that_gives_up_while_sending_leaves_nothing(client: Client, engine: WrittenEngine) -> None:
    for cut in (10, len(REQUEST), len(REQUEST) + 12):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write((REQUEST + b"\r\n" + BODY)[:cut])
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        del reader
    assert (await client.get("/health"))[0] == 200
    assert engine.submitted == {}
