"""Clients that leave, or stop in the middle of a request."""

from __future__ import annotations

import asyncio
import errno
import json
import socket

import pytest
from aiohttp import web
from server_rig import COMPLETIONS, Client, WrittenEngine, eventually, served

from kvbm.engines.embedded.http.connections import front, listen

pytest.importorskip("transformers")


def request_of(*, stream: bool = False) -> bytes:
    body = json.dumps({"prompt": "a", "max_tokens": 4, "stream": stream}).encode()
    return f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@served(is_paced=True)
async def test_a_client_that_leaves_ends_its_request_although_nothing_is_computed(
    client: Client, engine: WrittenEngine, stream: bool
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(request_of(stream=stream))
    engine.permit(1)
    await eventually(lambda: bool(engine.submitted))
    writer.close()
    await eventually(lambda: len(engine.aborted) == 1)


HERE, NOT_HERE = "127.0.0.1", "192.0.2.1"  # the second is of no machine


@pytest.mark.parametrize("addresses", [[NOT_HERE, HERE], [NOT_HERE], [NOT_HERE, None]])
def test_a_name_with_an_address_that_is_not_here_is_served_on_the_others(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str | None]
) -> None:
    async def scenario() -> None:
        async def getaddrinfo(*_: object, family: int, **__: object) -> list[tuple[object, ...]]:
            found = addresses[-1:] if family == socket.AF_INET else addresses
            if found == [None]:
                raise socket.gaierror(socket.EAI_ADDRFAMILY, "planted: no IPv4 address")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in found if one is not None]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        runner = front(web.Application())
        await runner.setup()
        try:
            await listen(runner, "a-name", 0)
            assert [one[0] for one in runner.addresses] == [HERE]
        finally:
            await runner.cleanup()

    if HERE in addresses:
        asyncio.run(scenario())
    else:
        with pytest.raises(OSError) as caught:
            asyncio.run(scenario())
        assert caught.value.errno == errno.EADDRNOTAVAIL
