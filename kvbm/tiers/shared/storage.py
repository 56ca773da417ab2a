"""SharedStorage: runs orders on an object store with threads, verifies what is read, and watches the store.

One thread owns it and calls `submit`, `poll` and `close`. Probes run before reads, reads before writes, otherwise in
order of submission; writes use `write_threads` of the store at most. `poll` returns each ticket once, after its last
access to host memory. While the breaker is open, orders fail at once, and one thread tries the store now and then.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from kvbm.child.child import ServiceCounters
from kvbm.host.threads import allowed_cores
from kvbm.tiers.shared.breaker import Breaker, WritePause
from kvbm.tiers.shared.geometry import Arrival, ExtentGeometry
from kvbm.tiers.shared.keys import KeySpace
from kvbm.tiers.shared.object_store import ObjectStore
from kvbm.tiers.shared.orders import Get, ObjectResult, Order, Outcome, Probe, ProbeResult, Put, Result, failed
from kvbm.tiers.shared.presence import DIGEST, digest_of
from kvbm.tiers.shared.settings import SharedSettings

STALL = 2  # a call may take so many times its limit before the store counts as not answering
IDLE_S = 0.5  # between looks at a store that was given up
CLOSE_LOOK_S = 0.01
LIST_DUTY = 20  # a listing begins at the earliest after so many times the duration of the last one
PROBED_AT_ONCE = 16

log = logging.getLogger(__name__)

SlotsCarry = Callable[[Sequence[int], Sequence[int]], bool]


@dataclass(slots=True)
class SharedStorageCounters(ServiceCounters):
    """Counters since the start of the process."""

    copies_read: int = 0  # objects that another engine of this machine has read from the store
    writes_saved: int = 0  # another engine had written the object
    absent_objects: int = 0
    bad_objects: int = 0
    failed_requests: int = 0
    probes: int = 0


class SharedStorage:
    """See the module's text. `slots_carry(host_slots, generations)`: whether host slots still hold these blocks."""

    def __init__(
        self,
        store: ObjectStore,
        keys: KeySpace,
        geometry: ExtentGeometry,
        slots_carry: SlotsCarry,
        settings: SharedSettings,
    ) -> None:
        self.store = store
        self.counters = SharedStorageCounters()
        self.on_result: Callable[[], None] = lambda: None  # any thread calls it after a result
        self._keys = keys
        self._geometry = geometry
        self._slots_carry = slots_carry
        self._aging_s = settings.expire_s / 2
        self._list_interval_s = settings.list_interval_s
        self._breaker = Breaker()
        self._write_pause = WritePause()
        self._stuck_s = 0.0  # calls that began until then have opened the breaker
        self._results: deque[Result] = deque()
        self._listing: deque[tuple[float, bytes]] = deque(maxlen=1)  # the last one
        # Shared by all threads under the lock of `_has_order`. Only threads that take orders wait for it, because an
        # order wakes only one. `_running` has the start time of each call.
        self._has_order = threading.Condition()
        self._queues: dict[type[Order], deque[Order]] = {Probe: deque(), Get: deque(), Put: deque()}
        self._running: dict[int, tuple[float, bool]] = {}
        self._reading: dict[int, str] = {}  # an object of each call that reads, oldest first
        self._last_read: str | None = None
        self._is_closed = threading.Event()
        self._has_listed = threading.Event()
        store.use_memory(geometry.shards)
        self._cores = allowed_cores()
        self._threads = [self._start(self._work) for _ in range(store.threads)]
        if store.can_list:
            self._threads.append(self._start(self._list))

    @property
    def off_because(self) -> str | None:
        return self._breaker.why

    def wait_for_listing(self, timeout_s: float) -> None:
        """Wait until the store has been listed once, or that has failed."""
        if self.store.can_list:
            self._has_listed.wait(timeout_s)

    def submit(self, order: Order) -> None:
        if not self._breaker.is_closed:
            self._end(failed(order, f"off: {self._breaker.why}"))
            return
        if isinstance(order, Put) and not self._write_pause.is_over:
            self._end(failed(order, "writes are paused, because earlier ones failed"))
            return
        with self._has_order:
            self._queues[type(order)].append(order)
            self._has_order.notify()

    def poll(self) -> list[Result]:
        """Return the orders that have ended. Fail those that wait for a store that does not answer."""
        with self._has_order:
            began = [since for since, _ in self._running.values() if since > self._stuck_s]
        stuck = [since for since in began if time.monotonic() - since > STALL * self.store.limit_s]
        if stuck and self._breaker.is_closed:  # once for each call: the store may answer all others
            self._stuck_s = max(stuck)
            self._breaker.open(f"no answer in {STALL * self.store.limit_s:.1f} s")
        if not self._breaker.is_closed:
            self._fail_waiting(f"off: {self._breaker.why}")
        self.counters.times_off = self._breaker.times_open
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def take_listing(self) -> tuple[float, bytes] | None:
        """Return the last listing, once: when it began, and sorted digests of all names."""
        try:
            return self._listing.pop()
        except IndexError:
            return None

    def close(self, timeout_s: float) -> None:
        """Finish queued writes within `timeout_s`, and fail the rest."""
        deadline_s = time.monotonic() + timeout_s
        while self._has_work() and self._breaker.is_closed and time.monotonic() < deadline_s:
            time.sleep(CLOSE_LOOK_S)
        self._is_closed.set()
        with self._has_order:
            self._has_order.notify_all()
        self._fail_waiting("closed")
        self.store.close()

    def _has_work(self) -> bool:
        with self._has_order:
            return bool(self._queues[Put] or self._running)

    def _start(self, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name="kvbm-shared", daemon=True)
        thread.start()
        return thread

    def _end(self, result: Result) -> None:
        self._results.append(result)
        self.on_result()

    def _fail_waiting(self, why: str) -> None:
        with self._has_order:
            orders = list(chain.from_iterable(self._queues.values()))
            for queue in self._queues.values():
                queue.clear()
        for order in orders:
            self._end(failed(order, why))

    def _work(self) -> None:
        os.sched_setaffinity(0, self._cores)  # applies to this thread only
        me = threading.get_ident()
        while orders := self._take(me):
            try:
                results = self._run(orders)
            except BaseException as error:  # the tickets must end in any case
                log.exception("kvbm: an order of the shared tier failed")
                results = [failed(order, str(error) or type(error).__name__) for order in orders]
            with self._has_order:
                del self._running[me]  # this thread takes the next order, so that no other one need wake
            for result in results:
                self._end(result)

    def _take(self, me: int) -> list[Order]:
        """Wait for orders of one kind, and try a store that was given up; an empty list at the end."""
        while True:
            with self._has_order:
                while not self._is_closed.is_set() and not self._breaker.may_try():
                    if orders := self._next_orders():
                        self._running[me] = time.monotonic(), isinstance(orders[0], Put)
                        return orders
                    self._has_order.wait(IDLE_S)
                if self._is_closed.is_set():
                    return []
            self._breaker.tried(self.store.check(self._doubtful()))

    def _next_orders(self) -> list[Order]:
        """Return the orders that run next, if there are any. Call under the lock."""
        if self._queues[Probe]:
            return [self._queues[Probe].popleft()]
        queue = self._queues[Get]
        if not queue and sum(is_write for _, is_write in self._running.values()) < self.store.write_threads:
            queue = self._queues[Put]
        return [queue.popleft() for _ in range(min(self.store.batch_objects, len(queue)))]

    def _run(self, orders: Sequence[Order]) -> list[Result]:
        first = orders[0]
        if isinstance(first, Probe):
            return [self._probe(first)]
        if isinstance(first, Get):
            return self._get([order for order in orders if isinstance(order, Get)])
        return self._put([order for order in orders if isinstance(order, Put)])

    def _doubtful(self) -> str | None:
        """Return the object whose read has lasted longest, or the one that was read last: if the store reads that, it
        works again."""
        with self._has_order:
            return next(iter(self._reading.values()), self._last_read)

    def _get(self, orders: Sequence[Get]) -> list[Result]:
        arrivals = [self._arrival(order) for order in orders]
        me = threading.get_ident()
        with self._has_order:
            self._reading[me] = self._last_read = arrivals[0].incoming.key
        try:
            answers = self.store.get([arrival.incoming for arrival in arrivals])
        finally:
            with self._has_order:
                del self._reading[me]
        results: list[Result] = []
        for order, arrival, answer in zip(orders, arrivals, answers, strict=True):
            result = self._geometry.received(order, answer, arrival, aging_s=self._aging_s)
            if result.outcome is Outcome.BAD and answer.is_copy:
                again = self._arrival(order)
                answer = self.store.get([replace(again.incoming, is_fresh=True)])[0]
                result = self._geometry.received(order, answer, again, aging_s=self._aging_s)
            if result.outcome is Outcome.BAD:
                log.warning("kvbm: ignoring object %s of the shared tier: %s", arrival.incoming.key, result.error)
            self._count(result, is_write=False)
            results.append(result)
        return results

    def _arrival(self, order: Get) -> Arrival:
        return self._geometry.arrival(order, self._keys.key(order.hashes[-1]))

    def _put(self, orders: Sequence[Put]) -> list[Result]:
        results: list[Result] = []
        fresh = self._not_written(orders, results)
        outgoing = [(order, self._geometry.outgoing(order, self._keys.key(order.hashes[-1]))) for order in fresh]
        sent = []
        for order, one in outgoing:  # the checksums are computed: were they those of the blocks?
            if self._slots_carry(order.host_slots, order.generations):
                sent.append((order, one))
            else:
                results.append(ObjectResult.failed(order, "a rank has ended"))
        answers = self.store.put([one for _, one in sent]) if sent else []
        for (order, _), answer in zip(sent, answers, strict=True):
            result = ObjectResult(order.ticket, answer.outcome, answer.error)
            self._count(result, is_write=True)
            results.append(result)
        return results

    def _not_written(self, orders: Sequence[Put], results: list[Result]) -> list[Put]:
        """Return the orders whose objects no other engine has written; append the results of the others. A store that
        does not answer this question is not sent the object."""
        asked = [order for order in orders if not order.replaces]
        found = self.store.are_present([self._keys.key(order.hashes[-1]) for order in asked]) if asked else []
        ended = set()
        for order, is_present in zip(asked, found, strict=True):
            if is_present is None:
                self._breaker.failed("no answer before a write")
            if is_present is not False:
                ended.add(order.ticket)
                exists = ObjectResult(order.ticket, Outcome.EXISTS)
                result = exists if is_present else ObjectResult.failed(order, "no answer before a write")
                self._count(result, is_write=True)
                results.append(result)
        return [order for order in orders if order.ticket not in ended]

    def _probe(self, order: Probe) -> ProbeResult:
        """Find the end of the extents that are present: extents are written head first, so that a chain has no gaps."""
        self.counters.probes += 1
        low, high = 0, len(order.names)  # those before low are present; high is absent, or the end
        while low < high:
            positions = _positions(low, high, is_first=low == 0 and high == len(order.names))
            found = self.store.are_present([self._keys.key(order.names[position]) for position in positions])
            if None in found:
                self._breaker.failed("a probe has no answer")
                self.counters.failed_requests += 1
                return ProbeResult(order.ticket, low or None)
            self._breaker.succeeded()
            for position, is_present in zip(positions, found, strict=True):
                if not is_present:
                    high = position
                    break
                low = position + 1
        return ProbeResult(order.ticket, low)

    def _count(self, result: ObjectResult, *, is_write: bool) -> None:
        counters = self.counters
        with self._has_order:
            match result.outcome:
                case Outcome.GOOD:
                    counters.copies_read += result.is_copy
                case Outcome.EXISTS:
                    counters.writes_saved += 1
                case Outcome.ABSENT:
                    counters.absent_objects += 1
                case Outcome.BAD:
                    counters.bad_objects += 1
                case Outcome.FAILED:
                    counters.failed_requests += 1
        why = result.error or "no answer"
        if result.outcome is Outcome.FAILED and is_write:
            if pause_s := self._write_pause.failed():
                log.warning("kvbm: writes to the shared tier failed, pausing them for %g s: %s", pause_s, why)
        elif result.outcome is Outcome.FAILED:
            self._breaker.failed(why)
        elif not result.is_copy:
            self._breaker.succeeded()
            if is_write and result.outcome is Outcome.GOOD:
                self._write_pause.succeeded()

    def _list(self) -> None:
        """List the namespace at the start, and again at intervals, for what other engines have written."""
        while not self._is_closed.is_set():
            began_s = time.monotonic()
            if self._breaker.is_closed:
                self._list_once(began_s)
            self._has_listed.set()
            lasted_s = time.monotonic() - began_s
            self._is_closed.wait(max(self._list_interval_s, LIST_DUTY * lasted_s))

    def _list_once(self, began_s: float) -> None:
        digests = array("Q")
        try:
            for page in self.store.keys(self._keys.prefix):
                names = (self._keys.name_of(key) for key in page)
                digests.extend(digest_of(name) for name in names if name is not None)
                if self._is_closed.is_set():
                    return
        except OSError as error:
            log.warning("kvbm: cannot list the objects of the shared tier: %s", error)
            self._breaker.failed(str(error))
            self.counters.failed_requests += 1
            return
        self._listing.append((began_s, np.sort(np.frombuffer(digests, DIGEST)).tobytes()))
        self.on_result()


def _positions(low: int, high: int, *, is_first: bool) -> list[int]:
    """Return which extents to look for next: at growing distances at first, then evenly between both ends."""
    if is_first:
        count = (high - low).bit_length()
        return sorted({min((1 << power) - 1, high - 1) for power in range(count + 1)})
    step = max(1, (high - low) // (PROBED_AT_ONCE + 1))
    return list(range(low + step - 1 if step > 1 else low, high, step))[:PROBED_AT_ONCE]
