"""What the server answers to good requests, against an engine whose answers are written here."""

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
    serving,
)

from kvbm.engines.launch_plan import ADMIN_HEADER


def texts(events: list[dict[str, Any]]) -> list[str]:
    """Of completions or chats."""
    choices = [choice for event in events for choice in event["choices"]]
    return [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]


# -- answers -----------------------------------------------------------------------------------------------------------


def test_a_completion_has_text_ending_and_usage_by_tier() -> None:
    async def use(client: Client) -> None:
        status, body = await client.post(COMPLETIONS, prompt="x" * 100, max_tokens=64)
        assert status == 200
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hello, world", "stop", None)
        assert (body["object"], body["model"]) == ("text_completion", "written")
        assert body["id"].startswith("cmpl-")
        assert body["usage"] == {
            "prompt_tokens": 100,
            "completion_tokens": 13,
            "total_tokens": 113,
            "prompt_tokens_details": {
                "cached_tokens": 48,
                "cached_tokens_by_tier": {"device": 16, "host": 32, "disk": 0, "shared": 0},
            },
        }

    serve(WrittenEngine(), use)


def test_a_cache_hit_beyond_the_prompt_counts_as_the_prompt() -> None:
    async def use(client: Client) -> None:
        _, body = await client.post(COMPLETIONS, prompt="x" * 40)
        details = body["usage"]["prompt_tokens_details"]
        assert details == {
            "cached_tokens": 40,
            "cached_tokens_by_tier": {"device": 16, "host": 24, "disk": 0, "shared": 0},
        }

    serve(WrittenEngine(), use)


def test_a_chat_has_a_message_and_its_prompt_is_the_models_template() -> None:
    engine = WrittenEngine()

    async def use(client: Client) -> None:
        status, body = await client.post(CHAT, messages=HELLO, max_tokens=5)
        assert status == 200
        assert body["object"] == "chat.completion"
        message = {"role": "assistant", "content": "Hello", "refusal": None}
        assert body["choices"][0]["message"] == message
        assert body["choices"][0]["finish_reason"] == "length"
        (submitted,) = engine.submitted.values()
        text = byte_codec().decode(submitted.prompt_token_ids, skip_special_tokens=False)
        assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"

    serve(engine, use)


def test_a_chat_may_use_all_that_is_left_of_the_context() -> None:
    engine = WrittenEngine()

    async def use(client: Client) -> None:
        await client.post(CHAT, messages=HELLO)
        (submitted,) = engine.submitted.values()
        assert submitted.params.max_tokens == engine.max_model_len - len(submitted.prompt_token_ids)

    serve(engine, use)


def test_a_completion_without_max_tokens_gets_sixteen_or_what_is_left() -> None:
    async def use(client: Client) -> None:
        for prompt_tokens, expected in [(1, 16), (4090, 6), (4095, 1)]:
            _, body = await client.post(COMPLETIONS, prompt=[1] * prompt_tokens, ignore_eos=True)
            assert body["usage"]["completion_tokens"] == expected

    serve(WrittenEngine(), use)


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


def test_without_include_usage_a_stream_has_no_usage() -> None:
    async def use(client: Client) -> None:
        assert all("usage" not in event for event in await client.stream(COMPLETIONS, prompt="a"))

    serve(WrittenEngine(), use)


def test_continuous_usage_counts_along() -> None:
    async def use(client: Client) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await client.stream(COMPLETIONS, prompt="abc", max_tokens=3, stream_options=options)
        assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]

    serve(WrittenEngine(), use)


def test_a_chunk_with_the_role_precedes_the_text_of_a_chat() -> None:
    async def use(client: Client) -> None:
        events = await client.stream(CHAT, messages=HELLO, max_tokens=3)
        deltas = [event["choices"][0]["delta"] for event in events]
        role = {"role": "assistant", "content": ""}
        assert deltas == [role, {"content": "H"}, {"content": "e"}, {"content": "l"}]

    serve(WrittenEngine(), use)


def test_continuous_usage_of_a_chat_begins_with_no_token() -> None:
    async def use(client: Client) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await client.stream(CHAT, messages=HELLO, max_tokens=2, stream_options=options)
        assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 2]

    serve(WrittenEngine(), use)


def test_the_first_chunk_arrives_with_the_first_token() -> None:
    engine = WrittenEngine(is_paced=True)

    async def use(client: Client) -> None:
        engine.permit(1)
        async with client.session.post(COMPLETIONS, json={"prompt": "a", "stream": True}) as response:
            first = await asyncio.wait_for(response.content.readuntil(b"\n\n"), 60)
            assert json.loads(first.removeprefix(b"data: "))["choices"][0]["text"] == "H"
            engine.permit(100)
            assert (await response.read()).endswith(b"data: [DONE]\n\n")

    serve(engine, use)


