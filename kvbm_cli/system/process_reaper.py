"""Clears away what an engine leaves: its processes, its files in shared memory, its temporary directory.

Run by path, as `python -I -S process_reaper.py PROCESS_GROUP DIRECTORY`, beside the engine and in a session of its own,
so that no terminal signals it; hence the standard library alone. The kernel kills the engine when its parent dies
(die_with_parent.py), but not what the engine has started. This process waits for the end of its standard input, a pipe
whose other end only the parent holds. Its first line names the files that are older than the engine. END on it means
that the engine is to end, end of file that the parent is gone: either way nothing of the engine is left afterwards.
LOOK asks for a look at once, and is answered when that is done. The parent clears away itself if this process was
killed.

A file in shared memory belongs to the engine if it is younger than the engine and a process of the engine was seen to
map it or hold it open. Which process made it cannot be known after a kill -9, so the guard looks while they live. Files
are known by their inode: the C library maps a semaphore under a name that is gone a moment later. A file that any other
living process holds is left alone.

Processes belong to the engine by their group, or because one that did started them and was seen to; that one lives at
that moment, so a process escapes only if it leaves the group and loses its parent between two looks.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

LOOK = b"l"
END = b"."
SHARED_MEMORY = "/dev/shm"
LOOK_INTERVAL_S = 1.0
LOOKS = 8
DEATH_TIMEOUT_S = 10.0
DEATH_INTERVAL_S = 0.01
DEAD_STATES = (b"Z", b"X")
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


class _Stat(NamedTuple):
    parent: int
    process_group: int
    started: int  # clock ticks since boot: with the process id, no other process ever has the same


@dataclass(slots=True)
class EngineRemains:
    """What is known of an engine's processes and files. `directory` is the engine's own temporary one; `foreign` are
    the inodes of the files in shared memory that were there before the engine."""

    process_group: int
    directory: str
    foreign: set[int]
    _escaped: dict[int, int] = field(default_factory=dict)  # process id to start time, for those outside the group
    _looks: dict[int, int] = field(default_factory=dict)
    _owned: set[int] = field(default_factory=set)

    def look(self, *, once_more: bool = False) -> None:
        """Notes new processes and files. A file that was looked at often enough is not the engine's, unless told."""
        unknown = set(shared_files()) - self.foreign - self._owned
        if not once_more:
            unknown = {inode for inode in unknown if self._looks.get(inode, 0) < LOOKS}
        members = self.members()
        if unknown:
            self._owned |= unknown & _held_files(members)
            for inode in unknown:
                self._looks[inode] = self._looks.get(inode, 0) + 1

    def members(self) -> set[int]:
        """The engine's living processes."""
        table = _processes()
        self._escaped = {
            pid: started for pid, started in self._escaped.items() if pid in table and table[pid].started == started
        }
        members = {pid for pid, stat in table.items() if stat.process_group == self.process_group} | set(self._escaped)
        while started := {pid for pid, stat in table.items() if stat.parent in members and pid not in members}:
            members |= started
        self._escaped = {pid: table[pid].started for pid in members if table[pid].process_group != self.process_group}
        return members

    def clear_away(self) -> bool:
        """Kills, then deletes. False if a process does not die; what that one holds is left.

        Stopped processes make no new files and no new processes between the last look and their end.
        """
        stopped: set[int] = set()
        while members := self._signal(signal.SIGSTOP) - stopped:
            stopped |= members
        self.look(once_more=True)
        deadline = time.monotonic() + DEATH_TIMEOUT_S
        while (alive := self._signal(signal.SIGKILL)) and time.monotonic() < deadline:
            time.sleep(DEATH_INTERVAL_S)
        self._delete_files()
        if os.path.isdir(self.directory):
            shutil.rmtree(self.directory)
        return not alive

    def _signal(self, number: signal.Signals) -> set[int]:
        """To every living process; returns them."""
        members = self.members()
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return members

    def _delete_files(self) -> None:
        names = {inode: name for inode, name in shared_files().items() if inode in self._owned}
        in_use = _held_files(_processes()) if names else set()
        for inode, name in names.items():
            if inode not in in_use:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(SHARED_MEMORY, name))


def shared_files() -> dict[int, str]:
    """Inode to name of this user's files in shared memory."""
    files = {}
    with os.scandir(SHARED_MEMORY) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    files[entry.inode()] = entry.name
    return files


def _held_files(pids: Iterable[int]) -> set[int]:
    """Inodes in shared memory that at least one of these processes maps or holds open."""
    device = os.stat(SHARED_MEMORY).st_dev
    mapping = re.compile(rb" %02x:%02x (\d+) " % (os.major(device), os.minor(device)))
    held: set[int] = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            with open(f"/proc/{pid}/maps", "rb") as maps:
                held.update(map(int, mapping.findall(maps.read())))
            held.update(_open_files(pid, device))
    return held


def _open_files(pid: int, device: int) -> Iterable[int]:
    for entry in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{entry}"
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(path).startswith("/") and (found := os.stat(path)).st_dev == device:
                yield found.st_ino


def _processes() -> dict[int, _Stat]:
    """Every process that lives."""
    table = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # from the third on: a name may hold anything
            if fields[0] not in DEAD_STATES:
                table[int(name)] = _Stat(int(fields[1]), int(fields[2]), int(fields[19]))
    return table


def _next_request() -> bytes | None:
    """None when it is time for a look that nobody has asked for."""
    readable, _, _ = select.select([sys.stdin], [], [], LOOK_INTERVAL_S)
    return os.read(sys.stdin.fileno(), 1) if readable else None


def main() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as requests:  # takes no byte behind the line
        foreign = set(map(int, requests.readline().split()))
    remains = EngineRemains(int(sys.argv[1]), sys.argv[2], foreign)
    while (request := _next_request()) not in (END, b""):
        remains.look()
        if request is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(sys.stdout.fileno(), LOOK)
    sys.exit(0 if remains.clear_away() else 1)


if __name__ == "__main__":
    main()
