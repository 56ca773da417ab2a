"""BoundedServer: a server inside an engine's process, for clients that may be slow, silent or hostile.

One thread with an event loop serves all clients. Each has CLIENT_TIMEOUT_S for its whole request, and as long to take
its whole answer. At most MAX_CLIENTS are connected. When one more connects, the server closes the oldest of those that
have not sent their whole request, or not taken their whole answer. Nothing of a client is logged.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from kvbm.host import threads

BACKLOG = 128
MAX_CLIENTS = 128
CLIENT_TIMEOUT_S = 2.0
PAUSE_S = 0.5  # after a client could not be accepted
PIECE_BYTES = 1 << 16

log = logging.getLogger(__name__)


class BoundedServer:
    """Owns `listening`. A request has at most `most_bytes` before its separator. Raises RuntimeError if its thread
    cannot be started. A subclass overrides `request`."""

    def __init__(self, listening: socket.socket, name: str, *, most_bytes: int) -> None:
        self._listening = listening
        self._most_bytes = most_bytes
        self._unfinished: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._answering: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self._loop = self._runner.get_loop()
        self._loop.set_exception_handler(lambda _, what: log.debug("kvbm: %s", what))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        listening.setblocking(False)
        try:
            threads.start(self._thread)
        except RuntimeError:
            self._runner.close()
            listening.close()
            raise

    async def request(self, reader: asyncio.StreamReader, client: socket.socket) -> Awaitable[bytes] | None:
        """Read a whole request and return what makes its answer, or None to hang up."""
        raise NotImplementedError

    async def in_thread(self, call: Callable[..., bytes], *arguments: Any) -> bytes:
        """Call what waits for the engine. Raises RuntimeError if no thread can be started."""
        future: Future[bytes] = Future()
        future.set_running_or_notify_cancel()
        threads.start(threading.Thread(target=lambda: future.set_result(call(*arguments)), daemon=True))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with self._runner, self._listening:
            self._runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop.add_reader(self._listening, self._accept)
        await self._stop.wait()
        self._loop.remove_reader(self._listening)

    def _accept(self) -> None:
        try:
            client, _ = self._listening.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptors; the client stays in the queue, and the selector would return it at once
            self._make_room()
            self._loop.remove_reader(self._listening)
            self._loop.call_later(PAUSE_S, self._loop.add_reader, self._listening, self._accept)
            return
        client.setblocking(False)
        task = self._loop.create_task(self._attend(client))
        task.add_done_callback(lambda task: self._forget(task, client))
        self._unfinished[task] = None
        if len(self._unfinished) + len(self._answering) > MAX_CLIENTS:
            self._make_room()

    def _make_room(self) -> None:
        if self._unfinished:
            oldest = next(iter(self._unfinished))
            del self._unfinished[oldest]
            oldest.cancel()

    def _forget(self, task: asyncio.Task[None], client: socket.socket) -> None:
        self._answering.discard(task)
        self._unfinished.pop(task, None)
        client.close()

    async def _attend(self, client: socket.socket) -> None:
        task: Any = asyncio.current_task()
        reader, writer = await asyncio.open_connection(sock=client, limit=self._most_bytes)
        try:
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                answer = await self.request(reader, client)
            if answer is not None:
                self._unfinished.pop(task, None)
                self._answering.add(task)
                writer.write(await answer)
                self._answering.discard(task)
                self._unfinished[task] = None
                async with asyncio.timeout(CLIENT_TIMEOUT_S):
                    writer.write_eof()
                    while await reader.read(PIECE_BYTES):  # a close before the client's could destroy the answer
                        pass
                    writer.close()
                    await writer.wait_closed()
        finally:
            writer.transport.abort()
