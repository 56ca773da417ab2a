"""Mooncake probe: tests whether a pool of Mooncake Store takes objects, and how fast, with objects that it removes.

It holds 64 MiB of the pool at most, because a full pool removes objects of others. Run it as `store_probe`.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvbm.errors import EnvironmentProblem
from kvbm.shared.object_store import Incoming, Outgoing, StoreAnswer
from kvbm.shared.orders import Outcome
from kvbm.shared.stores.mooncake import MooncakeStore
from kvbm_cli.doctor.store_report import (
    IN_FLIGHT,
    OBJECT_BYTES,
    PREFIX,
    SMALL_GETS,
    PhaseCallback,
    StepFailed,
    StoreReport,
)

SMALL_BYTES = 64


def probe(url: str, *, seconds: float, writes: bool, on_phase: PhaseCallback) -> StoreReport:
    """Probe the pool of a URL; each rate is measured for `seconds`. Without `writes`, it asks only for an object."""
    on_phase("connect")
    try:
        store = MooncakeStore.open(url, batch_objects=IN_FLIGHT, facts_key="", facts=b"", writes=False)
    except EnvironmentProblem as error:
        return StoreReport("connect", error.message)
    found = _MooncakeProbe(store, on_phase)
    try:
        found.run(seconds, writes=writes)
    except StepFailed as failed:
        step, reason = failed.args
        found.report = replace(found.report, failed=step, reason=reason)
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
        asked_s = [self._seconds(self._ask) for _ in range(SMALL_GETS)]
        self.report = replace(self.report, small_get_s=statistics.median(asked_s))
        if not writes:
            return
        content = secrets.token_bytes(SMALL_BYTES)
        self._put(self.keys[:1], [memoryview(content)])
        received = memoryview(bytearray(SMALL_BYTES))
        self._require("get", self._store.get([Incoming(self.keys[0], [received], SMALL_BYTES)]))
        if bytes(received) != content:
            raise StepFailed("get", "an object has other bytes than were written")
        self._on_phase("writes")
        put_rate = self._rate(lambda: self._put(self.keys, [slot.data for slot in self._slots]), seconds)
        self._on_phase("reads")
        object_s = statistics.median(self._seconds(lambda: self._get(self.keys[:1])) for _ in range(SMALL_GETS))
        get_rate = self._rate(lambda: self._get(self.keys), seconds)
        self.report = replace(self.report, put_rate=put_rate, get_rate=get_rate, object_get_s=object_s)

    def _ask(self) -> None:
        if None in self._store.are_present(self.keys[:1]):
            raise StepFailed("list", "the master does not answer")

    def _put(self, keys: Sequence[str], contents: Sequence[memoryview]) -> None:
        pairs = zip(keys, contents, strict=True)
        outgoing = [Outgoing(key, [content], len(content), replaces=True) for key, content in pairs]
        self._require("put", self._store.put(outgoing))

    def _get(self, keys: Sequence[str]) -> None:
        pairs = zip(keys, self._slots, strict=False)
        incoming = [Incoming(key, [slot.data], OBJECT_BYTES) for key, slot in pairs]
        self._require("get", self._store.get(incoming))

    def _require(self, step: str, answers: Sequence[StoreAnswer]) -> None:
        for answer in answers:
            if answer.outcome is not Outcome.GOOD:
                raise StepFailed(step, answer.error or "the object is not there")

    def _seconds(self, move: Callable[[], object]) -> float:
        began_s = time.monotonic()
        move()
        return time.monotonic() - began_s

    def _rate(self, move: Callable[[], object], seconds: float) -> float:
        """Return the bytes per second of moving all objects again and again until the time is over."""
        began_s, count = time.monotonic(), 0
        while not count or time.monotonic() - began_s < seconds:
            move()
            count += 1
        return count * IN_FLIGHT * OBJECT_BYTES / (time.monotonic() - began_s)
