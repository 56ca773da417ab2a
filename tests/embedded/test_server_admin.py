"""Who may empty the cache over HTTP: a program on this machine that has the token, and no web page."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest
from aiohttp.test_utils import make_mocked_request
from server_rig import ADMIN_TOKEN, COMPLETIONS, Client, WrittenEngine, serve

from kvbm.engines.embedded.http.admin import require_admin
from kvbm.engines.embedded.http.request_fields import RequestError
from kvbm.engines.launch_plan import ADMIN_HEADER

RESET = "/reset_prefix_cache"
TOKEN = {ADMIN_HEADER: ADMIN_TOKEN}
REFUSED = {
    "no token": {},
    "another token": {ADMIN_HEADER: "b" * 20},
    "an empty token": {ADMIN_HEADER: ""},
    "a token that is not ASCII": {ADMIN_HEADER: "é" * 20},
    "a web page": {**TOKEN, "Origin": "http://attacker.example"},
    "a page without origin": {**TOKEN, "Origin": "null"},
    "a page of the same name": {**TOKEN, "Origin": "http://127.0.0.1"},
    "a browser": {**TOKEN, "Sec-Fetch-Site": "cross-site"},
    "a page that rebinds its name": {**TOKEN, "Host": "attacker.example"},
    "a name that begins like ours": {**TOKEN, "Host": "127.0.0.1.attacker.example:8000"},
    "a name that ends like ours": {**TOKEN, "Host": "attacker.example@127.0.0.1x"},
    "a broken host": {**TOKEN, "Host": "[::1"},
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


@pytest.mark.parametrize("host", [b"127.0.0.1", b"\xff"])
def test_bytes_that_are_no_text_are_refused(host: bytes) -> None:
    async def use(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        name = ADMIN_HEADER.encode()
        writer.write(b"POST %b HTTP/1.1\r\nHost: %b\r\n%b: \xff\xfe\r\n\r\n" % (RESET.encode(), host, name))
        assert (await reader.readline()).split()[1] == b"403"
        writer.close()

    serve(WrittenEngine(), use)


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "127.8.9.1:70", "[::1]:8000"])
def test_caller_with_the_token_resets_it_under_every_loopback_name(host: str) -> None:
    async def use(client: Client) -> None:
        assert await client.post(RESET, {**TOKEN, "Host": host}) == (200, {"reset": True})

    serve(WrittenEngine(), use)


@pytest.mark.parametrize(
    ("remote", "token", "reason"),
    [
        ("192.0.2.1", ADMIN_TOKEN, "same machine"),
        ("::ffff:192.0.2.1", ADMIN_TOKEN, "same machine"),
        ("", ADMIN_TOKEN, "same machine"),
        ("127.0.0.1", None, "is off"),
    ],
)
def test_other_machine_is_refused_and_a_server_without_token_refuses_all(
    remote: str, token: str | None, reason: str
) -> None:
    async def check() -> None:
        request = make_mocked_request("POST", RESET, {**TOKEN, "Host": "127.0.0.1"}).clone(remote=remote)
        with pytest.raises(RequestError, match=reason) as refusal:
            require_admin(request, token)
        assert refusal.value.status == 403
        require_admin(request.clone(remote="::ffff:127.0.0.1"), ADMIN_TOKEN)

    asyncio.run(check())


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
