"""Filesystems of many kinds, mounted for the time of one test: loop devices over files, memory, overlay, FUSE.

`mounted(kind, directory)` needs root; it raises Unavailable with the reason where this machine cannot have one. All is
unmounted at the end whatever happened, and loop devices go with their mounts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MIB = 1 << 20
LIAR = Path(__file__).with_name("lying_filesystem.py")


class Unavailable(Exception):
    """This machine cannot have such a filesystem; the text says why."""


@contextlib.contextmanager
def mounted(kind: str, directory: Path) -> Iterator[Path]:
    """The mount point of a fresh filesystem; its image and its point are made in `directory`."""
    if os.geteuid() != 0:
        raise Unavailable("mounting needs root")
    point = directory / "mount"
    point.mkdir()
    with contextlib.ExitStack() as stack:
        yield (KINDS | BREAKABLE)[kind](directory, point, stack)


def _known(filesystem: str) -> None:
    known = {line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines()}
    if filesystem not in known:
        raise Unavailable(f"this kernel has no {filesystem}")


def run(*command: str | Path) -> str:
    """What a command prints. Unavailable if there is no such command, or it fails."""
    program = shutil.which(str(command[0]), path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if program is None:
        raise Unavailable(f"there is no {command[0]}")
    done = subprocess.run([program, *map(str, command[1:])], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise Unavailable(f"{command[0]} fails: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout.strip()


def _mount(stack: contextlib.ExitStack, kind: str, what: str | Path, point: Path, *options: str) -> Path:
    _known(kind)
    run("mount", "-t", kind, *(("-o", ",".join(options)) if options else ()), what, point)
    stack.callback(_unmount, point)
    return point


def _unmount(point: Path) -> None:
    """Lazily where somebody still holds it; the kernel clears it away then."""
    try:
        run("umount", point)
    except Unavailable:
        run("umount", "-l", point)


def _on_loop(kind: str, *make: str, size: int = 96, sectors: int = 512) -> Callable[..., Path]:
    def mount(directory: Path, point: Path, stack: contextlib.ExitStack) -> Path:
        _known(kind)
        if not Path("/dev/loop-control").exists():
            raise Unavailable("there are no loop devices")
        image = directory / "image"
        with open(image, "wb") as file:
            file.truncate(size * MIB)
        device = run("losetup", "--find", "--show", "--sector-size", str(sectors), image)
        stack.callback(_detach, device)
        run(*make, device)
        return _mount(stack, kind, device, point)

    return mount


def _detach(device: str) -> None:
    with contextlib.suppress(Unavailable):
        run("losetup", "--detach", device)


def _tmpfs(directory: Path, point: Path, stack: contextlib.ExitStack) -> Path:
    return _mount(stack, "tmpfs", "tmpfs", point, "size=96m")


def _ramfs(directory: Path, point: Path, stack: contextlib.ExitStack) -> Path:
    return _mount(stack, "ramfs", "ramfs", point)


def _overlay(directory: Path, point: Path, stack: contextlib.ExitStack) -> Path:
    """As containers have it: an ext4 with the upper layer."""
    base = directory / "base"
    base.mkdir()
    KINDS["ext4"](directory, base, stack)
    layers = {name: base / name for name in ("lower", "upper", "work")}
    for path in layers.values():
        path.mkdir()
    options = (f"lowerdir={layers['lower']}", f"upperdir={layers['upper']}", f"workdir={layers['work']}")
    return _mount(stack, "overlay", "overlay", point, *options)


def _btrfs_with_quota(directory: Path, point: Path, stack: contextlib.ExitStack) -> Path:
    KINDS["btrfs"](directory, point, stack)
    limited = point / "limited"
    run("btrfs", "quota", "enable", point)
    run("btrfs", "subvolume", "create", limited)
    run("btrfs", "qgroup", "limit", "20M", limited)
    return limited


def _full(left: int) -> Callable[..., Path]:
    """An ext4 on which so many bytes are free; with 0, not even what is kept for root."""

    def mount(directory: Path, point: Path, stack: contextlib.ExitStack) -> Path:
        KINDS["ext4"](directory, point, stack)
        with open(point / "everything", "wb", buffering=0) as file:
            for piece in (MIB, 4096, 1024):
                with contextlib.suppress(OSError):
                    while not left or _free_bytes(point) > left:
                        file.write(bytes(piece))
                        os.fdatasync(file.fileno())
        return point

    return mount


def _free_bytes(point: Path) -> int:
    space = os.statvfs(point)
    return space.f_bavail * space.f_frsize


def _lying(lie: str) -> Callable[..., Path]:
    def mount(directory: Path, point: Path, stack: contextlib.ExitStack) -> Path:
        if not Path("/dev/fuse").exists():
            raise Unavailable("there is no /dev/fuse")
        try:
            import mfusepy  # noqa: F401
        except (ImportError, OSError) as error:
            raise Unavailable(f"no mfusepy: {error}") from None
        below = directory / "below"
        below.mkdir()
        child = subprocess.Popen([sys.executable, LIAR, lie, point, below], stderr=subprocess.PIPE)
        stack.callback(_end, child)
        stack.callback(_unmount, point)
        deadline = time.monotonic() + 20
        while not os.path.ismount(point):
            if child.poll() is not None or time.monotonic() > deadline:
                stack.pop_all().close() if child.poll() is None else _end(child)
                raise Unavailable("the FUSE filesystem does not start")
            time.sleep(0.02)
        return point

    return mount


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


KINDS: dict[str, Callable[[Path, Path, contextlib.ExitStack], Path]] = {
    "ext4": _on_loop("ext4", "mkfs.ext4", "-q", "-b", "4096"),
    "ext4-1k": _on_loop("ext4", "mkfs.ext4", "-q", "-b", "1024"),
    "ext4-4096-sectors": _on_loop("ext4", "mkfs.ext4", "-q", sectors=4096),
    "ext2": _on_loop("ext2", "mkfs.ext2", "-q"),
    "xfs": _on_loop("xfs", "mkfs.xfs", "-q", size=320),
    "xfs-4096-sectors": _on_loop("xfs", "mkfs.xfs", "-q", size=320, sectors=4096),
    "btrfs": _on_loop("btrfs", "mkfs.btrfs", "-q", size=256),
    "btrfs-quota": _btrfs_with_quota,
    "tmpfs": _tmpfs,
    "ramfs": _ramfs,
    "overlay": _overlay,
    "fuse-refuses": _lying("refuses"),
    "fuse-fails": _lying("fails"),
    "fuse-drops": _lying("drops"),
    "full": _full(0),
    "nearly-full": _full(MIB),
}
BREAKABLE = {"fuse-obeys": _lying("obeys")}  # on request, by a file `orders` beside the mount point
