"""The requests of one arm in one cell, over all its runs: what the exported files and the goodput are made of.

Times of a record are milliseconds from the start of its run.

Goodput counts the requests that meet a service level objective (SLO):

    ttft:500,tpot:50   first token within 500 ms and 50 ms per further token, both as measured from the intended launch
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm.errors import UsageError
from kvbm_cli.bench.result.results import TIERS, CellResult, Measurement, RequestRecord, Results

_Z_975 = 1.959964

KEYS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class ArmResult:
    """`runs` is not empty and in order of time. `slo` is `None` if the workload sets no limits."""

    arm: str
    cell: CellResult
    runs: tuple[Measurement, ...]
    slo: Slo | None

    @property
    def requests(self) -> list[RequestRecord]:
        """All requests, run by run."""
        return [record for run in self.runs for record in run.records]

    @property
    def succeeded(self) -> list[RequestRecord]:
        return [record for record in self.requests if record.is_ok]

    @property
    def duration_s(self) -> float:
        """The time under load: the sum over the runs."""
        return float(sum(run.facts["duration_s"] for run in self.runs))

    @property
    def started_unix_s(self) -> float:
        return started_unix_s(self.runs[0])

    @property
    def concurrency(self) -> int | None:
        """Sessions in flight in a closed loop; `None` in an open loop."""
        return self.cell.plan.launches.concurrency if self.cell.plan else None

    @property
    def burstiness(self) -> float | None:
        """Of random launches; `None` for fixed times."""
        return self.cell.plan.launches.burstiness if self.cell.plan else None

    @property
    def model(self) -> str:
        """The name that the server uses; of a path its last part, because exports name no directory of this machine."""
        body = dict(self.cell.plan.requests[0].fields) if self.cell.plan else {}
        name = str(body.get("model", "unknown"))
        return Path(name).name if name.startswith(("/", "~", ".")) else name

    @property
    def offered_rate(self) -> float | None:
        """Intended launches per second in the first run; all runs of a cell have the same plan."""
        launches = [record.intended_ms for record in self.runs[0].records if record.intended_ms is not None]
        if len(launches) < 2 or max(launches) == min(launches):
            return None
        return (len(launches) - 1) / (max(launches) - min(launches)) * 1e3

    def unix_s(self, record: RequestRecord, stamp_ms: float) -> float:
        run = next(run for run in self.runs if run.run == record.run)
        return started_unix_s(run) + stamp_ms / 1e3

    def facts(self) -> dict[str, Any]:
        """Our own facts, under names that no other tool uses. Only what is known; values are not containers."""
        definition = self.cell.definition
        given = {
            "arm": self.arm,
            "cell": self.cell.name,
            "workload": definition["workload"]["name"],
            "pressure": definition["pressure"],
            "g1_capacity_tokens": definition["g1_tokens"],
            "runs": len(self.runs),
            **{f"prompt_tokens_{tier}": total_of(self.succeeded, f"{tier}_tokens") for tier in TIERS},
        }
        return {f"kvbm_{name}": value for name, value in given.items() if value is not None}


def arm_results(results: Results) -> list[ArmResult]:
    """One value per arm and cell that has a run."""
    return [_arm_result(arm, cell) for cell in results.cells for arm in cell.arms]


def _arm_result(arm: str, cell: CellResult) -> ArmResult:
    slo = cell.definition["workload"].get("slo")
    runs = tuple(sorted(cell.of_arm(arm), key=started_unix_s))
    return ArmResult(arm, cell, runs, None if slo is None else Slo.parse(slo))


def started_unix_s(run: Measurement) -> float:
    return float(run.facts["started_unix_s"])


def total_of(records: Sequence[RequestRecord], name: str) -> int | None:
    """Sum of a number of tokens; `None` if the server did not report it for one of the records."""
    values: list[int | None] = [getattr(record, name) for record in records]
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def output_tokens(record: RequestRecord) -> int:
    """Tokens of the answer; counted by the chunks if the server sent no usage."""
    if record.output_tokens is not None:
        return record.output_tokens
    return record.first_chunk_tokens + len(record.token_gaps_ms)


def launch_ms(record: RequestRecord) -> float:
    """Return the launch; of a request that was never sent, the intended launch or the moment at which it failed."""
    stamps = (record.launched_ms, record.intended_ms, record.end_ms, 0.0)
    return next(stamp for stamp in stamps if stamp is not None)


def wait_ms(record: RequestRecord) -> float:
    """Launch minus intended launch; 0 for a request that never became due."""
    return 0.0 if record.intended_ms is None else launch_ms(record) - record.intended_ms


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


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """Wilson's 95% score interval of a share. Unlike the normal interval, it holds for shares close to 0 and 1."""
    assert 0 <= successes <= count, (successes, count)
    if count == 0:
        return 0.0, 1.0
    share, z2 = successes / count, _Z_975**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z_975 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    return low, 1.0 if successes == count else min(1.0, centre + half)
