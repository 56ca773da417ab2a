"""What differs between the kinds of engines for the command: how one is launched, and what its arguments are called."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.errors import EnvironmentProblem
from kvbm_cli.engine.model_facts import SYNTHETIC_PREFIX

if TYPE_CHECKING:
    from kvbm.config.launch_plan import LaunchPlan
    from kvbm.config.schema import Profile
    from kvbm.vllm_integration.versions import VllmInstallation


def launch_plan(profile: Profile, *, connector: bool, port: int) -> LaunchPlan:
    """How to start the engine of `profile`; without `connector`, the same engine and no block manager.

    The plan is right whether or not the engine's interpreter holds what it needs, and before `make_model`.
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
    """The same profile with a directory in the place of `synthetic:...`, served under the name that the profile has."""
    model, arguments = profile.engine.model, profile.engine.arguments
    preset = _preset(profile)
    if preset is None:
        local, changed = os.path.expanduser(model) if model.startswith("~") else model, arguments
    else:
        from kvbm_cli.make_model import directory_of

        local = str(directory_of(preset))
        changed = arguments.model_copy(update={"served_model_name": arguments.served_model_name or model})
    engine = profile.engine.model_copy(update={"model": local, "arguments": changed})
    return profile.model_copy(update={"engine": engine})


def _preset(profile: Profile) -> str | None:
    """The name of a model that has to be made, None for one that exists or that the engine makes itself."""
    if profile.engine.kind == "embedded" or not profile.engine.model.startswith(SYNTHETIC_PREFIX):
        return None
    return profile.engine.model.removeprefix(SYNTHETIC_PREFIX)


def make_model(profile: Profile, *, say: Callable[[str], None] = lambda text: None) -> None:
    """Makes a synthetic model of vLLM in the user's cache if it is not there yet, which takes some seconds.

    EnvironmentProblem if neither this interpreter nor the engine's can make it.
    """
    from kvbm_cli.make_model import directory_of, materialise

    preset = _preset(profile)
    if preset is None or directory_of(preset).is_dir():
        return
    say(f"making {profile.engine.model} in {directory_of(preset)}, once")
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        materialise(preset)
    else:
        _make_elsewhere(preset, directory_of(preset), profile.engine.python or sys.executable)


def how_to_make_model(profile: Profile) -> list[str] | None:
    """The command that makes a model which `make_model` would make, None where there is nothing to make."""
    from kvbm_cli.make_model import directory_of

    preset = _preset(profile)
    if preset is None or directory_of(preset).is_dir():
        return None
    return [sys.executable, "-m", "kvbm_cli.make_model", preset, str(directory_of(preset))]


def _make_elsewhere(preset: str, directory: Path, python: str) -> None:
    from kvbm_cli import make_model as module

    directory.parent.mkdir(parents=True, exist_ok=True)
    program = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [python, "-c", program, str(module.__file__), preset, str(directory)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise EnvironmentProblem(f"`{python}` cannot make the model {preset}: {last}", hint="check `engine.python`")


def versions(profile: Profile) -> dict[str, str]:
    """What a run is made of, as far as this interpreter can tell without importing it."""
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
    """vLLM in the interpreter of the profile's engine, None if there is none or no such interpreter."""
    from kvbm_cli.engine.python_probe import find_vllm

    try:
        return find_vllm(profile.engine.python or sys.executable)
    except EnvironmentProblem:
        return None


def vllm_problem(profile: Profile) -> EnvironmentProblem | None:
    """Why vLLM of the profile's interpreter cannot be relied on, None if it can."""
    from kvbm.vllm_integration.versions import CONTRACT_TESTED, INSTALL, is_known, shown
    from kvbm_cli.engine.python_probe import find_vllm

    python = profile.engine.python or sys.executable
    try:
        found = find_vllm(python)
    except EnvironmentProblem as error:
        return error
    if found is None:
        hint = f"`{python} -m {INSTALL}`, or set `engine.python` to an interpreter that has it"
        return EnvironmentProblem(f"`{python}` has no vLLM", hint=hint)
    if found.rival is not None:
        hint = (
            f"`{python} -m pip uninstall kvbm`, then install kvbm-cli there again, with `--force-reinstall --no-deps`"
        )
        return EnvironmentProblem(f"`{python}` has NVIDIA's kvbm {found.rival}, whose modules hide ours", hint=hint)
    if not found.has_kvbm:
        hint = f"`{python} -m pip install` with the path of this checkout; vLLM loads the connector from there"
        return EnvironmentProblem(f"`{python}` has vLLM {found.version}, but not this kvbm", hint=hint)
    if not is_known(found.version):
        message = f"`{python}` has vLLM {found.version}; kvbm is tested with {shown(CONTRACT_TESTED)}"
        return EnvironmentProblem(message, hint="`kvbm serve --force` goes on all the same")
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
    from kvbm.config.engine import EmbeddedArguments
    from kvbm.sizing.vllm import block_tokens as block_tokens_of_vllm

    arguments = profile.engine.arguments
    if isinstance(arguments, EmbeddedArguments):
        return arguments.block_size
    return block_tokens_of_vllm(arguments, on_cpu=runs_on_cpu(profile))


def knows_block_tokens(profile: Profile) -> bool:
    """Whether `block_tokens` is more than a guess about a vLLM that is not there."""
    return profile.engine.arguments.block_size is not None or vllm_of(profile) is not None


def runs_on_cpu(profile: Profile) -> bool:
    """Whether vLLM in the profile's interpreter is a build for CPUs; without one, whether its variables say so."""
    installation = vllm_of(profile)
    if installation is not None:
        return installation.is_cpu
    return "VLLM_CPU_KVCACHE_SPACE" in {**os.environ, **profile.engine.environment}


def copy_count(profile: Profile) -> int:
    """How many engines, each with tiers of its own, the profile's command line starts."""
    from kvbm.config.engine import VllmArguments

    arguments = profile.engine.arguments
    copies = (arguments.data_parallel_size or 1) if isinstance(arguments, VllmArguments) else 1
    return copies * max(profile.disaggregated.prefill, 1)


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