def test_return_token_ids_gives_those_of_answer_and_prompt() -> None:
    async def use(client: Client) -> None:
        wanted = {"return_token_ids": True, "max_tokens": 2}
        _, completion = await client.post(COMPLETIONS, prompt=[7, 8], **wanted)
        assert completion["choices"][0]["token_ids"] == [72, 101]
        assert completion["choices"][0]["prompt_token_ids"] == [7, 8]
        events = await client.stream(COMPLETIONS, prompt=[7, 8], **wanted)
        choices = [event["choices"][0] for event in events]
        assert [choice["token_ids"] for choice in choices] == [[72], [101]]
        assert [choice.get("prompt_token_ids") for choice in choices] == [[7, 8], None]
        _, chat = await client.post(CHAT, messages=HELLO, **wanted)
        assert chat["choices"][0]["token_ids"] == [72, 101]
        assert len(chat["prompt_token_ids"]) > 5

    serve(WrittenEngine(), use)


def test_the_end_token_counts_but_has_no_text() -> None:
    async def use(client: Client) -> None:
        _, body = await client.post(COMPLETIONS, prompt="a", skip_special_tokens=False, return_token_ids=True)
        assert body["choices"][0]["text"] == "Hi"
        assert body["choices"][0]["token_ids"] == [72, 105, 258]

    serve(WrittenEngine(b"Hi"), use)


# -- stop strings ------------------------------------------------------------------------------------------------------


def test_a_stop_string_across_tokens_cuts_the_text_and_ends_the_request_in_the_engine() -> None:
    engine = WrittenEngine()

    async def use(client: Client) -> None:
        _, body = await client.post(COMPLETIONS, prompt="a", stop=["wor", "zzz"], max_tokens=100)
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hello, ", "stop", "wor")
        assert body["usage"]["completion_tokens"] == 10
        assert len(engine.aborted) == 1

    serve(engine, use)


def test_no_part_of_a_stop_string_is_streamed() -> None:
    engine = WrittenEngine(b"abcXabcXYabc")

    async def use(client: Client) -> None:
        events = await client.stream(
            COMPLETIONS, prompt="a", stop="XYa", max_tokens=100, stream_options={"include_usage": True}
        )
        assert texts(events) == ["a", "b", "c", "", "Xa", "b", "c", "", "", ""]
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
        assert events[-1]["usage"]["completion_tokens"] == 10
        assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 1

    serve(engine, use)


def test_text_held_back_for_a_stop_string_is_sent_when_the_answer_ends() -> None:
    async def use(client: Client) -> None:
        events = await client.stream(COMPLETIONS, prompt="a", stop="Hi there")
        assert "".join(texts(events)) == "Hi"
        assert events[-1]["choices"][0]["stop_reason"] is None

    serve(WrittenEngine(b"Hi"), use)


def test_a_stop_string_waits_for_min_tokens() -> None:
    async def use(client: Client) -> None:
        _, body = await client.post(COMPLETIONS, prompt="a", stop="b", min_tokens=3, max_tokens=9, ignore_eos=True)
        assert body["choices"][0]["text"] == "bbb"
        assert body["usage"]["completion_tokens"] == 4

    serve(WrittenEngine(b"b"), use)


# -- logprobs ----------------------------------------------------------------------------------------------------------


def test_logprobs_of_a_completion_name_tokens_and_stay_json() -> None:
    async def use(client: Client) -> None:
        _, body = await client.post(COMPLETIONS, prompt="a", logprobs=2, max_tokens=4)
        assert body["choices"][0]["logprobs"] == {
            "text_offset": [0, 1, 1, 1],
            "token_logprobs": [-0.5] * 4,
            "tokens": ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"],
            "top_logprobs": [
                {"a": -0.5, "bytes:\\xe2": -9999.0},
                {"bytes:\\xe2": -0.5},
                {"bytes:\\x82": -0.5, "bytes:\\xe2": -9999.0},
                {"bytes:\\xac": -0.5, "bytes:\\xe2": -9999.0},
            ],
        }

    serve(WrittenEngine("a€".encode()), use)


def test_logprobs_of_a_chat_give_the_bytes_of_each_token() -> None:
    async def use(client: Client) -> None:
        _, body = await client.post(CHAT, messages=HELLO, logprobs=True, top_logprobs=1, max_tokens=1)
        token = {"token": "H", "logprob": -0.5, "bytes": [72]}
        assert body["choices"][0]["logprobs"]["content"] == [{**token, "top_logprobs": [token]}]

    serve(WrittenEngine(), use)


def test_a_streamed_chunk_has_the_logprobs_of_its_own_tokens() -> None:
    async def use(client: Client) -> None:
        events = await client.stream(COMPLETIONS, prompt="a", logprobs=0, max_tokens=2)
        assert [event["choices"][0]["logprobs"]["tokens"] for event in events] == [["H"], ["e"]]
        assert [event["choices"][0]["logprobs"]["text_offset"] for event in events] == [[0], [1]]

    serve(WrittenEngine(), use)


# -- what reaches the engine -------------------------------------------------------------------------------------------


