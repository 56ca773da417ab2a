"""Launch plans of a TensorRT-LLM profile with `disaggregated`.

Prefill (context) engines have the connector. Decode (generation) engines have none: the connector interface refuses
their requests. TensorRT-LLM sends the blocks of a request from one to the other through its cache transceiver. Its own
server stands in front of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvbm.config.engine import TrtllmEngine
from kvbm.engines.disaggregated import ENGINE_HOST, Fleet, devices, with_metrics_port
from kvbm.engines.trtllm import launch

if TYPE_CHECKING:
    from kvbm.config.schema import Profile
    from kvbm.engines.installation import Installation
    from kvbm.engines.launch_plan import LaunchPlan

TRANSCEIVER = {"cache_transceiver_config": {"backend": "DEFAULT"}}
PREFILL = {"disable_overlap_scheduler": True, **TRANSCEIVER}  # as TensorRT-LLM's documentation has context servers


def fleet(
    profile: Profile, installation: Installation | None, ports: Iterator[int], environment: Mapping[str, str]
) -> Fleet:
    """Return how to start the engines. `ports` yields their ports, `environment` is the caller's."""
    assert isinstance(profile.engine, TrtllmEngine), f"this is a plan for TensorRT-LLM, not for {profile.engine.kind}"
    counts = profile.disaggregated
    ranks = profile.engine.arguments.tensor_parallel_size or 1
    gpus = devices(profile, counts.prefill + counts.decode, environment, ranks=ranks)
    alone = profile.model_copy(update={"server": profile.server.model_copy(update={"host": ENGINE_HOST})})

    def engine(name: str, number: int, defaults: Mapping[str, object], *, connector: bool) -> LaunchPlan:
        made = launch.plan(
            with_metrics_port(alone, number),
            connector=connector,
            port=next(ports),
            installation=installation,
            file=f"{name}-{number}.yaml",
            defaults=defaults,
        )
        return replace(made, environment={**next(gpus), **made.environment})

    prefill = [engine("prefill", number, PREFILL, connector=True) for number in range(counts.prefill)]
    return Fleet(prefill, [engine("decode", number, TRANSCEIVER, connector=False) for number in range(counts.decode)])
