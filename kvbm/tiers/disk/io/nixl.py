"""NixlIO: a BlockIO that submits all runs of a call together through NIXL.

It uses the POSIX plugin (io_uring or aio), or the GDS plugin for GPUDirect Storage, which is untested on real hardware.
Each rule below avoids a crash or wrong bytes; `choose_io` tests that the plugin works on this machine:

- One agent per concurrent call. An agent holds its lock while it submits, and releasing a handle waits for that lock
  with the GIL held, which would stop the engine. Agents still use the strict lock mode: without it, a second thread
  crashes the process.
- A handle is released only when it is done. If it were released earlier, its I/O would continue into the buffers, and
  later transfers would hang. A call therefore waits as long as the kernel does.
- The POSIX plugin reports a failure as soon as one I/O of a transfer has failed, while the others may still be running,
  and NIXL does not tell when they end. Such a call raises IoNotEnded, unless the transfer has only one I/O.
- Completion must be polled. Polling costs more CPU than the I/O, so a call first sleeps for most of the time that its
  bytes are expected to take.
- Failures have no reason. Where nothing is running, ThreadsIO repeats the call, which succeeds or raises the reason.
- The default backend, UCX, crashes the process at exit; it is never loaded.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbm.errors import EnvironmentProblem
from kvbm.tiers.disk.io.threads import Buffer, IoNotEnded, IoRun, ThreadsIO, address_of, pieces

log = logging.getLogger(__name__)

PACKAGES = ("nixl_cu13", "nixl_cu12")
QUEUES = ("uring", "aio")  # in order of preference
GDS = "gds"
INSTALL = "`pip install 'kvbm-cli[nixl]'`"
POLL_INTERVAL_S = 0.0005
LONGEST_SLEEP_S = 0.005
SHARE_SLEPT = 0.8  # of the expected time of a transfer
WEIGHT_OF_LAST = 0.2
MAX_DESCRIPTORS = 512  # per handle, half of POOL_SIZE: an agent that exhausts its pool fails from then on
POOL_SIZE = 1024
WHOLE_FILE = 1 << 62  # NIXL ignores the length of a file

Descriptors = NDArray[np.uint64]

_never_freed: list[object] = []  # agents and handles whose I/O may be running


class NixlIO:
    """`memory` contains all buffers of later calls, as arrays of rows. Raises EnvironmentProblem.

    `redone_count` counts calls that system calls had to repeat.
    """

    piece_bytes = 8 << 20  # less: handles and polls cost more than a warm CPU cache saves

    def __init__(self, fd: int, memory: Sequence[Buffer], *, queue: str) -> None:
        self._nixl = _load()
        self._fd, self._queue = fd, queue
        self._spans = [_span(rows) for rows in memory]
        self._threads = ThreadsIO(fd)
        self._idle = [self._new_agent()]  # shared by all threads: pop and append of a list are atomic
        self._seconds_per_byte = 0.0
        self.redone_count = 0

    @property
    def name(self) -> str:
        return GDS if self._queue == GDS else "nixl"

    def read(self, runs: Sequence[IoRun]) -> None:
        if not self._is_moved("READ", runs):
            self.redone_count += 1
            self._threads.read(runs)

    def write(self, runs: Sequence[IoRun]) -> None:
        if not self._is_moved("WRITE", runs):
            self.redone_count += 1
            self._threads.write(runs)

    def close(self) -> None:
        self._idle.clear()
        self._threads.close()

    def _is_moved(self, operation: str, runs: Sequence[IoRun]) -> bool:
        """Return False if system calls must repeat the whole call."""
        if not self._is_ours(runs):
            return False
        try:
            agent = self._take_agent()
        except EnvironmentProblem as error:
            log.warning("%s; using system calls", error.message)
            return False
        is_moved = all(self._is_done(agent, operation, *transfer) for transfer in _transfers(runs, self._fd))
        self._idle.append(agent)  # not after an exception: its I/O may be running
        return is_moved

    def _is_ours(self, runs: Sequence[IoRun]) -> bool:
        """Return whether the buffers are in registered memory; the page of a probe is not."""
        first = address_of(runs[0].buffers[0]) if runs else 0
        return any(start <= first < start + length for start, length in self._spans)

    def _take_agent(self) -> Any:
        try:
            return self._idle.pop()
        except IndexError:
            return self._new_agent()

    def _is_done(self, agent: Any, operation: str, memory: Descriptors, file: Descriptors) -> bool:
        """Run one transfer; return when none of its I/O is running. Raises IoNotEnded if that cannot be detected."""
        try:
            sides = agent.get_xfer_descs(memory, "DRAM"), agent.get_xfer_descs(file, "FILE")
            handle = agent.initialize_xfer(operation, *sides, agent.name)
        except self._nixl.errors as error:
            log.warning("NIXL refused a transfer (%s); using system calls for it", error)
            return False
        try:
            state = agent.transfer(handle)
            is_done = state == "DONE" or (state == "PROC" and self._ends_well(agent, handle, int(memory[:, 1].sum())))
            has_ended = is_done or (state == "PROC" and len(memory) == 1)
        except BaseException as error:  # also one from outside, as MemoryError
            has_ended, problem = False, str(error) or type(error).__name__
        else:
            problem = "a part of it failed"
        if not has_ended:
            _never_freed.append((agent, handle))
            raise IoNotEnded(f"I/O of NIXL may still be running: {problem}")
        try:
            agent.release_xfer_handle(handle)
        except self._nixl.errors as error:
            log.warning("NIXL did not release a transfer that has ended: %s", error)
            _never_freed.append(handle)
        return is_done

    def _ends_well(self, agent: Any, handle: Any, byte_count: int) -> bool:
        """Wait until NIXL reports success or failure."""
        started = time.monotonic()
        sleep_s = min(LONGEST_SLEEP_S, SHARE_SLEPT * self._seconds_per_byte * byte_count)
        try:
            while (state := agent.check_xfer_state(handle)) == "PROC":
                time.sleep(max(POLL_INTERVAL_S, sleep_s))
                sleep_s = 0.0
        except self._nixl.errors:
            return False
        pace = (time.monotonic() - started) / byte_count
        self._seconds_per_byte += WEIGHT_OF_LAST * (pace - self._seconds_per_byte)
        return bool(state == "DONE")

    def _new_agent(self) -> Any:
        api = self._nixl.api
        configuration = api.nixl_agent_config(backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        try:
            agent = api.nixl_agent("kvbm", configuration)
            if self._queue == GDS:
                agent.create_backend("GDS", {})
            else:
                agent.create_backend("POSIX", {f"use_{self._queue}": "true", "ios_pool_size": str(POOL_SIZE)})
            agent.register_memory([(start, length, 0, "") for start, length in self._spans], "DRAM")
            agent.register_memory([(0, WHOLE_FILE, self._fd, "")], "FILE")
        except self._nixl.errors as error:
            raise EnvironmentProblem(f"NIXL cannot use {self._queue} on this machine: {error}") from error
        return agent


@dataclass(frozen=True, slots=True)
class _Nixl:
    """The Python API of NIXL, and its exception types."""

    api: Any
    errors: tuple[type[Exception], ...]


def _load() -> _Nixl:
    """Import the first installed package: all contain the same file plugins."""
    for package in PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
            bindings = importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError as error:
            if error.name != package:
                raise EnvironmentProblem(f"cannot load NIXL: {error}") from error
        except ImportError as error:
            raise EnvironmentProblem(f"cannot load NIXL: {error}") from error
        else:
            if "NIXL_LOG_LEVEL" not in os.environ:  # it logs each agent to stdout
                logging.getLogger("nixl").setLevel(logging.WARNING)
            names = [name for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
            return _Nixl(api, tuple(getattr(bindings, name) for name in names))
    raise EnvironmentProblem("NIXL is not installed", hint=INSTALL)


def _transfers(runs: Sequence[IoRun], fd: int) -> Iterator[tuple[Descriptors, Descriptors]]:
    """Yield transfers of at most MAX_DESCRIPTORS buffers: rows of (address, length, 0) and of (offset, length, fd)."""
    memory, file = [], []
    for _, offset, buffer in pieces(runs):
        memory.append((address_of(buffer), buffer.nbytes, 0))
        file.append((offset, buffer.nbytes, fd))
    for start in range(0, len(memory), MAX_DESCRIPTORS):
        some = slice(start, start + MAX_DESCRIPTORS)
        yield np.array(memory[some], np.uint64), np.array(file[some], np.uint64)


def _span(rows: Buffer) -> tuple[int, int]:
    """Return the address and the length in bytes of an array of rows."""
    start = address_of(rows)
    return start, address_of(rows[-1:]) + rows[-1:].nbytes - start
