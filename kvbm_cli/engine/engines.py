"""Engines of profiles: one table of their kinds, and what the commands do with every kind."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.child.run import last_line
from kvbm.config.engine import SglangArguments, VllmArguments
from kvbm.config.installation import release_of
from kvbm.errors import EnvironmentProblem
from kvbm.identity.machine import cpu_flags
from kvbm.sizing import Cpu
from kvbm_cli import make_model as models
from kvbm_cli.engine.embedded_kind import EmbeddedKind
from kvbm_cli.engine.python_probe import run_elsewhere
from kvbm_cli.engine.sglang_kind import SglangKind
from kvbm_cli.engine.synthetic_directory import preset_of
from kvbm_cli.engine.trtllm_kind import TrtllmKind
from kvbm_cli.engine.vllm_kind import VllmKind

if TYPE_CHECKING:
    from kvbm.config.installation import Installation
    from kvbm.config.launch_plan import LaunchPlan
    from kvbm.config.schema import Profile
    from kvbm_cli.engine.engine_kind import EngineKind, ServerTraits

KINDS: Mapping[str, EngineKind] = {
    "embedded": EmbeddedKind(),
    "vllm": VllmKind(),
    "tensorrt-llm": TrtllmKind(),
    "sglang": SglangKind(),
}


def kind_of(profile: Profile) -> EngineKind:
    return KINDS[profile.engine.kind]


def traits_of(profile: Profile) -> ServerTraits:
    return kind_of(profile).traits


def launch_plan(profile: Profile, *, connector: bool, port: int) -> LaunchPlan:
    """Return the launch plan of a profile's engine; without `connector`, of the same engine without block manager.

    Does not require the engine to be installed, nor `make_model` to have run.
    """
    return kind_of(profile).launch_plan(profile, connector=connector, port=port)


def require_known_engine(profile: Profile) -> None:
    """Raise EnvironmentProblem if it is unknown whether the profile's interpreter has the engine: its command depends
    on that."""
    kind_of(profile).installed(profile)


def engine_problem(profile: Profile, *, has_cache: bool = True) -> EnvironmentProblem | None:
    """Return why the engine in the profile's interpreter is not usable, with the cache or without, or not tested."""
    return kind_of(profile).problem(profile, has_cache=has_cache)


def installation_of(profile: Profile) -> Installation | None:
    """Return the engine in the profile's interpreter, None if it or the interpreter is missing."""
    try:
        return kind_of(profile).installed(profile)
    except EnvironmentProblem:
        return None


def engine_version(profile: Profile) -> dict[str, str]:
    """Return the engine's distribution and version in the profile's interpreter, which may differ from this one."""
    found = installation_of(profile)
    return {} if found is None else {found.distribution: found.version}


def versions(profile: Profile) -> dict[str, str]:
    """Return the versions of the packages of a run, without importing them."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"kvbm": version("kvbm-cli"), "python": platform.python_version()}
    if profile.engine.kind != "embedded":
        return {**found, **engine_version(profile)}
    for name in ("torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def has_prefix_caching(profile: Profile) -> bool:
    """Whether the engine reuses blocks of earlier prompts in G1."""
    return kind_of(profile).has_prefix_caching(profile)


def block_tokens(profile: Profile) -> int:
    """Return the tokens per block."""
    return kind_of(profile).block_tokens(profile)


def knows_block_tokens(profile: Profile) -> bool:
    """Whether `block_tokens` is certain."""
    return kind_of(profile).knows_block_tokens(profile)


def runs_on_cpu(profile: Profile) -> bool:
    """Whether the engine computes on a CPU, as far as that decides the size of its cache."""
    return kind_of(profile).runs_on_cpu(profile)


def cpu_of(profile: Profile) -> Cpu:
    """Return this machine's CPU with the profile's vLLM, for engines that run on it."""
    found = installation_of(profile)
    return Cpu(cpu_flags(), None if found is None else release_of(found.version))


def copy_count(profile: Profile) -> int:
    """Return how many engines with their own tiers the profile starts."""
    arguments = profile.engine.arguments
    copies = 1
    if isinstance(arguments, VllmArguments):
        copies = arguments.data_parallel_size or 1
    elif isinstance(arguments, SglangArguments):
        copies = arguments.dp_size or 1
    return copies * max(profile.disaggregated.prefill, 1)


def metrics_count(profile: Profile) -> int:
    """Return how many processes of the profile serve metrics of kvbm: with SGLang, every rank does."""
    arguments = profile.engine.arguments
    ranks = (arguments.tp_size or 1) * (arguments.pp_size or 1) if isinstance(arguments, SglangArguments) else 1
    return ranks * copy_count(profile)


def with_device_blocks(profile: Profile, block_count: int) -> Profile:
    """Return the profile with prefix caching enabled and at least `block_count` blocks in G1."""
    return kind_of(profile).with_device_blocks(profile, block_count)


def caveats(profile: Profile) -> list[str]:
    """Return what a measurement of the profile's engine does not show."""
    return kind_of(profile).caveats(profile)


def make_model(profile: Profile, *, say: Callable[[str], None] = lambda text: None) -> None:
    """Generate a synthetic model in the user's cache if it is missing. This takes several seconds.

    Raises EnvironmentProblem if neither this interpreter nor the engine's can generate it.
    """
    preset = preset_of(profile)
    if preset is None or models.directory_of(preset).is_dir():
        return
    say(f"generating {profile.engine.model} in {models.directory_of(preset)} (once)")
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        models.materialise(preset)
    else:
        _make_elsewhere(preset, models.directory_of(preset), profile.engine.python or sys.executable)


def how_to_make_model(profile: Profile) -> list[str] | None:
    """Return the command line that does what `make_model` would do, None if the model exists."""
    preset = preset_of(profile)
    if preset is None or models.directory_of(preset).is_dir():
        return None
    return [sys.executable, "-P", "-m", "kvbm_cli.make_model", preset, str(models.directory_of(preset))]


def _make_elsewhere(preset: str, directory: Path, python: str) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    program = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = run_elsewhere(python, program, models.__file__, preset, str(directory))
    if done.code:
        last = last_line(done.err, f"exit code {done.code}")
        raise EnvironmentProblem(
            f"`{python}` cannot generate the model `{preset}`: {last}", hint="check `engine.python`"
        )
