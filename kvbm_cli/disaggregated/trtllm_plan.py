"""Launch plans of a TensorRT-LLM profile with `disaggregated`: one for each engine and one for TensorRT-LLM's server.

Prefill (context) engines have the connector. Decode (generation) engines have none: the connector interface refuses
their requests. TensorRT-LLM sends the blocks of a request from one to the other through its cache transceiver. Its own
server replaces kvbm's proxy in front of them. Engines listen on this machine only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvbm.config.engine import TrtllmEngine
from kvbm_cli.disaggregated.plan import ENGINE_HOST, DisaggregatedPlan, devices, free_ports, with_metrics_port
from kvbm_cli.engine.trtllm_kind import TrtllmKind

if TYPE_CHECKING:
    from kvbm.config.launch_plan import LaunchPlan
    from kvbm.config.schema import Profile

TRANSCEIVER = {"cache_transceiver_config": {"backend": "DEFAULT"}}
PREFILL = {"disable_overlap_scheduler": True, **TRANSCEIVER}  # as TensorRT-LLM's documentation has context servers


def trtllm_plan(
    profile: Profile,
    *,
    port: int,
    ports: Iterator[int] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> DisaggregatedPlan:
    """Return how to start the engines of `profile` and, on `port`, the server in front of them.

    `ports` yields the ports of the engines, `environment` is the caller's.
    """
    assert isinstance(profile.engine, TrtllmEngine), f"this is a plan for TensorRT-LLM, not for {profile.engine.kind}"
    counts, kind = profile.disaggregated, TrtllmKind()
    ports = ports if ports is not None else free_ports()
    ranks = profile.engine.arguments.tensor_parallel_size or 1
    gpus = devices(profile, counts.prefill + counts.decode, environment, ranks=ranks)
    server = profile.server.model_copy(update={"host": ENGINE_HOST})
    alone = profile.model_copy(update={"server": server})

    def engine(name: str, number: int, defaults: Mapping[str, object], *, connector: bool) -> LaunchPlan:
        made = kind.launch_plan(
            with_metrics_port(alone, number),
            connector=connector,
            port=next(ports),
            file=f"{name}-{number}.yaml",
            defaults=defaults,
        )
        return replace(made, environment={**next(gpus), **made.environment})

    prefill = {
        f"prefill {number}": engine("prefill", number, PREFILL, connector=True) for number in range(counts.prefill)
    }
    decode = {
        f"decode {number}": engine("decode", number, TRANSCEIVER, connector=False) for number in range(counts.decode)
    }
    front = kind.disaggregated_server(
        profile, port=port, prefill=_addresses(prefill.values()), decode=_addresses(decode.values())
    )
    return DisaggregatedPlan(tuple({**prefill, **decode}.items()), front)


def _addresses(plans: Iterable[LaunchPlan]) -> list[str]:
    return [plan.base_url.removeprefix("http://") for plan in plans]
