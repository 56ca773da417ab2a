"""Checks of host memory (G2): available memory, limits, huge pages, allocation rate, NUMA nodes of the GPUs.

`order_checks`: each tier is at least as large as the tier above it; a smaller one mostly replaces its blocks.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from kvbm.config.sizes import format_size
from kvbm.engines.table import kind_of
from kvbm.errors import EnvironmentProblem
from kvbm.host.machine_memory import gpus_of, node_of_pci_device
from kvbm_cli.doctor.check import Check, DoctorContext, capacity, failure, ok, skipped, warning
from kvbm_cli.profile.size import tier_warnings, tiers_of
from kvbm_cli.runs.reservations import largest_run, living_runs, pending_memory
from kvbm_cli.runs.run_directory import EngineRun
from kvbm_cli.terminal.quantities import shown_rate

PREFAULT_BYTES, QUICK_PREFAULT_BYTES = 1 << 30, 128 << 20
SHARE_OF_ROOM = 10
LEAST_CAPACITY = 1 << 20  # a smaller one holds no block of most models
SLOW_START_S = 60.0
SHMEM_ENABLED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def checks(context: DoctorContext) -> Iterator[Check]:
    needed = context.host_bytes
    gpus = gpus_of(context.machine.memory)
    yield from _room(context, needed)
    yield from _own_of_engine(context)
    yield from _locked(context, needed, has_gpu=bool(gpus))
    yield _huge_pages(context, needed)
    yield from _start(context, needed)
    yield from _nodes(context, gpus)


def _room(context: DoctorContext, needed: int | None) -> Iterator[Check]:
    room, living = context.machine.memory.room(), living_runs()
    pending = pending_memory(living)
    finding = f"{format_size(room.available_bytes)} available ({room.limit})"
    if pending:
        finding += f", of which starting engines will take {format_size(pending)}"
    facts = {"available_bytes": room.available_bytes, "needed_bytes": needed, "pending_bytes": pending}
    left = max(0, context.machine.memory.bytes_for_blocks() - pending)
    if needed is None:
        yield ok("available", finding, **facts)
    elif needed <= left:
        yield ok("available", f"{finding}, G2 requires {format_size(needed)}", **facts)
    else:
        remedy = _room_remedy(context, left, living)
        yield failure("available", f"{finding}, G2 requires {format_size(needed)}", remedy, **facts)
    groups = [room for room in context.machine.memory.rooms() if "control group" in room.limit]
    if not groups:
        yield ok("control group", "no limit")
    else:
        tightest = min(groups, key=lambda one: one.available_bytes)
        yield ok("control group", f"{format_size(tightest.available_bytes)} left ({tightest.limit})")


def _own_of_engine(context: DoctorContext) -> Iterator[Check]:
    """Check the engine's own host memory, which it refuses to allocate unless enough is left."""
    if context.resolved is None:
        return
    sizing, kind = context.sizing, kind_of(context.resolved.profile)
    device = sizing.device.total_bytes if sizing is not None and sizing.device is not None else None
    own, title = kind.own_memory(context.resolved.profile, device), kind.traits.title
    if own is None:
        return
    rule = f"{title} leaves {format_size(own.left_bytes)} free"
    if own.needed_bytes is None:
        yield skipped(f"{title}'s memory", f"a multiple of G1, which {title} determines at start-up; {rule}")
        return
    available = context.machine.memory.room().available_bytes
    finding = f"{format_size(own.needed_bytes)} of host memory; {rule}"
    if own.needed_bytes + own.left_bytes <= available:
        yield ok(f"{title}'s memory", finding, needed_bytes=own.needed_bytes)
    else:
        yield failure(f"{title}'s memory", f"{finding}, but {format_size(available)} are available", own.remedy)


def _room_remedy(context: DoctorContext, left_bytes: int, living: Sequence[EngineRun]) -> str:
    largest = largest_run(living)
    stop = f"run `kvbm stop {shlex.quote(largest.name)}`" if largest is not None else None
    fitting = left_bytes * 9 // 10 // context.engine_count
    if fitting < LEAST_CAPACITY and stop is not None:
        return stop
    remedy = f"set `tiers.host.capacity: {capacity(fitting)}` or less"
    return f"{remedy}, or {stop}" if stop is not None else remedy


