"""What differs on Arm: numbers of system calls, and pages of 64 KiB (the usual kernel of Grace)."""

import errno
import mmap
import os
import platform

import pytest

from kvbm.host import tree
from kvbm.host.shared_memory import Kernel
from kvbm.tiers.disk.io import kernel_aio
from kvbm.tiers.disk.io.kernel_aio import READ, KernelAio
from kvbm_cli.doctor.probes import disk_file

# Linux's arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h
NUMBERS = {
    "mbind": (237, 235),
    "membarrier": (324, 283),
    "io_setup": (206, 0),
    "io_submit": (209, 2),
    "io_getevents": (208, 4),
    "io_destroy": (207, 1),
    "openat2": (437, 437),
}


class Calls:
    """The C library, which only notes the numbers of system calls. An asynchronous request ends at once."""

    def __init__(self):
        self.numbers = []
        self.mincore = lambda address, length, states: states.__setitem__(0, 1) or 0

    def syscall(self, number, *arguments):
        self.numbers.append(getattr(number, "value", number))
        return os.open("/dev/null", os.O_RDONLY) if self.numbers[-1] == 437 else 0

    def asynchronous(self, number, context, *arguments):
        self.numbers.append(number)
        if len(arguments) == 1 and number in NUMBERS["io_setup"]:
            arguments[0]._obj.value = 1
        return 1 if arguments else 0


@pytest.fixture
def calls(monkeypatch):
    calls = Calls()
    for module in (tree, disk_file):
        monkeypatch.setattr(module, "LIBC", calls)
    monkeypatch.setattr(kernel_aio, "_system_call", calls.asynchronous)
    return calls


@pytest.mark.parametrize(("column", "machine"), [(0, "x86_64"), (1, "aarch64")])
def test_system_calls_have_the_numbers_of_the_machine(column, machine, calls, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    kernel = Kernel()
    kernel._libc = calls
    kernel.bind(0, 4096, [0])
    kernel.barrier()
    aio = KernelAio(0)
    aio.move(READ, [0], [0], [0])
    aio.close()
    os.close(tree._openat2(0, "name", os.O_RDONLY, 0))
    assert calls.numbers == [numbers[column] for numbers in NUMBERS.values()]


def test_a_machine_whose_numbers_are_unknown_is_named(calls, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "sparc64")
    for start in (Kernel().barrier, lambda: KernelAio(0)):
        with pytest.raises(OSError, match="sparc64") as caught:
            start()
        assert caught.value.errno == errno.ENOSYS
    assert not calls.numbers


def test_the_share_in_the_page_cache_counts_pages_of_the_machine(calls, tmp_path, monkeypatch):
    monkeypatch.setattr(mmap, "PAGESIZE", 65536)
    with (tmp_path / "area").open("w+b") as file:
        file.truncate(disk_file.AREA_BYTES)
        assert disk_file._cached_share(file.fileno()) == 1 / 4