def test_every_parameter_reaches_the_engine() -> None:
    engine = WrittenEngine()
    wanted = {
        "max_tokens": 5,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "seed": -4,
        "ignore_eos": True,
        "logprobs": 1,
        "cache_salt": "s",
        "kv_transfer_params": {"k": [1]},
    }

    async def use(client: Client) -> None:
        status, _ = await client.post(COMPLETIONS, prompt=[1, 2], **wanted)
        assert status == 200
        (submitted,) = engine.submitted.values()
        assert submitted.prompt_token_ids == [1, 2]
        assert {name: getattr(submitted.params, name) for name in wanted} == wanted

    serve(engine, use)


def test_a_vanishing_temperature_is_greedy() -> None:
    engine = WrittenEngine()

    async def use(client: Client) -> None:
        await client.post(COMPLETIONS, prompt="a", temperature=1e-300)
        (submitted,) = engine.submitted.values()
        assert submitted.params.temperature == 0.0

    serve(engine, use)


def test_a_request_id_is_kept_and_may_repeat() -> None:
    engine = WrittenEngine(is_paced=True)

    async def use(client: Client) -> None:
        requests = [
            client.session.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Id": "mine"}) for _ in range(2)
        ]
        engine.permit(100)
        for response in await asyncio.gather(*requests):
            assert response.headers["X-Request-Id"] == "mine"
            assert (await response.json())["id"] == "cmpl-mine"
        assert len(engine.submitted) == 2

    serve(engine, use)


# -- clients that go away ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens_before", [0, 3])
def test_a_client_that_hangs_up_aborts_its_request(stream: bool, tokens_before: int) -> None:
    engine = WrittenEngine(is_paced=True)

    async def use(client: Client) -> None:
        body = json.dumps({"prompt": "a", "stream": stream}).encode()
        with connected(client.port) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            await eventually(lambda: bool(engine.submitted))
            engine.permit(tokens_before)
            await eventually(lambda: next(iter(engine.submitted.values())).sent == tokens_before)
        await eventually(lambda: engine.aborted == list(engine.submitted))
        await eventually(lambda: not client.service.running)

    serve(engine, use)


def test_a_finished_request_is_not_aborted() -> None:
    engine = WrittenEngine()

    async def use(client: Client) -> None:
        await client.post(COMPLETIONS, prompt="a")
        await client.stream(COMPLETIONS, prompt="a")
        assert engine.aborted == []
        assert client.service.running == set()

    serve(engine, use)


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


def test_an_engine_error_in_a_stream_is_an_event() -> None:
    engine = WrittenEngine(is_paced=True)

    async def use(client: Client) -> None:
        engine.permit(1)
        async with client.session.post(COMPLETIONS, json={"prompt": "a", "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            engine.fails_with = "out of luck"
            rest = await response.read()
        error, done = rest.split(b"\n\n")[:2]
        assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "out of luck"
        assert done == b"data: [DONE]"

    serve(engine, use)


def test_a_dead_engine_is_a_503() -> None:
    engine = WrittenEngine()

    async def use(client: Client) -> None:
        engine.failure = "it is gone"
        status, body = await client.post(COMPLETIONS, prompt="a")
        assert (status, body["error"]["message"]) == (503, "the engine does not take requests: it is gone")

    serve(engine, use)


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


def test_models_are_listed() -> None:
    async def use(client: Client) -> None:
        status, body = await client.get("/v1/models")
        assert status == 200
        assert [model["id"] for model in body["data"]] == ["written"]
        assert body["data"][0]["max_model_len"] == 4096
        assert await client.get("/v1/models/written") == (200, body["data"][0])
        assert (await client.get("/v1/models/other"))[0] == 404

    serve(WrittenEngine(), use)


def test_a_text_and_messages_are_tokenized() -> None:
    async def use(client: Client) -> None:
        _, body = await client.post("/tokenize", prompt="h€<|im_end|>", add_special_tokens=False)
        assert body["tokens"] == [104, 226, 130, 172, 258]
        assert (body["count"], body["max_model_len"]) == (5, 4096)
        _, chat = await client.post("/tokenize", messages=HELLO)
        assert bytes(chat["tokens"][1:6]) == b"user\n"

    serve(WrittenEngine(), use)


def test_several_long_texts_at_once_are_tokenized_like_short_ones() -> None:
    async def use(client: Client) -> None:
        answers = await asyncio.gather(*(client.post("/tokenize", prompt="ab" * 50_000) for _ in range(4)))
        assert all(body["tokens"] == [97, 98] * 50_000 for _, body in answers)

    serve(WrittenEngine(), use)


def test_the_cache_is_reset_on_request() -> None:
    engine = WrittenEngine()

    async def use(client: Client) -> None:
        token = {ADMIN_HEADER: ADMIN_TOKEN}
        assert await client.post("/reset_prefix_cache?reset_external=true", token) == (200, {"reset": True})
        status, body = await client.post("/reset_prefix_cache?reset_external=maybe", token)
        assert (status, body["error"]["param"]) == (400, "reset_external")
        engine.can_reset = False
        assert (await client.post("/reset_prefix_cache", token))[0] == 409

    serve(engine, use)


def test_metrics_have_the_names_of_vllm() -> None:
    async def use(client: Client) -> None:
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

    serve(WrittenEngine(), use)
