"""The directory of the disk tier (G3): what it can do, whether the tier fits, how fast blocks come back.

Where a profile has a disk tier, what that tier would fail at is a failure; what a directory merely lacks is a warning.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kvbm.config.sizes import format_size
from kvbm.disk.directory import CacheFacts, list_caches
from kvbm.disk.files import PAGE_BYTES, require_usable_parent
from kvbm.disk.probe import IN_MEMORY, Direct, Report, Settings, Speed
from kvbm.errors import EnvironmentProblem
from kvbm_cli.doctor.machine import NoAnswer
from kvbm_cli.doctor.result import Check, State, failure, ok, rate, skipped, warning
from kvbm_cli.doctor.subject import Subject
from kvbm_cli.doctor.workplace import PREFIX, workplace

Found = Generator[Check, None, Settings | None]

BLOCKS_BYTES = 512  # of st_blocks
BLOCK_BYTES = 1 << 20  # where no profile says
PHASE_S, QUICK_PHASE_S = 2.0, 0.4
LOOK_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S, QUICK_PROBE_TIMEOUT_S = 120.0, 9.0
NVIDIA_FILES = "dynamo-kvbm-disk-cache-*"
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "9p", "virtiofs", "glusterfs"})
EXAMPLE_TOKENS = 4000
RECLAIM = "one of the same model is taken over; for others `tiers.disk.reclaim: true`, or `kvbm cache ls`"
ANOTHER = "another directory, by `--dir` or `tiers.disk.directory`"


def checks(subject: Subject) -> Found:
    """Returns the settings that the directory needs, None where it cannot be used."""
    directory = subject.directory
    if directory is None:
        yield skipped("directory", "the profile has no `tiers.disk`", "`--dir DIR` examines a directory all the same")
        return None
    try:
        subject.machine.ask(sys.executable, "look", [str(directory)], timeout_s=LOOK_TIMEOUT_S)
    except NoAnswer as error:  # from here on, this process itself waits for the filesystem
        yield failure("directory", f"the filesystem does not answer: {error}", ANOTHER)
        return None
    try:
        yield from _leftovers(subject, directory)
        with workplace(directory) as place:
            require_usable_parent(directory)
            report = _probe(subject, place)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        yield failure("directory", f"cannot be written: {reason}", _way_out(directory))
        return None
    except EnvironmentProblem as error:
        yield failure("directory", error.message, error.hint or ANOTHER)
        return None
    except NoAnswer as error:
        remedy = f"`kvbm doctor` without --quick waits longer; {ANOTHER}" if subject.is_quick else ANOTHER
        yield failure("directory", str(error), remedy)
        return None
    yield from _about(subject, directory, report)
    return report.settings


def _way_out(directory: Path) -> str:
    existing = next((path for path in (directory, *directory.parents) if path.exists()), directory)
    if existing.is_dir() and not os.access(existing, os.W_OK):
        return f"`chown {os.geteuid()} {existing}`, or {ANOTHER}"
    return ANOTHER


def _probe(subject: Subject, place: Path) -> Report:
    seconds, timeout_s = (QUICK_PHASE_S, QUICK_PROBE_TIMEOUT_S) if subject.is_quick else (PHASE_S, PROBE_TIMEOUT_S)
    return subject.machine.probe(
        place, block_bytes=_slot_bytes(subject), phase_s=seconds, timeout_s=timeout_s, say=subject.say
    )


def _slot_bytes(subject: Subject) -> int:
    """Bytes of one block on disk, over all ranks."""
    if subject.sizing is None:
        return BLOCK_BYTES
    tier = subject.sizing.disk or subject.sizing.host
    return -(-tier.total_bytes // tier.block_count // PAGE_BYTES) * PAGE_BYTES


def _about(subject: Subject, directory: Path, report: Report) -> Iterator[Check]:
    if report.write is None:
        yield ok("directory", "files can be created")
    elif not report.write.works:
        reason = report.write.reason
        yield failure("directory", f"a file cannot be written and read back: {reason}", ANOTHER)
    else:
        yield ok("directory", "files can be written and read back")
    yield _filesystem(report)
    yield from _space(subject, directory, report)
    if report.settings is None:
        yield skipped("abilities", f"not tried: {report.reason or 'nothing can be written'}")
        return
    yield from _abilities(subject, report, report.settings)
    yield from queue_checks(subject, report)
    if report.transfers is not None and not report.transfers.works:
        finding = f"many blocks at once fail: {report.transfers.reason}"
        yield failure("speed", finding, f"a quota or limit of this user, the log of the kernel, or {ANOTHER}")
    elif report.speed is None:
        yield skipped("speed", f"not measured: {report.reason}")
    else:
        yield from _speed(report.speed)
        yield from _onboarding(subject, report.speed)


def _filesystem(report: Report) -> Check:
    mount = report.mount
    where = f"{mount.kind} ({mount.source} at {mount.point})"
    facts = {"filesystem": mount.kind, "mount_point": mount.point}
    if mount.kind in IN_MEMORY:
        finding = f"{where} is memory: blocks there take host memory, and are gone after a reboot"
        return warning("filesystem", finding, "`tiers.host.capacity` instead, or a directory on a drive", **facts)
    if mount.kind == "overlay":
        finding = f"{where} is the layer of a container: blocks are gone with it"
        return warning("filesystem", finding, "`tiers.disk.directory` on a mounted volume", **facts)
    if mount.kind in NETWORK or mount.kind.startswith("fuse"):
        what = "a program" if mount.kind.startswith("fuse") else "a network"
        finding = f"{where} has {what} behind it, which may be slow or hang"
        return warning("filesystem", finding, "`tiers.disk.directory` on a local drive", **facts)
    return ok("filesystem", where, **facts)


def _space(subject: Subject, directory: Path, report: Report) -> Iterator[Check]:
    needed = _needed_bytes(subject)
    caches = list_caches(directory)
    held = sum(cache.arena_bytes for cache in caches if not cache.is_locked)
    free, total = report.free_bytes, report.total_bytes
    facts = {"free_bytes": free, "total_bytes": total, "needed_bytes": needed, "held_bytes": held}
    finding = f"{format_size(free)} of {format_size(total)} free"
    if not total:
        yield warning("free space", "the filesystem does not say how much there is", **facts)
    elif needed is None and report.write is None:
        yield warning("free space", finding, ANOTHER, **facts)
    elif needed is None:
        yield ok("free space", finding, **facts)
    elif needed <= free:
        yield ok("free space", f"{finding}, the tier takes {format_size(needed)}", **facts)
    elif needed <= free + held:
        finding += f", the tier takes {format_size(needed)}, {format_size(held)} are in caches that nobody uses"
        say = ok if subject.disk is not None and subject.disk.reclaim else warning
        yield replace(say("free space", finding, **facts), remedy=None if say is ok else RECLAIM)
    else:
        remedy = f"`tiers.disk.capacity: {_rounded(free * 9 // 10)}`, or another `tiers.disk.directory`"
        yield failure("free space", f"{finding}, the tier takes {format_size(needed)}", remedy, **facts)
    yield from _caches(directory, caches)
    yield from _limits(report, needed)


def _caches(directory: Path, caches: Sequence[CacheFacts]) -> Iterator[Check]:
    """What engines have left here to be found again."""
    if not caches:
        return
    taken, used = sum(cache.arena_bytes for cache in caches), sum(cache.is_locked for cache in caches)
    finding = f"{len(caches)} in the directory, {format_size(taken)}, {used} in use"
    facts = {"count": len(caches), "bytes": taken, "in_use": used}
    troubled = [cache for cache in caches if cache.problem is not None]
    if troubled:
        finding += f"; {len(troubled)} cannot be used: {troubled[0].problem}"
        yield warning("caches", finding, f"`kvbm cache ls {directory}`", **facts)
    else:
        yield ok("caches", finding, **facts)


def _limits(report: Report, needed: int | None) -> Iterator[Check]:
    for quota in report.quotas:
        finding = f"{quota.kind}: {format_size(quota.left_bytes)} of {format_size(quota.limit_bytes)} left"
        facts = {"left_bytes": quota.left_bytes, "limit_bytes": quota.limit_bytes}
        if needed is not None and needed > quota.left_bytes:
            remedy = f"`tiers.disk.capacity: {_rounded(quota.left_bytes * 9 // 10)}`, or a larger quota"
            yield failure("quota", f"{finding}, the tier takes {format_size(needed)}", remedy, **facts)
        elif quota.left_bytes < report.free_bytes:
            yield warning("quota", f"{finding}, less than the free space", **facts)
        else:
            yield ok("quota", finding, **facts)
    limit = report.file_limit_bytes
    if limit is None:
        return
    finding = f"a file of this user has at most {format_size(limit)} (RLIMIT_FSIZE)"
    if needed is not None and needed > limit:
        yield failure("file size", f"{finding}, the tier takes {format_size(needed)}", "`ulimit -f unlimited`")
    else:
        yield warning("file size", finding, "`ulimit -f unlimited`", limit_bytes=limit)


def _needed_bytes(subject: Subject) -> int | None:
    from kvbm_cli.engines import copy_count

    if subject.disk is None:
        return None
    if subject.resolved is not None and subject.sizing is not None and subject.sizing.disk is not None:
        return subject.sizing.disk.total_bytes * copy_count(subject.resolved.profile)
    return subject.disk.capacity


def _rounded(byte_count: int) -> str:
    """As one writes a capacity: whole units, rounded down."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if byte_count >= 10 * factor:
            return f"{byte_count // factor}{unit}"
    return f"{byte_count // 1000}KB"


