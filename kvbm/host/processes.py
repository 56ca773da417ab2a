"""Processes of this machine, from /proc: start and parent, and the namespace in which an id is valid."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

DEAD_STATES = ("Z", "X")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ProcessStat(NamedTuple):
    """`started` is in clock ticks since boot; together with the process id it is unique until the next boot."""

    parent: int
    started: int


def stat_of(pid: int) -> ProcessStat | None:
    """Return None if no such process is alive. Raises OSError if that is unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # after the process name, which may contain anything
    return None if fields[0] in DEAD_STATES else ProcessStat(parent=int(fields[1]), started=int(fields[19]))


def boot_id() -> str:
    """Return the id of this machine's last boot; processes with different ids share no memory. Raises OSError."""
    return BOOT_ID.read_text().strip()


def process_namespace() -> tuple[str, str]:
    """Return the boot and the namespace (container) in which process ids are valid. Raises OSError."""
    return boot_id(), os.readlink("/proc/self/ns/pid")
