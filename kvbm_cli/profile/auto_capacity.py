"""Chooses the size of tiers with `capacity: auto`: what this machine can spare of its memory, and of its disk.

    host = available memory - what starting engines will still allocate - what the engine itself takes - a margin
    disk = the size of the caches that the engine will open again; of a new cache, free space, with `reclaim` also that
           of unused caches, - a margin

Available is the least of the machine, of its control groups and, if the ranks bind their memory, of the NUMA nodes of
the GPUs. On a CPU, the engine itself takes weights, G1 and what its processes need. The chosen size is bytes from here
on, in the profile that an engine gets: every rank has an equal part of it, and the rank with the fewest slots decides
for all (Region.map).
`kvbm serve` chooses under a lock of the machine and claims the memory (memory_claims.py). A size that was chosen
without the lock is only shown. If nothing can be spared, a tier is a buffer of BOUNCE_BLOCKS, or of half of what is
available.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.config.schema import BOUNCE_BLOCKS
from kvbm.config.sizes import format_size
from kvbm.engines.model_facts import SYNTHETIC_PREFIX, weight_bytes
from kvbm.engines.synthetic_directory import with_local_model
from kvbm.engines.table import copy_count, cpu_of, kind_of, size
from kvbm.errors import EnvironmentProblem, ProfileError
from kvbm.host.machine_memory import THIS_MACHINE, HostMemory, gpus_of, margin_of, node_of_pci_device
from kvbm.sizing import SizeUnknown, Sizing, Wanted
from kvbm.tiers.disk.directory import SUPERBLOCK, arena_bytes, instances, is_locked
from kvbm.tiers.disk.superblock import Superblock, read_superblock
from kvbm_cli.runs.reservations import living_runs, pending_memory, pending_of_engines
from kvbm_cli.system.answering import answers
from kvbm_cli.system.filesystem import expanded, nearest_existing

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import DiskTierSection, Profile, Tiers

UNIT = 1 << 20  # chosen sizes are multiples of it
LEAST_BYTES = 64 * UNIT  # if only the engine knows the size of a block
SHARED_MEMORY = "/dev/shm"
PROCESS_BYTES = 512 << 20  # of an engine's server, and of each rank with its libraries: 0.43 to 0.45 GiB in vLLM 0.32
HUGE_SHARE = 64  # of a segment in huge pages, for its control words: 1 / HUGE_SHARE


UNMEASURED = "the minimum: "  # the beginning of a reason: what can be spared is unknown
KEPT = "the cache that exists keeps its size"
Choice = tuple[int, str]  # bytes of a tier for each engine of a profile, and why


def is_all_to_spare(reason: str) -> bool:
    """Whether a size was chosen because this machine can spare no more."""
    return not reason.startswith((UNMEASURED, KEPT))


def with_capacities(
    resolved: ResolvedProfile, *, facts: Mapping[str, object] | None = None, memory: HostMemory | None = None
) -> ResolvedProfile:
    """Return the profile with sizes in place of `capacity: auto`, and the reasons in `chosen`. `facts` is the model's
    configuration, by default that of `engine.model`."""
    profile = resolved.profile
    host, disk = profile.tiers.host, profile.tiers.disk
    update: dict[str, object] = {}
    chosen: dict[str, str] = {}
    if not profile.tiers.has_auto:
        return resolved
    least = _least(profile, facts)
    if host is not None and host.is_auto:
        capacity, chosen["G2"] = _host(profile, least, memory or THIS_MACHINE)
        update["host"] = host.model_copy(update={"capacity": capacity})
    if disk is not None and disk.is_auto:
        capacity, chosen["G3"] = _disk(profile, disk, least)
        update["disk"] = disk.model_copy(update={"capacity": capacity, "fit": True})
    tiers = profile.tiers.model_copy(update=update)
    return replace(resolved, profile=profile.model_copy(update={"tiers": tiers}), chosen=chosen)


def engine_bytes(profile: Profile, sizing: Sizing | SizeUnknown | None) -> int | None:
    """Return the host memory that the engines of a profile take for themselves: weights, G1 and processes on a CPU, or
    SGLang's own cache. None if only the engine knows."""
    kind = kind_of(profile)
    known = sizing if isinstance(sizing, Sizing) else None
    device = None if known is None or known.device is None else known.device.total_bytes
    own = kind.own_memory(profile, device)
    total = 0
    if own is not None:
        if own.needed_bytes is None:
            return None
        total += own.needed_bytes + own.left_bytes
    if kind.uses_host_memory(profile):
        if known is None or device is None:
            return None
        processes = PROCESS_BYTES * (1 + known.rank_count)
        engines = kind.copies(profile) * max(1, profile.disaggregated.prefill + profile.disaggregated.decode)
        total += (device + _weights(profile) + processes) * engines
    return total


