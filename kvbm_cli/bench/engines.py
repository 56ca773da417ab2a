"""Starts the engine of each arm as a process of its profile, or uses a running server by its URL."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvbm.config.schema import Profile
from kvbm.config.values import count_of
from kvbm.engines.engine_kind import ServerTraits
from kvbm.engines.launch_plan import ADMIN_HEADER
from kvbm.engines.model_tokenizer import model_tokenizer
from kvbm.engines.table import copy_count, kind_of
from kvbm.errors import EngineError, EnvironmentProblem
from kvbm.host.directories import make_private_directories
from kvbm.host.machine_memory import margin_of
from kvbm.sizing import SizeUnknown, Sizing
from kvbm.tiers.shared.settings import directory_of
from kvbm_cli.bench.arms import RECORDING, Arm, Comparison, base_url_of, with_values
from kvbm_cli.bench.load.control import Control, api_key, served_model
from kvbm_cli.bench.load.request import Target
from kvbm_cli.bench.workload.script import Tokenize
from kvbm_cli.engine.process import EngineProcess, choose_port
from kvbm_cli.profile.auto_capacity import engine_bytes, with_capacities
from kvbm_cli.profile.machine_problems import memory_bytes
from kvbm_cli.profile.size import size_if_known, size_of
from kvbm_cli.runs.memory_claims import MemoryClaim, claiming, make, release
from kvbm_cli.system.filesystem import remove_tree
from kvbm_cli.terminal.console import print_note

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile

LOOPBACK = "127.0.0.1"

HEADROOM = 1.25
SPARE_BLOCKS = 2  # besides those of the longest sequence, for which an engine refuses to start with a smaller G1
LOG_FILE, FIRST_LOG_FILE = "engine.log", "first-engine.log"


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine that serves; the context manager that yields it starts and stops it.

    `headers` and `ca_file` are for every request to it.
    `pid` is the process of an engine on this machine that the command started. `metrics_url` has the kvbm_* series if
    the engine's own `/metrics` does not. With a shared tier, `next_engine` stops this engine and starts another one,
    which finds in the tier what this one has written. `traits` are `None` for a server by URL, which is asked instead;
    `model_path` is the model in the profile.
    """

    base_url: str
    model: str
    startup_s: float
    has_ended: Callable[[], bool]
    headers: Mapping[str, str] = field(default_factory=dict)
    pid: int | None = None
    metrics_url: str = ""
    next_engine: Callable[[], AbstractContextManager[RunningEngine]] | None = None
    traits: ServerTraits | None = None
    model_path: str = ""
    ca_file: str = ""

    def control(self) -> Control:
        return Control(self.base_url, self.model, headers=self.headers, ca_file=self.ca_file)

    def target(self, run: str, arm: str, cell: str, pair: int, *, offset_s: float = 0.0) -> Target:
        """Return where the requests of one run go; see Target."""
        return Target(
            run, arm, cell, pair, self.base_url, offset_s, self.headers, has_ended=self.has_ended, ca_file=self.ca_file
        )

    def try_reset(self) -> bool:
        """Return whether the cache is empty now. One that no request empties has only the warm-up, after its start."""
        return (self.traits is not None and not self.traits.resets_cache) or self.control().try_reset()

    def tokenizer(self) -> Tokenize | None:
        """Return what counts tokens for a launched engine; None if nothing here can."""
        assert self.traits is not None
        return self.control().tokenize if self.traits.tokenizes else model_tokenizer(self.model_path)

    @property
    def has_metrics(self) -> bool:
        return self.traits is None or self.traits.has_metrics


@dataclass(frozen=True, slots=True)
class NeededRoom:
    """What G1 of the recording and of the floor must hold without eviction."""

    tokens: int
    sessions: int


class OpenArm(Protocol):
    """Opens the engine of an arm. `log` is the directory for its output; `room` is what its G1 must hold, in tokens and
    conversations, for the recording and the floor. Without it, they have the G1 of the profile. NoRoomInG1 if the
    engine does not start with a larger one."""

    def __call__(self, arm: str, log: Path, room: NeededRoom | None) -> AbstractContextManager[RunningEngine]: ...


class NoRoomInG1(EngineError):
    """The engine did not start with a G1 that holds everything."""


