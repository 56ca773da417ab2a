"""Drive wear below a directory: bytes written to the device, write amplification, and drive writes per day.

Linux counts per block device, so writes by other programs to the same device are included. The amplification is
therefore an upper bound, and exact if the cache has the device to itself. Writes added by the drive's firmware are not
visible. Nothing is known where the file system has no block device (tmpfs, overlay, network).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from kvbm.host.mounts import TABLE, mount_of

SECTOR_BYTES = 512  # unit of all counters in /sys, independent of the device's sector size
SECTORS_WRITTEN = 6  # field of /sys/dev/block/*/stat, Documentation/block/stat.rst of Linux
DAY_S = 86400.0
WINDOW_S = 3600.0
SAMPLE_INTERVAL_S = 60.0
LEAST_BYTES = 64 << 20  # with less, the journal and the index of a start outweigh the blocks
SYSFS = Path("/sys/dev/block")
AMPLIFICATION, WRITES_PER_DAY = "kvbm_disk_write_amplification", "kvbm_disk_drive_writes_per_day"


class WearMeter:
    """Compares the bytes that kvbm wrote below `directory` with the bytes that reached the device.

    Any thread may call `measure`: several scrapes may run in parallel. Nothing here raises.
    """

    def __init__(
        self,
        directory: Path,
        *,
        sysfs: Path = SYSFS,
        mounts: Path = TABLE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._device = _device_below(directory, sysfs, mounts)
        self._drive_bytes = _drive_bytes(self._device) if self._device else None
        self._device_bytes_before = self._device_bytes()
        self._samples_lock = threading.Lock()
        self._samples = deque([(clock(), 0)])

    def measure(self, bytes_written: int) -> dict[str, float]:
        """Return the known metrics by name: the amplification since the meter was created, in which time kvbm wrote
        `bytes_written`, and the writes per day from its last hour of writes."""
        before, now = self._device_bytes_before, self._device_bytes()
        known = {}
        if before is not None and now is not None and bytes_written >= LEAST_BYTES:
            known[AMPLIFICATION] = (now - before) / bytes_written
        if (per_day := self._drive_writes_per_day(bytes_written)) is not None:
            known[WRITES_PER_DAY] = per_day
        return known

    def _drive_writes_per_day(self, bytes_written: int) -> float | None:
        samples = self._samples
        with self._samples_lock:
            now = self._clock()
            if now - samples[-1][0] >= SAMPLE_INTERVAL_S:
                samples.append((now, bytes_written))
            while len(samples) > 1 and now - samples[1][0] >= WINDOW_S:
                samples.popleft()
            since, before = samples[0]
        if self._drive_bytes is None or now - since < SAMPLE_INTERVAL_S:
            return None
        return (bytes_written - before) / (now - since) * DAY_S / self._drive_bytes

    def _device_bytes(self) -> int | None:
        if self._device is None:
            return None
        try:
            return int((self._device / "stat").read_text().split()[SECTORS_WRITTEN]) * SECTOR_BYTES
        except (OSError, IndexError, ValueError):
            return None


def _device_below(directory: Path, sysfs: Path, mounts: Path) -> Path | None:
    """Return the block device of a file system. btrfs has virtual device numbers: its device is in the mounts."""
    try:
        number = os.stat(directory).st_dev
        if os.major(number) == 0:
            source = mount_of(directory.resolve(), mounts).source
            if not source.startswith("/dev/"):
                return None
            number = os.stat(source).st_rdev
        device = sysfs / f"{os.major(number)}:{os.minor(number)}"
        return device.resolve() if device.exists() else None
    except (OSError, ValueError, IndexError):  # also a mount table in an unknown format
        return None


def _drive_bytes(device: Path) -> int | None:
    """Return the size of the drive; `device` may be one of its partitions."""
    drive = device.parent if (device / "partition").exists() else device
    try:
        return int((drive / "size").read_text()) * SECTOR_BYTES or None
    except (OSError, ValueError):
        return None