def _weights(profile: Profile) -> int:
    """Return the bytes of the weights in memory, 0 if they are not on this machine."""
    found = weight_bytes(with_local_model(profile).engine.model) or 0
    is_widened = getattr(profile.engine.arguments, "dtype", None) in ("float32", "float")
    return 2 * found if is_widened and not profile.engine.model.startswith(SYNTHETIC_PREFIX) else found


def _least(profile: Profile, facts: Mapping[str, object] | None) -> Sizing | None:
    """Return the sizes with the least blocks in each tier that kvbm chooses; None if only the engine knows them."""
    buffer = {"capacity": None, "blocks": BOUNCE_BLOCKS}
    tiers: Tiers = profile.tiers
    present = {"host": tiers.host, "disk": tiers.disk}
    update = {name: one.model_copy(update=buffer) for name, one in present.items() if one is not None and one.is_auto}
    small = profile.model_copy(update={"tiers": tiers.model_copy(update=update)})
    try:
        known = kind_of(profile).model_facts(profile.engine.model) if facts is None else facts
        on_cpu = kind_of(profile).runs_on_cpu(profile)
        wanted = Wanted(cpu=cpu_of(profile)) if on_cpu else Wanted()
        return size(small, known, environment=os.environ, on_cpu=on_cpu, wanted=wanted)
    except (SizeUnknown, ProfileError):  # the checks of the profile report a mistake
        return None


