"""Clients that leave, or stop in the middle of a request."""

from __future__ import annotations

import asyncio
import json

import pytest
from server_rig import COMPLETIONS, Client, WrittenEngine, eventually, served

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
