"""Goodput: requests that meet a service level objective (SLO). Pure.

ttft:500,tpot:50       first token within 500 ms and 50 ms per further token, both as measured from the intended launch
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvbm.errors import UsageError
from kvbm_cli.bench.analysis.statistics import wilson_interval

KEYS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of one request in ms. A request that failed has `ttft_ms` and `e2e_ms` `None`; one token has no TPOT."""

    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in ms; `None` sets no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read `ttft:500,tpot:50,e2e:3000`, in any order, each at most once. Raises UsageError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            key, colon, number = (piece.strip() for piece in part.partition(":"))
            if not colon or key not in KEYS:
                raise _mistake(text, f"{part.strip()!r} is not a limit")
            if key in limits:
                raise _mistake(text, f"`{key}` is given twice")
            limits[key] = _limit(text, key, number)
        return cls(**{f"{key}_ms": limit for key, limit in limits.items()})

    def __str__(self) -> str:
        limits = zip(KEYS, (self.ttft_ms, self.tpot_ms, self.e2e_ms), strict=True)
        return ",".join(f"{key}:{limit:g}" for key, limit in limits if limit is not None)

    def is_met(self, times: RequestTimes) -> bool:
        """Return whether the goal is met. A failed request never meets it. An answer of one token has no TPOT and meets
        any limit of it."""
        if times.ttft_ms is None or times.e2e_ms is None:
            return False
        return (
            (self.ttft_ms is None or times.ttft_ms <= self.ttft_ms)
            and (self.tpot_ms is None or times.tpot_ms is None or times.tpot_ms <= self.tpot_ms)
            and (self.e2e_ms is None or times.e2e_ms <= self.e2e_ms)
        )


def _limit(text: str, key: str, number: str) -> float:
    try:
        limit = float(number)
    except ValueError:
        raise _mistake(text, f"`{key}` is {number!r}, which is not a number of milliseconds") from None
    if not (math.isfinite(limit) and limit > 0):
        raise _mistake(text, f"`{key}` is {number}, but it must be more than 0 ms")
    return limit


def _mistake(text: str, what: str) -> UsageError:
    return UsageError(
        f"the SLO {text!r} is invalid: {what}",
        hint="write limits in milliseconds, such as `ttft:500,tpot:50`; the keys are `ttft`, `tpot` and `e2e`",
    )


@dataclass(frozen=True, slots=True)
class Goodput:
    """`share` of all requests, failed ones included, that met the SLO, with Wilson's 95% interval.

    The interval takes requests as independent, so it is too narrow if slow requests come in bursts.
    """

    good_count: int
    request_count: int
    share: float
    low: float
    high: float
    requests_per_s: float | None


def goodput(requests: Sequence[RequestTimes], slo: Slo, duration_s: float) -> Goodput | None:
    """Good requests of all, and per second of `duration_s`; `None` without requests."""
    if not requests:
        return None
    good = sum(map(slo.is_met, requests))
    low, high = wilson_interval(good, len(requests))
    rate = good / duration_s if duration_s > 0 else None
    return Goodput(good, len(requests), good / len(requests), low, high, rate)
