"""StoreReport: what a probe finds in a store, and the sizes that all probes use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PREFIX = "kvbm-doctor"
OBJECT_BYTES = 4 << 20
IN_FLIGHT = 16
SMALL_GETS = 15

PhaseCallback = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What the probe found. `failed` is the step that failed, with the `reason`; later steps did not run.

    `creates_once`: whether a second creation of an object is refused. `clock_s`: how far the clock of the store is
    ahead of this machine's. `small_get_s` is the median of small GETs, `object_get_s` of GETs of one object at a time;
    rates are in bytes per second with IN_FLIGHT requests in flight. Unknown values are None.
    """

    failed: str | None = None
    reason: str | None = None
    creates_once: bool | None = None
    clock_s: float | None = None
    small_get_s: float | None = None
    object_get_s: float | None = None
    put_rate: float | None = None
    get_rate: float | None = None
    left_objects: int = 0


class StepFailed(Exception):
    """A step that failed, and why."""
