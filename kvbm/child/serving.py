"""The child's side of a service: opens a storage, executes the orders of one leader on it, and reports what has ended.

main of the process ──▶ serve_leader ──▶ StorageServer: disk and shared tier have a subclass each
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from kvbm.child import deadlines
from kvbm.child.channel import Channel, ChannelClosed
from kvbm.child.child import (
    Close,
    LogRelay,
    Problem,
    Status,
    beating,
    begin,
    end_of_channel,
    send_all,
)
from kvbm.errors import EnvironmentProblem, TierProblem

Send = Callable[[object], None]


class ServedStorage(Protocol):
    """`off_because` is None while it is on. `on_result` is called in any thread when `poll` has something."""

    on_result: Callable[[], None]

    @property
    def off_because(self) -> str | None: ...

    @property
    def counters(self) -> Any: ...

    def submit(self, order: Any, /) -> None: ...

    def poll(self) -> Sequence[Any]: ...

    def close(self, timeout_s: float, /) -> None: ...


class OpenOrder(Protocol):
    """The first message of a leader. The process runs on `cores`."""

    @property
    def cores(self) -> frozenset[int]: ...


Storage = TypeVar("Storage", bound=ServedStorage)
Order = TypeVar("Order", bound=OpenOrder)


class StorageServer(Generic[Storage]):
    """Serves one leader. `_in_flight_count` orders have no result yet."""

    def __init__(self, channel: Channel, storage: Storage, log: LogRelay) -> None:
        self._channel = channel
        self._storage = storage
        self._log = log
        self._in_flight_count = 0
        self._next_beat_s = 0.0
        self._reported_off_because = storage.off_because
        self._result_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        storage.on_result = partial(os.eventfd_write, self._result_event, 1)

    def serve(self) -> None:
        """Run until the leader sends Close. Raises ChannelClosed if the leader exits without."""
        while True:
            interval_s = deadlines.BUSY_INTERVAL_S if self._is_busy() else deadlines.IDLE_INTERVAL_S
            self._channel.wait(interval_s, or_readable=(self._result_event,))
            with suppress(BlockingIOError):
                os.eventfd_read(self._result_event)
            for message in self._channel.receive():
                if isinstance(message, Close):
                    self._storage.close(message.timeout_s)
                    return
                self._handle(message)
            self._report()

    def _handle(self, message: object) -> None:
        """Take a message that is not Close. A service calls `_submit` for orders."""

    def _submit(self, order: object) -> None:
        self._in_flight_count += 1
        self._storage.submit(order)

    def _is_busy(self) -> bool:
        return self._in_flight_count > 0

    def _moved_s(self, now_s: float) -> float:
        """Return until when there was progress, as in Status."""
        return 0.0

    def _report(self) -> None:
        results, now = self._storage.poll(), time.monotonic()
        is_beat_due = self._is_busy() and now >= self._next_beat_s
        self._in_flight_count -= len(results)
        off_because = self._storage.off_because
        if results or is_beat_due or off_because != self._reported_off_because:
            self._next_beat_s = now + deadlines.BEAT_S
            self._reported_off_because = off_because
            self._channel.send(Status(results, off_because, self._storage.counters, self._moved_s(now)))
        self._report_more()
        self._log.send(self._channel.send)

    def _report_more(self) -> None:
        """Send what the service says beside Status."""


def serve_leader(
    kind: type[Order],
    open_storage: Callable[[Order, Send, LogRelay], tuple[Storage, object]],
    server: Callable[[Channel, Storage, LogRelay], StorageServer[Storage]],
) -> int:
    """Open a storage as the leader's first message says, which is of this kind, and serve. Return the exit code: 0
    after Close, 1 if the storage could not be opened. If the leader exits, the process exits at once.

    `open_storage` may raise EnvironmentProblem, and returns the storage and the message that it is open.
    """
    log = begin()
    channel = end_of_channel()
    try:
        order = channel.receive_one(kind)
        os.sched_setaffinity(0, order.cores)
        try:
            with beating(channel) as send:
                storage, opened = open_storage(order, send, log)
        except EnvironmentProblem as error:
            channel.send(Problem(error.message, error.hint, isinstance(error, TierProblem)))
            send_all(channel)
            return 1
        channel.send(opened)
        server(channel, storage, log).serve()
        send_all(channel)
    except ChannelClosed:
        os._exit(0)
    return 0