class ArmEngines:
    """Starts the engine of an arm on a free port and stops it when the run ends; opens URLs as they are.

    If only the engine knows its G1, the recording starts with that one and reports it: evictions change no answer.
    """

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._reported_tokens: int | None = None

    def __call__(self, arm: str, log: Path, room: NeededRoom | None) -> AbstractContextManager[RunningEngine]:
        found = self._arm(arm)
        if found.url is not None:
            return nullcontext(running_server(found.url, self._comparison.ca_file))
        return self._started(found, arm, log, room)

    @contextmanager
    def _started(self, found: Arm, arm: str, log: Path, room: NeededRoom | None) -> Iterator[RunningEngine]:
        """Start an engine. No other start takes its memory until it is healthy, or has failed."""
        assert found.resolved is not None
        with claiming():
            resolved = with_capacities(found.resolved) if found.has_kvbm else found.resolved
            claim = make(_claim_of(resolved, has_kvbm=found.has_kvbm))
        own = profile = resolved.profile
        reports_g1 = False
        with ExitStack() as stack:
            try:
                if found is not self._comparison.measured:  # arms of several profiles may run at the same time
                    own = profile = with_values(own, "metrics", port=0)
                if found.kind == "floor" and room is not None:
                    sizing = size_if_known(found.resolved)
                    known = None if sizing is None else sizing.device
                    own_tokens = self._reported_tokens if known is None else known.token_count
                    reports_g1 = arm == RECORDING and own_tokens is None
                    profile = own if reports_g1 else with_room(own, room, sizing=sizing, own_tokens=own_tokens)
                engine = stack.enter_context(launched(profile, log, has_kvbm=found.has_kvbm))
            except EngineError as error:
                if profile is own:
                    raise
                raise NoRoomInG1(error.message, hint=error.hint) from error
            finally:
                if claim is not None:
                    release(claim)
            if reports_g1:
                self._reported_tokens = engine.control().g1_tokens()
            yield engine

    def _arm(self, name: str) -> Arm:
        """Return an arm. The recording runs on the floor's engine, or else on the engine of the profile without kvbm,
        or without a profile on the first server."""
        if name != RECORDING:
            return self._comparison.arm(name)
        measured = self._comparison.measured
        if measured.resolved is None:
            return self._comparison.arms[0]
        return self._comparison.floor or Arm(RECORDING, "baseline", measured.resolved)


def _claim_of(resolved: ResolvedProfile, *, has_kvbm: bool) -> MemoryClaim:
    sizing: Sizing | SizeUnknown
    try:
        sizing = size_of(resolved)
    except SizeUnknown as error:
        sizing = error
    profile = resolved.profile
    blocks = memory_bytes(profile.tiers, sizing, copy_count(profile)) if has_kvbm else 0
    return MemoryClaim(os.getpid(), blocks or 0, engine_bytes(resolved.profile, sizing) or 0)


@contextmanager
def launched(profile: Profile, log: Path, *, has_kvbm: bool) -> Iterator[RunningEngine]:
    profile = with_values(profile, "server", host=LOOPBACK)  # only this command uses it; it may have debug endpoints
    if not has_kvbm or profile.tiers.shared is None:
        with (
            fresh_disk(profile) if has_kvbm else nullcontext(profile) as own,
            _started(own, log / LOG_FILE, has_kvbm=has_kvbm) as engine,
        ):
            yield engine
        return
    with fresh_shared(profile) as shared, ExitStack() as first:

        @contextmanager
        def next_engine() -> Iterator[RunningEngine]:
            first.close()
            with fresh_disk(shared) as own, _started(own, log / LOG_FILE, has_kvbm=True) as engine:
                yield engine

        own = first.enter_context(fresh_disk(shared))
        engine = first.enter_context(_started(own, log / FIRST_LOG_FILE, has_kvbm=True))
        yield replace(engine, next_engine=next_engine)


