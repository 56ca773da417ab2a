"""Check: the result of one check, with its state, finding and remedy. DoctorContext: what a check may use."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbm_cli.doctor.machine import Machine, PhaseCallback, ProbeFailed
from kvbm_cli.system.answering import ANSWER_LIMIT_S

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import DiskTierSection, SharedTierSection, Tiers
    from kvbm.sizing import Sizing

Fact = str | int | float | bool | None


class CheckState(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """`finding` and `remedy` are one line each. A remedy names a command or a profile key. `facts` are for JSON."""

    name: str
    state: CheckState
    finding: str
    remedy: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)


def rate(bytes_per_s: float) -> str:
    """Format a rate in decimal units: `2.50 GB/s`."""
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"


def capacity(byte_count: int) -> str:
    """Format a capacity for a profile: whole units, rounded down."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if byte_count >= 10 * factor:
            return f"{byte_count // factor}{unit}"
    return f"{byte_count // 1000}KB"


def ok(name: str, finding: str, /, **facts: Fact) -> Check:
    return Check(name, CheckState.OK, finding, None, facts)


def warning(name: str, finding: str, remedy: str | None = None, /, **facts: Fact) -> Check:
    return Check(name, CheckState.WARNING, finding, remedy, facts)


def failure(name: str, finding: str, remedy: str | None = None, /, **facts: Fact) -> Check:
    return Check(name, CheckState.FAILURE, finding, remedy, facts)


def skipped(name: str, finding: str, remedy: str | None = None) -> Check:
    return Check(name, CheckState.SKIPPED, finding, remedy)


NO_ANSWER = f"the filesystem does not respond: no answer within {ANSWER_LIMIT_S:g} s"
OTHER_DIRECTORY = "use another directory (`--dir` or `tiers.disk.directory`)"


@dataclass(frozen=True, slots=True)
class DoctorContext:
    """`sizing` is None without a profile, or if only the engine knows the sizes. `tiers` come from the profile; without
    one, from the variables, as for an engine that is started by its own command. `url` is the store of the shared tier,
    None without one; `prefill_rate` is in tokens per second, None if unknown."""

    machine: Machine
    directory: Path | None
    resolved: ResolvedProfile | None
    tiers: Tiers | None
    sizing: Sizing | None
    is_quick: bool
    on_phase: PhaseCallback
    url: str | None = None
    prefill_rate: float | None = None

    @property
    def disk(self) -> DiskTierSection | None:
        return self.tiers.disk if self.tiers is not None else None

    @property
    def shared(self) -> SharedTierSection | None:
        return self.tiers.shared if self.tiers is not None else None

    def answer_of(
        self, name: str, python: str, program: str, arguments: Sequence[str], *, timeout_s: float, remedy: str
    ) -> dict[str, Any] | Check:
        """Run a probe with an engine's interpreter. Return its answer, or a check `name` with the reason for none."""
        try:
            return self.machine.run_probe(python, program, arguments, timeout_s=timeout_s)
        except ProbeFailed as error:
            if self.is_quick:
                return skipped(name, str(error), "run `kvbm doctor` without `--quick`, which waits longer")
            return failure(name, f"`{python}`: {error}", remedy)
