"""Engines of profiles: one table of their kinds, and what the commands do with every kind.

Another engine has a folder next to this file, a row in KINDS, and its section of a profile in `config/engine.py`.
In `kvbm_cli`, `profile/flags.yaml` has the flags of its command line, and `bench/arms.py` the arguments for a GPU.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.child.run import last_line
from kvbm.config import load as loading
from kvbm.engines import make_model as models
from kvbm.engines.embedded.kind import EmbeddedKind
from kvbm.engines.engine_kind import Place
from kvbm.engines.installation import release_of
from kvbm.engines.python_probe import run_elsewhere
from kvbm.engines.sglang.kind import SglangKind
from kvbm.engines.synthetic_directory import preset_of
from kvbm.engines.trtllm.kind import TrtllmKind
from kvbm.engines.vllm.kind import VllmKind
from kvbm.errors import EnvironmentProblem
from kvbm.identity.machine import cpu_flags, version_of
from kvbm.sizing.tiers import Sizing, sizing_of
from kvbm.sizing.wanted import Cpu, Wanted

if TYPE_CHECKING:
    from kvbm.config.schema import Profile
    from kvbm.engines.engine_kind import EngineKind
    from kvbm.engines.installation import Installation

KINDS: Mapping[str, EngineKind] = {
    "embedded": EmbeddedKind(),
    "tensorrt-llm": TrtllmKind(),  # whose files may have keys of vLLM, too: its `signs` are looked for first
    "vllm": VllmKind(),
    "sglang": SglangKind(),
}


AS_WRITTEN = Wanted()
load = partial(loading.load, refused=KINDS)
examine = partial(loading.examine, refused=KINDS)
examine_written = partial(loading.examine_written, refused=KINDS)


def kind_of(profile: Profile) -> EngineKind:
    return KINDS[profile.engine.kind]


def installation_of(profile: Profile) -> Installation | None:
    """Return the engine in the profile's interpreter, None if it or the interpreter is missing."""
    return kind_of(profile).found(profile)


def engine_version(profile: Profile) -> dict[str, str]:
    """Return the engine's distribution and version in the profile's interpreter, which may differ from this one."""
    found = installation_of(profile)
    return {} if found is None else {found.distribution: found.version}


def versions(profile: Profile) -> dict[str, str]:
    """Return the versions of the packages of a run, without importing them."""
    import platform

    found = engine_version(profile)
    if profile.engine.kind == "embedded":
        found = {name: version for name in ("torch", "transformers") if (version := version_of(name))}
    return {"kvbm": version_of("kvbm-cli"), "python": platform.python_version(), **found}


def cpu_of(profile: Profile) -> Cpu:
    """Return this machine's CPU with the profile's engine, for engines that run on it."""
    found = installation_of(profile)
    return Cpu(cpu_flags(), None if found is None else release_of(found.version))


def copy_count(profile: Profile) -> int:
    """Return how many engines with their own tiers the profile starts."""
    return kind_of(profile).copies(profile) * max(profile.disaggregated.prefill, 1)


def metrics_count(profile: Profile) -> int:
    """Return how many processes of the profile serve metrics of kvbm."""
    return kind_of(profile).serving_ranks(profile) * copy_count(profile)


def size(
    profile: Profile,
    model_config: Mapping[str, object],
    *,
    environment: Mapping[str, str] | None = None,
    on_cpu: bool = False,
    wanted: Wanted = AS_WRITTEN,
) -> Sizing:
    """Compute the sizes of the tiers of one engine.

    `environment` has the variables that the engine gets besides those of the profile; `on_cpu` is true for a CPU build.
    ProfileError if a tier holds no block or the model's configuration lacks a fact; SizeUnknown if only the engine
    knows the layout of the model's cache.
    """
    device = kind_of(profile).device(profile, model_config, Place(environment or {}, on_cpu), wanted)
    return sizing_of(device, profile.tiers, keeps_host_memory=profile.engine.keeps_host_memory)


def make_model(profile: Profile, *, say: Callable[[str], None] = lambda text: None) -> None:
    """Generate a synthetic model in the user's cache if it is missing. This takes several seconds.

    Raises EnvironmentProblem if neither this interpreter nor the engine's can generate it.
    """
    preset = _preset_of(profile)
    if preset is None or models.directory_of(preset).is_dir():
        return
    say(f"generating {profile.engine.model} in {models.directory_of(preset)} (once)")
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        models.materialise(preset)
    else:
        _make_elsewhere(preset, models.directory_of(preset), profile.engine.python or sys.executable)


def how_to_make_model(profile: Profile) -> list[str] | None:
    """Return the command line that does what `make_model` would do, None if the model exists."""
    preset = _preset_of(profile)
    if preset is None or models.directory_of(preset).is_dir():
        return None
    return [sys.executable, "-P", "-m", "kvbm_cli.make_model", preset, str(models.directory_of(preset))]


def _preset_of(profile: Profile) -> str | None:
    """Return the name of a model to generate, None for one that exists or that the engine generates itself."""
    return preset_of(profile) if kind_of(profile).presets else None


def _make_elsewhere(preset: str, directory: Path, python: str) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    program = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = run_elsewhere(python, program, models.__file__, preset, str(directory))
    if done.code:
        last = last_line(done.err, f"exit code {done.code}")
        raise EnvironmentProblem(
            f"`{python}` cannot generate the model `{preset}`: {last}", hint="check `engine.python`"
        )
