"""The proxy of disaggregated prefill, in front of HTTP servers that record what they get."""

import asyncio
import contextlib
import io
import json

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvbm_cli.disaggregated.proxy import is_one_answer, make_app, prefill_request

BLOCKS = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_port": 5600}


class Recorder:
    """An engine that answers what it is told to, in pieces, and remembers its requests."""

    def __init__(self, kind, status=200, pieces=None, breaks=False):
        prefilled = [json.dumps({"choices": [{"text": "x"}], "kv_transfer_params": BLOCKS}).encode()]
        self.pieces = pieces or (prefilled if kind == "prefill" else [b'{"choices": [', b'{"text": "answer"}]}'])
        self.status, self.breaks = status, breaks
        self.requests, self.headers, self.gone = [], [], asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def answer(self, request):
        self.requests.append(await request.json() if request.can_read_body else None)
        self.headers.append(request.headers)
        response = web.StreamResponse(status=self.status, headers={"Content-Type": "application/json"})
        await response.prepare(request)
        try:
            for piece in self.pieces:
                await response.write(piece)
                await self.go_on.wait()
        except (asyncio.CancelledError, ConnectionError):
            self.gone.set()
            raise
        if self.breaks:
            request.transport.abort()
        return response

    async def start(self, stack):
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/v1/{path:.*}", self.answer)
        server = TestServer(app)
        await server.start_server()
        stack.push_async_callback(server.close)
        return str(server.make_url("/")).rstrip("/")


class Rig:
    def __init__(self, prefill, decode):
        self.prefill, self.decode = prefill, decode

    async def __aenter__(self):
        self.stack = contextlib.AsyncExitStack()
        urls = [[await engine.start(self.stack) for engine in engines] for engines in (self.prefill, self.decode)]
        server = TestServer(make_app(*urls))
        await server.start_server()
        self.stack.push_async_callback(server.close)
        self.session = await self.stack.enter_async_context(aiohttp.ClientSession())
        self.url = str(server.make_url("/")).rstrip("/")
        return self

    async def __aexit__(self, *ended):
        await self.stack.aclose()

    def post(self, body, path="/v1/completions", **more):
        return self.session.post(self.url + path, json=body, **more)


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_request_is_prefilled_for_one_token_and_decoded_with_the_address_of_its_blocks():
    async def scenario():
        prefill, decode = Recorder("prefill"), Recorder("decode")
        async with Rig([prefill], [decode]) as rig:
            body = {"prompt": "a", "max_tokens": 9, "stream": True, "stream_options": {"x": 1}, "min_tokens": 3}
            async with rig.post(body, headers={"Authorization": "Bearer key"}) as answer:
                assert (answer.status, await answer.json()) == (200, {"choices": [{"text": "answer"}]})
        (asked,), (decoded,) = prefill.requests, decode.requests
        assert (asked["prompt"], asked["max_tokens"]) == ("a", 1)
        assert asked.keys().isdisjoint({"stream", "stream_options", "min_tokens"})
        assert (asked["kv_transfer_params"]["do_remote_decode"], decoded["kv_transfer_params"]) == (True, BLOCKS)
        assert {**decoded, "kv_transfer_params": None} == {**body, "kv_transfer_params": None}
        assert [engine.headers[0]["Authorization"] for engine in (prefill, decode)] == ["Bearer key"] * 2

    run(scenario)


def test_chat_request_asks_for_one_token_under_either_name():
    asked = prefill_request({"messages": [], "max_completion_tokens": 50, "kv_transfer_params": {"max_load_tokens": 0}})
    assert asked["max_tokens"] == 1
    assert "max_completion_tokens" not in asked
    assert asked["kv_transfer_params"]["max_load_tokens"] == 0


def test_engines_of_a_kind_take_turns():
    async def scenario():
        engines = [[Recorder("prefill") for _ in range(2)], [Recorder("decode") for _ in range(3)]]
        async with Rig(*engines) as rig:
            for _ in range(6):
                async with rig.post({"prompt": "a"}) as answer:
                    assert answer.status == 200
        assert [[len(engine.requests) for engine in kind] for kind in engines] == [[3, 3], [2, 2, 2]]

    run(scenario)


def test_pieces_arrive_before_the_answer_is_whole():
    async def scenario():
        decode = Recorder("decode", pieces=[b"data: 1\n\n", b"data: 2\n\n"])
        decode.go_on.clear()
        async with Rig([Recorder("prefill")], [decode]) as rig, rig.post({"prompt": "a", "stream": True}) as answer:
            assert await answer.content.readany() == b"data: 1\n\n"
            decode.go_on.set()
            assert await answer.content.read() == b"data: 2\n\n"

    run(scenario)


@pytest.mark.parametrize("refusing", ["prefill", "decode"])
def test_refusal_of_an_engine_is_passed_on_as_it_is(refusing):
    async def scenario():
        engines = {kind: Recorder(kind) for kind in ("prefill", "decode")}
        engines[refusing] = Recorder(refusing, status=400, pieces=[b'{"error": {"message": "too long"}}'])
        async with Rig([engines["prefill"]], [engines["decode"]]) as rig, rig.post({"prompt": "a"}) as answer:
            assert (answer.status, await answer.json()) == (400, {"error": {"message": "too long"}})
        assert len(engines["decode"].requests) == (refusing == "decode")

    run(scenario)


