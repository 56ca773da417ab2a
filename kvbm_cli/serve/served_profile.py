"""ServedProfile: a checked profile as `kvbm serve` starts it, with the cache or as its baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvbm.engines.launch_plan import LaunchPlan
from kvbm.engines.table import copy_count, kind_of
from kvbm.errors import UsageError
from kvbm_cli.disaggregated.plan import DisaggregatedPlan, free_ports, plan
from kvbm_cli.engine.process import STOP_TIMEOUT_S
from kvbm_cli.profile.auto_capacity import engine_bytes, with_capacities
from kvbm_cli.profile.machine_problems import memory_bytes
from kvbm_cli.profile.size import size_of

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import DiskTierSection, Profile
    from kvbm.sizing import SizeUnknown, Sizing

BASELINE = "baseline"
START_TIMEOUT_KEY = "transfer.init_timeout_s"  # applies to every engine


@dataclass(frozen=True, slots=True)
class ServedProfile:
    """`is_baseline`: the engine runs without the cache, so the tiers take no memory and no disk space."""

    resolved: ResolvedProfile
    sizing: Sizing | SizeUnknown
    is_baseline: bool

    @property
    def profile(self) -> Profile:
        return self.resolved.profile

    @property
    def run_name(self) -> str:
        """Returns the name of its runs, without a number."""
        return f"{self.resolved.name}-{BASELINE}" if self.is_baseline else self.resolved.name

    @property
    def model(self) -> str:
        """Returns the name of the model in requests."""
        return self.profile.engine.served_name

    @property
    def disk(self) -> DiskTierSection | None:
        return None if self.is_baseline else self.profile.tiers.disk

    @property
    def memory_bytes(self) -> int:
        """Returns the host memory for blocks (G2) of all its engines, 0 if unknown."""
        known = memory_bytes(self.profile.tiers, self.sizing, copy_count(self.profile))
        return 0 if self.is_baseline else known or 0

    @property
    def engine_bytes(self) -> int:
        """Returns the host memory that its engines take for themselves, as on a CPU, 0 if unknown."""
        return engine_bytes(self.profile, self.sizing) or 0

    def decided(self) -> ServedProfile:
        """Return it with the sizes that kvbm chooses now in place of `capacity: auto`."""
        if self.is_baseline or (resolved := with_capacities(self.resolved)) is self.resolved:
            return self
        is_sized = not isinstance(self.sizing, Exception)
        return replace(self, resolved=resolved, sizing=size_of(resolved) if is_sized else self.sizing)

    @property
    def stop_timeout_s(self) -> float:
        return STOP_TIMEOUT_S + (0.0 if self.is_baseline else self.profile.tiers.drain_s)

    def plan(self, port: int, *, taken: Sequence[int] = ()) -> LaunchPlan | DisaggregatedPlan:
        """Return how to start it on `port`. Engines behind a proxy get free ports that are not `taken`."""
        if self.profile.disaggregated.is_enabled:
            free = (one for one in free_ports() if one not in (port, *taken))
            return plan(self.profile, port=port, ports=free)
        return kind_of(self.profile).launch_plan(self.profile, connector=not self.is_baseline, port=port)


def require_baseline(resolved: ResolvedProfile, overrides: Sequence[str]) -> None:
    """Raise UsageError for a profile or an override that cannot be combined with `--baseline`."""
    from kvbm.config.schema import ConnectorConfig

    if resolved.profile.disaggregated.is_enabled:
        message = f"`--baseline` starts one engine without the cache, and `{resolved.name}` starts several"
        raise UsageError(message, hint="use the profile that it extends")
    for key in (override.partition("=")[0].strip() for override in overrides):
        if key.partition(".")[0] in ConnectorConfig.model_fields and key != START_TIMEOUT_KEY:
            message = f"`--baseline` starts the engine without the cache, so `--set {key}` has no effect"
            raise UsageError(message, hint="omit one of them")
