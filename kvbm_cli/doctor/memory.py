"""Host memory (G2): whether it is there, how it is limited, how fast it is taken, and where it lies beside the GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from kvbm.config.sizes import format_size
from kvbm.errors import EnvironmentProblem
from kvbm.host.machine_memory import node_of_pci_device
from kvbm_cli.doctor.result import Check, capacity, failure, ok, rate, skipped, warning
from kvbm_cli.doctor.subject import Subject

TOUCH_BYTES, QUICK_TOUCH_BYTES = 1 << 30, 128 << 20
SHARE_OF_ROOM = 10
SLOW_START_S = 60.0
UNLIMITED = 1 << 60  # version 1 of control groups has a number for it
NVIDIA_VENDOR = "0x10de"
GPU_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers
SHMEM_ENABLED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def checks(subject: Subject) -> Iterator[Check]:
    needed = _needed_bytes(subject)
    gpus = _gpus(subject)
    yield from _room(subject, needed)
    yield from _locked(subject, needed, has_gpu=bool(gpus))
    yield _huge_pages(subject, needed)
    yield from _start(subject, needed)
    yield from _nodes(subject, gpus)


def _needed_bytes(subject: Subject) -> int | None:
    from kvbm_cli.engine.engines import copy_count

    if subject.resolved is not None and subject.sizing is not None:
        return subject.sizing.host.total_bytes * copy_count(subject.resolved.profile)
    host = subject.tiers.host if subject.tiers is not None else None
    return host.capacity if host is not None else None


def _room(subject: Subject, needed: int | None) -> Iterator[Check]:
    room = subject.machine.memory.room()
    finding = f"{format_size(room.available_bytes)} available ({room.limit})"
    facts = {"available_bytes": room.available_bytes, "needed_bytes": needed}
    if needed is None:
        yield ok("available", finding, **facts)
    elif needed <= room.available_bytes:
        yield ok("available", f"{finding}, G2 takes {format_size(needed)}", **facts)
    else:
        remedy = f"`tiers.host.capacity: {capacity(room.available_bytes * 9 // 10)}` at most"
        yield failure("available", f"{finding}, G2 takes {format_size(needed)}", remedy, **facts)
    groups = [
        room
        for room in subject.machine.memory.rooms()
        if "control group" in room.limit and room.available_bytes < UNLIMITED
    ]
    if not groups:
        yield ok("control group", "no limit")
    else:
        tightest = min(groups, key=lambda one: one.available_bytes)
        yield ok("control group", f"{format_size(tightest.available_bytes)} left ({tightest.limit})")


def _locked(subject: Subject, needed: int | None, *, has_gpu: bool) -> Iterator[Check]:
    limit = subject.machine.lockable_bytes
    if limit is None:
        yield ok("locked memory", "no limit")
        return
    finding = f"RLIMIT_MEMLOCK is {format_size(limit)}"
    if subject.machine.is_root:
        yield ok("locked memory", f"{finding}, which root may pass", limit_bytes=limit)
    elif needed is None or needed <= limit:
        yield ok("locked memory", finding, limit_bytes=limit)
    else:
        why = "G2 is page-locked beside a GPU" if has_gpu else "page-locking G2 beside a GPU or for RDMA"
        finding = f"{finding}, and {why} may fail"
        yield warning("locked memory", finding, "`ulimit -l unlimited`", limit_bytes=limit)


def _huge_pages(subject: Subject, needed: int | None) -> Check:
    memory = subject.machine.memory
    _, reserved = memory.huge_pages()
    if reserved and (needed is None or needed <= reserved):
        return ok("huge pages", f"{format_size(reserved)} reserved", reserved_bytes=reserved)
    if memory.advises_huge_pages():
        return ok("huge pages", "shared memory gets them for the asking (shmem_enabled)", reserved_bytes=reserved)
    finding = "none for shared memory (shmem_enabled): the start takes longer, copies too"
    if reserved:
        finding = f"{format_size(reserved)} reserved, less than G2 takes; {finding}"
    return warning("huge pages", finding, f"`echo advise > {SHMEM_ENABLED}`, as root", reserved_bytes=reserved)


def _start(subject: Subject, needed: int | None) -> Iterator[Check]:
    room = subject.machine.memory.room().available_bytes
    tried = min(QUICK_TOUCH_BYTES if subject.is_quick else TOUCH_BYTES, room // SHARE_OF_ROOM)
    subject.say("taking host memory")
    try:
        speed = subject.machine.touch_rate(tried)
    except EnvironmentProblem as error:
        yield failure("touch rate", error.message, error.hint)
        return
    finding = f"{format_size(tried)} taken at {rate(speed)}"
    facts = {"bytes_per_s": round(speed), "start_s": None if needed is None else needed / speed}
    if needed is None:
        yield ok("touch rate", finding, **facts)
    elif needed / speed > SLOW_START_S:
        finding += f": the start takes {needed / speed:.0f} s for G2"
        yield warning("touch rate", finding, "huge pages, as above", **facts)
    else:
        yield ok("touch rate", f"{finding}: the start takes {needed / speed:.1f} s for G2", **facts)


def _gpus(subject: Subject) -> list[str]:
    """PCI addresses of NVIDIA's GPUs."""
    found = []
    for device in sorted((subject.machine.memory.sys / "bus/pci/devices").glob("*")):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == NVIDIA_VENDOR and kind.startswith(GPU_CLASSES):
            found.append(device.name)
    return found


def _nodes(subject: Subject, gpus: list[str]) -> Iterator[Check]:
    memory = subject.machine.memory
    if not gpus:
        yield skipped("NUMA", "no GPU of NVIDIA on the PCI bus")
        return
    count = memory.node_count()
    for address in gpus:
        node = node_of_pci_device(address, memory)
        if node is None and count > 1:
            finding = f"GPU {address}: the kernel does not say its node, of {count}"
            yield warning("NUMA", finding, "`numactl --cpunodebind` for the engine")
        else:
            yield ok("NUMA", f"GPU {address} is at node {node or 0} of {count}", node=node, nodes=count)
