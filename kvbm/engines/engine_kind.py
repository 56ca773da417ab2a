"""EngineKind: what the commands need to know about one kind of engines. table.py has one of each kind.

Each kind derives from EngineKind. What a kind does not override is true of most engines.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from kvbm.engines.python_probe import find
from kvbm.errors import EnvironmentProblem
from kvbm.sizing.wanted import Wanted

if TYPE_CHECKING:
    from kvbm.config.document import Document, Mistake
    from kvbm.config.schema import Profile
    from kvbm.engines.disaggregated import Fleet
    from kvbm.engines.installation import Installation, ProbedPackage
    from kvbm.engines.launch_plan import LaunchPlan
    from kvbm.sizing.findings import StateFinding
    from kvbm.sizing.tiers import Device


RETURN_TOKEN_IDS: Mapping[str, object] = MappingProxyType({"logprobs": 0, "return_token_ids": True})


@dataclass(frozen=True, slots=True)
class ServerTraits:
    """What a server of one kind can do, as far as a benchmark depends on it.

    `tokenizes`: its `/tokenize` counts tokens. Otherwise the model's own tokenizer does, in this process.
    `resets_cache`: a request empties its cache. Otherwise only a restart does.
    `has_metrics`: its `/metrics` has counters, by the source of prompt tokens.
    `has_kvbm_metrics`: its `/metrics` has those of kvbm too. Otherwise kvbm serves them on a port of its own.
    `shares_device`: engines of several arms can run at the same time on one device other than a CPU.
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


