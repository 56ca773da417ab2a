"""A server of metrics with a page that the test changes at any time, and that hangs or is slow on request."""

from __future__ import annotations

import asyncio

from fake_server import Connection, FakeServer, Request


class MetricsServerForTests(FakeServer):
    status, delay_s, hangs = 200, 0.0, False

    def __init__(self, text: str | bytes = "") -> None:
        super().__init__()
        self.text = text
        self.requests: list[Request] = []

    async def answer(self, request: Request, connection: Connection) -> None:
        self.requests.append(request)
        if self.hangs:
            await asyncio.sleep(60)
        text = self.text
        await asyncio.sleep(self.delay_s)
        connection.reply(self.status, text)
