"""Comparison: the two arms that an experiment compares, and their names.

    kvbm bench --profile demo --compare baseline      kvbm against baseline, the same engine without the block manager
    kvbm bench --profile demo --compare demo-disk     demo against demo-disk, both with the block manager

The third arm is always the floor. The name of an arm is also its directory in the output and its key in summary.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

RECORDING = "recording"
BASELINE, KVBM, FLOOR = "baseline", "kvbm", "floor"
RESERVED = (RECORDING, BASELINE, KVBM, FLOOR)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`measured` is compared with `reference`: "faster" means that `measured` is faster.

    `differences` are the keys in which two compared profiles differ, with the value of `measured` and of `reference`;
    `None` for a comparison with the baseline.
    """

    measured: str = KVBM
    reference: str = BASELINE
    differences: Mapping[str, tuple[object, object]] | None = None

    @classmethod
    def of_profiles(cls, measured: str, reference: str, differences: Mapping[str, tuple[object, object]]) -> Comparison:
        """Arms named after two profiles; a number is appended where a name is taken."""
        first = _free_name(measured, RESERVED)
        return cls(first, _free_name(reference, (*RESERVED, first)), differences)

    @property
    def arms(self) -> tuple[str, str, str]:
        """All arms, in the order in which they start."""
        return self.reference, self.measured, FLOOR

    @property
    def is_of_profiles(self) -> bool:
        return self.differences is not None

    @property
    def arms_with_kvbm(self) -> tuple[str, ...]:
        return (self.reference, self.measured) if self.is_of_profiles else (self.measured,)

    @property
    def engine_differences(self) -> tuple[str, ...]:
        """Keys of the engine in which the reference differs; its answers may then differ without being wrong."""
        return tuple(key for key in self.differences or () if key.startswith("engine."))

    @property
    def judged_arms(self) -> tuple[str, ...]:
        """Arms that must answer as the recording, whose engine is the measured arm's without the block manager."""
        return tuple(arm for arm in self.arms_with_kvbm if arm == self.measured or not self.engine_differences)


AGAINST_BASELINE = Comparison()


def _free_name(profile_name: str, taken: tuple[str, ...]) -> str:
    """A name that is safe as a directory and in an HTTP header."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", profile_name).strip(".-") or "profile"
    candidates = (name, *(f"{name}-{number}" for number in range(2, len(taken) + 3)))
    return next(candidate for candidate in candidates if candidate not in taken)
