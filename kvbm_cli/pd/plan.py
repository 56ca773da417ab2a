"""What it takes to serve a profile with `disaggregated`: a command line for each engine and one for the proxy.

Engines that prefill get PdConnector, which is DynamoConnector and NixlConnector together; engines that decode get
NixlConnector alone, because what they hold came from an engine that keeps it. All engines listen on this machine only,
the proxy where the profile says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvbm.config.engine import VllmEngine
from kvbm.config.flags import CONNECTOR_MODULE
from kvbm.config.launch_plan import LaunchPlan, reachable
from kvbm_cli.engines import launch_plan
from kvbm_cli.process import choose_port

if TYPE_CHECKING:
    from kvbm.config.schema import Profile

ENGINE_HOST = "127.0.0.1"
INSTALL = "pip install vllm nixl"


@dataclass(frozen=True, slots=True)
class DisaggregatedPlan:
    """`engines` have names such as `prefill 0`; `proxy` is where clients ask."""

    engines: tuple[tuple[str, LaunchPlan], ...]
    proxy: LaunchPlan


def plan(profile: Profile, *, port: int, ports: Iterator[int] | None = None) -> DisaggregatedPlan:
    """How to start the engines of `profile` and, on `port`, their proxy. `ports` are those that the engines take."""
    assert profile.disaggregated.is_wanted, "a plan of several engines for a profile of one"
    ports = ports if ports is not None else free_ports()
    make: tuple[tuple[str, int, Callable[[Profile], dict[str, object]]], ...] = (
        ("prefill", profile.disaggregated.prefill, prefill_connector),
        ("decode", profile.disaggregated.decode, decode_connector),
    )
    engines = {
        f"{kind} {number}": _engine(profile, connector(profile), next(ports), next(ports))
        for kind, count, connector in make
        for number in range(count)
    }
    return DisaggregatedPlan(tuple(engines.items()), _proxy(profile, port, engines))


def prefill_connector(profile: Profile) -> dict[str, object]:
    """PdConnector: ours, which has the host tier, and NIXL, which hands blocks to an engine that decodes."""
    from kvbm.vllm_integration.launch import transfer_config

    assert isinstance(profile.engine, VllmEngine), "only vLLM can prefill apart"
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


def decode_connector(profile: Profile) -> dict[str, object]:
    """NIXL alone. A prompt whose blocks cannot be fetched is computed where it is decoded."""
    return {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}


def free_ports() -> Iterator[int]:
    """Ports of this machine on which nobody listens, each once."""
    seen = set()
    while True:
        port = choose_port(ENGINE_HOST, 0)
        if port not in seen:
            seen.add(port)
            yield port


def _engine(profile: Profile, connector: dict[str, object], port: int, side_channel_port: int) -> LaunchPlan:
    """A plan without connector, to which this one is added; engines exchange their blocks' addresses on the other."""
    server = profile.server.model_copy(update={"host": ENGINE_HOST})
    alone = launch_plan(profile.model_copy(update={"server": server}), connector=False, port=port)
    side_channel = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": ENGINE_HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
    }
    return replace(
        alone,
        argv=(*alone.argv, "--kv-transfer-config", json.dumps(connector, separators=(",", ":"))),
        environment={**alone.environment, **side_channel},
        libraries=(*alone.libraries, "nixl"),
        install=INSTALL,
    )


def _proxy(profile: Profile, port: int, engines: dict[str, LaunchPlan]) -> LaunchPlan:
    host = profile.server.host
    base_url = f"http://{reachable(host)}:{port}"
    urls = {kind: [plan.base_url for name, plan in engines.items() if name.startswith(kind)] for kind in _KINDS}
    addresses = [word for kind in _KINDS for word in (f"--{kind}", *urls[kind])]
    return LaunchPlan(
        argv=(sys.executable, "-m", "kvbm_cli.pd.proxy", "--host", host, "--port", str(port), *addresses),
        environment={},
        base_url=base_url,
        health_url=f"{base_url}/health",
        model=next(iter(engines.values())).model,
    )


_KINDS = ("prefill", "decode")
