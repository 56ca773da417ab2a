"""Mount of a path: the type of its filesystem, which types keep no files on a drive, and which may hang."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TABLE = Path("/proc/self/mountinfo")
MAX_LINKS = 40
IN_MEMORY = frozenset({"tmpfs", "devtmpfs", "ramfs", "hugetlbfs"})
PSEUDO = frozenset(  # interfaces of the kernel, which hold no files of a program
    (
        *("proc", "sysfs", "cgroup", "cgroup2", "cpuset", "devpts", "debugfs", "tracefs", "securityfs", "pstore"),
        *("bpf", "configfs", "efivarfs", "fusectl", "mqueue", "binfmt_misc", "nsfs", "rpc_pipefs", "selinuxfs"),
    )
)
ON_A_DRIVE = frozenset(  # of this machine; what is not known may be a network or a program, and hang
    (
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay", "squashfs", "erofs", "iso9660"),
        *("vfat", "exfat", "ntfs3"),
    )
)
CANNOT_HANG = ON_A_DRIVE | IN_MEMORY | PSEUDO


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount of a path: filesystem type, source and mount point."""

    kind: str
    source: str
    point: str


def mount_of(path: Path, table: Path = TABLE) -> Mount:
    """Return the mount with the longest mount point above `path`; of several at one point, the last."""
    found = Mount("unknown", "unknown", "/")
    for mount in _mounts(table):
        point = Path(mount.point)
        if (point == path or point in path.parents) and len(mount.point) >= len(found.point):
            found = mount
    return found


def may_hang(path: str, table: Path = TABLE) -> bool:
    """Whether a file system that may hang is on the way to a path, also through links. Touches no such file system."""
    kinds = {mount.point: mount.kind for mount in _mounts(table)}  # of several at one point, the last
    if kinds.get("/", "") not in CANNOT_HANG:
        return True
    at, left, links = "/", os.path.abspath(path).split("/"), 0
    while left:
        name = left.pop(0)
        if name in ("", "."):
            continue
        at = os.path.normpath(os.path.join(at, name))  # all before it are directories, not links
        if at in kinds and kinds[at] not in CANNOT_HANG:
            return True
        try:
            target = os.readlink(at)
        except (OSError, ValueError):
            continue
        links += 1
        if links > MAX_LINKS:
            return False
        at, left = os.path.dirname(at), target.split("/") + left
        at = "/" if target.startswith("/") else at
    return False


def _mounts(table: Path) -> Iterator[Mount]:
    try:
        lines = table.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, (kind, source, *_) = before.split(), after.split()
        yield Mount(kind, _unescaped(source), _unescaped(fields[4]))


def _unescaped(text: str) -> str:
    """Decode the octal escapes of blanks and backslashes in the table."""
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text
