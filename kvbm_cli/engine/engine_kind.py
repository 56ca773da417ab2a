"""EngineKind: what the commands need to know about one kind of engines. engines.py has the table of all kinds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from kvbm.errors import EnvironmentProblem

if TYPE_CHECKING:
    from kvbm.config.installation import Installation
    from kvbm.config.launch_plan import LaunchPlan
    from kvbm.config.schema import Profile


RETURN_TOKEN_IDS: Mapping[str, object] = MappingProxyType({"logprobs": 0, "return_token_ids": True})


@dataclass(frozen=True, slots=True)
class ServerTraits:
    """What a server of one kind can do, as far as a benchmark depends on it.

    `tokenizes`: its `/tokenize` counts tokens. Otherwise the model's own tokenizer does, in this process.
    `resets_cache`: a request empties its cache. Otherwise only a restart does.
    `has_metrics`: its `/metrics` has counters, by the source of prompt tokens.
    `has_kvbm_metrics`: its `/metrics` has those of kvbm too. Otherwise kvbm serves them on a port of its own.
    `shares_device`: engines of several arms can run at the same time.
    `token_id_fields`: fields of a request that make it answer with token ids, and with log-probabilities if it has any.
    `variables`: what enables these requests.
    """

    title: str
    tokenizes: bool = True
    resets_cache: bool = True
    has_metrics: bool = True
    has_kvbm_metrics: bool = True
    shares_device: bool = True
    token_id_fields: Mapping[str, object] = field(default_factory=lambda: RETURN_TOKEN_IDS)
    variables: Mapping[str, str] = field(default_factory=dict)


class EngineKind(Protocol):
    @property
    def traits(self) -> ServerTraits: ...

    def launch_plan(self, profile: Profile, *, connector: bool, port: int) -> LaunchPlan:
        """Do not require the engine to be installed."""

    def installed(self, profile: Profile) -> Installation | None:
        """Return the engine in the interpreter of the profile, None if it is missing or part of kvbm. Raises
        EnvironmentProblem if the interpreter does not work."""

    def problem(self, profile: Profile, *, has_cache: bool) -> EnvironmentProblem | None:
        """Return why the engine in the interpreter is not usable, with the cache or without, or not tested."""

    def block_tokens(self, profile: Profile) -> int:
        """Return the tokens per block."""

    def knows_block_tokens(self, profile: Profile) -> bool:
        """Whether `block_tokens` is certain."""

    def has_prefix_caching(self, profile: Profile) -> bool:
        """Whether the engine reuses blocks of earlier prompts in G1."""

    def runs_on_cpu(self, profile: Profile) -> bool:
        """Whether the engine computes on a CPU, as far as that decides the size of its cache."""

    def with_device_blocks(self, profile: Profile, block_count: int) -> Profile:
        """Return the profile with prefix caching enabled and at least `block_count` blocks in G1."""

    def caveats(self, profile: Profile) -> list[str]:
        """Return what a measurement of this engine does not show."""


def python_of(profile: Profile) -> str:
    """Return the interpreter that runs the engine."""
    return profile.engine.python or sys.executable


def with_arguments(profile: Profile, **changed: object) -> Profile:
    """Return the profile with other values of some of its engine's arguments."""
    arguments = profile.engine.arguments.model_copy(update=changed)
    return profile.model_copy(update={"engine": profile.engine.model_copy(update={"arguments": arguments})})


def installation_problem(
    python: str, title: str, found: Installation, *, is_known: bool, tested: str
) -> EnvironmentProblem | None:
    """Return why this engine cannot be used with the cache, or is not tested with it. `title` names the engine."""
    if found.rival is not None:
        hint = f"run `{python} -m pip uninstall kvbm`, then reinstall kvbm-cli there with `--force-reinstall --no-deps`"
        return EnvironmentProblem(
            f"`{python}` has NVIDIA's kvbm {found.rival}, which replaces the modules of kvbm-cli", hint=hint
        )
    if not found.has_kvbm:
        hint = f"{title} loads the connector from there: run `{python} -m pip install` with the path of this checkout"
        return EnvironmentProblem(f"`{python}` has {title} {found.version}, but not kvbm-cli", hint=hint)
    if not is_known:
        message = f"`{python}` has {title} {found.version}; kvbm is tested with {tested}"
        return EnvironmentProblem(message, hint="start it anyway with `kvbm serve --force`")
    return None
