"""KernelAio: batches of reads or writes of one file, submitted to Linux together by `io_submit`, without a library.

A batch costs two system calls and one wait; `preadv` costs both per block. With O_DIRECT the whole batch is in the
device's queue at once. Without O_DIRECT the kernel would process it sequentially inside `io_submit`.
"""

from __future__ import annotations

import ctypes
import errno
import platform
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvbm.host.libc import LIBC, last_error

MAX_REQUESTS = 128  # per batch; the limit of all processes together is /proc/sys/fs/aio-max-nr, 65536 by default
READ, WRITE = 0, 1  # IOCB_CMD_PREAD and IOCB_CMD_PWRITE


class _SystemCalls(NamedTuple):
    setup: int
    destroy: int
    getevents: int
    submit: int


_SYSTEM_CALLS = {"x86_64": _SystemCalls(206, 207, 208, 209), "aarch64": _SystemCalls(0, 1, 4, 2)}

# struct iocb and struct io_event of <linux/aio_abi.h>, on little-endian machines
_REQUEST = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<u4"),
        ("operation", "<u2"),
        ("priority", "<i2"),
        ("fd", "<i4"),
        ("address", "<u8"),
        ("byte_count", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("event_fd", "<u4"),
    ]
)
_EVENT = np.dtype([("data", "<u8"), ("request", "<u8"), ("result", "<i8"), ("result2", "<i8")])

_system_call = LIBC["syscall"]  # its own function object, unlike LIBC.syscall, whose result type is int
_system_call.restype = ctypes.c_long


class KernelAio:
    """An AIO context, for one thread at a time. Raises OSError if AIO is not available or its limit is reached."""

    def __init__(self, fd: int) -> None:
        numbers = _SYSTEM_CALLS.get(platform.machine())
        if numbers is None:
            raise OSError(errno.ENOSYS, f"no asynchronous I/O on {platform.machine()}")
        self._numbers = numbers
        self._requests = np.zeros(MAX_REQUESTS, _REQUEST)
        self._requests["fd"] = fd
        self._requests["data"] = np.arange(MAX_REQUESTS)
        self._pointers = self._requests.ctypes.data + np.arange(MAX_REQUESTS, dtype=np.uint64) * _REQUEST.itemsize
        self._events = np.zeros(MAX_REQUESTS, _EVENT)
        self._context = ctypes.c_ulong(0)
        if _system_call(numbers.setup, ctypes.c_long(MAX_REQUESTS), ctypes.byref(self._context)) < 0:
            raise last_error()

    def move(
        self, operation: int, offsets: Sequence[int], addresses: Sequence[int], byte_counts: Sequence[int]
    ) -> list[int]:
        """Run at most MAX_REQUESTS; return for each the number of bytes moved, or a negative errno.

        No I/O of the batch is running after it returns or raises.
        """
        requests = self._requests[: len(offsets)]
        requests["operation"] = operation
        requests["offset"] = offsets
        requests["address"] = addresses
        requests["byte_count"] = byte_counts
        results = np.full(len(offsets), -errno.EAGAIN, np.int64)
        try:
            running = self._submit(len(offsets))
            while running:
                ended = self._wait_for(running)
                results[ended["data"]] = ended["result"]
                running -= len(ended)
        except BaseException:
            self.close()
            raise
        return results.tolist()

    def close(self) -> None:
        """Wait for running requests and free the context."""
        if self._context:
            _system_call(self._numbers.destroy, self._context)
            self._context.value = 0

    def _submit(self, count: int) -> int:
        """Return how many were submitted: those before the first that the kernel refuses."""
        taken: int = _system_call(
            self._numbers.submit, self._context, ctypes.c_long(count), ctypes.c_void_p(self._pointers.ctypes.data)
        )
        return max(0, taken)

    def _wait_for(self, count: int) -> np.ndarray:
        ended = -1
        while ended < 0:
            ended = _system_call(
                self._numbers.getevents,
                self._context,
                ctypes.c_long(count),
                ctypes.c_long(count),
                ctypes.c_void_p(self._events.ctypes.data),
                None,
            )
            if ended < 0 and ctypes.get_errno() != errno.EINTR:
                raise last_error()
        return self._events[:ended]
