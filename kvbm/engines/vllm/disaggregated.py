"""Launch plans of a vLLM profile with `disaggregated`.

Prefill engines get PdConnector, which combines DynamoConnector and NixlConnector. Decode engines get NixlConnector
only: their blocks come from a prefill engine, which keeps them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvbm.config.engine import VllmEngine
from kvbm.engines.disaggregated import ENGINE_HOST, Fleet, devices, with_metrics_port
from kvbm.engines.python_probe import run_elsewhere
from kvbm.engines.vllm import launch
from kvbm.engines.vllm.flags import CONNECTOR_MODULE
from kvbm.engines.vllm.versions import INSTALL as INSTALL_VLLM
from kvbm.errors import EnvironmentProblem

if TYPE_CHECKING:
    from kvbm.config.schema import Profile
    from kvbm.engines.launch_plan import LaunchPlan

INSTALL = f"{INSTALL_VLLM} nixl"
HINT = "run `pip install nixl` in that environment"
STATE_LAYOUT = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}  # NIXL requires it for models with states
# A prompt whose blocks cannot be fetched is computed by the decode engine.
DECODE_CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}


def fleet(
    profile: Profile,
    launch_plan: Callable[..., LaunchPlan],
    ports: Iterator[int],
    environment: Mapping[str, str],
    *,
    on_cpu: bool,
) -> Fleet:
    """Return how to start the engines. `launch_plan` plans one engine, as EngineKind's does; `ports` yields their
    ports, `environment` is the caller's."""
    counts = profile.disaggregated
    assert isinstance(profile.engine, VllmEngine), f"this is a plan for vLLM, not for {profile.engine.kind}"
    arguments = profile.engine.arguments
    gpus = devices(
        profile,
        counts.prefill + counts.decode,
        environment,
        ranks=(arguments.tensor_parallel_size or 1) * (arguments.pipeline_parallel_size or 1),
        on_cpu=on_cpu,
    )

    alone = profile.model_copy(update={"server": profile.server.model_copy(update={"host": ENGINE_HOST})})

    def engines(connectors: Sequence[Mapping[str, object]]) -> list[LaunchPlan]:
        return [_engine(alone, launch_plan, one, next(gpus), next(ports), next(ports)) for one in connectors]

    prefill = engines([prefill_connector(profile, number) for number in range(counts.prefill)])
    return Fleet(prefill, engines([DECODE_CONNECTOR] * counts.decode))


def prefill_connector(profile: Profile, number: int = 0) -> dict[str, object]:
    """Return the flags of PdConnector: DynamoConnector for the tiers, NixlConnector to send blocks to a decode engine.
    Each prefill engine has its own metrics port, if metrics are served."""
    profile = with_metrics_port(profile, number)
    assert isinstance(profile.engine, VllmEngine), f"this is a plan for vLLM, not for {profile.engine.kind}"
    ours = launch.transfer_config(profile, profile.engine.arguments)
    return {
        "kv_connector": "PdConnector",
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": ours["kv_load_failure_policy"],
        "kv_connector_extra_config": {
            "connectors": [ours, {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}],
        },
    }


def lacks_nixl(profile: Profile) -> EnvironmentProblem | None:
    """Return the problem if the engines' interpreter has no NIXL. vLLM would fail only after half a minute."""
    python = profile.engine.python or sys.executable
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('nixl') is None)"
    if not run_elsewhere(python, program, variables=profile.engine.environment).code:
        return None
    return EnvironmentProblem(f"disaggregated engines require nixl, which `{python}` does not have", hint=HINT)


def _engine(
    profile: Profile,
    launch_plan: Callable[..., LaunchPlan],
    connector: Mapping[str, object],
    devices: dict[str, str],
    port: int,
    side_channel_port: int,
) -> LaunchPlan:
    """Return the plan of one engine with this connector. Engines exchange block addresses on the side channel."""
    alone = launch_plan(profile, connector=False, port=port)
    side_channel = {"VLLM_NIXL_SIDE_CHANNEL_HOST": ENGINE_HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port)}
    return replace(
        alone,
        argv=(*alone.argv, "--kv-transfer-config", json.dumps(connector, separators=(",", ":"))),
        environment={**devices, **STATE_LAYOUT, **alone.environment, **side_channel},
        libraries=(*alone.libraries, "nixl"),
        install=INSTALL,
    )
