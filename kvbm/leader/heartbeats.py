"""Heartbeats: recognises ranks that have orders and show no sign of life.

A rank increases its heartbeat each time it polls its copies: in each engine step, and several times a second in a
process of its own. A rank that is stopped (SIGSTOP) is silent. It may continue later, and then its copies continue too.
So after silence no request waits for the rank any longer, but the memory of its copies stays held.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbm.host.region import Region

log = logging.getLogger(__name__)


class Heartbeats:
    """Heartbeats of all ranks. `silence_s` without one is silence. If it `is_idle`, `check` without orders changes
    nothing."""

    def __init__(self, region: Region, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._region = region
        self._silence_s = silence_s
        self._clock = clock
        self._beats = region.heartbeats()
        self._heard_s = [clock()] * len(self._beats)
        self.is_idle = True
        self.are_missing = False

    def check(self, *, has_orders: bool) -> bool:
        """Return whether a rank with orders is silent. Call once per step, unless it would change nothing."""
        if not has_orders and not self.are_missing:
            self.is_idle = True  # silence counts from the next order on
            return False
        beats, now_s = self._region.heartbeats(), self._clock()
        for rank, beat in enumerate(beats):
            if beat is None or beat != self._beats[rank] or not has_orders or self.is_idle:
                self._heard_s[rank] = now_s
        self._beats, self.is_idle = beats, False
        silent = [rank for rank, heard_s in enumerate(self._heard_s) if now_s - heard_s > self._silence_s]
        if bool(silent) != self.are_missing:
            self.are_missing = bool(silent)
            if silent:
                log.warning("kvbm: ranks %s do not respond for %g s; requests are computed", silent, self._silence_s)
            else:
                log.warning("kvbm: all ranks respond again")
        return self.are_missing
