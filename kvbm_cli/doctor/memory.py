"""Checks of host memory (G2): available memory, limits, huge pages, allocation rate, NUMA nodes of the GPUs.

`tier_checks`: each tier is at least as large as the tier above it; a smaller one mostly replaces its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvbm.config.sizes import format_size
from kvbm.engines.table import kind_of
from kvbm.errors import EnvironmentProblem
from kvbm.host.machine_memory import gpus_of, node_of_pci_device
from kvbm_cli.doctor.check import DoctorContext
from kvbm_cli.profile.machine_check import Check, failure, ok, skipped, warning
from kvbm_cli.profile.machine_problems import memory_check
from kvbm_cli.profile.size import order_checks, tiers_of
from kvbm_cli.runs.reservations import living_runs
from kvbm_cli.terminal.quantities import shown_rate

PREFAULT_BYTES, QUICK_PREFAULT_BYTES = 1 << 30, 128 << 20
SHARE_OF_ROOM = 10
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
    memory = context.machine.memory
    sizing, living = context.sizing, living_runs()
    yield memory_check(context.resolved, needed, context.engine_count, living, sizing=sizing, memory=memory)
    groups = [room for room in memory.rooms() if "control group" in room.limit]
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


def tier_checks(context: DoctorContext) -> Iterator[Check]:
    resolved, sizing = context.resolved, context.sizing
    if resolved is None:
        yield skipped("order", "the sizes of the tiers are unknown without a profile", "add `--profile PROFILE`")
        return
    if sizing is None:
        return
    if sizing.device is None:
        yield skipped("G1", "the engine determines its number of blocks at start-up")
    found = order_checks(resolved, sizing)
    yield from found
    if not found and (tiers := tiers_of(resolved, sizing)):
        tokens = {name: tier.token_count for name, tier in tiers.items()}
        yield ok("order", f"tokens: {', '.join(f'{name} {count:,}' for name, count in tokens.items())}", **tokens)
    kind, buffer = kind_of(resolved.profile), f"a buffer of {format_size(sizing.host.total_bytes)}"
    if resolved.profile.tiers.host is None and kind.own_memory(resolved.profile, None) is not None:
        yield ok("G2", f"{kind.traits.title}'s own host memory; pages pass through {buffer} of kvbm")
    elif resolved.profile.tiers.host is None:
        yield warning("G2", f"no host tier: every block passes through {buffer}", "set `tiers.host.capacity`")
