"""Identity: one process for good. A process id is given to another process later; with its start time it never is.

The start time counts from the boot of this machine, and process ids belong to a namespace (a container), so both are
part of it: a process of another machine, container or boot is never taken for one of ours, and never signalled.
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

DEAD_STATES = ("Z", "X")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """`started` is in clock ticks since the boot `boot`; `namespace` is that of process ids."""

    pid: int
    started: int
    boot: str
    namespace: str
    host: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """None where no such process lives."""
        started = _start_of(pid)
        return None if started is None else cls(pid, started, *_surroundings())

    def is_here(self) -> bool:
        """Whether it ran, or runs, where this process can see it."""
        return (self.boot, self.namespace, self.host) == _surroundings()

    def is_alive(self) -> bool:
        return self.is_here() and _start_of(self.pid) == self.started

    def signal(self, number: signal.Signals) -> bool:
        """False if it does not live. Nobody else is ever signalled: a descriptor of the process is taken first, and
        then it is looked at."""
        with self._descriptor() as descriptor:
            if descriptor is None:
                return False
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
            return True

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within `timeout_s`."""
        with self._descriptor() as descriptor:
            return descriptor is None or bool(select.select([descriptor], [], [], timeout_s)[0])

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


def _start_of(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in DEAD_STATES else int(fields[19])  # fields from the third on: a name may hold anything


@cache
def _surroundings() -> tuple[str, str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.readlink("/proc/self/ns/pid"), socket.gethostname()
