"""Handover: blocks of a prompt that a prefill engine pins for a decode engine, and their release if none takes them.

NIXL frees them when the decode engine has read them or has aborted the request, otherwise after a lease of 30 seconds.
A decode engine that did not admit the request does neither, so the proxy asks the prefill engine to free them:

- The client left before the request was sent to a decode engine.
- The decode engine is not reachable, closes the connection without an answer, or answers with an error.

Blocks that a decode engine may still read are never released. They would be overwritten meanwhile, and the decode
engine would keep wrong ones. An engine ignores a request whose connection is closed before it has read the body. So if
a client leaves, the connection to the decode engine stays open until ADMISSION_S after the request was sent. After
that, the engine has admitted the request, and frees the blocks itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
from multidict import CIMultiDict

from kvbm_cli.disaggregated.client_request import release_request

ADMISSION_S = 1.0
RELEASE_TIMEOUT_S = 30.0  # it takes effect before it is answered
ATTEMPTS = 2  # an engine can close an idle connection at the moment when the proxy uses it
FIRST_ERROR = 400

Post = Callable[[str, CIMultiDict[str], bytes], Awaitable[aiohttp.ClientResponse]]


@dataclass(slots=True)
class Handover:
    """One prompt. `ticket` names its blocks for the prefill engine, which may have pinned them unless it refused."""

    post: Post
    prefill_url: str
    headers: CIMultiDict[str]
    ticket: str
    is_pinned: bool = True
    _decoding: asyncio.Future[aiohttp.ClientResponse] | None = None
    _admitted_at: float = 0.0

    async def decode(self, url: str, body: bytes) -> aiohttp.ClientResponse:
        """Send the request to a decode engine and return its answer, which `end` closes."""
        self._admitted_at = asyncio.get_running_loop().time() + ADMISSION_S
        self._decoding = asyncio.ensure_future(self.post(url, self.headers, body))
        return await asyncio.shield(self._decoding)

    async def end(self) -> None:
        """Close the connection to the decode engine, and release the blocks if it did not admit the request."""
        try:
            is_admitted = self._decoding is not None and await self._is_admitted(self._decoding)
        finally:
            self._leave()
        if self.is_pinned and not is_admitted:
            await self._release()

    async def _is_admitted(self, decoding: asyncio.Future[aiohttp.ClientResponse]) -> bool:
        """Return when the decode engine has admitted the request, or has refused it."""
        if not decoding.done():
            await asyncio.wait([decoding], timeout=self._time_to_admit_s())
        if not decoding.done():
            return True
        if (error := decoding.exception()) is not None:
            return isinstance(error, aiohttp.SocketTimeoutError)  # it has the request, and computes for very long
        answer = decoding.result()
        if answer.status < FIRST_ERROR and not answer.content.is_eof():
            await asyncio.sleep(self._time_to_admit_s())
        return answer.status < FIRST_ERROR

    def _leave(self) -> None:
        decoding = self._decoding
        if decoding is not None and not decoding.cancel() and decoding.exception() is None:
            decoding.result().close()

    def _time_to_admit_s(self) -> float:
        return max(0.0, self._admitted_at - asyncio.get_running_loop().time())

    async def _release(self) -> None:
        for _ in range(ATTEMPTS):
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with asyncio.timeout(RELEASE_TIMEOUT_S):
                    url = f"{self.prefill_url}/v1/completions"
                    (await self.post(url, self.headers, release_request(self.ticket))).close()
                return
