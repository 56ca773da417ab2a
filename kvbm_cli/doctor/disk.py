"""The directory of the disk tier (G3): whether it can be used, on what it lies, and whether the tier fits.

What it can do then is in disk_abilities.py.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kvbm.config.sizes import format_size
from kvbm.disk.directory import CacheFacts, list_caches
from kvbm.disk.files import PAGE_BYTES, require_usable_parent
from kvbm.errors import EnvironmentProblem
from kvbm_cli.doctor import disk_abilities
from kvbm_cli.doctor.machine import NoAnswer
from kvbm_cli.doctor.probe import IN_MEMORY, Report, Settings
from kvbm_cli.doctor.result import Check, capacity, failure, ok, skipped, warning
from kvbm_cli.doctor.scratch_directory import PREFIX, scratch_directory
from kvbm_cli.doctor.subject import ANOTHER, Subject
from kvbm_cli.system.filesystem import nearest_existing

Found = Generator[Check, None, Settings | None]

BLOCKS_BYTES = 512  # of st_blocks
BLOCK_BYTES = 1 << 20  # where no profile says
PHASE_S, QUICK_PHASE_S = 2.0, 0.4
LOOK_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S, QUICK_PROBE_TIMEOUT_S = 120.0, 9.0
NVIDIA_FILES = "dynamo-kvbm-disk-cache-*"
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "9p", "virtiofs", "glusterfs"})
RECLAIM = "one of the same model is taken over; for others `tiers.disk.reclaim: true`, or `kvbm cache ls`"


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
        with scratch_directory(directory) as place:
            require_usable_parent(directory)
            report = _probe(subject, place)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        yield failure("directory", f"cannot be written: {reason}", _way_out(directory, error))
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


def _way_out(directory: Path, error: OSError) -> str:
    existing = nearest_existing(directory)
    if error.errno == errno.EROFS:
        return f"`mount -o remount,rw {_mount_point(existing)}`, or {ANOTHER}"
    if existing.is_dir() and not os.access(existing, os.W_OK):
        is_own = existing.stat().st_uid == os.geteuid()
        return f"`{'chmod u+rwx' if is_own else f'chown {os.geteuid()}'} {existing}`, or {ANOTHER}"
    return ANOTHER


def _mount_point(directory: Path) -> Path:
    return next(path for path in (directory, *directory.parents) if path.is_mount())


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
        yield ok("directory", "files can be written and read back", unnamed=report.has_unnamed_files)
    yield _filesystem(report)
    yield from _space(subject, directory, report)
    if report.settings is None:
        yield skipped("abilities", f"not tried: {report.reason or 'nothing can be written'}")
        return
    yield from disk_abilities.checks(subject, report, report.settings, _needed_bytes(subject))


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
        remedy = f"{_smaller(subject, free)}another `tiers.disk.directory`"
        yield failure("free space", f"{finding}, the tier takes {format_size(needed)}", remedy, **facts)
    yield from _caches(directory, caches)
    yield from _limits(subject, report, needed)


def _smaller(subject: Subject, room: int) -> str:
    """A capacity that fits, unless host memory holds as much, so that such a disk would be of no use."""
    fits = room * 9 // 10
    return "" if fits < _host_bytes(subject) else f"`tiers.disk.capacity: {capacity(fits)}`, or "


def _host_bytes(subject: Subject) -> int:
    host = subject.tiers.host if subject.tiers is not None else None
    if host is None:
        return 0
    sized = subject.sizing.host.total_bytes if subject.sizing is not None else host.capacity or 0
    return sized * _engine_count(subject)


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


def _limits(subject: Subject, report: Report, needed: int | None) -> Iterator[Check]:
    """What is allowed to this user; each engine has one file."""
    arena_bytes = needed if needed is None else needed // _engine_count(subject)
    for quota in report.quotas:
        finding = f"{quota.kind}: {format_size(quota.left_bytes)} of {format_size(quota.limit_bytes)} left"
        facts = {"left_bytes": quota.left_bytes, "limit_bytes": quota.limit_bytes}
        if needed is not None and needed > quota.left_bytes:
            remedy = f"{_smaller(subject, quota.left_bytes)}a larger quota"
            yield failure("quota", f"{finding}, the tier takes {format_size(needed)}", remedy, **facts)
        elif quota.left_bytes < report.free_bytes:
            yield warning("quota", f"{finding}, less than the free space", **facts)
        else:
            yield ok("quota", finding, **facts)
    limit = report.file_limit_bytes
    if limit is None:
        return
    finding = f"a file of this user has at most {format_size(limit)} (RLIMIT_FSIZE)"
    if arena_bytes is not None and arena_bytes > limit:
        yield failure("file size", f"{finding}, the tier takes {format_size(arena_bytes)}", "`ulimit -f unlimited`")
    else:
        yield warning("file size", finding, "`ulimit -f unlimited`", limit_bytes=limit)


def _engine_count(subject: Subject) -> int:
    from kvbm_cli.engine.engines import copy_count

    return 1 if subject.resolved is None else copy_count(subject.resolved.profile)


def _needed_bytes(subject: Subject) -> int | None:
    if subject.disk is None:
        return None
    if subject.sizing is not None and subject.sizing.disk is not None:
        return subject.sizing.disk.total_bytes * _engine_count(subject)
    return None if subject.disk.capacity is None else subject.disk.capacity * _engine_count(subject)


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