@pytest.mark.parametrize("answer", [b'{"choices": []}', b'{"kv_transfer_params": null}'])
def test_prefill_without_an_address_is_a_bad_gateway(answer):
    async def scenario():
        decode = Recorder("decode")
        async with Rig([Recorder("prefill", pieces=[answer])], [decode]) as rig, rig.post({"prompt": "a"}) as got:
            assert got.status == 502
            assert "returned no `kv_transfer_params`" in (await got.json())["error"]["message"]
        assert decode.requests == []

    run(scenario)


def test_engine_that_does_not_answer_is_a_bad_gateway():
    async def scenario():
        async with contextlib.AsyncExitStack() as stack:
            server = TestServer(make_app(["http://127.0.0.1:9"], ["http://127.0.0.1:9"]))
            await server.start_server()
            stack.push_async_callback(server.close)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            async with session.post(server.make_url("/v1/completions"), json={"prompt": "a"}) as answer:
                assert answer.status == 502
                assert "127.0.0.1:9" in (await answer.json())["error"]["message"]

    run(scenario)


def test_answer_that_breaks_off_breaks_off_for_the_client_too():
    async def scenario():
        decode = Recorder("decode", pieces=[b"data: 1\n\n"], breaks=True)
        async with Rig([Recorder("prefill")], [decode]) as rig, rig.post({"prompt": "a", "stream": True}) as answer:
            with pytest.raises(aiohttp.ClientError):
                await answer.read()

    run(scenario)


@pytest.mark.parametrize("during", ["prefill", "decode"])
def test_client_that_leaves_ends_its_request_at_the_engine(during):
    async def scenario():
        engines = {kind: Recorder(kind) for kind in ("prefill", "decode")}
        engines[during].pieces = [b"data: 1\n\n"] * 1000
        engines[during].go_on.clear()
        async with Rig([engines["prefill"]], [engines["decode"]]) as rig:
            request = asyncio.create_task(rig.post({"prompt": "a", "stream": True}).__aenter__())
            while not engines[during].requests:
                await asyncio.sleep(0.01)
            if during == "decode":
                (await request).close()
            request.cancel()
            await engines[during].gone.wait()

    run(scenario)


@pytest.mark.parametrize(
    ("request_body", "is_one"),
    [
        ({"prompt": "text"}, True),
        ({"prompt": [1, 2, 3]}, True),
        ({"prompt": ["text"]}, True),
        ({"prompt": [[1, 2]], "n": 1}, True),
        ({"messages": []}, True),
        ({"prompt": ["text", "other"]}, False),
        ({"prompt": [[1, 2], [3]]}, False),
        ({"prompt": "text", "n": 2}, False),
        ({"prompt": "text", "use_beam_search": True}, False),
    ],
)
def test_several_prompts_or_answers_are_computed_wholly_by_an_engine_that_decodes(request_body, is_one):
    async def scenario():
        prefill, decode = Recorder("prefill"), Recorder("decode")
        async with Rig([prefill], [decode]) as rig, rig.post(request_body) as answer:
            assert answer.status == 200
        assert len(prefill.requests) == int(is_one)
        assert ("kv_transfer_params" in decode.requests[0]) == is_one

    assert is_one_answer(request_body) == is_one
    run(scenario)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "the request is not a JSON object"),
        (b"[1]", "the request is not a JSON object"),
        (b"{", "the request is not a JSON object"),
        (b'{"prompt": "a", "kv_transfer_params": "b"}', "`kv_transfer_params` is not an object"),
    ],
)
def test_what_is_no_request_is_refused(body, complaint):
    async def scenario():
        prefill = Recorder("prefill")
        rig = Rig([prefill], [Recorder("decode")])
        async with rig, rig.session.post(rig.url + "/v1/chat/completions", data=body) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["message"] == complaint
        assert prefill.requests == []

    run(scenario)


def test_models_are_those_of_an_engine_and_health_names_the_process():
    async def scenario():
        async with Rig([Recorder("prefill")], [Recorder("decode", pieces=[b'{"data": []}'])]) as rig:
            async with rig.session.get(rig.url + "/v1/models") as answer:
                assert await answer.json() == {"data": []}
            async with rig.session.get(rig.url + "/health") as answer:
                assert (answer.status, "pid" in await answer.json()) == (200, True)

    run(scenario)


def test_long_prompt_passes():
    async def scenario():
        prefill, decode = Recorder("prefill"), Recorder("decode")
        prompt = list(range(400_000))  # more than aiohttp takes by default
        body = io.BytesIO(json.dumps({"prompt": prompt}).encode())
        rig = Rig([prefill], [decode])
        async with rig, rig.session.post(rig.url + "/v1/completions", data=body) as answer:
            assert answer.status == 200
        assert prefill.requests[0]["prompt"] == decode.requests[0]["prompt"] == prompt

    run(scenario)
