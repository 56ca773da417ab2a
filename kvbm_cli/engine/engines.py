"""Differences between the kinds of engines: launch plans, names of arguments, installed versions."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.config.engine import EmbeddedArguments, VllmArguments
from kvbm.errors import EnvironmentProblem
from kvbm.sizing.vllm import default_block_tokens
from kvbm.vllm_integration.versions import CONTRACT_TESTED, INSTALL, VllmInstallation, is_known, shown
from kvbm_cli import make_model as models
from kvbm_cli.engine.model_facts import SYNTHETIC_PREFIX
from kvbm_cli.engine.python_probe import SAFE_PATH, find_vllm

if TYPE_CHECKING:
    from kvbm.config.launch_plan import LaunchPlan
    from kvbm.config.schema import Profile


def launch_plan(profile: Profile, *, connector: bool, port: int) -> LaunchPlan:
    """Returns the launch plan of a profile's engine; without `connector`, of the same engine without block manager.

    Does not require the engine to be installed, nor `make_model` to have run.
    """
    if profile.engine.kind == "embedded":
        from kvbm.embedded import launch as embedded

        return embedded.plan(profile, connector=connector, port=port)
    from kvbm.vllm_integration import launch as vllm

    return vllm.plan(
        _with_local_model(profile),
        connector=connector,
        port=port,
        installation=vllm_of(profile),
        environment=dict(os.environ),
    )


def _with_local_model(profile: Profile) -> Profile:
    """Returns the profile with a directory in place of `synthetic:...`, served under the name in the profile."""
    model, arguments = profile.engine.model, profile.engine.arguments
    preset = _preset(profile)
    if preset is None:
        local, changed = os.path.expanduser(model) if model.startswith("~") else model, arguments
    else:
        local = str(models.directory_of(preset))
        changed = arguments.model_copy(update={"served_model_name": arguments.served_model_name or model})
    engine = profile.engine.model_copy(update={"model": local, "arguments": changed})
    return profile.model_copy(update={"engine": engine})


def _preset(profile: Profile) -> str | None:
    """Returns the name of a model to generate, None for one that exists or that the engine generates itself."""
    if profile.engine.kind == "embedded" or not profile.engine.model.startswith(SYNTHETIC_PREFIX):
        return None
    return profile.engine.model.removeprefix(SYNTHETIC_PREFIX)


def make_model(profile: Profile, *, say: Callable[[str], None] = lambda text: None) -> None:
    """Generates a synthetic model for vLLM in the user's cache if it is missing. This takes several seconds.

    Raises EnvironmentProblem if neither this interpreter nor the engine's can generate it.
    """
    preset = _preset(profile)
    if preset is None or models.directory_of(preset).is_dir():
        return
    say(f"generating {profile.engine.model} in {models.directory_of(preset)} (once)")
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        models.materialise(preset)
    else:
        _make_elsewhere(preset, models.directory_of(preset), profile.engine.python or sys.executable)


def how_to_make_model(profile: Profile) -> list[str] | None:
    """Returns the command line that does what `make_model` would do, None if the model exists."""
    preset = _preset(profile)
    if preset is None or models.directory_of(preset).is_dir():
        return None
    return [sys.executable, "-P", "-m", "kvbm_cli.make_model", preset, str(models.directory_of(preset))]


def _make_elsewhere(preset: str, directory: Path, python: str) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    program = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [python, "-c", program, models.__file__, preset, str(directory)]
    environment = {**os.environ, **SAFE_PATH}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise EnvironmentProblem(
            f"`{python}` cannot generate the model `{preset}`: {last}", hint="check `engine.python`"
        )


def versions(profile: Profile) -> dict[str, str]:
    """Returns the versions of the packages of a run, without importing them."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"kvbm": version("kvbm-cli"), "python": platform.python_version()}
    if profile.engine.kind == "vllm":
        installation = vllm_of(profile)
        return {**found, **({installation.distribution: installation.version} if installation is not None else {})}
    for name in ("torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def vllm_of(profile: Profile) -> VllmInstallation | None:
    """Returns vLLM in the interpreter of the profile's engine, None if it or the interpreter is missing."""
    try:
        return find_vllm(profile.engine.python or sys.executable)
    except EnvironmentProblem:
        return None


def require_known_vllm(profile: Profile) -> None:
    """Raises EnvironmentProblem if it is unknown whether the profile's interpreter has vLLM: its command depends on
    that."""
    if profile.engine.kind == "vllm":
        find_vllm(profile.engine.python or sys.executable)


def vllm_problem(profile: Profile, *, has_cache: bool = True) -> EnvironmentProblem | None:
    """Returns why vLLM in the profile's interpreter is not usable, with the cache or without, or not tested."""
    python = profile.engine.python or sys.executable
    try:
        found = find_vllm(python)
    except EnvironmentProblem as error:
        return error
    if found is None:
        hint = f"run `{python} -m {INSTALL}`, or set `engine.python` to an interpreter that has vLLM"
        return EnvironmentProblem(f"`{python}` has no vLLM", hint=hint)
    if not has_cache:
        return None
    if found.rival is not None:
        hint = f"run `{python} -m pip uninstall kvbm`, then reinstall kvbm-cli there with `--force-reinstall --no-deps`"
        return EnvironmentProblem(
            f"`{python}` has NVIDIA's kvbm {found.rival}, which replaces the modules of kvbm-cli", hint=hint
        )
    if not found.has_kvbm:
        hint = f"vLLM loads the connector from there: run `{python} -m pip install` with the path of this checkout"
        return EnvironmentProblem(f"`{python}` has vLLM {found.version}, but not kvbm-cli", hint=hint)
    if not is_known(found.version):
        message = f"`{python}` has vLLM {found.version}; kvbm is tested with {shown(CONTRACT_TESTED)}"
        return EnvironmentProblem(message, hint="start it anyway with `kvbm serve --force`")
    return None


def has_prefix_caching(profile: Profile) -> bool:
    """Whether the engine reuses blocks of earlier prompts in G1."""
    arguments = profile.engine.arguments
    if isinstance(arguments, EmbeddedArguments):
        return arguments.prefix_caching
    return arguments.enable_prefix_caching is not False


def block_tokens(profile: Profile) -> int:
    """Returns the tokens per block. vLLM's default depends on the platform of its build."""
    arguments = profile.engine.arguments
    if isinstance(arguments, EmbeddedArguments):
        return arguments.block_size
    return default_block_tokens(arguments, on_cpu=runs_on_cpu(profile))


def knows_block_tokens(profile: Profile) -> bool:
    """Whether `block_tokens` is certain. It is a guess if vLLM is not installed."""
    return profile.engine.arguments.block_size is not None or vllm_of(profile) is not None


def runs_on_cpu(profile: Profile) -> bool:
    """Whether vLLM in the profile's interpreter is a CPU build; if it is missing, whether the variables indicate it."""
    installation = vllm_of(profile)
    if installation is not None:
        return installation.is_cpu
    return "VLLM_CPU_KVCACHE_SPACE" in {**os.environ, **profile.engine.environment}


def copy_count(profile: Profile) -> int:
    """Returns how many engines with their own tiers the profile starts."""
    arguments = profile.engine.arguments
    copies = (arguments.data_parallel_size or 1) if isinstance(arguments, VllmArguments) else 1
    return copies * max(profile.disaggregated.prefill, 1)


def with_device_blocks(profile: Profile, block_count: int) -> Profile:
    """Returns the profile with prefix caching enabled and at least `block_count` blocks in G1."""
    arguments = profile.engine.arguments
    changed: dict[str, object]
    if isinstance(arguments, EmbeddedArguments):
        changed = {"num_blocks": max(block_count, arguments.num_blocks), "prefix_caching": True}
    else:
        given = arguments.num_gpu_blocks_override or 0
        changed = {"num_gpu_blocks_override": max(block_count + 1, given), "enable_prefix_caching": True}
    roomy = arguments.model_copy(update=changed)
    return profile.model_copy(update={"engine": profile.engine.model_copy(update={"arguments": roomy})})
