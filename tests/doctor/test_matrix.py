"""The doctor on real filesystems: what it finds, what it recommends, and that a disk tier works with exactly that.

Needs root, loop devices and the tools of each filesystem; a row that cannot be had here is skipped with the reason. The
engine and the memory are not what this is about, so those answers are written down (doctor_machine.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doctor_machine import machine
from filesystems import KINDS, Unavailable, mounted
from waiting import eventually

from kvbm.engines.table import load
from kvbm.host.layout import BlockLayout
from kvbm.host.segment import Segment
from kvbm.tiers.disk.orders import Read, Write
from kvbm.tiers.disk.settings import DiskSettings, Namespace
from kvbm.tiers.disk.storage import DiskStorage
from kvbm_cli.doctor.command import doctor
from kvbm_cli.doctor.machine import run_probe

ROOT = Path(__file__).resolve().parents[2]
PROFILE = """\
engine:
  model: synthetic:tiny
tiers:
  host: {capacity: 8MiB}
  disk:
    directory: %s
    capacity: %s
"""
DIRECT = ("default", True, False)
DIRECT_ZEROS = ("default", True, True)
BUFFERED_ZEROS = ("default", False, True)
BLOCKS = 16


@dataclass(frozen=True)
class Row:
    """What is expected under the defaults of a profile. `recommended` are allocator, o_direct and zerofill; `states`
    are those of the checks that are not ok, whose `finding` has such words."""

    kind: str
    recommended: tuple[str, bool, bool] | None
    states: Mapping[str, str] = field(default_factory=dict)
    findings: Mapping[str, str] = field(default_factory=dict)
    capacity: str = "16MiB"

    @property
    def exit_code(self) -> int:
        return int("failure" in self.states.values())


LIE = {"filesystem": "warning", "fallocate": "failure"}
TABLE = (
    Row("ext4", DIRECT),
    Row("ext4-1k", DIRECT),
    Row("ext4-4096-sectors", DIRECT),
    Row("ext2", DIRECT_ZEROS, {"fallocate": "failure"}, {"fallocate": "ENOTSUP"}),
    Row("xfs", DIRECT),
    Row("xfs-4096-sectors", DIRECT),
    Row("btrfs", DIRECT, findings={"O_DIRECT by open": "the page cache is still used"}),
    Row("tmpfs", DIRECT, {"filesystem": "warning"}, {"filesystem": "is in memory"}),
    Row(
        "ramfs",
        BUFFERED_ZEROS,
        {
            "filesystem": "warning",
            "free space": "warning",
            "fallocate": "failure",
            "O_DIRECT by open": "warning",
            "O_DIRECT by fcntl": "failure",
        },
        {"O_DIRECT by open": "EINVAL", "filesystem": "is in memory"},
    ),
    Row("overlay", DIRECT, {"filesystem": "warning"}, {"filesystem": "is a container layer"}),
    Row(
        "fuse-refuses",
        BUFFERED_ZEROS,
        {**LIE, "O_DIRECT by open": "warning", "O_DIRECT by fcntl": "failure"},
        {"O_DIRECT by open": "EINVAL", "O_DIRECT by fcntl": "open refuses it"},
    ),
    Row(
        "fuse-fails",
        BUFFERED_ZEROS,
        {**LIE, "O_DIRECT by open": "warning", "O_DIRECT by fcntl": "failure"},
        {"O_DIRECT by open": "EINVAL"},
    ),
    Row(
        "fuse-drops",
        BUFFERED_ZEROS,
        {**LIE, "O_DIRECT by open": "warning", "O_DIRECT by fcntl": "failure"},
        {"O_DIRECT by open": "the bytes read differ from the bytes written"},
    ),
    Row("full", None, {"directory": "failure"}, {"directory": "no space left on device"}),
    Row(
        "nearly-full",
        None,
        {"free space": "failure", "features": "skipped"},
        {"free space": "the tier requires 16.0 MiB"},
    ),
)


@contextlib.contextmanager
def filesystem(kind: str, directory: Path) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        try:
            point = stack.enter_context(mounted(kind, directory))
        except Unavailable as error:
            pytest.skip(f"{kind}: {error}")
        yield point


class LeastFree:
    """The least free space that a filesystem had while a test ran, and what it had at first."""

    def __init__(self, point: Path) -> None:
        self._point = point
        self.first = self.least = self._free()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _free(self) -> int:
        space = os.statvfs(self._point)
        return space.f_bavail * space.f_frsize

    def _run(self) -> None:
        while not self._over.wait(0.002):
            self.least = min(self.least, self._free())

    def __enter__(self) -> LeastFree:
        self._thread.start()
        return self

    def __exit__(self, *ignored: object) -> None:
        self._over.set()
        self._thread.join()


def examine(capsys: Any, tmp_path: Path, directory: Path, capacity: str, **changes: Any) -> dict[str, Any]:
    """What `kvbm doctor --profile P --write FILE --quick --json` says of the real directory."""
    profile = tmp_path / "mine.yaml"
    profile.write_text(PROFILE % (directory, capacity))

    fake = machine(tmp_path / "machine", probes={"disk": run_probe}, **changes)
    options = {"directory": None, "as_json": True, "is_quick": True, "write": tmp_path / "written.yaml"}
    code = doctor([str(profile)], [], machine=fake, **options)
    data = json.loads(capsys.readouterr().out)
    assert code == data["exit_code"]
    return data


def disk_checks(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in data["checks"] if check["group"] == "disk"}


def move_blocks(directory: Path, recommended: Mapping[str, Any], *, persist: bool) -> None:
    """A pattern through a DiskTier with these settings, in a second life of it too if it persists."""
    layout = BlockLayout.block_contiguous(block_count=2 * BLOCKS, block_bytes=64 << 10)
    segment = Segment.create(rank=0, layout=layout, slot_count=2 * BLOCKS)
    pattern = np.random.default_rng(1).integers(0, 256, (BLOCKS, 64 << 10), np.uint8)
    segment.payload[:BLOCKS] = pattern
    hashes = [bytes([number]) * 8 for number in range(BLOCKS)]
    settings = DiskSettings(directory, block_count=BLOCKS, persist=persist, **recommended)

    def opened() -> DiskStorage:
        return DiskStorage.open(settings, Namespace(b"matrix", {}), [segment.payload], hash_bytes=8)

    tier = opened()
    tier.submit(Write(1, hashes, range(BLOCKS), range(BLOCKS), [b""] * BLOCKS, [0] * BLOCKS))
    assert all(_result(tier).is_good)
    if persist:
        tier.close(10)
        tier = opened()
        assert sorted(tier.recovered().hashes) == hashes
    tier.submit(Read(2, hashes, range(BLOCKS), range(BLOCKS, 2 * BLOCKS)))
    assert all(_result(tier).is_good)
    tier.close(10)
    assert (segment.payload[BLOCKS:] == pattern).all()
    segment.close()


def _result(tier: DiskStorage) -> Any:
    return eventually(tier.poll)[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.kind)
def test_verdict_and_what_is_recommended(row, tmp_path, capsys):
    with filesystem(row.kind, tmp_path) as point:
        before = sorted(os.listdir(point))
        with LeastFree(point) as free:
            data = examine(capsys, tmp_path, point / "cache", row.capacity)
        assert sorted(os.listdir(point)) == before
        assert free.least >= free.first * 9 // 10
        checks = disk_checks(data)
        states = {name: check["state"] for name, check in checks.items() if check["state"] != "ok"}
        assert states == row.states
        for name, words in row.findings.items():
            assert words in checks[name]["finding"]
        found = data["recommended"] and tuple(data["recommended"].values())
        assert found == row.recommended
        if row.recommended is None:
            return
        written = load(str(tmp_path / "written.yaml"), directories=[]).profile.tiers.disk
        assert (written.allocator, written.o_direct, written.zerofill) == row.recommended
        recommended = dict(zip(("allocator", "o_direct", "zerofill"), row.recommended, strict=True))
        for persist in (False, True):
            move_blocks(point / "cache", recommended, persist=persist)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("delay_s", [0.3, 0.8, 1.6])
def test_kill_leaves_nothing_where_files_have_names(delay_s, tmp_path):
    with filesystem("fuse-refuses", tmp_path) as point:
        command = [sys.executable, "-c", "from kvbm_cli.app import main; main()", "doctor", "--quick", "--dir", point]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(lambda: os.listdir(point) or child.poll() is not None)
        assert child.poll() is None
        time.sleep(delay_s)
        child.kill()
        child.wait()
        eventually(lambda: not os.listdir(point))


def test_filesystem_that_hangs(tmp_path, capsys):
    with filesystem("fuse-refuses", tmp_path) as point:
        (daemon,) = [pid for pid in processes() if b"lying_filesystem.py" in pid[1] and str(point).encode() in pid[1]]
        os.kill(daemon[0], signal.SIGSTOP)
        try:
            started = time.monotonic()
            data = examine(capsys, tmp_path, point / "cache", "16MiB")
            taken_s = time.monotonic() - started
        finally:
            os.kill(daemon[0], signal.SIGCONT)
        (check,) = disk_checks(data).values()
        assert (check["state"], check["finding"]) == (
            "failure",
            "the filesystem does not respond: no answer within 3 s",
        )
        assert taken_s < 60


def processes() -> Iterator[tuple[int, bytes]]:
    """Every process with its command line."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                yield int(entry.name), (entry / "cmdline").read_bytes()


def test_every_filesystem_has_its_row():
    assert {row.kind for row in TABLE} == set(KINDS) - {"btrfs-quota"}
