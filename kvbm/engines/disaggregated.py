"""What the engines of a profile with `disaggregated` have in common: their addresses, their devices, their metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbm.errors import EnvironmentProblem

if TYPE_CHECKING:
    from kvbm.config.schema import Profile
    from kvbm.engines.launch_plan import LaunchPlan

ENGINE_HOST = "127.0.0.1"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines, which listen on this machine only. `prefill` engines have the cache."""

    prefill: Sequence[LaunchPlan]
    decode: Sequence[LaunchPlan]


def with_metrics_port(profile: Profile, number: int) -> Profile:
    """Return the profile of prefill engine `number`, with a port of its own for metrics if they are served."""
    metrics = profile.metrics
    port = metrics.port + number if metrics.port and metrics.serve else metrics.port
    return profile.model_copy(update={"metrics": metrics.model_copy(update={"port": port})})


def devices(
    profile: Profile, engine_count: int, environment: Mapping[str, str], *, ranks: int, on_cpu: bool = False
) -> Iterator[dict[str, str]]:
    """Yield the variables that give each engine of `ranks` ranks its GPUs, in order. They are empty on a CPU, and if
    the profile sets CUDA_VISIBLE_DEVICES.

    Raises EnvironmentProblem if the caller sees too few GPUs.
    """
    if VISIBLE_DEVICES in profile.engine.environment or on_cpu:
        yield from [{}] * engine_count
        return
    needed, listed = ranks * engine_count, environment.get(VISIBLE_DEVICES)
    visible = listed.split(",") if listed else [str(index) for index in range(needed)]
    if len(visible) < needed:
        hint = f"set `engine.environment.{VISIBLE_DEVICES}` to give all engines the same GPUs"
        raise EnvironmentProblem(
            f"the engines need {needed} GPUs, but {VISIBLE_DEVICES} lists {len(visible)}", hint=hint
        )
    for first in range(0, needed, ranks):
        yield {VISIBLE_DEVICES: ",".join(visible[first : first + ranks])}