@contextmanager
def _started(profile: Profile, log_path: Path, *, has_kvbm: bool) -> Iterator[RunningEngine]:
    kind = kind_of(profile)
    traits = kind.traits
    if has_kvbm and (profile.tiers.are_below_engine or not traits.has_kvbm_metrics):
        metrics_port = choose_port(profile.metrics.host or profile.server.host, 0)
        profile = with_values(profile, "metrics", serve=True, port=metrics_port)
    port = choose_port(profile.server.host, 0)
    plan = kind.launch_plan(profile, connector=has_kvbm, port=port).placed(log_path.parent.absolute())
    plan = replace(plan, environment={**plan.environment, **traits.variables})
    with EngineProcess.start(plan, log_path=log_path) as process:
        process.wait_healthy(profile.transfer.init_timeout_s)
        yield RunningEngine(
            plan.base_url,
            plan.model,
            process.elapsed_s,
            lambda: process.poll() is not None,
            {} if process.admin_token is None else {ADMIN_HEADER: process.admin_token},
            process.pid,
            plan.metrics_url if has_kvbm else "",
            traits=traits,
            model_path=profile.engine.model,
        )


def running_server(url: str, ca_file: str = "") -> RunningEngine:
    """Return the server at a URL. EngineError if it does not answer."""
    base_url = base_url_of(url)
    key = api_key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    model = served_model(base_url, headers, ca_file)
    return RunningEngine(base_url, model, 0.0, lambda: False, headers, ca_file=ca_file)


@contextmanager
def fresh_disk(profile: Profile) -> Iterator[Profile]:
    """Yield the same profile with an empty disk tier: a new directory inside the profile's own, removed afterwards."""
    disk = profile.tiers.disk
    if disk is None:
        yield profile
        return
    parent = Path(disk.directory).expanduser()
    try:
        make_private_directories(parent)
        directory = tempfile.mkdtemp(prefix="bench-", dir=parent)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot create a directory for this run in {parent}: {error.strerror or error}",
            hint="set `tiers.disk.directory`",
        ) from error
    try:
        if disk.fit and (free := shutil.disk_usage(directory).free) <= margin_of(free):
            hint = "remove caches with `kvbm cache purge`, or set `tiers.disk.directory`"
            raise EnvironmentProblem(f"{parent} has no space to spare for the disk tier of a benchmark", hint=hint)
        fresh = disk.model_copy(update={"directory": directory, "drain_s": 0.0})
        yield with_values(profile, "tiers", disk=fresh)
    finally:
        remove_tree(Path(directory))


@contextmanager
def fresh_shared(profile: Profile) -> Iterator[Profile]:
    """Yield the same profile with an empty shared tier: a new place below the profile's own, whose objects are deleted
    afterwards if the store can list them."""
    shared = profile.tiers.shared
    assert shared is not None
    url = f"{shared.url.rstrip('/')}/bench-{secrets.token_hex(8)}"
    directory = directory_of(url)
    if directory is not None:
        with suppress(FileExistsError):
            directory.parent.mkdir(mode=0o700)
    try:
        yield with_values(profile, "tiers", shared=shared.model_copy(update={"url": url}))
    finally:
        if directory is not None:
            remove_tree(directory)
        elif not url.startswith("mooncake:"):
            delete_objects(url)


def delete_objects(url: str) -> None:
    """Delete all objects of kvbm below a URL."""
    from kvbm_cli.store.inventory import open_inventory

    try:
        inventory = open_inventory(url)
        for found in inventory.namespaces(lambda _: True, lambda _: None):
            inventory.delete(found.extents, lambda _: None)
            inventory.delete_facts(found.namespace)
    except EnvironmentProblem as problem:
        print_note(f"the objects of this run remain in {url}: {problem.message}")


def with_room(
    profile: Profile, room: NeededRoom, *, sizing: Sizing | None = None, own_tokens: int | None = None
) -> Profile:
    """Return the same profile with its prefix cache on and a G1 that holds everything without eviction.

    The same object if its own G1, which holds `own_tokens`, is enough. A G1 that is set holds the longest sequence,
    too. A token takes at most one block in each of the KV cache groups.
    """
    kind = kind_of(profile)
    tokens_of_block = kind.block_tokens(profile) if sizing is None else sizing.block_tokens
    needed = math.ceil(HEADROOM * room.tokens / tokens_of_block) + room.sessions
    if own_tokens is not None and needed * tokens_of_block <= own_tokens and kind.has_prefix_caching(profile):
        return profile
    arguments = profile.engine.arguments
    longest = count_of(getattr(arguments, arguments.LENGTH)) or (0 if sizing is None else sizing.sequence_tokens)
    needed = max(needed, math.ceil(longest / tokens_of_block) + SPARE_BLOCKS)
    return kind.with_device_blocks(profile, needed * (1 if sizing is None else sizing.group_count))
