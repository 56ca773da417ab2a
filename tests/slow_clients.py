"""Clients that keep a server busy with little: each does one thing slowly, and connects again when it is closed."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

PAUSE_S = 0.2


@contextmanager
def slow_clients(
    count: int, connect: Callable[[], socket.socket], begin: bytes, drip: bytes, *, reads: bool = False
) -> Iterator[None]:
    """Each sends `begin`, then `drip` again and again with a pause before. With `reads`, it takes a byte of the answer
    each time. They are connected when the body begins."""
    loop, connected = asyncio.new_event_loop(), threading.Barrier(2)

    async def one(opened: list[None]) -> None:
        while True:
            with suppress(OSError), connect() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
                connection.setblocking(False)
                await loop.sock_sendall(connection, begin)
                opened.append(None)
                if len(opened) == count:
                    await asyncio.to_thread(connected.wait)
                while True:
                    await asyncio.sleep(PAUSE_S)
                    await loop.sock_sendall(connection, drip)
                    if reads and not await loop.sock_recv(connection, 1):
                        break
            await asyncio.sleep(0.01)

    async def run() -> None:
        opened: list[None] = []
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*(one(opened) for _ in range(count)))

    task = loop.create_task(run())
    thread = threading.Thread(target=loop.run_until_complete, args=(task,))
    thread.start()
    try:
        connected.wait(60)
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
