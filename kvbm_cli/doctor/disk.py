"""Checks of the directory of the disk tier (G3): whether it is usable, its filesystem, and whether the tier fits.

disk_features.py checks what the filesystem supports.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from kvbm.config.sizes import format_size, whole_size
from kvbm.errors import EnvironmentProblem, path_hint, reason_of
from kvbm.host.mounts import IN_MEMORY, PSEUDO, mount_of
from kvbm.tiers.disk.files import PAGE_BYTES, require_usable_parent
from kvbm_cli.doctor import disk_features
from kvbm_cli.doctor.check import NO_ANSWER, OTHER_DIRECTORY, DoctorContext
from kvbm_cli.doctor.machine import SCRATCH_PREFIX, ProbeFailed, scratch_directory
from kvbm_cli.doctor.probes.disk import DiskReport, RecommendedSettings
from kvbm_cli.profile.machine_check import Check, failure, ok, skipped, warning
from kvbm_cli.store.caches import CacheFacts, list_caches
from kvbm_cli.system.answering import answers
from kvbm_cli.system.filesystem import missing_mount, nearest_existing, unsafe_parents

BLOCKS_BYTES = 512  # of st_blocks
BLOCK_BYTES = 1 << 20  # without a profile
PHASE_S, QUICK_PHASE_S = 2.0, 0.4
PROBE_TIMEOUT_S, QUICK_PROBE_TIMEOUT_S = 120.0, 9.0
NVIDIA_FILES = "dynamo-kvbm-disk-cache-*"
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "9p", "virtiofs", "glusterfs"})
ON_A_DRIVE = "use a directory on a drive (`--dir` or `tiers.disk.directory`)"
RECLAIM = "a cache of the same model is reused; for others set `tiers.disk.reclaim: true`, or see `kvbm cache ls`"


def checks(context: DoctorContext, recommend: Callable[[RecommendedSettings], None]) -> Iterator[Check]:
    """Yield the checks. `recommend` gets the recommended settings if the directory can be used."""
    directory = context.directory
    if directory is None:
        yield skipped("directory", "the profile has no `tiers.disk`", "add `--dir DIR` to check a directory")
        return
    if not answers(directory, changes=True):  # past here this process itself waits for the filesystem
        yield failure("directory", NO_ANSWER, OTHER_DIRECTORY)
        return
    if (reason := missing_mount(directory)) is not None:
        yield warning("mount", reason, f"mount it, or {OTHER_DIRECTORY}")
    if (mount := mount_of(Path(os.path.realpath(nearest_existing(directory))))).kind in PSEUDO:
        yield failure("filesystem", f"{mount.point} is a {mount.kind} filesystem, which cannot hold files", ON_A_DRIVE)
        return
    try:
        yield from _leftovers(context, directory)
        with scratch_directory(directory) as place:
            require_usable_parent(directory)
            report = _probe(context, place)
    except OSError as error:
        remedies = [one for one in (path_hint(error, directory), OTHER_DIRECTORY) if one is not None]
        yield failure("directory", f"not writable: {reason_of(error)}", ", or ".join(remedies))
        return
    except EnvironmentProblem as error:
        yield failure("directory", error.message, error.hint or OTHER_DIRECTORY)
        return
    except ProbeFailed as error:
        remedy = (
            f"run `kvbm doctor` without `--quick`, which waits longer, or {OTHER_DIRECTORY}"
            if context.is_quick
            else OTHER_DIRECTORY
        )
        yield failure("directory", str(error), remedy)
        return
    yield from _about(context, directory, report)
    if report.settings is not None:
        recommend(report.settings)


def _probe(context: DoctorContext, place: Path) -> DiskReport:
    seconds, timeout_s = (QUICK_PHASE_S, QUICK_PROBE_TIMEOUT_S) if context.is_quick else (PHASE_S, PROBE_TIMEOUT_S)
    given = {"directory": str(place), "seconds": seconds, "block_bytes": _slot_bytes(context)}
    answer = context.machine.run_probe(
        sys.executable, "disk", [json.dumps(given)], timeout_s=timeout_s, on_phase=context.on_phase
    )
    return TypeAdapter(DiskReport).validate_python(answer["report"])


def _slot_bytes(context: DoctorContext) -> int:
    """Bytes of one block on disk, summed over the ranks."""
    if context.sizing is None:
        return BLOCK_BYTES
    tier = context.sizing.disk or context.sizing.host
    return -(-tier.total_bytes // tier.block_count // PAGE_BYTES) * PAGE_BYTES


def _about(context: DoctorContext, directory: Path, report: DiskReport) -> Iterator[Check]:
    if report.write is None:
        yield ok("directory", "files can be created")
    elif not report.write.works:
        reason = report.write.reason
        yield failure("directory", f"a test file cannot be written and read back: {reason}", OTHER_DIRECTORY)
    else:
        yield ok("directory", "files can be written and read back", unnamed=report.has_unnamed_files)
    for parent, reason in unsafe_parents(directory):
        remedy = f"use a directory whose parents belong to you or root, or `chmod go-w {shlex.quote(str(parent))}`"
        yield warning("parents", f"{parent} {reason}, so another user can move the cache away", remedy)
    yield _filesystem(report)
    yield from _space(context, directory, report)
    if report.settings is None:
        yield skipped("features", f"not checked: {report.reason or 'the directory is not writable'}")
        return
    yield from disk_features.checks(context, report, report.settings, _needed_bytes(context))


def _filesystem(report: DiskReport) -> Check:
    mount = report.mount
    where = f"{mount.kind} ({mount.source} at {mount.point})"
    facts = {"filesystem": mount.kind, "mount_point": mount.point}
    if mount.kind in IN_MEMORY:
        finding = f"{where} is in memory: its blocks use host memory and are lost at a reboot"
        return warning("filesystem", finding, "use `tiers.host.capacity` instead, or a directory on a drive", **facts)
    if mount.kind == "overlay":
        finding = f"{where} is a container layer: its blocks are lost with the container"
        return warning("filesystem", finding, "set `tiers.disk.directory` to a directory on a mounted volume", **facts)
    if mount.kind in NETWORK or mount.kind.startswith("fuse"):
        what = "a FUSE program" if mount.kind.startswith("fuse") else "the network"
        finding = f"{where} depends on {what}, which may be slow or hang"
        return warning("filesystem", finding, "set `tiers.disk.directory` to a directory on a local drive", **facts)
    return ok("filesystem", where, **facts)


def _space(context: DoctorContext, directory: Path, report: DiskReport) -> Iterator[Check]:
    needed = _needed_bytes(context)
    caches = list_caches(directory)
    held = sum(cache.arena_bytes for cache in caches if not cache.is_locked)
    free, total = report.free_bytes, report.total_bytes
    facts = {"free_bytes": free, "total_bytes": total, "needed_bytes": needed, "held_bytes": held}
    finding = f"{format_size(free)} of {format_size(total)} free"
    if not total:
        yield warning("free space", "the filesystem does not report its free space", **facts)
    elif needed is None and report.write is None:
        yield warning("free space", finding, OTHER_DIRECTORY, **facts)
    elif needed is None:
        yield ok("free space", finding, **facts)
    elif needed <= free:
        yield ok("free space", f"{finding}, the tier requires {format_size(needed)}", **facts)
    elif needed <= free + held:
        finding += f", the tier requires {format_size(needed)}; unused caches hold {format_size(held)}"
        check = ok if context.disk is not None and context.disk.reclaim else warning
        yield replace(check("free space", finding, **facts), remedy=None if check is ok else RECLAIM)
    else:
        remedy = f"{_smaller(context, free)}use another `tiers.disk.directory`"
        yield failure("free space", f"{finding}, the tier requires {format_size(needed)}", remedy, **facts)
    yield from _caches(directory, caches)


def _smaller(context: DoctorContext, room: int) -> str:
    """Suggests a capacity that fits; nothing if it is below host memory, because such a disk tier is useless."""
    fits = room * 9 // 10
    return "" if fits < (context.host_bytes or 0) else f"set `tiers.disk.capacity: {whole_size(fits)}`, or "


def _caches(directory: Path, caches: Sequence[CacheFacts]) -> Iterator[Check]:
    """Check the caches that earlier engines left in the directory."""
    if not caches:
        return
    taken, used = sum(cache.arena_bytes for cache in caches), sum(cache.is_locked for cache in caches)
    finding = f"{len(caches)} in this directory, {format_size(taken)}, {used} in use"
    facts = {"count": len(caches), "bytes": taken, "in_use": used}
    troubled = [cache for cache in caches if cache.problem is not None]
    if troubled:
        finding += f"; {len(troubled)} cannot be used: {troubled[0].problem}"
        yield warning("caches", finding, f"see `kvbm cache ls --dir {shlex.quote(str(directory))}`", **facts)
    else:
        yield ok("caches", finding, **facts)


def _needed_bytes(context: DoctorContext) -> int | None:
    if context.disk is None or context.disk.is_auto:
        return None
    if context.sizing is not None and context.sizing.disk is not None:
        return context.sizing.disk.total_bytes * context.engine_count
    capacity_bytes = context.disk.capacity_bytes
    return None if capacity_bytes is None else capacity_bytes * context.engine_count


def _leftovers(context: DoctorContext, directory: Path) -> Iterator[Check]:
    """Find files of crashed engines with NVIDIA's block manager, here and in its default directory, and of a killed
    doctor."""
    for where in dict.fromkeys((directory, context.machine.nvidia_directory)):
        yield from _left(where, NVIDIA_FILES, "NVIDIA's block manager")
    yield from _left(directory, f"{SCRATCH_PREFIX}*", "a killed or running `kvbm doctor`")


def _left(directory: Path, pattern: str, whose: str) -> Iterator[Check]:
    found = sorted(directory.glob(pattern)) if directory.is_dir() else []
    if found:
        taken = sum(path.lstat().st_blocks * BLOCKS_BYTES for path in found)
        remedy = f"`rm -r {shlex.quote(str(directory))}/{pattern}` while none is running"
        finding = f"left by {whose} in {directory}: {format_size(taken)}, files: {len(found)}"
        yield warning("leftovers", finding, remedy, count=len(found), bytes=taken)
