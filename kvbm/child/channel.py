"""Channel: the socket between the leader and one of its child processes.

`send` and `receive` never block, so that an engine's step never does: what the socket does not accept is buffered and
sent by a later call. Messages are pickled; both ends are the same program, and no other process has the socket.
"""

from __future__ import annotations

import math
import pickle
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import TypeVar

HEADER = struct.Struct("<Q")
UNPICKLING_ERRORS = (  # what bytes that are not a pickle lead to
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
MAX_MESSAGE_BYTES = 1 << 30  # blocks found at start, the largest message, take less than 100 bytes a block
RECEIVE_BYTES = 1 << 20
RECEIVED_AT_ONCE = 4 << 20  # one call takes no more, so that no engine step follows a sender that goes on
BUFFER_BYTES = 4 << 20

Message = TypeVar("Message")


class ChannelClosed(Exception):
    """The other process has exited, or has sent an invalid message."""


class Channel:
    """One end of the channel. One thread uses it."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self.socket = end
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)
        self._outgoing = bytearray()
        self._incoming = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: object) -> None:
        """May raise ChannelClosed."""
        self._outgoing += encoded(message)
        self.flush()

    def flush(self) -> None:
        """Send buffered bytes. Raises ChannelClosed."""
        try:
            while self._outgoing:
                del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError as error:
            self._outgoing.clear()
            raise ChannelClosed from error

    def has_more_to_send(self) -> bool:
        return bool(self._outgoing)

    def receive(self) -> list[object]:
        """Return complete messages that have arrived. Raises ChannelClosed when none is left and the channel is
        closed."""
        if not (self._incoming or self._readable.poll(0)):  # a sixth of the time of a `recv` that finds nothing
            return []
        is_over = False
        end = len(self._incoming) + RECEIVED_AT_ONCE
        try:
            while len(self._incoming) < end and not is_over:
                received = self.socket.recv(RECEIVE_BYTES)
                self._incoming += received
                is_over = not received
        except BlockingIOError:
            pass
        except OSError:
            is_over = True
        messages = self._take_whole()
        if is_over and not messages:
            raise ChannelClosed
        return messages

    def receive_one(self, kind: type[Message], timeout_s: float | None = None) -> Message:
        """Wait for a message of a process that sends one at a time. Raises ChannelClosed and TimeoutError."""
        end_s = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        while not (messages := self.receive()):
            if time.monotonic() > end_s:
                raise TimeoutError
            self.wait(None if timeout_s is None else end_s - time.monotonic())
        message = messages[0]
        assert isinstance(message, kind), message
        return message

    def wait(self, timeout_s: float | None, *, or_readable: Sequence[int] = ()) -> None:
        """Wait until the channel or one of these descriptors is readable; meanwhile send buffered bytes."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            poll = select.poll()  # select(2) is limited to descriptors below 1024
            for fd in or_readable:
                poll.register(fd, select.POLLIN)
            poll.register(self.fileno(), select.POLLIN | (select.POLLOUT if self._outgoing else 0))
            ready = poll.poll(None if left_s is None else 1000 * left_s)
            if (self.fileno(), select.POLLOUT) not in ready:
                return
            try:
                self.flush()
            except ChannelClosed:  # `receive` reports it
                return

    def close(self) -> None:
        """May be called twice."""
        self.socket.close()

    def _take_whole(self) -> list[object]:
        messages = []
        start = 0
        while len(self._incoming) - start >= HEADER.size:
            content = start + HEADER.size
            end = content + length_of(self._incoming[start:content])
            if len(self._incoming) < end:
                break
            messages.append(decoded(memoryview(self._incoming)[content:end]))
            start = end
        if start:
            del self._incoming[:start]
        return messages


def encoded(message: object) -> bytes:
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(content)) + content


def length_of(header: bytes | bytearray) -> int:
    """Return how many bytes follow. Raises ChannelClosed."""
    (length,) = HEADER.unpack(header)
    if length > MAX_MESSAGE_BYTES:
        raise ChannelClosed(f"a message of {length} bytes")
    return int(length)


def decoded(content: memoryview | bytes) -> object:
    """Raise ChannelClosed for bytes that are not a message: the process that sent them is not trusted any more."""
    try:
        return pickle.loads(content)
    except UNPICKLING_ERRORS as error:
        raise ChannelClosed(f"not a message: {error!r}") from error
