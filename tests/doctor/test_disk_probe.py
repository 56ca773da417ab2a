"""Parts of the probe that need no mount: what follows from what, and files that have no name."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvbm.host.mounts import mount_of
from kvbm.tiers.disk.io.threads import IoRun, ThreadsIO
from kvbm_cli.doctor.probes import disk as module
from kvbm_cli.doctor.probes.disk import RecommendedSettings, probe, recommend
from kvbm_cli.doctor.probes.disk_file import DirectIO, ProbeFile, ProbeOutcome

WORKS, UNSUPPORTED, FULL = ProbeOutcome(True), ProbeOutcome(False, "ENOTSUP"), ProbeOutcome(False, "ENOSPC")
DIRECT, CACHED, REFUSED = (
    DirectIO(True, None, 512),
    DirectIO(True, None, 512, is_cached=True),
    DirectIO(False, "EINVAL"),
)
IGNORED = DirectIO(False, "the flag is not kept")
NEEDS = {
    "ordinary": ((WORKS, DIRECT, DIRECT), RecommendedSettings("default", True, False)),
    "ext2": ((UNSUPPORTED, DIRECT, DIRECT), RecommendedSettings("default", True, True)),
    "space_is_short": ((FULL, DIRECT, DIRECT), RecommendedSettings("default", True, False)),
    "fcntl_is_ignored": ((WORKS, DIRECT, IGNORED), RecommendedSettings("open-direct", True, False)),
    "fcntl_is_buffered": ((WORKS, DIRECT, CACHED), RecommendedSettings("open-direct", True, False)),
    "all_is_cached": ((WORKS, CACHED, CACHED), RecommendedSettings("default", True, False)),
    "only_fcntl": ((UNSUPPORTED, REFUSED, DIRECT), RecommendedSettings("default", False, True)),
    "nothing": ((UNSUPPORTED, REFUSED, REFUSED), RecommendedSettings("default", False, True)),
}
MOUNTS = """\
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 21 0:40 / /data rw,noatime shared:5 - xfs /dev/nvme0n1 rw,attr2
31 30 0:41 / /data/a\\040b ro,noatime - nfs4 host:/x rw
32 30 0:42 / /data/over rw - tmpfs tmpfs rw
33 30 0:43 / /data/over rw - ext4 /dev/sdb rw
34 21 0:44 / /database rw - btrfs /dev/sdc rw
"""


@pytest.mark.parametrize("name", NEEDS)
def test_what_is_recommended(name):
    found, needed = NEEDS[name]
    assert recommend(*found) == needed


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home", "ext4"),
        ("/data", "xfs"),
        ("/data/cache", "xfs"),
        ("/data/a b/c", "nfs4"),
        ("/data/over/c", "ext4"),
        ("/database", "btrfs"),
    ],
)
def test_mount_of_a_path(path, kind, tmp_path):
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert mount_of(Path(path), tmp_path / "mountinfo").kind == kind


def test_everything_is_found_about_a_directory(tmp_path):
    phases: list[str] = []
    report = probe(tmp_path, block_bytes=65536, seconds=0.02, on_phase=phases.append)
    assert report.settings is not None
    assert min(report.speed.sequential_read, report.speed.random_read, report.speed.random_write) > 0
    assert phases[0] == "testing the filesystem"
    assert phases[-1] == "random writes"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR])
def test_file_loses_its_name_where_it_must_have_one(number, tmp_path, monkeypatch):
    real = os.open

    def without_unnamed_files(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(number, os.strerror(number))
        return real(path, flags, mode)

    monkeypatch.setattr(module.os, "open", without_unnamed_files)
    with ProbeFile.create(tmp_path) as file:
        assert not file.is_unnamed
        assert list(tmp_path.iterdir()) == []
        assert os.fstat(file.fd).st_nlink == 0


@pytest.mark.parametrize(
    ("reads", "reason"),
    [
        (lambda buffer, done: buffer.__setitem__(77, buffer[77] ^ 1), "the bytes read differ from the bytes written"),
        (lambda buffer, done: done - 1, f"{module.AREA_BYTES - 1} of {module.AREA_BYTES} bytes read"),
    ],
)
def test_wrong_bytes_and_short_reads_are_noticed(reads, reason, tmp_path, monkeypatch):
    real = os.preadv

    def wrong(fd: int, buffers: Any, offset: int) -> int:
        done = real(fd, buffers, offset)
        changed = reads(buffers[0], done)
        return done if changed is None else changed

    monkeypatch.setattr(module.os, "preadv", wrong)
    assert probe(tmp_path).write == ProbeOutcome(False, reason)


def test_directory_that_takes_no_file_is_an_outcome(tmp_path, monkeypatch):
    def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(module.os, "open", refuse)
    report = probe(tmp_path)
    assert report.write == ProbeOutcome(False, "EROFS")
    assert report.settings is None


def test_a_tenth_of_the_free_space_bounds_what_is_written(tmp_path, monkeypatch):
    free, block = 64 << 20, 65536
    most = 0
    real = ThreadsIO.write

    def watched(io: ThreadsIO, runs: Sequence[IoRun]) -> None:
        nonlocal most
        real(io, runs)
        most = max(most, *(run.offset + sum(buffer.nbytes for buffer in run.buffers) for run in runs))

    class Space:
        f_blocks, f_bavail, f_frsize = 1 << 20, free // 4096, 4096

    monkeypatch.setattr(module.os, "statvfs", lambda path: Space)
    monkeypatch.setattr(ThreadsIO, "write", watched)
    report = probe(tmp_path, block_bytes=block, seconds=1.0)
    assert report.speed is not None
    assert free // 20 < most <= free // 10