def _locked(context: DoctorContext, needed: int | None, *, has_gpu: bool) -> Iterator[Check]:
    limit = context.machine.lockable_bytes
    if limit is None:
        yield ok("locked memory", "no limit")
        return
    finding = f"RLIMIT_MEMLOCK is {format_size(limit)}"
    if context.machine.is_root:
        yield ok("locked memory", f"{finding}; root is not limited", limit_bytes=limit)
    elif needed is None or needed <= limit:
        yield ok("locked memory", finding, limit_bytes=limit)
    else:
        what = "page-locking G2" if has_gpu else "page-locking G2, for a GPU or RDMA,"
        finding = f"{finding}, less than G2 requires ({format_size(needed)}): {what} may fail"
        yield warning("locked memory", finding, "run `ulimit -l unlimited`", limit_bytes=limit)


def _huge_pages(context: DoctorContext, needed: int | None) -> Check:
    memory = context.machine.memory
    _, reserved = memory.huge_pages()
    if reserved and (needed is None or needed <= reserved):
        return ok("huge pages", f"{format_size(reserved)} reserved", reserved_bytes=reserved)
    if memory.has_transparent_huge_pages():
        return ok("huge pages", "enabled for shared memory (shmem_enabled)", reserved_bytes=reserved)
    finding = "disabled for shared memory (shmem_enabled): start-up and copies take longer"
    if reserved:
        finding = f"{format_size(reserved)} reserved, less than G2 requires; {finding}"
    return warning("huge pages", finding, f"run `echo advise > {SHMEM_ENABLED}` as root", reserved_bytes=reserved)


def _start(context: DoctorContext, needed: int | None) -> Iterator[Check]:
    room = context.machine.memory.room().available_bytes
    tried = min(QUICK_PREFAULT_BYTES if context.is_quick else PREFAULT_BYTES, room // SHARE_OF_ROOM)
    context.on_phase("allocating host memory")
    try:
        speed = context.machine.prefault_rate(tried)
    except EnvironmentProblem as error:
        yield failure("allocation rate", error.message, error.hint)
        return
    finding = f"{format_size(tried)} allocated at {shown_rate(speed)}"
    facts = {"bytes_per_s": round(speed), "start_s": None if needed is None else needed / speed}
    if needed is None:
        yield ok("allocation rate", finding, **facts)
    elif needed / speed > SLOW_START_S:
        finding += f": G2 takes {needed / speed:.0f} s at start-up"
        yield warning("allocation rate", finding, "enable huge pages (see above)", **facts)
    else:
        yield ok("allocation rate", f"{finding}: G2 takes {needed / speed:.1f} s at start-up", **facts)


def _nodes(context: DoctorContext, gpus: list[str]) -> Iterator[Check]:
    memory = context.machine.memory
    if not gpus:
        yield skipped("NUMA", "no NVIDIA GPU on the PCI bus")
        return
    count = memory.node_count()
    for address in gpus:
        node = node_of_pci_device(address, memory)
        if node is None and count > 1:
            finding = f"GPU {address}: the kernel does not report its NUMA node ({count} nodes)"
            yield warning("NUMA", finding, "run the engine under `numactl --cpunodebind`")
        else:
            yield ok("NUMA", f"GPU {address} is on node {node or 0} of {count}", node=node, nodes=count)


def order_checks(context: DoctorContext) -> Iterator[Check]:
    resolved, sizing = context.resolved, context.sizing
    if resolved is None:
        yield skipped("order", "the sizes of the tiers are unknown without a profile", "add `--profile PROFILE`")
        return
    if sizing is None:
        return
    if sizing.device is None:
        yield skipped("G1", "the engine determines its number of blocks at start-up")
    found = tier_warnings(resolved, sizing)
    for text in found:
        yield warning("order", text, "raise the capacity of the tier")
    if not found and (tiers := tiers_of(resolved, sizing)):
        tokens = {name: tier.token_count for name, tier in tiers.items()}
        yield ok("order", f"tokens: {', '.join(f'{name} {count:,}' for name, count in tokens.items())}", **tokens)
    kind = kind_of(resolved.profile)
    if resolved.profile.tiers.host is None and kind.own_memory(resolved.profile, None) is not None:
        yield ok("G2", f"{kind.traits.title}'s own host memory; pages pass through a small buffer of kvbm")
    elif resolved.profile.tiers.host is None:
        yield warning("G2", "no host tier: every block passes through a small buffer", "set `tiers.host.capacity`")
