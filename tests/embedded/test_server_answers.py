"""What the server does with good requests, against an engine whose answers are written here. Most of its answers are
exchanges: test_server_exchanges.py."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("transformers")

from server_rig import (
    ADMIN_TOKEN,
    CHAT,
    COMPLETIONS,
    HELLO,
    Client,
    WrittenEngine,
    byte_codec,
    connected,
    eventually,
    serve,
    serve_written,
    served,
    serving,
)

from kvbm.engines.launch_plan import ADMIN_HEADER


def texts(events: list[dict[str, Any]]) -> list[str]:
    """Of completions or chats."""
    choices = [choice for event in events for choice in event["choices"]]
    return [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]


@served()
async def test_a_completion_without_max_tokens_gets_sixteen_or_what_is_left(client: Client) -> None:
    for prompt_tokens, expected in [(1, 16), (4090, 6), (4095, 1)]:
        _, body = await client.post(COMPLETIONS, prompt=[1] * prompt_tokens, ignore_eos=True)
        assert body["usage"]["completion_tokens"] == expected


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})])
def test_a_stream_joins_to_the_answer_in_one_piece(path: str, prompt: dict[str, Any]) -> None:
    answer = "Grüße, 世界 🎉!"

    async def use(client: Client) -> None:
        options = {"include_usage": True}
        _, whole = await client.post(path, **prompt, max_tokens=100)
        events = await client.stream(path, **prompt, max_tokens=100, stream_options=options)
        assert "".join(texts(events)) == answer
        assert all("�" not in text for text in texts(events))
        *chunks, last = events
        if path == CHAT:
            opening = chunks.pop(0)["choices"][0]
            assert (opening["delta"], opening["finish_reason"]) == ({"role": "assistant", "content": ""}, None)
        assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        endings = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert endings == [None] * (len(chunks) - 1) + ["stop"]
        assert len(chunks) == len(answer.encode()) + 1
        assert len({event["id"] for event in events}) == 1

    serve(WrittenEngine(answer.encode()), use)


@served(is_paced=True)
async def test_the_first_chunk_arrives_with_the_first_token(client: Client, engine: WrittenEngine) -> None:
    engine.permit(1)
    async with client.session.post(COMPLETIONS, json={"prompt": "a", "stream": True}) as response:
        first = await asyncio.wait_for(response.content.readuntil(b"\n\n"), 60)
        assert json.loads(first.removeprefix(b"data: "))["choices"][0]["text"] == "H"
        engine.permit(100)
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


@served(is_paced=True)
async def test_a_request_id_is_kept_and_may_repeat(client: Client, engine: WrittenEngine) -> None:
    requests = [
        client.session.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Id": "mine"}) for _ in range(2)
    ]
    engine.permit(100)
    for response in await asyncio.gather(*requests):
        assert response.headers["X-Request-Id"] == "mine"
        assert (await response.json())["id"] == "cmpl-mine"
    assert len(engine.submitted) == 2


# -- clients that go away ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens_before", [0, 3])
@served(is_paced=True)
async def test_a_client_that_hangs_up_aborts_its_request(
    client: Client, engine: WrittenEngine, stream: bool, tokens_before: int
) -> None:
    body = json.dumps({"prompt": "a", "stream": stream}).encode()
    with connected(client.port) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await eventually(lambda: bool(engine.submitted))
        engine.permit(tokens_before)
        await eventually(lambda: next(iter(engine.submitted.values())).sent == tokens_before)
    await eventually(lambda: engine.aborted == list(engine.submitted))
    await eventually(lambda: not client.service.running)


@served()
async def test_a_finished_request_is_not_aborted(client: Client, engine: WrittenEngine) -> None:
    await client.post(COMPLETIONS, prompt="a")
    await client.stream(COMPLETIONS, prompt="a")
    assert engine.aborted == []
    assert client.service.running == set()


# -- failures of the engine --------------------------------------------------------------------------------------------


def test_an_engine_error_before_the_first_token_is_a_500() -> None:
    engine = WrittenEngine()
    engine.fails_with = "out of luck"

    async def use(client: Client) -> None:
        for stream in (True, False):
            status, body = await client.post(COMPLETIONS, prompt="a", stream=stream)
            assert status == 500
            assert body["error"]["message"] == "out of luck"
            assert body["error"]["type"] == "server_error"

    serve(engine, use)


@served(is_paced=True)
async def test_an_engine_error_in_a_stream_is_an_event(client: Client, engine: WrittenEngine) -> None:
    engine.permit(1)
    async with client.session.post(COMPLETIONS, json={"prompt": "a", "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        engine.fails_with = "out of luck"
        rest = await response.read()
    error, done = rest.split(b"\n\n")[:2]
    assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "out of luck"
    assert done == b"data: [DONE]"


@served()
async def test_a_dead_engine_is_a_503(client: Client, engine: WrittenEngine) -> None:
    engine.failure = "it is gone"
    status, body = await client.post(COMPLETIONS, prompt="a")
    assert (status, body["error"]["message"]) == (503, "the engine does not take requests: it is gone")


# -- states ------------------------------------------------------------------------------------------------------------


def test_health_tells_loading_serving_stopping_and_dead_apart() -> None:
    async def run() -> None:
        async with serving(None) as client:
            client.service.phase = "loading synthetic:tiny"
            assert await client.get("/health") == (503, {"status": "loading", "phase": "loading synthetic:tiny"})
            status, body = await client.post(COMPLETIONS, prompt="a")
            assert (status, body["error"]["message"]) == (503, "the engine is loading: loading synthetic:tiny")
            client.service.served = serve_written(WrittenEngine(), byte_codec())
            assert await client.get("/health") == (200, {"status": "ok", "pid": os.getpid()})
            client.service.is_stopping = True
            assert await client.get("/health") == (503, {"status": "stopping"})
            client.service.failure = "it died"
            assert await client.get("/health") == (503, {"status": "dead", "error": "it died"})
            assert (await client.get("/v1/models"))[0] == 503
            assert (await client.get("/version"))[0] == 200
            client.service.served.engine.stop()

    asyncio.run(run())


# -- the quiet endpoints -----------------------------------------------------------------------------------------------


@served()
async def test_several_long_texts_at_once_are_tokenized_like_short_ones(client: Client) -> None:
    answers = await asyncio.gather(*(client.post("/tokenize", prompt="ab" * 50_000) for _ in range(4)))
    assert all(body["tokens"] == [97, 98] * 50_000 for _, body in answers)


@served()
async def test_the_cache_is_reset_on_request(client: Client, engine: WrittenEngine) -> None:
    token = {ADMIN_HEADER: ADMIN_TOKEN}
    assert await client.post("/reset_prefix_cache?reset_external=true", token) == (200, {"reset": True})
    status, body = await client.post("/reset_prefix_cache?reset_external=maybe", token)
    assert (status, body["error"]["param"]) == (400, "reset_external")
    engine.can_reset = False
    assert (await client.post("/reset_prefix_cache", token))[0] == 409


@served()
async def test_metrics_have_the_names_of_vllm(client: Client) -> None:
    await client.post(COMPLETIONS, prompt="x" * 100)
    async with client.session.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    samples = {
        (sample.name, sample.labels.get("source") or sample.labels.get("finished_reason")): sample.value
        for family in families
        for sample in family.samples
    }
    for name, label, value in [
        ("prompt_tokens_by_source_total", "local_compute", 52),
        ("prompt_tokens_by_source_total", "local_cache_hit", 16),
        ("prompt_tokens_by_source_total", "external_kv_transfer", 32),
        ("request_success_total", "stop", 1),
        ("prompt_tokens_total", None, 100),
        ("generation_tokens_total", None, 13),
        ("request_queue_time_seconds_sum", None, 0.25),
        ("request_prefill_time_seconds_sum", None, 0.5),
        ("time_to_first_token_seconds_count", None, 1),
        ("inter_token_latency_seconds_count", None, 12),
        ("e2e_request_latency_seconds_count", None, 1),
        ("num_requests_running", None, 1),
        ("num_requests_waiting", None, 2),
        ("kv_cache_usage_perc", None, 0.5),
        ("num_preemptions_total", None, 3),
        ("prefix_cache_queries_total", None, 4),
        ("prefix_cache_hits_total", None, 5),
        ("external_prefix_cache_queries_total", None, 6),
        ("external_prefix_cache_hits_total", None, 7),
        ("cache_config_info", None, 1),
    ]:
        assert samples[f"vllm:{name}", label] == value, name
