"""ProcessIdentity: identifies one process permanently. Process ids are reused, but not with the same start time.

The start time counts from boot, and process ids belong to a namespace (a container), so both are part of the identity.
A process of another machine, container or boot is never confused with a local one, and never signalled.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvbm.host.processes import process_namespace, stat_of


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """`started` is in clock ticks since the boot `boot`; `namespace` is the namespace of process ids."""

    pid: int
    started: int
    boot: str
    namespace: str
    host: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Return None if no such process is alive."""
        found = stat_of(pid)
        return None if found is None else cls(pid, found.started, *_surroundings())

    def is_valid(self) -> bool:
        """Whether the values, which may come from a file, have the right types."""
        texts = (self.boot, self.namespace, self.host)
        return (
            type(self.pid) is type(self.started) is int and self.pid > 0 and all(isinstance(one, str) for one in texts)
        )

    def is_here(self) -> bool:
        """Whether it runs or ran on this machine and in this container, since the last boot."""
        return (self.boot, self.namespace, self.host) == _surroundings()

    def is_alive(self) -> bool:
        found = stat_of(self.pid) if self.is_here() else None
        return found is not None and found.started == self.started

    def age_s(self) -> float | None:
        """Return how long the process has run, whatever happened to the clock; None if it is not alive here."""
        if not self.is_alive():
            return None
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, uptime_s - self.started / os.sysconf("SC_CLK_TCK"))

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal. Returns False if the process is not alive. Never signals another process: opens a descriptor
        of the process first, then checks its identity."""
        with self._descriptor() as descriptor:
            if descriptor is None:
                return False
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
            return True

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`. Returns whether the process has ended."""
        with self._descriptor() as descriptor:
            if descriptor is None:
                return True
            end = select.poll()
            end.register(descriptor, select.POLLIN)
            return bool(end.poll(1000 * timeout_s))

    @contextlib.contextmanager
    def _descriptor(self) -> Iterator[int | None]:
        descriptor = None
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid) if self.is_here() else None
        try:
            yield descriptor if self.is_alive() else None
        finally:
            if descriptor is not None:
                os.close(descriptor)


@cache
def _surroundings() -> tuple[str, str, str]:
    return *process_namespace(), socket.gethostname()


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and its living descendants."""
    parents = {}
    for one in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # of another user, on a machine that hides them
            if (found := stat_of(one)) is not None:
                parents[one] = found.parent
    known = [pid]
    for one in known:
        yield one
        known += [child for child, parent in parents.items() if parent == one]
