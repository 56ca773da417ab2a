"""The proxy of disaggregated prefill, in front of HTTP servers that record what they get."""

import asyncio
import contextlib
import functools
import gzip
import io
import json

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvbm.engines.embedded.http import connections
from kvbm.engines.embedded.http.connections import front, listen
from kvbm_cli.disaggregated import client_request, handover, proxy
from kvbm_cli.disaggregated.client_request import engine_requests, is_one_answer
from kvbm_cli.disaggregated.proxy import make_app

ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
ASKED |= dict.fromkeys(("remote_block_ids", "remote_host", "remote_port"))
BLOCKS = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_port": 5600}
PREFILLED = json.dumps({"choices": [{"text": "x"}], "kv_transfer_params": BLOCKS}).encode()
ANSWER = (b'{"choices": [', b'{"text": "answer"}]}')
PATH = "/v1/completions"
A = {"prompt": "a"}


class Recorder:
    """An engine that answers what it is told to, in pieces, and remembers its requests."""

    def __init__(self, *pieces):
        self.pieces, self.status, self.breaks, self.content_type = pieces, 200, False, "application/json"
        self.hangs_up = False
        self.requests, self.headers, self.paths = [], [], []
        self.gone, self.begin, self.go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.begin.set()
        self.go_on.set()

    async def answer(self, request):
        self.paths.append(request.path)
        self.requests.append(await request.json() if request.can_read_body else None)
        self.headers.append(request.headers)
        if self.hangs_up:
            request.transport.abort()
        response = web.StreamResponse(status=self.status, headers={"Content-Type": self.content_type})
        try:
            await self.begin.wait()
            await response.prepare(request)
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
        app.router.add_route("*", "/{path:.*}", self.answer)
        server = TestServer(app)
        await server.start_server()
        stack.push_async_callback(server.close)
        return str(server.make_url("/")).rstrip("/")