def _host(profile: Profile, least: Sizing | None, memory: HostMemory) -> Choice:
    copies, own = copy_count(profile), engine_bytes(profile, least)
    room, living = memory.room(), living_runs()
    pending = pending_memory(living, memory=memory) + pending_of_engines(memory)
    margin = margin_of(room.available_bytes)
    least_bytes, block_bytes, buffers = LEAST_BYTES, 1, 0
    if least is not None:
        buffers = least.buffer_bytes * copies
        least_bytes, block_bytes = least.host.total_bytes, least.stored_bytes
    spare = room.available_bytes - pending - margin - (own or 0) - buffers
    least_bytes = max(block_bytes, min(least_bytes, (room.available_bytes - pending) // (2 * copies)))
    title = kind_of(profile).traits.title
    limits = [room.limit, *([] if memory.has_limit() else ["no memory limit is known"])]
    parts = [f"{format_size(room.available_bytes)} available ({', '.join(limits)})"]
    ranks = (1 if least is None else least.rank_count) * copies
    bound, where = _bound(profile, memory, ranks, pending)
    if bound is not None and bound < spare:
        spare = bound
        parts.append(f"{format_size(bound)} of it {where}")
    page_bytes, huge = memory.huge_pages()
    huge -= pending
    huge -= huge // HUGE_SHARE + 2 * page_bytes * ranks
    if bound is None and huge > max(spare, 0):  # those of other nodes are of no use
        each = _rounded(huge // copies)
        return max(each, least_bytes), f"{format_size(each)} of reserved huge pages are free"
    parts += [f"- {format_size(pending)} for starting engines"] if pending else []
    parts += [f"- {format_size(own)} for {title} itself"] if own else []
    parts += [f"- {format_size(buffers)} for the buffer below it"] if buffers else []
    parts.append(f"- a margin of {format_size(margin)}")
    parts += [f"for {copies} engines"] if copies > 1 else []
    each = _rounded(spare // copies)
    if own is None:
        reason = f"only {title} knows how much memory it takes itself; set its size of G1, or a capacity"
        return least_bytes, f"{UNMEASURED}{reason}"
    if each < least_bytes:
        return least_bytes, f"the minimum, because nothing is left of {' '.join(parts)}"
    return each, " ".join(parts)


def _bound(profile: Profile, memory: HostMemory, ranks: int, pending: int) -> tuple[int | None, str]:
    """Return how much of the machine's memory these ranks can have at most, and where; None if nothing limits it."""
    if profile.tiers.are_below_engine:
        facts = os.statvfs(SHARED_MEMORY)
        free = facts.f_bavail * facts.f_frsize
        left = max(0, free - pending - free // 10)
        return left, f"in {SHARED_MEMORY}, from which {kind_of(profile).traits.title} takes it"
    if profile.transfer.numa and not kind_of(profile).uses_host_memory(profile):
        return _room_on_nodes(memory, ranks, pending), "for these ranks on the NUMA nodes of the GPUs"
    return None, ""


def _room_on_nodes(memory: HostMemory, ranks: int, pending: int) -> int | None:
    """Return the memory for blocks of an engine whose ranks each allocate on the node of their GPU, whichever GPUs
    these are; None if memory is not bound."""
    nodes = [node_of_pci_device(address, memory) for address in gpus_of(memory)]
    if memory.node_count() < 2 or not nodes or None in nodes:
        return None
    least = []
    for node in {one for one in nodes if one is not None}:
        available = memory.room(node).available_bytes
        ranks_there = min(ranks, nodes.count(node))
        least.append((available - pending - margin_of(available)) * ranks // ranks_there)
    return min(least)


def _disk(profile: Profile, disk: DiskTierSection, least: Sizing | None) -> Choice:
    copies = copy_count(profile)
    directory = expanded(disk.directory)
    tier = None if least is None else least.disk
    least_bytes = LEAST_BYTES if tier is None else tier.total_bytes
    try:
        if not answers(directory):
            return least_bytes, f"{UNMEASURED}{disk.directory} does not answer"
        unused = _unused(directory)
        facts = os.statvfs(nearest_existing(directory))
    except (OSError, EnvironmentProblem) as error:
        return least_bytes, f"{UNMEASURED}cannot read {disk.directory}: {error}"
    parts = kind_of(profile).serving_ranks(profile)
    block_bytes = None if tier is None else tier.total_bytes // tier.block_count // parts
    found = [one for one, superblock in unused if _is_usable(superblock, profile, block_bytes)]
    own = sum(found[: copies * parts]) if disk.persist else 0
    if own:
        return max(_rounded(own // copies), least_bytes), KEPT
    reclaimed = sum(one for one, _ in unused) if disk.reclaim else 0
    free = facts.f_bavail * facts.f_frsize + reclaimed
    each = _rounded((free - margin_of(free)) // copies)
    where = f"free in {disk.directory}" if not reclaimed else f"free or in unused caches in {disk.directory}"
    text = f"{format_size(free)} {where} - a margin of {format_size(margin_of(free))}"
    text += f", for {copies} engines" if copies > 1 else ""
    if each < least_bytes:
        return least_bytes, f"the minimum, because nothing is left of {text}"
    return each, text


def _unused(directory: Path) -> list[tuple[int, Superblock]]:
    """Return the unused caches of all models with their sizes, the one used last first. May raise OSError or
    EnvironmentProblem."""
    found: list[tuple[int, Superblock]] = []
    for path in reversed(instances(directory, [])):
        with suppress(EnvironmentProblem):  # of another format or user: `kvbm cache ls` says so
            superblock = read_superblock(path / SUPERBLOCK)
            if superblock is not None and not is_locked(path):
                found.append((arena_bytes(path), superblock))
    return found


def _is_usable(superblock: Superblock, profile: Profile, block_bytes: int | None) -> bool:
    """Whether a cache is of this model, with blocks of this size. Only the engine knows whether it can use the blocks;
    if not, it makes a new cache."""
    if superblock.facts.get("model") not in (profile.engine.model, with_local_model(profile).engine.model):
        return False
    return block_bytes is None or is_near(superblock.slot_bytes, block_bytes)


def is_near(one: int, other: int) -> bool:
    """Whether two sizes of a block differ by padding only: another type of the cache halves or doubles it."""
    return 3 * one <= 4 * other <= 5 * one


def _rounded(byte_count: int) -> int:
    return byte_count // UNIT * UNIT
