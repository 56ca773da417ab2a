"""Store probe: tests what a store allows and how fast it is, with objects below `kvbm-doctor/` that it removes again.

It works in the order of growing permissions: list, put, get, delete; it stops at the first that fails. A store may
hang, so callers run this module as a program (`run_probe` in machine.py) with a timeout.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbm.errors import EnvironmentProblem
from kvbm.tiers.shared.object_store import Incoming, Outgoing, StoreAnswer
from kvbm.tiers.shared.orders import Outcome
from kvbm.tiers.shared.settings import directory_of
from kvbm_cli.doctor.probes import answer

if TYPE_CHECKING:
    from kvbm.tiers.shared.stores.mooncake import MooncakeStore
    from kvbm_cli.store.access import LeftOut, StoreAccess

PREFIX = "kvbm-doctor"
OBJECT_BYTES = 4 << 20
IN_FLIGHT = 16
SMALL_GETS = 15
MAX_OBJECTS = 128  # in the store at a time
LIMIT_S = 10.0  # of one request
LEFT_AFTER_S = 3600.0  # no doctor runs so long
SMALL_BYTES = 64

PhaseCallback = Callable[[str], None]


@dataclass(slots=True)
class StoreReport:
    """What the probe found. `failed` is the step that failed, with the `reason`; later steps did not run.

    `clock_s`: how far the clock of the store is ahead of this machine's. `small_get_s` is the median of small GETs,
    `object_get_s` of GETs of one object at a time; rates are in bytes per second with IN_FLIGHT requests in flight.
    Unknown values are None.
    """

    failed: str | None = None
    reason: str | None = None
    clock_s: float | None = None
    small_get_s: float | None = None
    object_get_s: float | None = None
    put_rate: float | None = None
    get_rate: float | None = None
    left_objects: int = 0


class StepFailed(Exception):
    """A step that failed, and why."""


def probe(url: str, *, seconds: float, writes: bool, on_phase: PhaseCallback = lambda text: None) -> StoreReport:
    """Probes the store of a URL; each rate is measured for `seconds`. Without `writes`, it only lists and reads."""
    if url.startswith("mooncake:"):
        return _probe_pool(url, seconds=seconds, writes=writes, on_phase=on_phase)
    from kvbm_cli.store.directory_access import DirectoryAccess
    from kvbm_cli.store.inventory import open_access

    directory = directory_of(url)
    is_new = directory is not None and not directory.exists()
    try:
        store = open_access(url, LIMIT_S)
    except EnvironmentProblem as error:
        return StoreReport("connect", error.message)
    try:
        return _StoreProbe(store, on_phase).report(seconds, writes=writes)
    finally:
        if isinstance(store, DirectoryAccess):
            with contextlib.suppress(OSError):
                store.remove_empty(PREFIX)
        if is_new and directory is not None:
            with contextlib.suppress(OSError):  # not empty
                directory.rmdir()


class _StoreProbe:
    def __init__(self, store: StoreAccess, on_phase: PhaseCallback) -> None:
        self._store = store
        self._on_phase = on_phase
        self._place = f"{PREFIX}/{secrets.token_hex(8)}"
        self._large = os.urandom(OBJECT_BYTES)
        self._written: list[str] = []
        self._found = StoreReport()

    def report(self, seconds: float, *, writes: bool) -> StoreReport:
        try:
            with self._step("list"):
                self._remove_left()
            if writes:
                self._write_and_read(seconds)
            else:
                with self._step("get"):
                    self._found.small_get_s = _median_s(self._ask_absent)
        except StepFailed as failed:
            self._found.failed, self._found.reason = failed.args
        finally:
            self._remove()
        return self._found

    def _write_and_read(self, seconds: float) -> None:
        key, content = f"{self._place}/small", secrets.token_bytes(64)
        with self._step("put"):
            began_s = time.time()
            self._put(key, content)
            self._found.clock_s = self._clock_s(key, began_s)
        with self._step("get"):
            if self._store.read(key) != content:
                raise OSError("an object has other bytes than were written")
            self._on_phase("small reads")
            small_get_s = _median_s(lambda: self._store.read(key))
        self._found.small_get_s = small_get_s
        with self._step("put"):
            self._on_phase("writes")
            put_rate = _rate(self._put_large, seconds)
        large = [one for one in self._written if one != key]
        with self._step("get"):
            self._on_phase("reads")
            waiting = itertools.cycle(large)
            object_s = _median_s(lambda: self._store.read(next(waiting)))
            get_rate = _rate(lambda number: self._store.read(large[number % len(large)]), seconds)
        self._found.put_rate, self._found.get_rate, self._found.object_get_s = put_rate, get_rate, object_s
        with self._step("delete"):
            self._delete()

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[None]:
        self._on_phase(name)
        try:
            yield
        except OSError as error:
            raise StepFailed(name, str(error) or type(error).__name__) from None

    def _put(self, key: str, content: bytes) -> None:
        self._written.append(key)
        self._store.write(key, content)

    def _clock_s(self, key: str, began_s: float) -> float | None:
        """Return how far the store is ahead. A store that counts whole seconds may be behind by up to one."""
        written_s, ended_s = self._store.about(key).written_s, time.time()
        if written_s > ended_s:
            return written_s - ended_s
        return min(0.0, written_s - (began_s - 1.0))

    def _ask_absent(self) -> None:
        """Look for an object that is not there."""
        with contextlib.suppress(FileNotFoundError):
            self._store.about(f"{self._place}/absent")

    def _put_large(self, number: int) -> None:
        self._put(f"{self._place}/{number % MAX_OBJECTS}", self._large)

    def _delete(self) -> None:
        why: list[str] = []
        remaining = self._store.delete(sorted(set(self._written)), lambda left_out: why.append(left_out.why))
        self._written = remaining
        if remaining:
            raise OSError(why[0])

    def _remove(self) -> None:
        """Remove what is left after a failure, as far as that is possible."""
        left = 0
        for key in sorted(set(self._written)):
            try:
                left += len(self._store.delete([key], _pass_over))
            except OSError:
                left += 1
        self._found.left_objects = left

    def _remove_left(self) -> None:
        """List the objects of earlier doctors, and remove those of one that was killed."""
        before_s = time.time() - LEFT_AFTER_S
        for page in self._store.objects(PREFIX, _pass_over):
            old = [found.key for found in page if found.written_s < before_s]
            if old:
                with contextlib.suppress(OSError):
                    self._store.delete(old, _pass_over)


def _rate(move: Callable[[int], object], seconds: float, *, threads: int = IN_FLIGHT) -> float:
    """Return the bytes per second of moving IN_FLIGHT objects at a time, on threads or by one call, until the time is
    over."""
    began_s = time.monotonic()

    def run(first: int) -> int:
        count = 0
        while not count or time.monotonic() - began_s < seconds:
            move(first + count * threads)
            count += 1
        return count

    with ThreadPoolExecutor(threads) as pool:
        count = sum(pool.map(run, range(threads)))
    return count * IN_FLIGHT // threads * OBJECT_BYTES / (time.monotonic() - began_s)


def _median_s(action: Callable[[], object]) -> float:
    """Return the median of the seconds of SMALL_GETS actions."""
    taken = []
    for _ in range(SMALL_GETS):
        began_s = time.monotonic()
        action()
        taken.append(time.monotonic() - began_s)
    return statistics.median(taken)


def _pass_over(left_out: LeftOut) -> None:
    """Links and other files in the place of the doctor are not its own."""


def _probe_pool(url: str, *, seconds: float, writes: bool, on_phase: PhaseCallback) -> StoreReport:
    """Test whether a pool of Mooncake Store takes objects, and how fast. Each rate is measured for `seconds`. Without
    `writes`, it asks only for an object. It holds 64 MiB at most, because a full pool removes objects of others."""
    from kvbm.tiers.shared.stores.mooncake import MooncakeStore

    on_phase("connect")
    try:
        store = MooncakeStore.open(url, batch_objects=IN_FLIGHT, facts_key="", facts=b"", writes=False)
    except EnvironmentProblem as error:
        return StoreReport("connect", error.message)
    found = _MooncakeProbe(store, on_phase)
    try:
        found.run(seconds, writes=writes)
    except StepFailed as failed:
        found.report.failed, found.report.reason = failed.args
    finally:
        if writes:
            store.remove(found.keys)
        store.close()
    return found.report


class _MooncakeProbe:
    def __init__(self, store: MooncakeStore, on_phase: PhaseCallback) -> None:
        import numpy as np

        self.report = StoreReport()
        self.keys = [f"{PREFIX}/{secrets.token_hex(8)}/{number}" for number in range(IN_FLIGHT)]
        self._slots = np.full((IN_FLIGHT, OBJECT_BYTES), 1, np.uint8)
        store.use_memory([self._slots])
        self._store = store
        self._on_phase = on_phase

    def run(self, seconds: float, *, writes: bool) -> None:
        self._on_phase("small reads")
        self.report.small_get_s = _median_s(self._ask)
        if not writes:
            return
        content = secrets.token_bytes(SMALL_BYTES)
        self._put(self.keys[:1], [memoryview(content)])
        received = memoryview(bytearray(SMALL_BYTES))
        self._require("get", self._store.get([Incoming(self.keys[0], [received], SMALL_BYTES)]))
        if bytes(received) != content:
            raise StepFailed("get", "an object has other bytes than were written")
        self._on_phase("writes")
        contents = [slot.data for slot in self._slots]
        put_rate = _rate(lambda number: self._put(self.keys, contents), seconds, threads=1)
        self._on_phase("reads")
        object_s = _median_s(lambda: self._get(self.keys[:1]))
        get_rate = _rate(lambda number: self._get(self.keys), seconds, threads=1)
        self.report.put_rate, self.report.get_rate, self.report.object_get_s = put_rate, get_rate, object_s

    def _ask(self) -> None:
        if None in self._store.are_present(self.keys[:1]):
            raise StepFailed("list", "the master does not answer")

    def _put(self, keys: Sequence[str], contents: Sequence[memoryview]) -> None:
        pairs = zip(keys, contents, strict=True)
        outgoing = [Outgoing(key, [content], replaces=True) for key, content in pairs]
        self._require("put", self._store.put(outgoing))

    def _get(self, keys: Sequence[str]) -> None:
        pairs = zip(keys, self._slots, strict=False)
        incoming = [Incoming(key, [slot.data], OBJECT_BYTES) for key, slot in pairs]
        self._require("get", self._store.get(incoming))

    def _require(self, step: str, answers: Sequence[StoreAnswer]) -> None:
        for one in answers:
            if one.outcome is not Outcome.GOOD:
                raise StepFailed(step, one.error or "the object is not there")


if __name__ == "__main__":
    answer(probe)
