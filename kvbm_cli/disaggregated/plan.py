"""Launch plans of a profile with `disaggregated`: one for each engine, and one for what stands in front of them, on
`server.host`: the engine's own server, or kvbm's proxy."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.engines.disaggregated import ENGINE_HOST, Fleet
from kvbm.engines.launch_plan import LaunchPlan, served_at
from kvbm.engines.table import kind_of
from kvbm_cli.engine.process import choose_port

if TYPE_CHECKING:
    from kvbm.config.schema import Profile


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
    """Return how to start the engines of `profile` and, on `port`, what clients connect to.

    `ports` yields the ports of the engines, `environment` is the caller's.
    """
    assert profile.disaggregated.is_enabled, "the profile has one engine"
    kind = kind_of(profile)
    fleet = kind.fleet(profile, ports if ports is not None else free_ports(), environment)
    front = kind.front(profile, fleet, port) or _proxy(profile, fleet, port)
    prefill = ((f"prefill {number}", engine) for number, engine in enumerate(fleet.prefill))
    decode = ((f"decode {number}", engine) for number, engine in enumerate(fleet.decode))
    return DisaggregatedPlan((*prefill, *decode), front)


def free_ports() -> Iterator[int]:
    """Yield free ports of this machine, each once."""
    seen = set()
    while True:
        port = choose_port(ENGINE_HOST, 0)
        if port not in seen:
            seen.add(port)
            yield port


def _proxy(profile: Profile, fleet: Fleet, port: int) -> LaunchPlan:
    host = profile.server.host
    argv = [sys.executable, "-m", "kvbm_cli.disaggregated.proxy", "--host", host, "--port", str(port)]
    argv += ["--prefill", *(engine.base_url for engine in fleet.prefill)]
    argv += ["--decode", *(engine.base_url for engine in fleet.decode)]
    return LaunchPlan(
        argv=tuple(argv),
        environment={},
        base_url=served_at(host, port),
        model=fleet.prefill[0].model,
    )
