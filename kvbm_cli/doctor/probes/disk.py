"""Disk probe: tests what the filesystem of a directory supports, and recommends settings of a disk tier.

The probe does not trust documented features. It writes a file and reads it back in every way that the tier could use.
It writes first, because reads of unwritten space succeed even with a wrong alignment. It compares, because some
filesystems accept O_DIRECT and then ignore it. Nothing remains, even if the process is killed: the file has no name
(O_TMPFILE), or is unlinked before anything is written.

The probe uses at most a tenth of the free space. A filesystem may hang, so callers run this module as a program
(`run_probe` in machine.py) with a timeout.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbm.host.mounts import Mount, mount_of
from kvbm.tiers.disk.files import PAGE_BYTES, UNSUPPORTED, fallocate
from kvbm.tiers.disk.io.threads import ThreadsIO
from kvbm_cli.doctor.probes import answer
from kvbm_cli.doctor.probes.disk_file import (
    AREA_BYTES,
    DirectIO,
    ProbeFile,
    ProbeOutcome,
    attempt,
    direct_flag,
    name_of,
)
from kvbm_cli.doctor.probes.disk_speed import PhaseCallback, Speed, SpeedTrial

SHARE_OF_FREE = 10
MAX_FILE_BYTES = 1 << 30
MAX_WRITTEN_BYTES = 8 << 30  # limits the wear of the drive
BUFFERED_BYTES_PER_S = 256 << 20  # a slow disk writes for long what the page cache accepts at once
COPY_ON_WRITE = frozenset({"btrfs", "zfs", "bcachefs"})
UNKNOWN_SPACE_BYTES = 16 << 20  # for a filesystem that does not report its size, such as ramfs


@dataclass(frozen=True, slots=True)
class RecommendedSettings:
    """Values of `tiers.disk` that a directory requires."""

    allocator: str
    o_direct: bool
    zerofill: bool


@dataclass(slots=True)
class DiskReport:
    """Everything that the probe found. A test that could not run is None, with the reason in `reason`. `total_bytes` is
    0 for a filesystem that does not report its size."""

    mount: Mount
    total_bytes: int
    free_bytes: int
    write: ProbeOutcome | None = None
    has_unnamed_files: bool = False
    fallocate: ProbeOutcome | None = None
    by_open: DirectIO | None = None
    by_fcntl: DirectIO | None = None
    settings: RecommendedSettings | None = None
    transfers: ProbeOutcome | None = None
    speed: Speed | None = None
    reason: str | None = None


def probe(
    directory: str | Path,
    *,
    block_bytes: int | None = None,
    seconds: float = 0.0,
    on_phase: PhaseCallback = lambda text: None,
) -> DiskReport:
    """Probes an existing directory. With `block_bytes`, also measures speeds, for `seconds` per phase.

    Raises OSError only if the directory cannot be accessed.
    """
    directory = Path(directory).resolve(strict=True)
    space = os.statvfs(directory)
    report = DiskReport(mount_of(directory), space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize)
    on_phase("testing the filesystem")
    try:
        with ProbeFile.create(directory) as file:
            report.has_unnamed_files = file.is_unnamed
            _try_features(file, report)
            if report.settings is not None and block_bytes is not None:
                _measure(file, report, block_bytes, seconds, on_phase)
    except OSError as error:
        report.write = ProbeOutcome(False, name_of(error))
    return report


def recommend(fallocate: ProbeOutcome, by_open: DirectIO, by_fcntl: DirectIO) -> RecommendedSettings:
    """Recommends settings. O_DIRECT is used only if open accepts it, because fcntl does not ask a FUSE filesystem.

    If the page cache is used despite O_DIRECT, direct I/O is still recommended: it is no worse than buffered I/O.
    """
    takes_open = by_open.works
    takes_fcntl = takes_open and by_fcntl.works and (by_open.is_cached or not by_fcntl.is_cached)
    return RecommendedSettings(
        allocator="default" if takes_fcntl or not takes_open else "open-direct",
        o_direct=takes_open,
        zerofill=fallocate.reason in map(errno.errorcode.get, UNSUPPORTED),
    )


def _try_features(file: ProbeFile, report: DiskReport) -> None:
    if (room := _room(report)) < AREA_BYTES:
        report.reason = f"the test needs {AREA_BYTES >> 10} KiB, but may use only {room >> 10} KiB"
        return
    report.fallocate = attempt(lambda: fallocate(file.fd, 0, 0, AREA_BYTES))
    report.write = file.write()
    if report.write.works:
        report.by_open, report.by_fcntl = file.direct_by_open(), file.direct_by_fcntl()
        report.settings = recommend(report.fallocate, report.by_open, report.by_fcntl)


def _room(report: DiskReport) -> int:
    """Bytes that the probe may use."""
    free = report.free_bytes // SHARE_OF_FREE if report.total_bytes else UNKNOWN_SPACE_BYTES
    return min(free, MAX_FILE_BYTES)


def _measure(file: ProbeFile, report: DiskReport, block_bytes: int, seconds: float, on_phase: PhaseCallback) -> None:
    """Measures speeds in the space that remains of the tenth; the feature tests have freed their files."""
    assert report.settings is not None
    assert report.by_open is not None
    room = _room(report) * 9 // 10  # leaves room for the filesystem's metadata
    stride = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
    written = MAX_WRITTEN_BYTES
    if report.mount.kind in COPY_ON_WRITE:  # an overwritten block is freed later
        room, written = room // 4, room
    is_cached = not report.settings.o_direct or report.by_open.is_cached
    if is_cached:
        room = min(room, int(BUFFERED_BYTES_PER_S * seconds))
    blocks = min(room, MAX_FILE_BYTES) // stride
    if blocks < 4:
        report.reason = f"a tenth of the free space holds only {blocks} blocks of {stride} bytes; 4 are needed"
        return
    try:
        with _prepared(file, report.settings, blocks * stride) as fd:
            io = ThreadsIO(fd, is_direct=report.settings.o_direct)
            trial = SpeedTrial(fd, io, stride, seconds, on_phase, is_cached=is_cached)
            report.speed = trial.measure(blocks, may_write_bytes=written)
        report.transfers = ProbeOutcome(True)
    except OSError as error:
        report.transfers = ProbeOutcome(False, name_of(error))


@contextlib.contextmanager
def _prepared(file: ProbeFile, settings: RecommendedSettings, byte_count: int) -> Iterator[int]:
    """Allocates the file like an arena of that size and yields its descriptor. Raises OSError."""
    fd = file.fd
    if settings.o_direct and settings.allocator == "open-direct":
        assert file.direct_fd is not None
        fd = file.direct_fd
    os.ftruncate(fd, 0)
    if not settings.zerofill:
        fallocate(fd, 0, 0, byte_count)
    with direct_flag(fd) if settings.o_direct and settings.allocator == "default" else contextlib.nullcontext():
        yield fd


if __name__ == "__main__":
    answer(probe)
