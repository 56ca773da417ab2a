"""Faults by wrapper: the real copier, made to fail on request.

    copier = FaultyCopier(DeviceCopier(...))
    copier.next("fail")      the next call raises before it copies anything
    copier.at(2, "short")    the third call from now copies a part of its blocks, then raises

    fail   TransferError, nothing copied         short  the first half of the blocks copied, then TransferError
    die    SystemExit, as of a thread that ends  odd    an exception that nobody expects from a copier
    hold   copies only after `release` or `heal`, and then succeeds
    lost   copies, but returns only after `release` or `heal`

`wait_until_held()` returns when a call hangs in `hold` or `lost`. Calls of both directions are counted together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvbm.errors import TransferError

FAULTS = ("fail", "short", "die", "odd", "hold", "lost")
LIMIT_S = 60.0


class FaultyCopier:
    """See the module's text. Calls come from any thread, orders from the test's."""

    def __init__(self, copier) -> None:
        self._copier = copier
        self._lock = threading.Lock()
        self._plan: dict[int, str] = {}
        self._calls = 0
        self._released = threading.Event()
        self._held = threading.Semaphore(0)

    def next(self, fault: str) -> None:
        self.at(0, fault)

    def at(self, call: int, fault: str) -> None:
        assert fault in FAULTS, fault
        with self._lock:
            self._plan[self._calls + call] = fault
            if fault in ("hold", "lost"):
                self._released.clear()

    def release(self) -> None:
        """Let every call go that is held."""
        self._released.set()

    def heal(self) -> None:
        """Forget what was ordered, and let every call go."""
        with self._lock:
            self._plan.clear()
        self.release()

    def wait_until_held(self) -> None:
        assert self._held.acquire(timeout=LIMIT_S), "no call is held"

    def fence(self) -> object | None:
        return self._copier.fence()

    def offload(self, block_ids: Sequence[int], slots: Sequence[int], fence: object | None) -> None:
        self._call(self._copier.offload, block_ids, slots, fence)

    def onboard(self, slots: Sequence[int], block_ids: Sequence[int], fence: object | None) -> None:
        self._call(self._copier.onboard, slots, block_ids, fence)

    def _call(self, copy: Callable[..., None], first: Sequence[int], second: Sequence[int], fence: object) -> None:
        with self._lock:
            fault = self._plan.pop(self._calls, None)
            self._calls += 1
        if fault == "fail":
            raise TransferError("fault: copy failed")
        if fault == "odd":
            raise ValueError("fault: nobody expects this")
        if fault == "die":
            raise SystemExit("fault: thread ends")
        if fault == "short":
            half = len(first) // 2
            copy(first[:half], second[:half], fence)
            raise TransferError(f"fault: copied {half} of {len(first)} blocks")
        if fault == "hold":
            self._wait()
        copy(first, second, fence)
        if fault == "lost":
            self._wait()

    def _wait(self) -> None:
        self._held.release()
        assert self._released.wait(LIMIT_S), "a held call was never released"
