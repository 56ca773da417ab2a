"""What reaches the drive: read from a made-up /sys, so that every filesystem's case can be shown anywhere."""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path

import pytest

from kvbm.tiers.disk.wear import (
    AMPLIFICATION,
    DAY_S,
    LEAST_BYTES,
    SAMPLE_INTERVAL_S,
    SYSFS,
    WINDOW_S,
    WRITES_PER_DAY,
    WearMeter,
)

GIB = 1 << 30
MOUNTS = "22 27 0:21 / /proc rw - proc proc rw\n23 27 8:1 / / rw - ext4 /dev/root rw\n"


class Drive:
    """A drive of 1 TiB as /sys shows it, below the directory's own device number."""

    def __init__(self, root: Path, directory: Path, *, is_partition: bool = False) -> None:
        self.sysfs = root / "sys"
        drive = root / "devices" / "nvme0n1"
        self.device = drive / "nvme0n1p1" if is_partition else drive
        self.device.mkdir(parents=True)
        (drive / "size").write_text(f"{1 << 31}\n")
        if is_partition:
            (self.device / "partition").write_text("1\n")
            (self.device / "size").write_text("1024\n")
        number = os.stat(directory).st_dev
        self.sysfs.mkdir()
        (self.sysfs / f"{os.major(number)}:{os.minor(number)}").symlink_to(self.device)
        self.write(0)

    def write(self, total_bytes: int) -> None:
        (self.device / "stat").write_text(f"1 2 3 4 5 6 {total_bytes // 512} 8 9 10 11\n")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def drive(tmp_path: Path) -> Drive:
    if os.major(os.stat(tmp_path).st_dev) == 0:
        pytest.skip("the temporary directory has no block device below it")
    return Drive(tmp_path, tmp_path)


def meter(drive: Drive, directory: Path, clock: Clock) -> WearMeter:
    return WearMeter(directory, sysfs=drive.sysfs, clock=clock)


def test_amplification_is_what_reached_the_drive_over_what_was_written(
    drive: Drive, tmp_path: Path, clock: Clock
) -> None:
    drive.write(7 * GIB)  # before our time
    wear = meter(drive, tmp_path, clock)
    drive.write(7 * GIB + 5 * GIB // 4)
    assert wear.measure(GIB) == {AMPLIFICATION: 1.25}


def test_few_bytes_say_nothing_about_amplification(drive: Drive, tmp_path: Path, clock: Clock) -> None:
    wear = meter(drive, tmp_path, clock)
    drive.write(GIB)
    assert AMPLIFICATION not in wear.measure(LEAST_BYTES - 1)


def test_drive_writes_per_day_are_those_of_the_last_hour(drive: Drive, tmp_path: Path, clock: Clock) -> None:
    wear = meter(drive, tmp_path, clock)
    written = 0
    rates = []
    for per_minute in [GIB] * 90 + [0] * 90:
        clock.now += 60
        written += per_minute
        rates.append(wear.measure(written)[WRITES_PER_DAY])
    assert rates[0] == rates[89] == pytest.approx(GIB * DAY_S / 60 / (1 << 40))
    assert rates[119] == pytest.approx(rates[0] / 2)
    assert rates[-1] == 0


def test_drive_is_the_whole_one_where_the_directory_lies_on_a_partition(tmp_path: Path, clock: Clock) -> None:
    if os.major(os.stat(tmp_path).st_dev) == 0:
        pytest.skip("the temporary directory has no block device below it")
    wear = meter(Drive(tmp_path, tmp_path, is_partition=True), tmp_path, clock)
    clock.now += DAY_S / 1024
    assert wear.measure(GIB)[WRITES_PER_DAY] == pytest.approx(1)


def test_filesystem_without_a_device_is_not_guessed_about(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "sys").mkdir()
    wear = WearMeter(tmp_path, sysfs=tmp_path / "sys", clock=clock)
    clock.now += DAY_S
    assert wear.measure(GIB) == {}


def test_device_that_goes_away_is_not_guessed_about(drive: Drive, tmp_path: Path, clock: Clock) -> None:
    wear = meter(drive, tmp_path, clock)
    (drive.device / "stat").unlink()
    assert AMPLIFICATION not in wear.measure(GIB)


def test_device_of_btrfs_is_the_source_of_its_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat
    disk = next((path for path in (Path("/dev/loop0"), Path("/dev/vda"), Path("/dev/sda")) if path.exists()), None)
    if disk is None:
        pytest.skip("no block device in /dev")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"{MOUNTS}40 23 0:50 /sub {tmp_path} rw shared:1 - btrfs {disk} rw\n")

    def anonymous(path: object, *arguments: object, **named: object) -> object:
        result = real(path, *arguments, **named)  # type: ignore[call-overload]
        if str(path) != str(tmp_path):
            return result
        return os.stat_result((*result[:2], os.makedev(0, 50), *result[3:]))

    monkeypatch.setattr(os, "stat", anonymous)
    wear = WearMeter(tmp_path, mounts=mounts)
    number = real(disk).st_rdev
    assert wear._device == (SYSFS / f"{os.major(number)}:{os.minor(number)}").resolve()


class Interrupted(deque):
    """Samples; the first time that their number is read, another thread measures an hour later, before the reader goes
    on."""

    other: threading.Thread | None = None
    clock: Clock

    def __len__(self) -> int:
        count = super().__len__()
        if count == 2 and self.other is not None and self.other.ident is None:
            self.clock.now += WINDOW_S
            self.other.start()
            self.other.join(0.2)
        return count


def test_two_threads_may_measure_at_one_time(drive: Drive, tmp_path: Path, clock: Clock) -> None:
    wear = meter(drive, tmp_path, clock)
    wear._samples = samples = Interrupted(wear._samples)
    clock.now += SAMPLE_INTERVAL_S
    samples.clock, samples.other = clock, threading.Thread(target=wear.measure, args=(GIB,))
    assert WRITES_PER_DAY in wear.measure(GIB)
    samples.other.join()


@pytest.mark.parametrize("mounts", ["", "22 27\n", "22 27 0:21 / / rw proc\n", "22 27 0:21 / / rw -\n", None])
def test_mount_table_in_an_unknown_format_is_not_guessed_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: str | None
) -> None:
    table = tmp_path / "mountinfo"
    if mounts is not None:
        table.write_text(mounts)
    monkeypatch.setattr(os, "major", lambda number: 0)
    assert WearMeter(tmp_path, mounts=table).measure(GIB) == {}


def test_directory_that_is_gone_is_not_guessed_about(tmp_path: Path) -> None:
    assert WearMeter(tmp_path / "gone").measure(GIB) == {}
