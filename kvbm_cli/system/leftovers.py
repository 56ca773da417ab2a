"""Guard program: removes what an engine or a doctor leaves behind, however it ends.

Run by path as `python -I -S leftovers.py` (guard_process.py does so), in a session of its own, so that no terminal
signals it. It imports only the standard library. Its standard input is a pipe whose other end only the parent holds:

- The first line is a JSON list of the arguments of `Leftovers`.
- SCAN requests a scan now. The guard answers with SCAN when the scan is done.
- END or end of file (the parent has died) starts the removal.

The kernel kills the engine when its parent dies (kvbm/child/start.py), but not the processes that the engine started.

A file in shared memory belongs to the engine if it is younger than the engine and a process of the engine mapped it or
held it open during a scan. After a `kill -9` the owner of a file is unknown, so the guard scans while the processes
live. Files are identified by inode: the C library maps a semaphore under a temporary name. A file that any other living
process holds is kept.

A process belongs to the engine by its process group, or if a process of the engine was seen as its parent. A process
escapes only if it leaves the group and loses its parent between two scans.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SCAN = b"s"
END = b"."
SHARED_MEMORY = "/dev/shm"
SCAN_INTERVAL_S = 1.0
SCAN_LIMIT = 8  # scans of one file before it counts as a file of another program
DEATH_TIMEOUT_S = 10.0
DEATH_INTERVAL_S = 0.01
REMOVAL_TIMEOUT_S = 15.0
REMOVAL_INTERVAL_S = 0.02
DEAD_STATES = (b"Z", b"X")
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


class _Stat(NamedTuple):
    parent: int
    process_group: int
    started: int  # clock ticks since boot; unique together with the process id


@dataclass(slots=True)
class Leftovers:
    """Directories, and with `process_group` also the processes and the shared memory files of an engine.

    `directory` is removed with its content, each of `parents` only if it is empty by then. `existing_files` are inodes
    of files in shared memory that are older than the engine.
    """

    directory: str
    parents: Sequence[str] = ()
    process_group: int | None = None
    existing_files: Collection[int] = ()
    _escaped: dict[int, int] = field(default_factory=dict)  # process id to start time, outside the group
    _scans: dict[int, int] = field(default_factory=dict)  # inode to count
    _owned: set[int] = field(default_factory=set)

    def to_json(self) -> bytes:
        return json.dumps([self.directory, self.parents, self.process_group, list(self.existing_files)]).encode()

    def scan(self, *, is_last: bool = False) -> None:
        """Record new processes and files. A file that was scanned SCAN_LIMIT times is skipped until the last scan."""
        if self.process_group is None:
            return
        unknown = set(shared_files()).difference(self.existing_files, self._owned)
        if not is_last:
            unknown = {inode for inode in unknown if self._scans.get(inode, 0) < SCAN_LIMIT}
        members = self.members()
        if unknown:
            self._owned |= unknown & _held_files(members)
            for inode in unknown:
                self._scans[inode] = self._scans.get(inode, 0) + 1

    def members(self) -> set[int]:
        """Return the living processes of the engine."""
        table = _processes()
        self._escaped = {
            pid: started for pid, started in self._escaped.items() if pid in table and table[pid].started == started
        }
        members = {pid for pid, stat in table.items() if stat.process_group == self.process_group} | set(self._escaped)
        while started := {pid for pid, stat in table.items() if stat.parent in members and pid not in members}:
            members |= started
        self._escaped = {pid: table[pid].started for pid in members if table[pid].process_group != self.process_group}
        return members

    def remove(self) -> bool:
        """Kills the processes, then deletes files and directories. False if a process or the directory remains."""
        are_dead = self.process_group is None or self._kill()
        self._delete_files()
        return self._remove_directories() and are_dead

    def _kill(self) -> bool:
        """Stop all processes before the last scan: a stopped process makes no new file and no new process."""
        stopped: set[int] = set()
        while members := self._signal(signal.SIGSTOP) - stopped:
            stopped |= members
        self.scan(is_last=True)
        deadline = time.monotonic() + DEATH_TIMEOUT_S
        while (alive := self._signal(signal.SIGKILL)) and time.monotonic() < deadline:
            time.sleep(DEATH_INTERVAL_S)
        return not alive

    def _signal(self, number: signal.Signals) -> set[int]:
        """Signals every living process and returns them."""
        members = self.members()
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return members

    def _delete_files(self) -> None:
        names = {inode: name for inode, name in shared_files().items() if inode in self._owned} if self._owned else {}
        in_use = _held_files(_processes()) if names else set()
        for inode, name in names.items():
            if inode not in in_use:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(SHARED_MEMORY, name))

    def _remove_directories(self) -> bool:
        """Retries: FUSE keeps files that a dying process still has open, under other names."""
        deadline = time.monotonic() + REMOVAL_TIMEOUT_S
        remove_tree(self.directory)
        while (is_there := os.path.lexists(self.directory)) and time.monotonic() < deadline:
            time.sleep(REMOVAL_INTERVAL_S)
            remove_tree(self.directory)
        for parent in self.parents:
            with contextlib.suppress(OSError):  # in use by another process
                os.rmdir(parent)
        return not is_there


def remove_tree(directory: str) -> None:
    """Remove a directory, as far as that is possible. Leaves it while something is mounted on it or in it, or if this
    cannot be known: `shutil.rmtree` follows no link, but would delete what is mounted."""
    place = os.path.realpath(directory) + "/"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
            mounts = [line.split()[4] for line in table]
    except OSError:
        return
    for escaped in mounts:
        mounted = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), escaped)
        if f"{mounted}/".startswith(place):
            return
    shutil.rmtree(directory, ignore_errors=True)


def shared_files() -> dict[int, str]:
    """Return inode to name of this user's files in shared memory."""
    files = {}
    with os.scandir(SHARED_MEMORY) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    files[entry.inode()] = entry.name
    return files


def _held_files(pids: Iterable[int]) -> set[int]:
    """Return the inodes in shared memory that at least one of these processes maps or holds open."""
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
    """Return all living processes."""
    table = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # after the process name, which may contain anything
            if fields[0] not in DEAD_STATES:
                table[int(name)] = _Stat(int(fields[1]), int(fields[2]), int(fields[19]))
    return table


def main() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as requests:  # reads nothing after the line
        leftovers = Leftovers(*json.loads(requests.readline()))
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    while True:
        is_requested = bool(poll.poll(1000 * SCAN_INTERVAL_S))
        if is_requested and os.read(sys.stdin.fileno(), 1) != SCAN:
            break
        leftovers.scan()
        if is_requested:
            with contextlib.suppress(BrokenPipeError):
                os.write(sys.stdout.fileno(), SCAN)
    if not leftovers.remove():
        sys.exit(f"kvbm: could not remove everything of {leftovers.directory}")


if __name__ == "__main__":
    main()
