"""Starts the engine of each arm as a process of its profile."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from kvbm.config.launch_plan import LaunchPlan
from kvbm.config.schema import Profile
from kvbm.errors import EnvironmentProblem
from kvbm.host.directories import make_private_directories
from kvbm_cli.bench.comparison import AGAINST_BASELINE, Comparison
from kvbm_cli.bench.experiment import RunningEngine
from kvbm_cli.bench.output_directory import OutputDirectory
from kvbm_cli.engine.engines import block_tokens, launch_plan, with_device_blocks
from kvbm_cli.engine.process import EngineProcess, choose_port
from kvbm_cli.profile.workload import Workload

HEADROOM = 1.25
LOOPBACK = "127.0.0.1"


class ProfileEngines:
    """Starts the engine of an arm on a free port and stops it when the arm ends."""

    def __init__(
        self,
        profile: Profile,
        workload: Workload,
        directory: OutputDirectory,
        *,
        comparison: Comparison = AGAINST_BASELINE,
        reference: Profile | None = None,
    ) -> None:
        """`reference` is the profile that `profile` is compared with; `None` for the baseline."""
        compared = profile if reference is None else with_free_metrics_port(reference)
        self._profiles = {comparison.measured: profile, comparison.reference: compared}
        self._roomy_profile = with_room(profile, workload)
        self._arms_with_kvbm = comparison.arms_with_kvbm
        self._directory = directory

    @contextmanager
    def __call__(self, arm: str) -> Iterator[RunningEngine]:
        profile, has_kvbm = on_loopback(self._profiles.get(arm, self._roomy_profile)), arm in self._arms_with_kvbm
        port = choose_port(profile.server.host, 0)
        with fresh_disk(profile) if has_kvbm else nullcontext(profile) as profile:
            directory = self._directory.arm(arm)
            plan = with_reset(launch_plan(profile, connector=has_kvbm, port=port), profile).placed(directory)
            with EngineProcess.start(plan, log_path=directory / "engine.log") as process:
                process.wait_healthy(profile.transfer.init_timeout_s)
                yield RunningEngine(
                    plan.base_url,
                    plan.model,
                    process.elapsed_s,
                    lambda: process.poll() is not None,
                    process.admin_token,
                )


@contextmanager
def fresh_disk(profile: Profile) -> Iterator[Profile]:
    """The same profile with an empty disk tier: a new directory inside the profile's own, removed afterwards."""
    disk = profile.tiers.disk
    if disk is None:
        yield profile
        return
    parent = Path(disk.directory).expanduser()
    try:
        make_private_directories(parent)
        holder = tempfile.TemporaryDirectory(prefix="bench-", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot create a directory for this run in {parent}: {error.strerror or error}",
            hint="set `tiers.disk.directory`",
        ) from error
    with holder as directory:
        fresh = disk.model_copy(update={"directory": directory, "drain_s": 0.0})
        yield profile.model_copy(update={"tiers": profile.tiers.model_copy(update={"disk": fresh})})


def with_free_metrics_port(profile: Profile) -> Profile:
    """The same profile with any free port for its metrics: both arms of two profiles may run at the same time."""
    return profile.model_copy(update={"metrics": profile.metrics.model_copy(update={"port": 0})})


def on_loopback(profile: Profile) -> Profile:
    """The same profile on a loopback address: only this command uses the engine, which may have debug endpoints."""
    server = profile.server.model_copy(update={"host": LOOPBACK})
    return profile.model_copy(update={"server": server})


def with_reset(plan: LaunchPlan, profile: Profile) -> LaunchPlan:
    """The same plan with the endpoint that resets the prefix cache, which vLLM has only in its development mode."""
    if profile.engine.kind != "vllm":
        return plan
    return replace(plan, environment={**plan.environment, "VLLM_SERVER_DEV_MODE": "1"})


def with_room(profile: Profile, workload: Workload) -> Profile:
    """The same profile with its prefix cache on and a G1 that holds the whole workload without eviction."""
    needed = math.ceil(HEADROOM * workload.working_set_tokens / block_tokens(profile)) + workload.users
    return with_device_blocks(profile, needed)