def _leftovers(subject: Subject, directory: Path) -> Iterator[Check]:
    """What crashed engines of NVIDIA's block manager, here or where it puts files by itself, have left, or a doctor
    whose guard was killed too."""
    for where in dict.fromkeys((directory, subject.machine.nvidia_directory)):
        yield from _left(where, NVIDIA_FILES, "NVIDIA's block manager")
    yield from _left(directory, f"{PREFIX}*", "a doctor that was killed, or is at work")


def _left(directory: Path, pattern: str, whose: str) -> Iterator[Check]:
    found = sorted(directory.glob(pattern)) if directory.is_dir() else []
    if found:
        taken = sum(path.lstat().st_blocks * BLOCKS_BYTES for path in found)
        remedy = f"`rm -r {directory / pattern}`, when none is running"
        finding = f"{len(found)} of {whose} in {directory}, {format_size(taken)}"
        yield warning("leftovers", finding, remedy, count=len(found), bytes=taken)


def _abilities(subject: Subject, report: Report, needs: Settings) -> Iterator[Check]:
    assert report.fallocate is not None
    assert report.punch_hole is not None
    assert report.by_open is not None
    assert report.by_fcntl is not None
    disk = subject.disk
    if report.fallocate.works:
        yield ok("fallocate", "works")
    elif not needs.zerofill:
        yield failure("fallocate", f"fails: {report.fallocate.reason}", ANOTHER)
    else:
        finding = f"{report.fallocate.reason}: space can only be taken by writing zeros{_zeros_take(subject, report)}"
        if disk is not None and disk.zerofill:
            yield ok("fallocate", finding)
        else:
            say = failure if disk is not None else warning
            yield say("fallocate", finding, "`tiers.disk.zerofill: true`")
    yield from _direct(subject, report.by_open, report.by_fcntl, needs)
    yield _alignment(report, report.by_open)
    if report.punch_hole.works:
        yield ok("punch hole", "works")
    else:
        yield warning(
            "punch hole", f"{report.punch_hole.reason}: a cache that shrinks gives nothing back before it ends"
        )


