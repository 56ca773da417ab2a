"""What differs between the kinds of engines for the command: how one is launched, and what its arguments are called."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from kvbm.errors import EnvironmentProblem

if TYPE_CHECKING:
    from kvbm.config.launch_plan import LaunchPlan
    from kvbm.config.schema import Profile
    from kvbm.vllm_integration.versions import VllmInstallation


def launch_plan(profile: Profile, *, connector: bool, port: int) -> LaunchPlan:
    """How to start the engine of `profile`; without `connector`, the same engine and no block manager."""
    if profile.engine.kind == "embedded":
        from kvbm.embedded import launch as embedded

        return embedded.plan(profile, connector=connector, port=port)
    from kvbm.vllm_integration import launch as vllm

    return vllm.plan(
        profile, connector=connector, port=port, installation=vllm_of(profile), environment=dict(os.environ)
    )


def vllm_of(profile: Profile) -> VllmInstallation | None:
    """vLLM in the interpreter of the profile's engine, None if there is none or no such interpreter."""
    from kvbm_cli.interpreter import find_vllm

    try:
        return find_vllm(profile.engine.python or sys.executable)
    except EnvironmentProblem:
        return None


def has_prefix_caching(profile: Profile) -> bool:
    """Whether the engine itself finds prompts again that are still in G1."""
    from kvbm.config.engine import EmbeddedArguments

    arguments = profile.engine.arguments
    if isinstance(arguments, EmbeddedArguments):
        return arguments.prefix_caching
    return arguments.enable_prefix_caching is not False


def block_tokens(profile: Profile) -> int:
    """Tokens in a block of the engine; vLLM's own choice depends on the platform that it was built for."""
    if profile.engine.arguments.block_size is not None:
        return profile.engine.arguments.block_size
    from kvbm.sizing import CPU_BLOCK_TOKENS, GPU_BLOCK_TOKENS

    return CPU_BLOCK_TOKENS if runs_on_cpu(profile) else GPU_BLOCK_TOKENS


def runs_on_cpu(profile: Profile) -> bool:
    """Whether vLLM in the profile's interpreter is a build for CPUs; without one, whether its variables say so."""
    installation = vllm_of(profile)
    if installation is not None:
        return installation.is_cpu
    return "VLLM_CPU_KVCACHE_SPACE" in {**os.environ, **profile.engine.environment}


def with_device_blocks(profile: Profile, block_count: int) -> Profile:
    """The same engine with its prefix cache on and room for at least `block_count` blocks in G1."""
    from kvbm.config.engine import EmbeddedArguments

    arguments = profile.engine.arguments
    changed: dict[str, object]
    if isinstance(arguments, EmbeddedArguments):
        changed = {"num_blocks": max(block_count, arguments.num_blocks), "prefix_caching": True}
    else:
        given = arguments.num_gpu_blocks_override or 0
        changed = {"num_gpu_blocks_override": max(block_count + 1, given), "enable_prefix_caching": True}
    roomy = arguments.model_copy(update=changed)
    return profile.model_copy(update={"engine": profile.engine.model_copy(update={"arguments": roomy})})
