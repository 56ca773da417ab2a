"""Arms: the configurations of the engine that an experiment compares, and the order of their runs.

    kvbm bench --profile demo                                     kvbm against baseline, the same engine without kvbm
    kvbm bench --profile demo --compare demo-disk                 demo against demo-disk, both with kvbm
    kvbm bench --profile demo --compare baseline:other            kvbm against the engine of `other` without kvbm
    kvbm bench --compare new=http://host:1 --compare old=http://host:2    two running servers

The first arm is measured; the others are its references. `floor` is the engine of the profile without kvbm and with a
G1 that holds everything. The name of an arm is also part of the names of its runs and files.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
from kvbm.text.outside import without_secret_value

RECORDING = "recording"
BASELINE, KVBM, FLOOR = "baseline", "kvbm", "floor"
RESERVED = (RECORDING, BASELINE, KVBM, FLOOR)
DEFAULT_PAIRS = {"in_turn": 3, "interleaved": 1}

ArmKind = Literal["kvbm", "baseline", "profile", "floor", "url"]


@dataclass(frozen=True, slots=True)
class Arm:
    """`differences` are the keys in which the profile of a reference differs from the measured one's."""

    name: str
    kind: ArmKind
    resolved: ResolvedProfile | None = None
    url: str | None = None
    differences: Mapping[str, tuple[object, object]] = field(default_factory=dict)

    @property
    def has_kvbm(self) -> bool:
        return self.kind in ("kvbm", "profile")

    @property
    def engine_differences(self) -> tuple[str, ...]:
        """Keys of the engine in which this reference differs; its answers may then differ without being wrong."""
        return tuple(key for key in self.differences if key.startswith("engine."))

    def to_json(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "profile": self.resolved.name if self.resolved else None,
            "url": self.url,
            "differences": {
                key: [without_secret_value(key, value) for value in values] for key, values in self.differences.items()
            },
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """`measured` is compared with each reference: "faster" means that `measured` is faster."""

    measured: Arm
    references: tuple[Arm, ...]
    floor: Arm | None

    @property
    def arms(self) -> tuple[Arm, ...]:
        """All arms; the first reference comes first, because its answers are what others are compared with."""
        floor = (self.floor,) if self.floor else ()
        return (*self.references[:1], self.measured, *self.references[1:], *floor)

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def is_of_urls(self) -> bool:
        return all(arm.kind == "url" for arm in self.arms)


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Arms that run at the same time, in repetition `pair`."""

    pair: int
    arms: tuple[str, ...]


def groups(comparison: Comparison, *, interleaved: bool, pairs: int, seed: int) -> list[RunGroup]:
    """Return the order of all runs of a cell.

    In turn, arms alternate: A B, B A, A B, ... or the reverse, which the seed decides. So a machine that slowly gets
    slower changes no ratio. The floor runs once, at the end of the first pair. Interleaved, all arms run in each pair.
    """
    names = [arm.name for arm in comparison.arms]
    if interleaved:
        return [RunGroup(pair, tuple(names)) for pair in range(1, pairs + 1)]
    compared = [name for name in names if comparison.floor is None or name != comparison.floor.name]
    is_reversed = random.Random(seed).random() < 0.5
    result = []
    for pair in range(1, pairs + 1):
        order = compared[::-1] if is_reversed else compared
        result += [RunGroup(pair, (name,)) for name in order]
        if pair == 1 and comparison.floor is not None:
            result.append(RunGroup(pair, (comparison.floor.name,)))
        is_reversed = not is_reversed
    return result


def free_name(wanted: str, taken: Sequence[str]) -> str:
    """Return a name that is safe as a directory and in an HTTP header; a number is appended where it is taken."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", wanted).strip("-")[:40] or "arm"
    candidates = (name, *(f"{name}-{number}" for number in range(2, len(taken) + 3)))
    return next(candidate for candidate in candidates if candidate not in taken)
