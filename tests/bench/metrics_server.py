"""A server of metrics with a page that the test changes, and that hangs or is slow on request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from fake_server import Connection, FakeServer, Request


@dataclass
class MetricsPages:
    text: str | bytes = ""
    status: int = 200
    delay_s: float = 0.0
    hangs: bool = False
    requests: int = 0
    headers: dict[str, str] = field(default_factory=dict)


class MetricsServerForTests(FakeServer):
    """`pages` may be changed at any time."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self.pages = MetricsPages(text)

    async def answer(self, request: Request, connection: Connection) -> None:
        pages = self.pages
        pages.requests += 1
        pages.headers = request.headers
        if pages.hangs:
            await asyncio.sleep(60)
        text = pages.text
        await asyncio.sleep(pages.delay_s)
        connection.reply(pages.status, text)
