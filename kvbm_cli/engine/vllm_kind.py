"""vLLM, for the commands: its launch plan with a local model, its installation, and its defaults."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvbm.config.engine import VllmArguments
from kvbm.config.installation import shown
from kvbm.engines.vllm.versions import CONTRACT_TESTED, INSTALL, INSTALL_FOR_CPU, VllmInstallation, is_known
from kvbm.errors import EnvironmentProblem
from kvbm.sizing.vllm import default_block_tokens
from kvbm_cli.engine.engine_kind import ServerTraits, installation_problem, python_of, with_arguments
from kvbm_cli.engine.python_probe import find_vllm
from kvbm_cli.engine.synthetic_directory import with_local_model

if TYPE_CHECKING:
    from kvbm.config.launch_plan import LaunchPlan
    from kvbm.config.schema import Profile

LOOKAHEAD = (
    "with an EAGLE or MTP drafter, vLLM from 0.33 on finds the last block of a hit in G1 only without a connector "
    "(`num_hash_lookahead_tokens`): per hit, one block less comes from G1 with kvbm than with the baseline, and kvbm "
    "loads it"
)


class VllmKind:
    """See EngineKind."""

    traits = ServerTraits("vLLM", variables={"VLLM_SERVER_DEV_MODE": "1"})  # which can reset

    def launch_plan(self, profile: Profile, *, connector: bool, port: int) -> LaunchPlan:
        """Do not require `make_model` to have run either."""
        from kvbm.engines.vllm import launch

        return launch.plan(
            with_local_model(profile),
            connector=connector,
            port=port,
            installation=vllm_of(profile),
            environment=dict(os.environ),
        )

    def installed(self, profile: Profile) -> VllmInstallation | None:
        return find_vllm(python_of(profile))

    def problem(self, profile: Profile, *, has_cache: bool) -> EnvironmentProblem | None:
        python = python_of(profile)
        try:
            found = find_vllm(python)
        except EnvironmentProblem as error:
            return error
        if found is None:
            install = INSTALL_FOR_CPU if self.runs_on_cpu(profile) else INSTALL
            hint = f"run `{python} -m {install}`, or set `engine.python` to an interpreter that has vLLM"
            return EnvironmentProblem(f"`{python}` has no vLLM", hint=hint)
        if not has_cache:
            return None
        return installation_problem(
            python, "vLLM", found, is_known=is_known(found.version), tested=shown(CONTRACT_TESTED)
        )

    def block_tokens(self, profile: Profile) -> int:
        """vLLM's default depends on the platform of its build."""
        return default_block_tokens(_arguments(profile), on_cpu=self.runs_on_cpu(profile))

    def knows_block_tokens(self, profile: Profile) -> bool:
        """Return whether the block size is certain. It is a guess if vLLM is not installed."""
        return _arguments(profile).block_size is not None or vllm_of(profile) is not None

    def has_prefix_caching(self, profile: Profile) -> bool:
        return _arguments(profile).enable_prefix_caching is not False

    def runs_on_cpu(self, profile: Profile) -> bool:
        """Whether it is a CPU build; if vLLM is missing, whether the variables indicate it."""
        installation = vllm_of(profile)
        if installation is not None:
            return installation.is_cpu
        return "VLLM_CPU_KVCACHE_SPACE" in {**os.environ, **profile.engine.environment}

    def with_device_blocks(self, profile: Profile, block_count: int) -> Profile:
        blocks = max(block_count + 1, _arguments(profile).num_gpu_blocks_override or 0)
        return with_arguments(profile, num_gpu_blocks_override=blocks, enable_prefix_caching=True)

    def caveats(self, profile: Profile) -> list[str]:
        found = ["vLLM computes on a CPU: the speed-up on a GPU is different"] if self.runs_on_cpu(profile) else []
        installation, speculates = vllm_of(profile), "speculative_config" in (_arguments(profile).model_extra or {})
        if speculates and installation is not None and installation.hashes_lookahead:
            found.append(LOOKAHEAD)
        return found


def vllm_of(profile: Profile) -> VllmInstallation | None:
    """Return vLLM in the interpreter of the profile's engine, None if it or the interpreter is missing."""
    try:
        return find_vllm(python_of(profile))
    except EnvironmentProblem:
        return None


def _arguments(profile: Profile) -> VllmArguments:
    assert isinstance(profile.engine.arguments, VllmArguments)
    return profile.engine.arguments
