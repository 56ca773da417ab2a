"""The cache is emptied over HTTP only with the token of the server."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest
from server_rig import ADMIN_TOKEN, COMPLETIONS, Client, WrittenEngine, serve, served

from kvbm.engines.launch_plan import ADMIN_HEADER

RESET = "/reset_prefix_cache"
TOKEN = {ADMIN_HEADER: ADMIN_TOKEN}
REFUSED = {
    "no token": {},
    "another token": {ADMIN_HEADER: "b" * 20},
    "an empty token": {ADMIN_HEADER: ""},
    "a token that is not ASCII": {ADMIN_HEADER: "é" * 20},
}


@pytest.mark.parametrize("headers", REFUSED.values(), ids=REFUSED)
def test_refused_caller_does_not_reset_the_cache(headers: dict[str, str]) -> None:
    engine = WrittenEngine()
    resets: list[bool] = []
    begin_reset = engine.begin_reset
    engine.begin_reset = lambda: resets.append(True) or begin_reset()  # type: ignore[method-assign]

    async def use(client: Client) -> None:
        status, body = await client.post(RESET, headers)
        assert (status, body["error"]["code"]) == (403, "not_allowed")

    serve(engine, use)
    assert resets == []


@served()
async def test_a_server_without_token_refuses_all(client: Client) -> None:
    client.service.admin_token = None
    for token in (ADMIN_TOKEN, ""):
        status, body = await client.post(RESET, {ADMIN_HEADER: token})
        assert (status, "it is off" in body["error"]["message"]) == (403, True)


@served()
async def test_bytes_that_are_no_text_are_refused(client: Client) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(b"POST %b HTTP/1.1\r\nHost: a\r\n%b: \xff\xfe\r\n\r\n" % (RESET.encode(), ADMIN_HEADER.encode()))
    assert (await reader.readline()).split()[1] == b"403"
    writer.close()


def test_resets_that_wait_hold_up_no_completion() -> None:
    """A text is tokenized in a thread of the event loop's pool, which has few."""
    engine = WrittenEngine()
    resets = [Future[bool]() for _ in range(50)]
    waiting = list(resets)
    engine.begin_reset = waiting.pop  # type: ignore[method-assign]

    async def use(client: Client) -> None:
        callers = [asyncio.create_task(client.post(RESET, TOKEN)) for _ in resets]
        while waiting:
            await asyncio.sleep(0.01)
        status, _ = await client.post(COMPLETIONS, prompt="Hello", max_tokens=2)
        assert status == 200
        for reset in resets:
            reset.set_result(True)
        assert await asyncio.gather(*callers) == [(200, {"reset": True})] * len(resets)

    serve(engine, use)
