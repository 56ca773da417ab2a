"""ControlServer: the Unix socket through which the operator of an engine controls its cache.

It is `control-<engine>-<pid>.sock` in the run directory, with mode 0600 in a directory with mode 0700. Only the user of
the engine and root are answered, whatever the modes are. A connection carries one message, a line, and its answer. It
runs in the leader's process, so clients, their time and their bytes are bounded.

A socket's path has at most 107 bytes, and a run directory may be longer: the socket is bound through a descriptor of
its directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.observe.bounded_server import BACKLOG, BoundedServer
from kvbm.observe.control_desk import MAX_BYTES

if TYPE_CHECKING:
    import asyncio

    from kvbm.observe.control_desk import ControlDesk

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

log = logging.getLogger(__name__)


class ControlServer(BoundedServer):
    """Serves `desk` in `directory`. Raises OSError if the socket cannot be made."""

    def __init__(self, directory: Path, desk: ControlDesk, *, engine: int) -> None:
        self._desk = desk
        self._directory = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._name = f"control-{engine}-{os.getpid()}.sock"
        try:
            self._remove()
            listening = _listening(f"/proc/self/fd/{self._directory}/{self._name}")
            super().__init__(listening, "kvbm-control", most_bytes=MAX_BYTES)
        except BaseException:
            os.close(self._directory)
            raise

    async def request(self, reader: asyncio.StreamReader, client: socket.socket) -> Awaitable[bytes] | None:
        pid, uid, _ = _CREDENTIALS.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        sender = f"process {pid} of user {uid}"
        if uid not in (os.geteuid(), 0):
            log.warning("kvbm: control: %s was refused, the engine belongs to user %d", sender, os.geteuid())
            return None
        line = await reader.readuntil(b"\n")
        return self._reply(line[:-1], sender)

    async def _reply(self, message: bytes, sender: str) -> bytes:
        return await self.in_thread(self._desk.reply, message, sender) + b"\n"

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):
            self._remove()
        os.close(self._directory)

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name, dir_fd=self._directory)


def _listening(path: str) -> socket.socket:
    """Return a socket at `path`. The file gets the mode of the descriptor, so that it is never open to others."""
    listening = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(listening.fileno(), 0o600)
        listening.bind(path)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def opened(directory: str | None, desk: ControlDesk, *, engine: int) -> ControlServer | None:
    """Return the server, or None with a warning: an engine serves without control. None without a directory."""
    if not directory:
        return None
    try:
        return ControlServer(Path(directory), desk, engine=engine)
    except (OSError, RuntimeError) as error:
        log.warning("kvbm: `kvbm cache` cannot reach this engine, because its socket cannot be made: %s", error)
        return None
