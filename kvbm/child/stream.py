"""MessageStream: a channel for an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from typing import Any

from kvbm.child.channel import BUFFER_BYTES, HEADER, Channel, ChannelClosed, decoded, encoded, length_of
from kvbm.child.parent import end, start_child


class MessageStream:
    """One end of a channel. One event loop uses it."""

    def __init__(self, channel: Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._channel = channel  # so that a forked child closes it
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, channel: Channel) -> MessageStream:
        """Consumes `channel`."""
        return cls(channel, *await asyncio.open_connection(sock=channel.socket, limit=BUFFER_BYTES))

    def send(self, message: object) -> None:
        """Send a message, now or later. `receive` reports that the other process has ended."""
        if not self._writer.is_closing():
            self._writer.write(encoded(message))

    async def drain(self) -> None:
        """Wait while much is buffered."""
        with contextlib.suppress(ConnectionError):  # `receive` reports it
            await self._writer.drain()

    async def receive(self) -> Any:
        """Return the next message. Raises ChannelClosed when the other process has ended or sent something else."""
        try:
            length = length_of(await self._reader.readexactly(HEADER.size))
            return decoded(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ChannelClosed from error

    async def finish(self) -> None:
        """Close it when everything is sent."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    def close(self) -> None:
        """Close it at once. May be called twice."""
        self._writer.transport.abort()


async def start_with_stream(
    module: str, what: str, *, stderr: int | None = None
) -> tuple[subprocess.Popen[bytes], MessageStream]:
    """Run `python -m module FD` as `start_child` does. The child dies with its parent, and with a task that is
    cancelled meanwhile."""
    child, channel = start_child(module, what, stderr=stderr, dies_with_parent=True)
    try:
        return child, await MessageStream.over(channel)
    except BaseException:
        channel.close()
        end(child, 0)
        raise