class Unusable(NamedTuple):
    """An argument of a profile that cannot be used on this machine or with kvbm: its name, why, and what to do."""

    argument: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine runs: the variables that it gets besides those of the profile, whether on a CPU, and whether it
    is installed, so that this is known."""

    environment: Mapping[str, str] = field(default_factory=dict)
    on_cpu: bool = False
    is_installed: bool = False


@dataclass(frozen=True, slots=True)
class SizedBy:
    """How `kvbm size --engine` gets a profile: the shipped one that it begins with, and the keys of its options.
    `layouts` are the values of `layout_variable`."""

    profile: str
    block_size: str
    cache_type: str
    layouts: Sequence[str] = ()
    layout_variable: str = ""
    ranks: str = "tensor_parallel_size"
    stages: str = "pipeline_parallel_size"


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """Host memory that an engine allocates for itself, only if `left_bytes` stay available. `needed_bytes` is None if
    the engine determines it at start-up. `remedy` says how to make it smaller."""

    needed_bytes: int | None
    left_bytes: int
    remedy: str


class EngineKind(ABC):
    traits: ClassVar[ServerTraits]
    package: ClassVar[ProbedPackage | None] = None  # None for a part of kvbm
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}  # synthetic models that make_model.py makes for it
    suggested_preset: ClassVar[str] = ""
    sized_by: ClassVar[SizedBy | None] = None  # None if `kvbm size` does not know it without a profile
    judges_states: ClassVar[bool] = False  # whether `findings` has any
    signs: ClassVar[frozenset[str]] = frozenset()  # keys of its files of arguments that no other file has
    reserved_blocks: ClassVar[int] = 0  # of G1, that hold no tokens
    tested: ClassVar[str | None] = None  # with which versions, None for a part of kvbm
    supported: ClassVar[str] = ""  # the versions that `is_known` accepts
    to_compile: ClassVar[str | None] = None  # what to install so that it can build an extension when it starts

    @abstractmethod
    def imported(self, profile: Profile) -> list[str]:
        """Return the modules of kvbm that the engine imports, in this order."""

    @abstractmethod
    def launch_plan(self, profile: Profile, *, connector: bool, port: int) -> LaunchPlan:
        """Do not require the engine to be installed."""

    def fleet(self, profile: Profile, ports: Iterator[int], environment: Mapping[str, str]) -> Fleet:
        """Return how to start the engines of a profile with `disaggregated`, which listen on `ports` of this machine.
        `environment` is the caller's. EnvironmentProblem if it has too few devices."""
        raise NotImplementedError(f"{profile.engine.kind} cannot transfer the blocks of a request")

    def front(self, profile: Profile, fleet: Fleet, port: int) -> LaunchPlan | None:
        """Return the engine's own server in front of these engines, None if it has none."""
        return None

    def problem_of_fleet(self, profile: Profile) -> EnvironmentProblem | None:
        """Return what the engine's interpreter lacks for `disaggregated`."""
        return None

    def problem_of_address(self, profile: Profile) -> EnvironmentProblem | None:
        """Return what clients can do that they should not, if the server is not on a loopback address."""
        return None

    @staticmethod
    def refused(document: Document) -> Iterable[Mistake]:
        """Return the arguments in a document that kvbm sets, or that the engine does not have."""
        return ()

    def installed(self, profile: Profile) -> Installation | None:
        """Return the engine in the interpreter of the profile, None if it is missing or part of kvbm. Raises
        EnvironmentProblem if the interpreter does not work."""
        return None if self.package is None else find(python_of(profile), self.package)

    def found(self, profile: Profile) -> Installation | None:
        """Return what `installed` does, None too if the interpreter does not work."""
        try:
            return self.installed(profile)
        except EnvironmentProblem:
            return None

    def install(self, profile: Profile) -> str | None:
        """Return the arguments of Python that install the engine, None for a part of kvbm."""
        return None

    @staticmethod
    def is_known(version: str) -> bool:
        """Whether kvbm is tested with this version of the engine."""
        return True

    def problem(self, profile: Profile, *, has_cache: bool) -> EnvironmentProblem | None:
        """Return why the engine in the interpreter is not usable, with the cache or without, or not tested."""
        python, title, install = python_of(profile), self.traits.title, self.install(profile)
        try:
            found = self.installed(profile)
        except EnvironmentProblem as error:
            return error
        if found is None and install is not None:
            hint = f"run `{python} -m {install}`, or set `engine.python` to an interpreter that has {title}"
            return EnvironmentProblem(f"`{python}` has no {title}", hint=hint)
        return None if found is None or not has_cache else self.problem_of_cache(python, found)

    def problem_of_cache(self, python: str, found: Installation) -> EnvironmentProblem | None:
        """Return why this installation cannot be used with the cache, or is not tested with it."""
        title = self.traits.title
        if found.rival is not None:
            uninstall = f"run `{python} -m pip uninstall kvbm`"
            return EnvironmentProblem(
                f"`{python}` has NVIDIA's kvbm {found.rival}, which replaces the modules of kvbm-cli",
                hint=f"{uninstall}, then reinstall kvbm-cli there with `--force-reinstall --no-deps`",
            )
        if not found.has_kvbm:
            hint = (
                f"{title} loads the connector from there: run `{python} -m pip install` with the path of this checkout"
            )
            return EnvironmentProblem(f"`{python}` has {title} {found.version}, but not kvbm-cli", hint=hint)
        if not self.is_known(found.version):
            message = f"`{python}` has {title} {found.version}; kvbm is tested with {self.supported}"
            return EnvironmentProblem(message, hint="start it anyway with `kvbm serve --force`")
        return None

    def unknown_arguments(self, profile: Profile) -> Iterable[Unusable]:
        """Return the arguments that the installed engine does not have."""
        return ()

    def unstorable_arguments(self, profile: Profile) -> Iterable[Unusable]:
        """Return the arguments with which kvbm cannot keep the blocks of the engine."""
        return ()

    @abstractmethod
    def block_tokens(self, profile: Profile) -> int:
        """Return the tokens per block."""

    def knows_block_tokens(self, profile: Profile) -> bool:
        """Whether `block_tokens` is certain."""
        return True

    def has_prefix_caching(self, profile: Profile) -> bool:
        """Whether the engine reuses blocks of earlier prompts in G1."""
        return True

    def runs_on_cpu(self, profile: Profile) -> bool:
        """Whether the engine computes on a CPU, as far as that decides the size of its cache."""
        return False

    def uses_host_memory(self, profile: Profile) -> bool:
        """Whether weights and G1 are in host memory, or may be."""
        return self.runs_on_cpu(profile)

    @abstractmethod
    def with_device_blocks(self, profile: Profile, block_count: int) -> Profile:
        """Return the profile with prefix caching enabled and at least `block_count` blocks in G1."""

    def copies(self, profile: Profile) -> int:
        """Return how many copies of the engine one process starts, each with its own tiers."""
        return 1

    def serving_ranks(self, profile: Profile) -> int:
        """Return how many ranks of one engine serve metrics of kvbm."""
        return 1

    @abstractmethod
    def device(self, profile: Profile, model_config: Mapping[str, object], place: Place, wanted: Wanted) -> Device:
        """Return the blocks of the engine. ProfileError if the model's configuration lacks a fact; SizeUnknown if only
        the engine knows the layout of the model's cache."""

    def model_facts(self, model: str) -> Mapping[str, object]:
        """Return the content of a model's config.json. ProfileError for a missing or unsupported model, SizeUnknown for
        one that only the engine can find."""
        from kvbm.engines.model_facts import model_facts

        return model_facts(model, self.presets, self.suggested_preset)

    def check_model(self, profile: Profile, model_config: Mapping[str, object]) -> None:
        """ProfileError or SizeUnknown for a problem of the model alone, independent of the tiers."""
        self.device(profile, model_config, Place(), Wanted())

    def findings(
        self, profile: Profile, model_config: Mapping[str, object], place: Place, wanted: Wanted
    ) -> Sequence[StateFinding]:
        """Return what the engine's settings mean for the states of the model. ProfileError if it lacks a fact."""
        return ()

    def own_memory(self, profile: Profile, device_bytes: int | None) -> OwnMemory | None:
        """Return the host memory of the engine itself, for blocks of G1 with `device_bytes`; None without one."""
        return None

    def caveats(self, profile: Profile) -> list[str]:
        """Return what a measurement of this engine does not show."""
        return []


def python_of(profile: Profile) -> str:
    """Return the interpreter that runs the engine."""
    return profile.engine.python or sys.executable


def with_arguments(profile: Profile, **changed: object) -> Profile:
    """Return the profile with other values of some of its engine's arguments."""
    arguments = profile.engine.arguments.model_copy(update=changed)
    return profile.model_copy(update={"engine": profile.engine.model_copy(update={"arguments": arguments})})
