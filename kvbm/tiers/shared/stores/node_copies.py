"""NodeCopies: engines of one machine that share a disk directory read an object from the store once.

    <disk directory>/shared-copies/<32 hex>           an object as it was received; its mtime is when it was written
                                   <32 hex>.part      the same while the holder of its lock (flock) receives it
                                   <16 hex>.member    locked by an engine that uses this directory

The first engine that reads an object keeps a copy for COPY_S, and the others wait for it, at most half of the time that
a request may take. An engine that is alone keeps no copies. If anything fails here, the object is read from the store.
A copy is checked like an object. If a check fails, the object is read from the store. If the directory hangs, there are
no copies until it answers: each use of it is limited to ANSWER_LIMIT_S, and touches no host memory after that.

If the directory has more than MOST_BYTES, its oldest copies are deleted. Locks end with their processes. An engine that
has waited for a process that does not continue waits for no copy during the next PAUSE_S.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvbm.host.directories import make_private_directories
from kvbm.host.limited_calls import LimitedCalls
from kvbm.host.tree import Tree
from kvbm.tiers.shared.object_store import Incoming, ObjectStore, Outgoing, StoreAnswer, scatter
from kvbm.tiers.shared.orders import Outcome
from kvbm.tiers.shared.stores.directory import read_file, write_all

COPIES = "shared-copies"
COPY_S = 30.0
MOST_BYTES = 512 << 20
LOOK_S = 0.003  # between looks at an object that another engine receives
PAUSE_S = 5.0
MEMBERS_S = 1.0  # between looks for other engines
ANSWER_LIMIT_S = 0.5  # for the directory: with the read from the store, less than a read may take
PURGES = 8  # times that the copies are counted while MOST_BYTES are written
MEMBER, PART = ".member", ".part"
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
COPY_NAME = re.compile(r"[0-9a-f]{32}(\.part)?")

SPARE_THREADS = 2  # for a listing, and for what is given up

Result = TypeVar("Result")
Drop = Callable[[Result], None]
Found = tuple[StoreAnswer, memoryview] | int | None  # a copy, or the descriptor of the file for one

log = logging.getLogger(__name__)


class NodeCopies:
    """An ObjectStore around another one. See the module's text."""

    def __init__(self, store: ObjectStore, directory: Path, url: str) -> None:
        """Raise OSError if the directory cannot be used, or belongs to another user."""
        self._store = store
        self._url = url
        self._directory, self._home = directory, directory / COPIES
        self._member = f"{secrets.token_hex(8)}.member"
        self._member_lock: int | None = None
        self._copies: Tree
        self._is_open = False
        self._calls = LimitedCalls(store.threads + SPARE_THREADS, ANSWER_LIMIT_S, "kvbm-copies")
        self._lock = threading.Lock()  # of what follows
        self._is_alone = True
        self._members_due_s = self._purge_due_s = 0.0
        self._patient_from_s = self._keeping_from_s = 0.0  # when it waits, and when it keeps copies again
        self._unpurged_bytes = 0
        self._has_warned = False
        self.name, self.can_list, self.batch_objects = store.name, store.can_list, store.batch_objects
        self.threads, self.write_threads = store.threads, store.write_threads
        try:
            self._calls.run(self._open)
        except TimeoutError as error:
            self._stop_keeping(error)

    def _open(self) -> None:
        """May raise OSError."""
        make_private_directories(self._home)
        with Tree.open(self._directory) as parent:
            self._copies = parent.directory(COPIES)  # what is done in it begins here, whatever becomes of its name
        about = os.fstat(self._copies.descriptor)
        if about.st_uid != os.geteuid() or about.st_mode & OTHERS_WRITE:
            self._copies.close()
            raise PermissionError(f"{self._home} belongs to another user, or others may write to it")
        self._member_lock = _locked(self._copies, self._member)
        self._is_open = True

    @property
    def limit_s(self) -> float:
        return self._store.limit_s

    def use_memory(self, memory: Sequence[NDArray[np.uint8]]) -> None:
        self._store.use_memory(memory)

    def get(self, objects: Sequence[Incoming]) -> list[StoreAnswer]:
        return [self._get(one) for one in objects]

    def put(self, objects: Sequence[Outgoing]) -> list[StoreAnswer]:
        answers = self._store.put(objects)
        for one in objects:
            if one.replaces:  # a copy would say that the object is still old
                with suppress(OSError):
                    self._forget(self._name(one.key))
        return answers

    def are_present(self, keys: Sequence[str]) -> list[bool | None]:
        return self._store.are_present(keys)

    def keys(self, prefix: str) -> Iterator[list[str]]:
        self._purge_soon()  # called at intervals, also while nothing is read
        yield from self._store.keys(prefix)

    def check(self, key: str | None) -> str | None:
        return self._store.check(key)

    def close(self) -> None:
        with suppress(OSError):
            self._on_disk(self._close)
        self._store.close()

    def _close(self) -> None:
        self._purge()
        with suppress(OSError):
            self._copies.unlink_file(self._member)
        if self._member_lock is not None:
            os.close(self._member_lock)
            self._member_lock = None
        self._copies.close()
        self._is_open = False

    def _get(self, one: Incoming) -> StoreAnswer:
        name = self._name(one.key)
        found: StoreAnswer | int | None = None
        try:
            found = self._claim(one, name) if self._has_others() else None
        except OSError as error:
            self._stop_keeping(error)
        return self._fetch_and_keep(one, name, found) if isinstance(found, int) else found or self._fetch(one)

    def _on_disk(self, function: Callable[..., Result], *arguments: Any, drop: Drop[Result] | None = None) -> Result:
        """Return what a function returns that uses the directory. Raises OSError, TimeoutError if it hangs."""
        if not self._is_open:
            raise FileNotFoundError(f"{self._home} is not open")
        return self._calls.run(function, *arguments, drop=drop)

    def _forget(self, name: str) -> None:
        """May raise OSError."""
        with suppress(FileNotFoundError):
            self._on_disk(self._copies.unlink_file, name)

    def _fetch(self, one: Incoming) -> StoreAnswer:
        return self._store.get([one])[0]

    def _claim(self, one: Incoming, name: str) -> StoreAnswer | int | None:
        """Return the answer from a copy; or the locked descriptor of the file that the caller receives the object into;
        None if another engine is doing that, and it takes too long. Raises OSError."""
        if one.is_fresh:
            self._forget(name)
        began_s = time.monotonic()
        keeps = began_s >= self._keeping_from_s and one.length <= MOST_BYTES // PURGES
        waits = keeps and not one.is_fresh and began_s >= self._patient_from_s
        look, drop = partial(self._look, one, name, keeps=keeps), partial(self._drop, name + PART)
        while True:
            found: Found = self._on_disk(look, drop=drop)
            if isinstance(found, tuple):
                scatter([found[1]], one)
                return found[0]
            if found is not None or not waits:
                return found
            if time.monotonic() >= began_s + self.limit_s / 2:
                self._patient_from_s = time.monotonic() + PAUSE_S
                return None
            time.sleep(LOOK_S)

    def _look(self, one: Incoming, name: str, *, keeps: bool) -> Found:
        """Return a copy; or, if this engine keeps one, the locked descriptor of the file that it is received into; None
        while another engine does that. Raises OSError."""
        if (copied := self._read_copy(one, name)) is not None or not keeps:
            return copied
        descriptor = _locked(self._copies, name + PART)
        if descriptor is not None and (copied := self._read_copy(one, name)) is not None:  # since the look before
            _discard(self._copies, name + PART, descriptor)
            return copied
        return descriptor

    def _drop(self, part: str, found: object) -> None:
        """Give up what `_look` returned."""
        if isinstance(found, int):
            _discard(self._copies, part, found)

    def _read_copy(self, one: Incoming, name: str) -> tuple[StoreAnswer, memoryview] | None:
        """Read a copy into memory that has no other use: a read that hangs may end at any time. None without one that
        can be used."""
        if one.is_fresh:
            return None
        try:
            descriptor = self._copies.open_file(name)
            if not 0 <= time.time() - os.fstat(descriptor).st_ctime <= COPY_S:
                os.close(descriptor)
                return None
            content = np.empty(one.length, np.uint8).data
            answer = read_file(descriptor, Incoming(name, [content], one.length))
        except OSError:
            return None
        return (replace(answer, is_copy=True), content) if answer.outcome is Outcome.GOOD else None

    def _fetch_and_keep(self, one: Incoming, name: str, descriptor: int) -> StoreAnswer:
        """Read an object from the store, and keep all of it, also what the caller skips. *Consumes* the descriptor."""
        buffers = [buffer for buffer in one.buffers if not isinstance(buffer, int)]
        has_gaps = len(buffers) < len(one.buffers)
        if has_gaps:
            buffers = [np.empty(one.length, np.uint8).data]
        try:
            answer = self._fetch(replace(one, buffers=buffers, filled=None if has_gaps else one.filled))
        except BaseException:
            self._calls.begin(self._drop, name + PART, descriptor)
            raise
        if answer.outcome is not Outcome.GOOD:
            self._calls.begin(self._drop, name + PART, descriptor)
            return answer
        if has_gaps:
            scatter(buffers, one)
        is_late = threading.Event()
        try:
            self._calls.result(self._calls.begin(self._keep, name, descriptor, buffers, answer.age_s, is_late))
        except OSError as error:
            is_late.set()  # the caller may use the buffers again after this
            self._stop_keeping(error)
        else:
            self._note_kept(one.length)
        return answer

    def _keep(
        self, name: str, descriptor: int, buffers: Sequence[memoryview], age_s: float, is_late: threading.Event
    ) -> None:
        """Write a copy, unless it is late. *Consumes* the descriptor. Raises OSError."""
        home = self._copies.descriptor
        try:
            os.ftruncate(descriptor, 0)
            write_all(descriptor, buffers)
            os.utime(descriptor, (time.time(), time.time() - age_s))
            if is_late.is_set():
                raise TimeoutError("the buffers may have changed while they were written")
            os.rename(name + PART, name, src_dir_fd=home, dst_dir_fd=home)
        except BaseException:
            _discard(self._copies, name + PART, descriptor)
            raise
        os.close(descriptor)

    def _name(self, key: str) -> str:
        return hashlib.sha256(f"{self._url}\0{key}".encode()).hexdigest()[:32]

    def _has_others(self) -> bool:
        """Whether other engines use the directory now, as of the last look. Raises TimeoutError."""
        now = time.monotonic()
        with self._lock:
            if now >= self._members_due_s and self._is_open:
                self._members_due_s = now + MEMBERS_S
                self._is_alone = not self._on_disk(self._find_others)
            return not self._is_alone

    def _find_others(self) -> bool:
        names: list[str] = []
        with suppress(OSError), self._copies.scan() as entries:
            names = [entry.name for entry in entries if entry.name.endswith(MEMBER) and entry.name != self._member]
        return any(_is_alive(self._copies, name) for name in names)

    def _stop_keeping(self, error: OSError) -> None:
        """Keep no copies for a while: the directory is full, or cannot be used for another reason."""
        self._keeping_from_s = time.monotonic() + PAUSE_S
        if not self._has_warned:
            self._has_warned = True
            log.warning("kvbm: cannot keep copies of objects for other engines in %s: %s", self._home, error)

    def _note_kept(self, size: int) -> None:
        with self._lock:
            self._unpurged_bytes += size
            is_due = self._unpurged_bytes >= MOST_BYTES // PURGES or time.monotonic() >= self._purge_due_s
        if is_due:
            self._purge_soon()

    def _purge_soon(self) -> None:
        with suppress(OSError):
            self._on_disk(self._purge)

    def _purge(self) -> None:
        """Remove copies that are old, and the oldest if there are too many."""
        with self._lock:
            self._unpurged_bytes, self._purge_due_s = 0, time.monotonic() + COPY_S / PURGES
        kept = []
        with suppress(OSError), self._copies.scan() as entries:
            for entry in entries:
                if COPY_NAME.fullmatch(entry.name):
                    with suppress(OSError):
                        about = entry.stat(follow_symlinks=False)
                        kept.append((about.st_ctime, about.st_size, entry.name))
        now = time.time()  # after the look: a copy that another thread has just made is not of the future
        total = sum(size for _, size, _ in kept)
        for changed_s, size, name in sorted(kept):
            if total <= MOST_BYTES and 0 <= now - changed_s <= COPY_S:
                break
            total -= size
            with suppress(OSError):
                _remove(self._copies, name)


def _locked(home: Tree, name: str) -> int | None:
    """Create or open a file and lock it; None if another process has locked it. Raises OSError."""
    descriptor = home.open_file(name, os.O_RDWR | os.O_CREAT)
    try:
        if os.fstat(descriptor).st_nlink > 1:
            raise PermissionError(f"{name} is also the name of another file")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if home.has_at(name, descriptor):
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _discard(home: Tree, part: str, descriptor: int) -> None:
    """Remove the file of a locked descriptor, so that another engine may begin. *Consumes* the descriptor."""
    with suppress(OSError):
        if home.has_at(part, descriptor):
            home.unlink_file(part)
    os.close(descriptor)


def _remove(home: Tree, name: str) -> None:
    """Remove a copy, or a part without a receiver. Raises OSError."""
    if not name.endswith(PART):
        home.unlink_file(name)
    elif (descriptor := _locked(home, name)) is not None:
        _discard(home, name, descriptor)


def _is_alive(home: Tree, member: str) -> bool:
    """Whether the engine of this file lives. Removes the file if it does not."""
    with suppress(OSError):
        if (descriptor := _locked(home, member)) is None:
            return True
        _discard(home, member, descriptor)
    return False
