"""What is examined: a machine, a profile or none, a directory or none, and how thoroughly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm_cli.doctor.machine import Machine, Say

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import DiskTier
    from kvbm.sizing import Sizing


@dataclass(frozen=True, slots=True)
class Subject:
    """`sizing` is None where there is no profile, or where only the engine can tell."""

    machine: Machine
    directory: Path | None
    resolved: ResolvedProfile | None
    sizing: Sizing | None
    is_quick: bool
    say: Say

    @property
    def disk(self) -> DiskTier | None:
        return self.resolved.profile.tiers.disk if self.resolved is not None else None
