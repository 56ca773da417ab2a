"""KernelAio: many reads or writes of one file, handed to Linux at once (`io_submit`, which needs no library).

A batch costs two system calls and one wait, where `preadv` costs both for each block, and with O_DIRECT all of it is in
the device's queue at the same time. Without O_DIRECT the kernel would do it one by one within `io_submit`.
"""

from __future__ import annotations

import ctypes
import errno
import platform
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvbm.host.libc import LIBC, last_error

MAX_REQUESTS = 128  # of one batch; what all processes may have together is /proc/sys/fs/aio-max-nr, by default 65536
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

_system_call = LIBC["syscall"]  # a function of our own, unlike LIBC.syscall, whose result is an int
_system_call.restype = ctypes.c_long


class KernelAio:
    """For one thread at a time. Raises OSError where the kernel does not give it, or has no more of it to give."""

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
        """Do at most MAX_REQUESTS; returns of each how many bytes it has moved, or minus an errno.

        When it returns or raises, none of it is running any more.
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
        """Waits for what is running."""
        if self._context:
            _system_call(self._numbers.destroy, self._context)
            self._context.value = 0

    def _submit(self, count: int) -> int:
        """Returns how many are running. The kernel takes those before the first that it refuses."""
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
