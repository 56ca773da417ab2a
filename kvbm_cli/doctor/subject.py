"""What is examined: a machine, a profile or none, a directory or none, and how thoroughly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm_cli.doctor.machine import Machine, Say

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import DiskTierSection, Tiers
    from kvbm.sizing import Sizing


ANOTHER = "another directory, by `--dir` or `tiers.disk.directory`"


@dataclass(frozen=True, slots=True)
class Subject:
    """`sizing` is None where there is no profile, or where only the engine can tell. `tiers` are those of the profile,
    without one those of the variables, as an engine would have them that is started by its own command line."""

    machine: Machine
    directory: Path | None
    resolved: ResolvedProfile | None
    tiers: Tiers | None
    sizing: Sizing | None
    is_quick: bool
    say: Say

    @property
    def disk(self) -> DiskTierSection | None:
        return self.tiers.disk if self.tiers is not None else None
