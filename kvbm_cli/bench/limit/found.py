"""The limits of all arms, and the sentences that compare them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvbm_cli.bench.limit.conditions import Condition
from kvbm_cli.bench.limit.search import Bounds, Ratio, ratio_of

SETTLED_S = 30.0


@dataclass(frozen=True, slots=True)
class ArmLimit:
    """`compared` answers were compared with the recorded ones, and `different` of them differed."""

    arm: str
    bounds: Bounds
    probes: int
    compared: int
    different: int

    def to_json(self) -> dict[str, Any]:
        high = None if math.isinf(self.bounds.high) else self.bounds.high
        return {
            "arm": self.arm,
            "requests_per_s": {"low": self.bounds.low, "high": high},
            "is_known": self.bounds.is_known,
            "probes": self.probes,
            "answers": {"compared": self.compared, "different": self.different},
        }


@dataclass(frozen=True, slots=True)
class FoundLimits:
    conditions: tuple[Condition, ...]
    workload: str
    requests: int
    arms: tuple[ArmLimit, ...]
    measured: str

    def ratio(self, reference: ArmLimit) -> Ratio | None:
        return ratio_of(self._measured.bounds, reference.bounds)

    @property
    def references(self) -> list[ArmLimit]:
        return [one for one in self.arms if one.arm != self.measured]

    def sentence(self, reference: ArmLimit) -> str:
        """Return how many times the users of `reference` the measured arm serves, or why that is not known."""
        ratio = self.ratio(reference)
        limits = ", ".join(map(str, self.conditions))
        if ratio is None:
            unknown = [one.arm for one in self.arms if one in (reference, self._measured) and not one.bounds.is_known]
            return f"the limit of {' and '.join(unknown)} is not known, so there is no ratio under {limits}"
        between = f"({ratio.low:.2f} to {ratio.high:.2f})"
        if not ratio.is_clear:
            return f"{self.measured} and {reference.arm} serve equally many users under {limits}, or nearly {between}"
        return f"{self.measured} serves {ratio.value:.2f} times the users of {reference.arm} under {limits} {between}"

    @property
    def _measured(self) -> ArmLimit:
        return next(one for one in self.arms if one.arm == self.measured)

    @property
    def notes(self) -> list[str]:
        """Return what makes a limit doubtful."""
        lengths_s = [(one.arm, self.requests / one.bounds.low) for one in self.arms if one.bounds.is_known]
        return [
            f"a probe at the limit of {arm} takes {length_s:.0f} s, too short for a queue to grow: send more"
            for arm, length_s in lengths_s
            if length_s < SETTLED_S
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "limits": [str(one) for one in self.conditions],
            "workload": self.workload,
            "arms": [one.to_json() for one in self.arms],
            "ratios": [
                {
                    "measured": self.measured,
                    "reference": one.arm,
                    "ratio": None if ratio is None else {"value": ratio.value, "low": ratio.low, "high": ratio.high},
                    "sentence": self.sentence(one),
                }
                for one in self.references
                for ratio in [self.ratio(one)]
            ],
            "notes": self.notes,
        }