def _zeros_take(subject: Subject, report: Report) -> str:
    needed = _needed_bytes(subject)
    if needed is None or report.speed is None:
        return ""
    return f", {needed / report.speed.sequential_write:.0f} s at the first start"


def _direct(subject: Subject, by_open: Direct, by_fcntl: Direct, needs: Settings) -> Iterator[Check]:
    disk = subject.disk
    wanted = None if disk is None or not disk.o_direct else disk.allocator
    remedy = f"`tiers.disk.allocator: {needs.allocator}`" if needs.o_direct else "`tiers.disk.o_direct: false`"
    for name, way, allocator in (("by open", by_open, "open-direct"), ("by fcntl", by_fcntl, "default")):
        name = f"O_DIRECT {name}"
        facts = {"alignment": way.alignment, "is_cached": way.is_cached}
        is_trap = way.works and not by_open.works
        if is_trap:
            finding = "accepted, but open refuses it: fcntl never asked the filesystem"
        elif not way.works:
            finding = f"fails: {way.reason}"
        elif way.is_cached:
            finding = "accepted, and the page cache is used all the same"
        else:
            finding = f"written and read back at an alignment of {way.alignment}"
        if way.works and not is_trap:
            state = State.OK
        else:
            state = State.FAILURE if wanted == allocator else State.WARNING
        yield Check(name, state, finding, None if state is State.OK else remedy, facts)
    if disk is not None and not disk.o_direct and needs.o_direct and not by_open.is_cached:
        finding = "off, though it works: the page cache will hold every block a second time"
        yield warning("O_DIRECT", finding, "`tiers.disk.o_direct: true`")


