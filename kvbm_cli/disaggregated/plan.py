"""Launch plans of a vLLM profile with `disaggregated`: one for each engine and one for the proxy.

Prefill engines get PdConnector, which combines DynamoConnector and NixlConnector. Decode engines get NixlConnector
only: their blocks come from a prefill engine, which keeps them. Engines listen on this machine only, the proxy on
`server.host`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.config.engine import VllmEngine
from kvbm.config.flags import CONNECTOR_MODULE
from kvbm.config.launch_plan import LaunchPlan, served_at
from kvbm.engines.vllm.versions import INSTALL as INSTALL_VLLM
from kvbm.errors import EnvironmentProblem
from kvbm_cli.engine.engines import launch_plan
from kvbm_cli.engine.process import choose_port
from kvbm_cli.engine.python_probe import run_elsewhere
from kvbm_cli.engine.vllm_kind import vllm_of

if TYPE_CHECKING:
    from kvbm.config.schema import Profile

ENGINE_HOST = "127.0.0.1"
INSTALL = f"{INSTALL_VLLM} nixl"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
HINT = "run `pip install nixl` in that environment"
STATE_LAYOUT = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}  # NIXL requires it for models with states
# A prompt whose blocks cannot be fetched is computed by the decode engine.
DECODE_CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}


@dataclass(frozen=True, slots=True)
class DisaggregatedPlan:
    """`engines` are pairs of a name such as `prefill 0` and a plan; clients connect to `proxy`."""

    engines: tuple[tuple[str, LaunchPlan], ...]
    proxy: LaunchPlan

    def placed(self, directory: Path) -> DisaggregatedPlan:
        """Return the plan with the files of all its programs in `directory`."""
        engines = tuple((name, engine.placed(directory)) for name, engine in self.engines)
        return DisaggregatedPlan(engines, self.proxy.placed(directory))


def plan(
    profile: Profile,
    *,
    port: int,
    ports: Iterator[int] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> DisaggregatedPlan:
    """Return how to start the vLLM engines of `profile` and, on `port`, their proxy.

    `ports` yields the ports of the engines, `environment` is the caller's.
    """
    counts = profile.disaggregated
    assert counts.is_enabled, "the profile has one engine"
    ports = ports if ports is not None else free_ports()
    assert isinstance(profile.engine, VllmEngine), f"this is a plan for vLLM, not for {profile.engine.kind}"
    arguments, installation = profile.engine.arguments, vllm_of(profile)
    gpus = devices(
        profile,
        counts.prefill + counts.decode,
        environment,
        ranks=(arguments.tensor_parallel_size or 1) * (arguments.pipeline_parallel_size or 1),
        on_cpu=installation is not None and installation.is_cpu,
    )

    def engines(kind: str, connectors: Sequence[Mapping[str, object]]) -> dict[str, LaunchPlan]:
        return {
            f"{kind} {number}": _engine(profile, connector, next(gpus), next(ports), next(ports))
            for number, connector in enumerate(connectors)
        }

    prefill = engines("prefill", [prefill_connector(profile, number) for number in range(counts.prefill)])
    decode = engines("decode", [DECODE_CONNECTOR] * counts.decode)
    proxy = _proxy(profile, port, prefill=list(prefill.values()), decode=list(decode.values()))
    return DisaggregatedPlan(tuple({**prefill, **decode}.items()), proxy)


def prefill_connector(profile: Profile, number: int = 0) -> dict[str, object]:
    """Return the flags of PdConnector: DynamoConnector for the tiers, NixlConnector to send blocks to a decode engine.
    Each prefill engine has its own metrics port, if metrics are served."""
    from kvbm.engines.vllm.launch import transfer_config

    profile = with_metrics_port(profile, number)
    assert isinstance(profile.engine, VllmEngine), f"this is a plan for vLLM, not for {profile.engine.kind}"
    ours = transfer_config(profile, profile.engine.arguments)
    return {
        "kv_connector": "PdConnector",
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": ours["kv_load_failure_policy"],
        "kv_connector_extra_config": {
            "connectors": [ours, {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}],
        },
    }


def with_metrics_port(profile: Profile, number: int) -> Profile:
    """Return the profile of prefill engine `number`, with a port of its own for metrics if they are served."""
    metrics = profile.metrics
    port = metrics.port + number if metrics.port and metrics.serve else metrics.port
    return profile.model_copy(update={"metrics": metrics.model_copy(update={"port": port})})


def require_nixl(profile: Profile) -> None:
    """Raise EnvironmentProblem if the engines' interpreter has no NIXL. vLLM would fail only after half a minute."""
    python = profile.engine.python or sys.executable
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('nixl') is None)"
    if run_elsewhere(python, program, variables=profile.engine.environment).code:
        raise EnvironmentProblem(f"disaggregated engines require nixl, which `{python}` does not have", hint=HINT)


def free_ports() -> Iterator[int]:
    """Yield free ports of this machine, each once."""
    seen = set()
    while True:
        port = choose_port(ENGINE_HOST, 0)
        if port not in seen:
            seen.add(port)
            yield port


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


def _engine(
    profile: Profile, connector: Mapping[str, object], devices: dict[str, str], port: int, side_channel_port: int
) -> LaunchPlan:
    """Return the plan of one engine with this connector. Engines exchange block addresses on the side channel."""
    server = profile.server.model_copy(update={"host": ENGINE_HOST})
    alone = launch_plan(profile.model_copy(update={"server": server}), connector=False, port=port)
    side_channel = {"VLLM_NIXL_SIDE_CHANNEL_HOST": ENGINE_HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port)}
    return replace(
        alone,
        argv=(*alone.argv, "--kv-transfer-config", json.dumps(connector, separators=(",", ":"))),
        environment={**devices, **STATE_LAYOUT, **alone.environment, **side_channel},
        libraries=(*alone.libraries, "nixl"),
        install=INSTALL,
    )


def _proxy(profile: Profile, port: int, *, prefill: Sequence[LaunchPlan], decode: Sequence[LaunchPlan]) -> LaunchPlan:
    host = profile.server.host
    argv = [sys.executable, "-m", "kvbm_cli.disaggregated.proxy", "--host", host, "--port", str(port)]
    argv += ["--prefill", *(engine.base_url for engine in prefill)]
    argv += ["--decode", *(engine.base_url for engine in decode)]
    return LaunchPlan(
        argv=tuple(argv),
        environment={},
        base_url=served_at(host, port),
        model=prefill[0].model,
    )