class Rig:
    """A proxy and its engines: `prefill` and `decode` are the first of each kind."""

    def __init__(self, *, counts=(1, 1), urls=None, decode_url=None, **options):
        self.kinds = [[Recorder(PREFILLED) for _ in range(counts[0])], [Recorder(*ANSWER) for _ in range(counts[1])]]
        self.engines = self.prefill, self.decode = [kind[0] for kind in self.kinds]
        self.urls, self.decode_url, self.options = urls, decode_url, options

    async def __aenter__(self):
        self.stack = contextlib.AsyncExitStack()
        urls = self.urls or [[await engine.start(self.stack) for engine in kind] for kind in self.kinds]
        app = make_app(urls[0], [self.decode_url] if self.decode_url else urls[1])
        runner = front(app, **self.options)
        await runner.setup()
        self.ending = app[proxy.ENGINES].ending
        self.stack.push_async_callback(runner.cleanup)
        await listen(runner, "127.0.0.1", 0)
        self.session = await self.stack.enter_async_context(aiohttp.ClientSession())
        self.port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *ended):
        await self.stack.aclose()

    def post(self, body, headers=None):
        """As a stream, because aiohttp warns of long bytes."""
        headers = {"Content-Type": "application/json", **(headers or {})}
        return self.session.post(self.url + PATH, data=io.BytesIO(json.dumps(body).encode()), headers=headers)

    async def ask(self, body, **more):
        """The status of the answer, and what it says."""
        async with self.post(body, **more) as answer:
            return answer.status, await answer.json()

    async def send(self, content, **options):
        """A connection on which these bytes were sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, **options)
        writer.write(content)
        await writer.drain()
        return reader, writer

    async def exchange(self, content):
        """The whole answer to raw bytes, read until the server closes."""
        reader, writer = await self.send(content)
        try:
            return await reader.read()
        finally:
            writer.close()


def head(line, length, *, rest="Connection: close\r\n"):
    return f"{line}\r\nHost: a\r\n{rest}Content-Length: {length}\r\n\r\n".encode()


def in_a_loop(test):
    @functools.wraps(test)
    def run(**arguments):
        asyncio.run(asyncio.wait_for(test(**arguments), 120))

    return run


@in_a_loop
async def test_request_is_prefilled_for_one_token_and_decoded_with_the_address_of_its_blocks():
    body = {"prompt": "a", "max_tokens": 9, "stream": True, "stream_options": {"x": 1}, "min_tokens": 3}
    async with Rig() as rig:
        answer = await rig.ask(body, headers={"Authorization": "Bearer key"})
    assert answer == (200, {"choices": [{"text": "answer"}]})
    (asked,), (decoded,) = (engine.requests for engine in rig.engines)
    assert (asked["prompt"], asked["max_tokens"]) == ("a", 1)
    assert asked.keys().isdisjoint({"stream", "stream_options", "min_tokens"})
    assert (asked["kv_transfer_params"]["do_remote_decode"], decoded["kv_transfer_params"]) == (True, BLOCKS)
    assert {**decoded, "kv_transfer_params": None} == {**body, "kv_transfer_params": None}
    assert [engine.headers[0]["Authorization"] for engine in rig.engines] == ["Bearer key"] * 2


def test_chat_request_asks_for_one_token_under_either_name():
    body = {"messages": [], "max_completion_tokens": 50, "kv_transfer_params": {"max_load_tokens": 0}}
    asked = json.loads(engine_requests(json.dumps(body).encode()).prefill)
    assert (asked["max_tokens"], asked["kv_transfer_params"]["max_load_tokens"]) == (1, 0)
    assert "max_completion_tokens" not in asked


@in_a_loop
async def test_engines_of_a_kind_take_turns():
    async with Rig(counts=(2, 3)) as rig:
        assert [(await rig.ask(A))[0] for _ in range(6)] == [200] * 6
    assert [[len(engine.requests) for engine in kind] for kind in rig.kinds] == [[3, 3], [2, 2, 2]]


@in_a_loop
async def test_pieces_arrive_before_the_answer_is_whole():
    async with Rig() as rig:
        rig.decode.pieces = b"data: 1\n\n", b"data: 2\n\n"
        rig.decode.go_on.clear()
        async with rig.post({**A, "stream": True}) as answer:
            assert await answer.content.readany() == b"data: 1\n\n"
            rig.decode.go_on.set()
            assert await answer.content.read() == b"data: 2\n\n"


@pytest.mark.parametrize("refusing", ["prefill", "decode"])
@in_a_loop
async def test_refusal_of_an_engine_is_passed_on_as_it_is(refusing):
    async with Rig() as rig:
        engine = getattr(rig, refusing)
        engine.status, engine.pieces = 400, [b'{"error": {"message": "too long"}}']
        assert await rig.ask(A) == (400, {"error": {"message": "too long"}})
    assert len(rig.decode.requests) == (refusing == "decode")


@pytest.mark.parametrize("answer", [b'{"choices": []}', b'{"kv_transfer_params": null}'])
@in_a_loop
async def test_prefill_without_an_address_is_a_bad_gateway(answer):
    async with Rig() as rig:
        rig.prefill.pieces = [answer]
        status, said = await rig.ask(A)
    assert status == 502
    assert "returned no `kv_transfer_params`" in said["error"]["message"]
    assert rig.decode.requests == []


@in_a_loop
async def test_engine_that_does_not_answer_is_a_bad_gateway():
    async with Rig(urls=[["http://127.0.0.1:9"]] * 2) as rig:
        status, said = await rig.ask(A)
    assert status == 502
    assert "127.0.0.1:9" in said["error"]["message"]


@in_a_loop
async def test_answer_that_breaks_off_breaks_off_for_the_client_too():
    async with Rig() as rig:
        rig.decode.pieces, rig.decode.breaks = [b"data: 1\n\n"], True
        async with rig.post({**A, "stream": True}) as answer:
            with pytest.raises(aiohttp.ClientError):
                await answer.read()


@pytest.mark.parametrize("during", ["prefill", "decode"])
@in_a_loop
async def test_client_that_leaves_ends_its_request_at_the_engine(during):
    async with Rig() as rig:
        engine = getattr(rig, during)
        engine.pieces, engine.content_type = [b"data: 1\n\n"] * 1000, "text/event-stream"
        engine.go_on.clear()
        request = asyncio.create_task(rig.post({**A, "stream": True}).__aenter__())
        while not engine.requests:
            await asyncio.sleep(0.01)
        if during == "decode":
            (await request).close()
        request.cancel()
        await engine.gone.wait()


SEVERAL = [
    *({"prompt": ["text", "other"]}, {"prompt": [[1, 2], [3]]}, {"prompt": "text", "n": 2}),
    {"prompt": "text", "use_beam_search": True},
]
ONE = [
    *({"prompt": "text"}, {"prompt": [1, 2, 3]}, {"prompt": ["text"]}, {"prompt": [[1, 2]], "n": 1}, {"messages": []}),
]


@pytest.mark.parametrize("body", [*ONE, *SEVERAL])
@in_a_loop
async def test_several_prompts_or_answers_are_computed_wholly_by_an_engine_that_decodes(body):
    is_one = body in ONE
    assert is_one_answer(body) == is_one
    async with Rig() as rig:
        assert (await rig.ask(body))[0] == 200
    assert len(rig.prefill.requests) == int(is_one)
    assert ("kv_transfer_params" in rig.decode.requests[0]) == is_one


UNUSUAL = [
    *({"stream_options": {"include_usage": True}}, {"stream": False, "stream_options": {"include_usage": True}}),
    *(
        {"stream": "maybe"},
        {"stream": 1},
        {"stream": True, "stream_options": 5},
        {"stream": True, "stream_options": []},
    ),
    {"stream": True, "stream_options": {"include_usage": "x"}},
    *({"max_tokens": value} for value in ("x", "5", 1.5, -1, 0, True, [], 10**15)),
    *({"max_completion_tokens": "x"}, {"min_tokens": "x"}, {"min_tokens": -1}, {"stream": True, "prompt_logprobs": 1}),
]
USUAL = [
    *({"stream": False}, {"stream": None, "stream_options": None}, {"stream": True, "stream_options": None}),
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": None}},
    *({"max_tokens": None, "min_tokens": 0}, {"max_completion_tokens": 5}, {"prompt_logprobs": 1}),
]


@pytest.mark.parametrize("more", [*UNUSUAL, *USUAL], ids=str)
@in_a_loop
async def test_only_what_every_engine_accepts_is_prefilled_before_the_decode_engine_has_read_it(more):
    async with Rig() as rig:
        assert (await rig.ask({**A, **more}))[0] == 200
    assert len(rig.prefill.requests) == int(more in USUAL)
    assert {**rig.decode.requests[0], "kv_transfer_params": None} == {**A, **more, "kv_transfer_params": None}


def params(engine):
    return [request["kv_transfer_params"] for request in engine.requests]


async def assert_is_released(rig):
    """By one more request to the prefill engine, with the ticket of the first."""
    await eventually(lambda: len(rig.prefill.requests) == 2)
    asked, released = params(rig.prefill)
    assert released == {"pd_release": asked["pd_ticket"]}
    assert rig.prefill.headers[1]["Authorization"] == "Bearer key"


async def eventually(condition):
    while not condition():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("cause", [400, 422, 500, 503, "unreachable", "hangs up"])
@in_a_loop
async def test_blocks_are_released_if_no_decode_engine_admits_the_request(cause):
    async with Rig(decode_url="http://127.0.0.1:9" if cause == "unreachable" else None) as rig:
        rig.decode.status, rig.decode.hangs_up = cause if isinstance(cause, int) else 200, cause == "hangs up"
        async with rig.post(A, headers={"Authorization": "Bearer key"}) as answer:
            assert answer.status == (cause if isinstance(cause, int) else 502)
        await assert_is_released(rig)


@in_a_loop
async def test_release_is_sent_again_if_the_connection_was_closed():
    async with Rig() as rig:
        rig.decode.status, rig.decode.pieces = 400, [b"{}"]
        rig.decode.go_on.clear()
        asked = asyncio.create_task(rig.ask(A))
        await eventually(lambda: rig.decode.requests)
        rig.prefill.hangs_up = True
        rig.decode.go_on.set()
        assert (await asked)[0] == 400
        await eventually(lambda: len(rig.prefill.requests) > 1)
        rig.prefill.hangs_up = False
        await eventually(lambda: len(rig.prefill.requests) == 3)
    assert params(rig.prefill)[1] == params(rig.prefill)[2]


@in_a_loop
async def test_blocks_are_released_if_the_client_leaves_during_prefill():
    async with Rig() as rig:
        rig.prefill.go_on.clear()
        request = asyncio.create_task(rig.post(A, headers={"Authorization": "Bearer key"}).__aenter__())
        await eventually(lambda: rig.prefill.requests)
        request.cancel()
        await rig.prefill.gone.wait()
        await assert_is_released(rig)
    assert rig.decode.requests == []


@pytest.mark.parametrize("has_begun", [False, True])
@in_a_loop
async def test_blocks_that_a_decode_engine_may_read_are_not_released(has_begun, monkeypatch):
    """It gets the time to admit a request whose client leaves, and releases its blocks itself."""
    monkeypatch.setattr(handover, "ADMISSION_S", 0.5)
    async with Rig() as rig:
        assert (await rig.ask(A))[0] == 200
        rig.decode.pieces, rig.decode.content_type = [b"data: 1\n\n"] * 2, "text/event-stream"
        (rig.decode.go_on if has_begun else rig.decode.begin).clear()
        request = asyncio.create_task(rig.post(A).__aenter__())
        await eventually(lambda: len(rig.decode.requests) == 2)
        arrived = asyncio.get_running_loop().time()
        if has_begun:
            (await request).close()
        request.cancel()
        await rig.decode.gone.wait()
        assert asyncio.get_running_loop().time() - arrived > 0.3
        rig.prefill.status = 400
        assert (await rig.ask(A))[0] == 400
        await eventually(lambda: not rig.ending)
    assert all("pd_release" not in one for one in params(rig.prefill))
    assert len({one["pd_ticket"] for one in params(rig.prefill)}) == 3


NO_OBJECT = "the request is not a JSON object"
LIMIT = b'{"prompt": "a", "kv_transfer_params": {"%s": %s}}'
LONG_TEXT = b'"%s"' % (b"\\n" * 50_000)
NO_LIMITS = (b'"5"', b"-1", b"true", b"1.5", b'{"a": 1}', b"[1]", b"1" + b"0" * 30, LONG_TEXT)
REFUSED: dict[str, tuple[bytes, int, str]] = {
    "nothing": (b"", 400, NO_OBJECT),
    "a list": (b"[1]", 400, NO_OBJECT),
    "half an object": (b"{", 400, NO_OBJECT),
    "parameters that are no object": (
        *(b'{"prompt": "a", "kv_transfer_params": "b"}', 400, "`kv_transfer_params` is not an object"),
    ),
    "a body that decodes to 64 MiB": (gzip.compress(b'{"prompt": "' + b"a" * 2**26 + b'"}'), 415, ""),
    **{f"deep {name}": (text * 100_000, 400, "") for name, text in (("lists", b"["), ("objects", b'{"a":'))},
    "text that is not UTF-8": (b'{"prompt": "\xff"}', 400, ""),
    **{
        f"the number {number[:9].decode()} of {len(number)} digits": (b'{"prompt": %s}' % number, 400, "")
        for number in (b"NaN", b"1e400", b"-Infinity", b"9" * 5000)
    },
    **{
        f"{name.decode()} of {value[:9].decode()}": (LIMIT % (name, value), 400, name.decode())
        for name in (b"max_load_tokens", b"max_offload_tokens")
        for value in NO_LIMITS
    },
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("charset", ["utf-8", "unknown"])
@in_a_loop
async def test_what_is_no_request_is_refused_with_its_beginning(name, charset):
    body, status, complaint = REFUSED[name]
    headers = {"Content-Type": f"application/json; charset={charset}"}
    headers |= {"Content-Encoding": "gzip"} if status == 415 else {}
    async with Rig() as rig, rig.session.post(f"{rig.url}/v1/chat/completions", data=body, headers=headers) as answer:
        text = await answer.text()
        assert (answer.status, len(text) < 600, complaint in text) == (status, True, True), text
    assert rig.prefill.requests == rig.decode.requests == []


@in_a_loop
async def test_models_are_those_of_an_engine_and_health_names_the_process():
    async with Rig() as rig:
        rig.decode.pieces = [b'{"data": []}']
        async with rig.session.get(rig.url + "/v1/models") as answer:
            assert await answer.json() == {"data": []}
        async with rig.session.get(rig.url + "/health") as answer:
            assert (answer.status, "pid" in await answer.json()) == (200, True)


@in_a_loop
async def test_long_prompt_passes():
    prompt = list(range(400_000))  # more than aiohttp takes by default
    async with Rig() as rig:
        assert (await rig.ask({"prompt": prompt}))[0] == 200
    assert rig.prefill.requests[0]["prompt"] == rig.decode.requests[0]["prompt"] == prompt


SECRET = {"do_remote_prefill": True, "remote_host": "attacker.example", "remote_port": 1, "remote_block_ids": [[9]]}
LIMITS = {"max_load_tokens": 16, "max_offload_tokens": 0}


@pytest.mark.parametrize(
    "more", [{}, {"n": 2}, {"prompt": ["a", "b"]}, {"best_of": 3}], ids=["one", "n", "prompts", "best_of"]
)
@pytest.mark.parametrize("place", ["kv_transfer_params", "vllm_xargs"])
@in_a_loop
async def test_client_cannot_name_the_host_and_the_blocks_that_an_engine_reads(more, place):
    given = {"kv_transfer_params": {**SECRET, **LIMITS, "unknown": 1}, "ec_transfer_params": {"peer": "x"}}
    async with Rig() as rig:
        body = {**A, **(given if place == "kv_transfer_params" else {place: {**given, "own": 1}}), **more}
        assert (await rig.ask(body))[0] == 200
    expected = LIMITS if place == "kv_transfer_params" else {}
    for engine, added in zip(rig.engines, (ASKED, {} if more else BLOCKS), strict=True):
        for request in engine.requests:
            params = request.get("kv_transfer_params", {})
            assert len(params.pop("pd_ticket", "0" * 32)) == 32
            assert params == {**expected, **added}
            assert "ec_transfer_params" not in request
            assert request.get("vllm_xargs", {"own": 1}) == {"own": 1}


@in_a_loop
async def test_only_the_address_of_blocks_passes_from_one_engine_to_the_other():
    address = {**BLOCKS, "remote_num_tokens": 5, "tp_size": 2, "max_load_tokens": 0, "command": "run"}
    async with Rig() as rig:
        rig.prefill.pieces = [json.dumps({"kv_transfer_params": address}).encode()]
        assert (await rig.ask(A))[0] == 200
    assert rig.decode.requests[0]["kv_transfer_params"] == {**BLOCKS, "remote_num_tokens": 5, "tp_size": 2}


NOT_SERVED = [
    *("/metrics", "/reset_prefix_cache", "/v1/../reset_prefix_cache", "/v1/%2e%2e/reset_prefix_cache"),
    *("/v1/completions/../../reset_prefix_cache", "/v1/completions%2f..%2f..%2freset_prefix_cache"),
    *("//v1/completions", "/v1/completions/", "/collective_rpc", "/v1/load_lora_adapter"),
    "http://attacker.example/reset_prefix_cache",
]


@pytest.mark.parametrize("target", NOT_SERVED)
@in_a_loop
async def test_no_other_endpoint_of_an_engine_is_reachable(target):
    async with Rig() as rig:
        for method in ("GET", "POST"):
            answer = await rig.exchange(head(f"{method} {target} HTTP/1.1", 2) + b"{}")
            assert answer.split()[1] in (b"404", b"405", b"400"), answer
    assert rig.prefill.paths == rig.decode.paths == []


@in_a_loop
async def test_absolute_target_reaches_our_engine_and_no_other_host():
    async with Rig() as rig:
        line = "POST http://attacker.example/v1/completions HTTP/1.1\r\nHost: attacker.example"
        content = head(line, 15).replace(b"\r\nHost: a\r\n", b"\r\n") + b'{"prompt": "a"}'
        assert (await rig.exchange(content)).split()[1] == b"200"
    assert rig.prefill.paths == rig.decode.paths == [PATH]
    assert all("attacker" not in engine.headers[0]["Host"] for engine in rig.engines)


@in_a_loop
async def test_headers_of_one_connection_do_not_reach_an_engine():
    headers = {"Connection": "keep-alive, X-Hop", "X-Hop": "1", "X-End": "2", "Proxy-Authorization": "secret"}
    async with Rig() as rig:
        assert (await rig.ask(A, headers={**headers, "TE": "trailers"}))[0] == 200
    for engine in rig.engines:
        assert engine.headers[0]["X-End"] == "2"
        assert not {"X-Hop", "Proxy-Authorization", "TE"} & set(engine.headers[0])


@pytest.mark.parametrize(("module", "limit"), [(proxy, "MAX_BODY_BYTES"), (client_request, "MAX_VALUES")])
@in_a_loop
async def test_body_that_is_too_long_is_refused(monkeypatch, module, limit):
    monkeypatch.setattr(module, limit, 1000)
    async with Rig() as rig:
        status, said = await rig.ask({"prompt": [1] * 1100})
        assert (status, "1000" in said["error"]["message"]) == (413, True)
        assert (await rig.ask({**A, "metadata": [[[[[[[[]]]]]]]] * 200}))[0] == 413


@in_a_loop
async def test_body_that_does_not_arrive_is_given_up(monkeypatch):
    monkeypatch.setattr(connections, "BODY_TIMEOUT_S", 0.1)
    async with Rig() as rig:
        assert (await rig.exchange(head(f"POST {PATH} HTTP/1.1", 99) + b"{")).split()[1] == b"408"


@in_a_loop
async def test_request_whose_headers_do_not_arrive_is_closed():
    async with Rig(keepalive_s=0.2) as rig:
        assert await rig.exchange(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n") == b""


@pytest.mark.parametrize("silent", ["prefill", "decode"])
@in_a_loop
async def test_engine_that_accepts_and_never_answers_is_a_bad_gateway(monkeypatch, silent):
    monkeypatch.setattr(proxy, "ENGINE_TIMEOUT_S", 0.2)
    async with Rig() as rig:
        engine = getattr(rig, silent)
        engine.pieces = [b" "]
        engine.go_on.clear()
        try:
            async with rig.post(A) as answer:
                await answer.read()
                assert (silent, answer.status) == ("prefill", 502)
        except aiohttp.ClientError:
            assert silent == "decode"  # the status was already sent
    await asyncio.wait_for(engine.gone.wait(), 60)


@in_a_loop
async def test_client_that_does_not_read_ends_its_request(monkeypatch):
    monkeypatch.setattr(proxy, "CLIENT_TIMEOUT_S", 0.2)
    async with Rig() as rig:
        rig.decode.pieces = [b"x" * 2**20] * 1000
        _, writer = await rig.send(head(f"POST {PATH} HTTP/1.1", 15, rest="") + b'{"prompt": "a"}', limit=1)
        await asyncio.wait_for(rig.decode.gone.wait(), 60)
        writer.close()


ODD = [
    *(b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"),
    *(b"GET /health HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n"),
    b"GET /health HTTP/1.1\r\nA b: c\r\n\r\n",
]


@pytest.mark.parametrize("content", ODD)
@in_a_loop
async def test_odd_request_is_no_error_of_the_server_and_no_line_of_log(caplog, content):
    async with Rig() as rig:
        for _ in range(3):
            answer = await rig.exchange(content)
            assert int(answer.split()[1]) < 500
    assert caplog.text == ""
