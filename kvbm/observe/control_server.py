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
import threading
import time
from pathlib import Path
from socketserver import BaseRequestHandler, UnixStreamServer
from typing import TYPE_CHECKING

from kvbm.host import threads
from kvbm.observe.bounded_server import CLIENT_TIMEOUT_S, BoundedServer
from kvbm.observe.control_desk import MAX_BYTES

if TYPE_CHECKING:
    from kvbm.observe.control_desk import ControlDesk

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

log = logging.getLogger(__name__)


class ControlServer:
    """Serves `desk` in `directory`. Raises OSError if the socket cannot be made."""

    def __init__(self, directory: Path, desk: ControlDesk, *, engine: int) -> None:
        self._directory = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._name = f"control-{engine}-{os.getpid()}.sock"
        try:
            self._remove()
            self._server = _SocketServer(f"/proc/self/fd/{self._directory}/{self._name}", desk)
        except BaseException:
            os.close(self._directory)
            raise
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvbm-control", daemon=True)
        threads.start(self._thread)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._remove()
        os.close(self._directory)

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name, dir_fd=self._directory)


def opened(directory: str | None, desk: ControlDesk, *, engine: int) -> ControlServer | None:
    """Return the server, or None with a warning: an engine serves without control. None without a directory."""
    if not directory:
        return None
    try:
        return ControlServer(Path(directory), desk, engine=engine)
    except (OSError, RuntimeError) as error:
        log.warning("kvbm: `kvbm cache` cannot reach this engine, because its socket cannot be made: %s", error)
        return None


class _SocketServer(BoundedServer, UnixStreamServer):
    def __init__(self, path: str, desk: ControlDesk) -> None:
        self.desk = desk
        super().__init__(path, _ControlHandler)

    def server_bind(self) -> None:
        """Create the socket with its mode: the file gets the mode of the descriptor, so that it is never open."""
        os.fchmod(self.socket.fileno(), 0o600)
        super().server_bind()


class _ControlHandler(BaseRequestHandler):
    request: socket.socket
    server: _SocketServer

    def handle(self) -> None:
        pid, uid, _ = _CREDENTIALS.unpack(
            self.request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        sender = f"process {pid} of user {uid}"
        if uid not in (os.geteuid(), 0):
            log.warning("kvbm: control: %s was refused, the engine belongs to user %d", sender, os.geteuid())
            return
        message = self._line()
        if message is not None:
            self.request.settimeout(CLIENT_TIMEOUT_S)
            self.request.sendall(self.server.desk.reply(message, sender) + b"\n")

    def _line(self) -> bytes | None:
        """Return the first line; None if it does not come in time, or is too long."""
        end_s = time.monotonic() + CLIENT_TIMEOUT_S
        received = b""
        while b"\n" not in received and len(received) <= MAX_BYTES:
            self.request.settimeout(max(0.001, end_s - time.monotonic()))
            try:
                more = self.request.recv(MAX_BYTES)
            except TimeoutError:
                return None
            if not more or time.monotonic() > end_s:
                return None
            received += more
        line, _, _ = received.partition(b"\n")
        return line if len(line) <= MAX_BYTES else None
