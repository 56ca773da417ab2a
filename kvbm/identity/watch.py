"""ChangeWatch: which directories were renamed or removed, and which files written, while an engine loaded its model.

The times of a directory do not distinguish a rename of itself from a new entry in it, as in /tmp all the time. inotify
does. It also reports the end of a call of `write` that began before the load, which moves no time.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from kvbm.host.libc import LIBC, last_error

MODIFY, MOVE_SELF, DELETE_SELF, UNMOUNT, OVERFLOW = 0x2, 0x800, 0x400, 0x2000, 0x4000
ONLY_DIRECTORIES = 0x01000000
EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name
EVENT_BYTES = 1 << 16


class ChangeWatch:
    """Watches directories and files. *Owns* a descriptor until `end`."""

    def __init__(self, fd: int, paths: dict[int, str]) -> None:
        self._fd = fd
        self._paths = paths

    @classmethod
    def watch(cls, directories: Iterable[str], files: Iterable[str]) -> ChangeWatch | None:
        """Start to watch; None if the system or the limits of the user do not allow it."""
        fd = LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return None
        watched: dict[int, str] = {}
        watch = cls(fd, watched)
        try:
            moves = MOVE_SELF | DELETE_SELF | ONLY_DIRECTORIES
            for path, mask in (*((path, moves) for path in directories), *((path, MODIFY) for path in files)):
                number = LIBC.inotify_add_watch(fd, os.fsencode(path), ctypes.c_uint32(mask))
                if number < 0:
                    raise last_error()
                watched[number] = path
        except OSError:
            os.close(fd)
            return None
        return watch

    def end(self) -> str | None:
        """Stop watching. Return a directory that was renamed, removed or unmounted meanwhile, or a file that was
        written; None if there is none."""
        try:
            events = os.read(self._fd, EVENT_BYTES)
        except BlockingIOError:
            return None
        finally:
            os.close(self._fd)
        at = 0
        while at < len(events):
            number, mask, _, length = EVENT.unpack_from(events, at)
            if mask & (MODIFY | MOVE_SELF | DELETE_SELF | UNMOUNT | OVERFLOW):
                return self._paths.get(number, "a file")
            at += EVENT.size + length
        return None