def _alignment(report: Report, way: Direct) -> Check:
    claimed = report.claimed
    if way.alignment is None:
        return skipped("alignment", "there is no direct I/O to align")
    found = f"{way.alignment} works, and a block's slot begins at a multiple of {PAGE_BYTES}"
    if claimed is None or claimed.offset == 0:
        return ok("alignment", f"{found}; statx claims nothing", works=way.alignment)
    facts = {"works": way.alignment, "claimed_offset": claimed.offset, "claimed_memory": claimed.memory}
    if claimed.offset < way.alignment:
        finding = f"statx claims {claimed.offset}, and only {way.alignment} works"
        return warning("alignment", finding, f"nothing to do: kvbm aligns to {PAGE_BYTES}", **facts)
    return ok("alignment", f"{found}; statx claims {claimed.offset} (memory {claimed.memory})", **facts)


def queue_checks(subject: Subject, report: Report) -> Iterator[Check]:
    """What NIXL needs of the kernel; threads need nothing."""
    assert report.io_uring is not None
    assert report.aio is not None
    wants_nixl = subject.disk is not None and subject.disk.io == "nixl"
    ways = {"io_uring": report.io_uring, "aio": report.aio}
    shown = ", ".join(f"{name} {'works' if way.works else way.reason}" for name, way in ways.items())
    facts = {name: way.works for name, way in ways.items()}
    if report.io_uring.works:
        yield ok("kernel queues", shown, **facts)
    elif report.aio.works:
        yield warning(
            "kernel queues", f"{shown}: NIXL falls back to aio; `tiers.disk.io: threads` needs neither", **facts
        )
    else:
        say = failure if wants_nixl else warning
        yield say("kernel queues", f"{shown}: NIXL cannot work", "`tiers.disk.io: threads`", **facts)


def _speed(speed: Speed) -> Iterator[Check]:
    block = format_size(speed.block_bytes)
    for name, read, write in (
        ("sequential", speed.sequential_read, speed.sequential_write),
        ("random", speed.random_read, speed.random_write),
    ):
        finding = f"reads {rate(read)}, writes {rate(write)} in blocks of {block} by {speed.threads} threads"
        yield ok(name, finding, read_bytes_per_s=round(read), write_bytes_per_s=round(write), block=speed.block_bytes)
    yield ok("flush", f"fdatasync after a block: {speed.flush_s * 1000:.2f} ms", flush_s=speed.flush_s)


def _onboarding(subject: Subject, speed: Speed) -> Iterator[Check]:
    """Tokens that random reads bring, which is also the rate of an engine to which recomputing is as good."""
    if subject.sizing is None:
        yield skipped("onboarding", "how many tokens that is depends on the model", "`--profile PROFILE`")
        return
    tier = subject.sizing.disk or subject.sizing.host
    tokens_per_s = speed.random_read / tier.total_bytes * tier.token_count
    finding = f"{tokens_per_s:,.0f} tokens/s, {EXAMPLE_TOKENS} tokens in {EXAMPLE_TOKENS / tokens_per_s:.2f} s"
    yield ok("onboarding", finding, tokens_per_s=round(tokens_per_s))
    finding = f"an engine that prefills more than {tokens_per_s:,.0f} tokens/s is faster without the disk"
    yield ok("break-even", finding, tokens_per_s=round(tokens_per_s))
