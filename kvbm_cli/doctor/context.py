"""Context of the checks: the machine, an optional profile and directory, and how thorough the checks are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm_cli.doctor.machine import Machine, PhaseCallback
from kvbm_cli.system.answering import ANSWER_LIMIT_S

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import DiskTierSection, SharedTierSection, Tiers
    from kvbm.sizing import Sizing


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
