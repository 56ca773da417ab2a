"""One call of `write` that stays under way until it is released. It sets the times of the file when it begins.

The second half of its bytes lies in memory that has no pages yet. The kernel asks this process for them (userfaultfd).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbm.host.libc import LIBC

SYSCALLS = {"x86_64": 323, "aarch64": 282}
UFFDIO_API, UFFDIO_REGISTER, UFFDIO_COPY = 0xC018AA3F, 0xC020AA00, 0xC028AA03
API, MISSING = 0xAA, 1


class HeldWrite:
    """A write into a file whose first half is done."""

    def __init__(self, fault_fd: int, memory: mmap.mmap, rest: bytes, thread: threading.Thread) -> None:
        self._fault_fd, self._memory, self._rest, self._thread = fault_fd, memory, rest, thread

    def end(self) -> None:
        """Let the write go on, and wait for its end."""
        if not self._rest:
            return
        source = ctypes.create_string_buffer(self._rest, len(self._rest))
        target = address_of(self._memory) + len(self._memory) - len(self._rest)
        order = struct.pack("QQQQq", target, ctypes.addressof(source), len(self._rest), 0, 0)
        fcntl.ioctl(self._fault_fd, UFFDIO_COPY, bytearray(order))
        self._rest = b""
        self._thread.join()


@contextmanager
def held_write(path: Path, content: bytes, *, is_direct: bool = False) -> Iterator[HeldWrite]:
    """Write `content`, of an even number of pages, into a file, and stay in the middle until `end`, or to the end of
    this context. Skips the test where this process may not do that."""
    half = len(content) // 2
    assert half % mmap.PAGESIZE == 0
    fault_fd = LIBC.syscall(SYSCALLS.get(platform.machine(), -1), os.O_CLOEXEC | os.O_NONBLOCK)
    if fault_fd < 0:
        pytest.skip("this process may not use userfaultfd")
    try:
        fd = os.open(path, os.O_WRONLY | (os.O_DIRECT if is_direct else 0))
    except OSError:
        os.close(fault_fd)
        pytest.skip("no O_DIRECT here")
    memory = mmap.mmap(-1, len(content), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:half] = content[:half]
    fcntl.ioctl(fault_fd, UFFDIO_API, bytearray(struct.pack("QQQ", API, 0, 0)))
    held = struct.pack("QQQQ", address_of(memory) + half, half, MISSING, 0)
    fcntl.ioctl(fault_fd, UFFDIO_REGISTER, bytearray(held))
    address, size = ctypes.c_void_p(address_of(memory)), ctypes.c_size_t(len(content))
    thread = threading.Thread(target=lambda: LIBC.write(fd, address, size))
    thread.start()
    write = HeldWrite(fault_fd, memory, content[half:], thread)
    try:
        wait_for_the_fault(fault_fd)
        yield write
    finally:
        write.end()
        os.close(fd)
        os.close(fault_fd)


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def wait_for_the_fault(fault_fd: int) -> None:
    os.set_blocking(fault_fd, True)
    os.read(fault_fd, 32)
