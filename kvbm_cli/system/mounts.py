"""Mount of a path: the type of its filesystem, and which types keep no files on a drive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

IN_MEMORY = frozenset({"tmpfs", "devtmpfs", "ramfs", "hugetlbfs"})
PSEUDO = frozenset(  # interfaces of the kernel, which hold no files of a program
    (
        *("proc", "sysfs", "cgroup", "cgroup2", "cpuset", "devpts", "debugfs", "tracefs", "securityfs", "pstore"),
        *("bpf", "configfs", "efivarfs", "fusectl", "mqueue", "binfmt_misc", "nsfs", "rpc_pipefs", "selinuxfs"),
    )
)


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount of a path: filesystem type, source and mount point."""

    kind: str
    source: str
    point: str


def mount_of(path: Path, table: Path = Path("/proc/self/mountinfo")) -> Mount:
    """Return the mount with the longest mount point above `path`; of several at one point, the last."""
    found = Mount("unknown", "unknown", "/")
    try:
        lines = table.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return found
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, (kind, source, *_) = before.split(), after.split()
        point = Path(_unescaped(fields[4]))
        if (point == path or point in path.parents) and len(str(point)) >= len(found.point):
            found = Mount(kind, _unescaped(source), str(point))
    return found


def _unescaped(text: str) -> str:
    """Decode the octal escapes of blanks and backslashes in the table."""
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text
