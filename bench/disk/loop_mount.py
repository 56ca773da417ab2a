"""A filesystem on a loop device over tmpfs, so that software and not a drive limits the speed. Requires root."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = Path("/dev/shm")


@contextmanager
def loop_mount(size_bytes: int, *, filesystem: str = "ext4") -> Iterator[Path]:
    """Mount a filesystem of `size_bytes`; unmount and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="kvbm-disk-", dir=MEMORY) as directory:
        image, mounted = Path(directory, "image"), Path(directory, "mounted")
        mounted.mkdir()
        with image.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        device = _output("losetup", "--find", "--show", str(image))
        try:
            _output(f"mkfs.{filesystem}", "-q", device)
            _output("mount", device, str(mounted))
            try:
                yield mounted
            finally:
                _output("umount", str(mounted))
        finally:
            _output("losetup", "--detach", device)


def _output(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
