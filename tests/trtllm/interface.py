"""TensorRT-LLM's connector interface, transcribed per version, and the modules around it as stubs.

`installed(version)` puts stub modules into `sys.modules` and imports the connector against them. The manager is the
upstream logic: accumulated lists, parking, broadcast, and the intersection over ranks. Ranks are threads.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import pickle
import sys
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, make_dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

CONNECTOR = "kvbm.engines.trtllm.connector"
NEW_PATH = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"
OLD_PATH = "tensorrt_llm._torch.pyexecutor.kv_cache_connector"
LIMIT_S = 30.0


@dataclass(frozen=True)
class Version:
    """What differs between the interfaces. `releases_one`: only the first of several saved requests is released."""

    name: str
    path: str = OLD_PATH
    counts_scheduled: bool = True
    has_extras: bool = False
    has_salt_ids: bool = False  # a request has `cache_salt_id`, and its data no salt
    is_grouped: bool = False
    has_reset: bool = False
    takes_executor_config: bool = False
    releases_one: bool = False

    def __str__(self) -> str:
        return self.name


V1_1 = Version("1.1", counts_scheduled=False, takes_executor_config=True, releases_one=True)
V1_2 = Version("1.2", releases_one=True)
V1_3 = Version("1.3rc", path=NEW_PATH, has_extras=True)
V1_3_WITH_SALT_IDS = replace(V1_3, name="1.3rc-salt-ids", has_salt_ids=True)
MAIN = Version("main", path=NEW_PATH, has_extras=True, is_grouped=True, has_reset=True)
MAIN_WITHOUT_RESETS = replace(MAIN, name="main-without-resets", has_reset=False)
VERSIONS = (V1_1, V1_2, V1_3, MAIN)


class State(enum.Enum):
    CONTEXT_INIT = 0
    GENERATION_IN_PROGRESS = 1
    GENERATION_COMPLETE = 2
    DISAGG_GENERATION_TRANS_IN_PROGRESS = 3
    DISAGG_CONTEXT_TRANS_IN_PROGRESS = 4


class Collectives:
    """MPI for threads: values travel as pickles, and every rank must take part."""

    def __init__(self, rank_count: int) -> None:
        self.rank_count = rank_count
        self._local = threading.local()
        self._barrier = threading.Barrier(rank_count)
        self._values: list[bytes] = [b""] * rank_count

    def enter(self, rank: int) -> None:
        self._local.rank = rank

    def rank(self) -> int:
        return getattr(self._local, "rank", 0)

    def abort(self) -> None:
        self._barrier.abort()

    def allgather(self, value: Any) -> list[Any]:
        self._values[self.rank()] = pickle.dumps(value)
        self._barrier.wait(LIMIT_S)
        values = [pickle.loads(one) for one in self._values]
        self._barrier.wait(LIMIT_S)
        return values

    def broadcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value if self.rank() == root else None)[root]


class Scheduler(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        super().__init__()

    @abstractmethod
    def build_connector_meta(self, scheduler_output): ...
    @abstractmethod
    def get_num_new_matched_tokens(self, request, num_computed_tokens): ...
    @abstractmethod
    def request_finished(self, request, cache_block_ids): ...
    @abstractmethod
    def update_state_after_alloc(self, request, block_ids): ...


class GroupedScheduler(Scheduler):
    """An earlier form of `main`: it takes blocks away from running requests without a call."""

    supports_attention_dp = False

    def request_finished_by_layer_group(self, request, cache_block_ids_by_layer_group): ...
    def update_state_after_alloc_by_layer_group(self, request, block_ids_by_layer_group): ...
    def wait_for_initialization(self) -> None: ...


class ResettingScheduler(GroupedScheduler):
    """The newest form, with its optional methods."""

    def cancel_load(self, request, start_token, end_token) -> None: ...
    def request_reset(self, request) -> None: ...


class Worker(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata = None
        super().__init__()

    def bind_connector_meta(self, metadata) -> None:
        self._metadata = metadata

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor): ...
    @abstractmethod
    def start_load_kv(self, stream): ...
    @abstractmethod
    def wait_for_layer_load(self, layer_idx, stream): ...
    @abstractmethod
    def save_kv_layer(self, layer_idx, stream): ...
    @abstractmethod
    def wait_for_save(self, stream): ...
    @abstractmethod
    def get_finished(self, finished_gen_req_ids, started_loading_req_ids): ...


class WorkerWithLayout(Worker):
    supports_attention_dp = False

    def register_forward_pass_callable(self): ...
    def register_kv_cache_layout(self, layout) -> None: ...


def _request_data(version: Version) -> type:
    fields: list[Any] = [("request_id", int), ("new_tokens", list), ("new_block_ids", list), ("computed_position", int)]
    if version.counts_scheduled:
        fields.append(("num_scheduled_tokens", int))
    if version.has_extras:
        fields += [
            ("block_hashes", list, field(default_factory=list)),
            ("priorities", object, field(default=None)),
        ]
    if version.has_extras and not version.has_salt_ids:
        fields.append(("cache_salt", object, field(default=None)))
    if version.is_grouped:
        fields.append(("new_block_ids_by_layer_group", object, field(default_factory=list)))
    return make_dataclass("RequestData", fields)


def _modules(version: Version, collectives: Collectives) -> dict[str, ModuleType]:
    modules: dict[str, ModuleType] = {}
    parts = version.path.split(".")
    for end in range(1, len(parts) + 1):
        modules[".".join(parts[:end])] = ModuleType(".".join(parts[:end]))
    utils = modules["tensorrt_llm._utils"] = ModuleType("tensorrt_llm._utils")
    utils.mpi_rank, utils.mpi_allgather = collectives.rank, collectives.allgather
    utils.mpi_broadcast = collectives.broadcast
    modules["tensorrt_llm"].__version__ = version.name
    interface = modules[version.path]
    grouped = ResettingScheduler if version.has_reset else GroupedScheduler
    interface.KvCacheConnectorScheduler = grouped if version.is_grouped else Scheduler
    interface.KvCacheConnectorWorker = WorkerWithLayout if version.is_grouped else Worker
    interface.RequestData = _request_data(version)
    interface.LlmRequest = type("LlmRequest", (), {"cache_salt_id": None} if version.has_salt_ids else {})
    for name, module in modules.items():
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules


@contextlib.contextmanager
def installed(version: Version, collectives: Collectives):
    """Yield (the connector module, the interface module) of this version."""
    modules = _modules(version, collectives)
    sys.modules.pop(CONNECTOR, None)
    sys.modules.update(modules)
    try:
        yield importlib.import_module(CONNECTOR), modules[version.path]
    finally:
        for name in (*modules, CONNECTOR):
            sys.modules.pop(name, None)


@dataclass
class SchedulerOutput:
    new_requests: list = field(default_factory=list)
    cached_requests: list = field(default_factory=list)


@dataclass
class _Ids:
    saving: dict = field(default_factory=dict)
    loading: dict = field(default_factory=dict)

    def add(self, other: _Ids) -> None:
        self.saving.update(other.saving)
        self.loading.update(other.loading)


@dataclass
class _Seen:
    block_ids: list[list[int]]
    tokens: int = 0


class Manager:
    """KvCacheConnectorManager of one rank. `cache` answers `block_ids(request)` per layer group."""

    def __init__(self, version: Version, interface, collectives: Collectives, worker, scheduler, cache) -> None:
        self._version, self._interface, self._collectives = version, interface, collectives
        self.worker, self.scheduler, self._cache = worker, scheduler, cache
        self.new, self.pending, self.local = _Ids(), _Ids(), _Ids()
        self.finished_async_loading: dict[int, Any] = {}
        self._external: dict[int, int] = {}
        self._seen: dict[int, _Seen] = {}
        self._output = SchedulerOutput()
        self.broadcasts: list[Any] = []
        self.outputs: list[SchedulerOutput] = []

    def _lead(self, run):
        """Rank 0 runs, every rank gets the result. An exception ends the executor."""
        return self._collectives.broadcast(run() if self._collectives.rank() == 0 else None)

    def get_num_new_matched_tokens(self, request, computed: int) -> int:
        if request.is_generation_only_request:
            raise RuntimeError("generation-only request")
        tokens, is_async = self._lead(lambda: self.scheduler.get_num_new_matched_tokens(request, computed))
        if tokens == 0 and is_async:
            raise RuntimeError("(0, True)")
        if is_async:
            self.new.loading[request.request_id] = request
        self._external[request.request_id] = tokens
        return tokens

    def update_state_after_alloc(self, request, groups) -> None:
        if self._version.is_grouped:
            self._lead(lambda: self.scheduler.update_state_after_alloc_by_layer_group(request, groups))
        else:
            self._lead(lambda: self.scheduler.update_state_after_alloc(request, groups[0]))

    def _data(self, request):
        groups, tokens = self._cache.block_ids(request), request.get_tokens(0)
        seen = self._seen.setdefault(request.request_id, _Seen([[] for _ in groups]))
        new_ids = [ids[len(old) :] for ids, old in zip(groups, seen.block_ids, strict=True)]
        new_tokens = tokens[seen.tokens :]
        seen.block_ids, seen.tokens = [list(ids) for ids in groups], len(tokens)
        if request.state in (State.CONTEXT_INIT, State.DISAGG_GENERATION_TRANS_IN_PROGRESS):
            position = request.context_current_position
            count = min(request.context_remaining_length, request.context_chunk_size)
        else:
            position, count = len(tokens) - 1, 1
        values: dict[str, Any] = {}
        if self._version.counts_scheduled:
            values["num_scheduled_tokens"] = count
        if self._version.has_extras:
            if not self._version.has_salt_ids:
                values["cache_salt"] = request.cache_salt
            if request.priority is not None and not self._version.is_grouped:  # the second manager has none
                values["priorities"] = [request.priority] * len(new_ids[0])
        if self._version.is_grouped:
            by_group = dict(enumerate(new_ids))
            values["new_block_ids_by_layer_group"] = by_group if request.request_id % 2 else new_ids
        return self._interface.RequestData(request.request_id, new_tokens, new_ids[0], position, **values)

    def build_scheduler_output(self, contexts, generations) -> None:
        output = SchedulerOutput()
        for request in contexts:
            if request.request_id in self.new.loading:
                continue
            is_new = request.request_id not in self._seen
            data = self._data(request)
            data.computed_position -= self._external.get(request.request_id, 0)
            (output.new_requests if is_new else output.cached_requests).append(data)
        output.cached_requests += [self._data(request) for request in generations]
        self._external.clear()
        self._output = output

    def take_scheduled_requests_pending_load(self, contexts) -> list:
        for request in contexts:
            if request.request_id in self.new.loading:
                request.state = State.DISAGG_GENERATION_TRANS_IN_PROGRESS
        return [request for request in contexts if request.request_id not in self.new.loading]

    def handle_metadata(self) -> None:
        output, self._output = self._output, SchedulerOutput()
        self.outputs.append(output)
        metadata = self._lead(lambda: self.scheduler.build_connector_meta(output))
        self.broadcasts.append(metadata)
        self.worker.bind_connector_meta(metadata)

    def request_reset(self, request) -> None:
        self._seen.pop(request.request_id, None)
        self.finished_async_loading.pop(request.request_id, None)  # what it loaded went with its blocks
        if self._version.has_reset:
            self._lead(lambda: self.scheduler.request_reset(request))

    def request_finished(self, request, groups) -> bool:
        self.finished_async_loading.pop(request.request_id, None)
        if self._version.is_grouped:
            run = lambda: self.scheduler.request_finished_by_layer_group(request, groups)  # noqa: E731
        else:
            run = lambda: self.scheduler.request_finished(request, groups[0])  # noqa: E731
        is_saving = self._lead(run)
        assert isinstance(is_saving, bool)
        if is_saving:
            self.new.saving[request.request_id] = request
            request.state = State.DISAGG_CONTEXT_TRANS_IN_PROGRESS
        return is_saving

    def get_finished(self) -> list:
        """Return the requests whose saves have ended on all ranks."""
        saving, loading = list(self.new.saving), list(self.new.loading)
        self.pending.add(self.new)
        self.new = _Ids()
        saved, loaded = self.worker.get_finished(saving, loading)
        for request_id in saved:
            self.local.saving[request_id] = self.pending.saving.pop(request_id)  # KeyError: never received, or twice
        for request_id in loaded:
            self.local.loading[request_id] = self.pending.loading.pop(request_id)
        everywhere = self._collectives.allgather((list(self.local.saving), list(self.local.loading)))
        all_saved = set.intersection(*(set(one[0]) for one in everywhere))
        all_loaded = set.intersection(*(set(one[1]) for one in everywhere))
        for request_id in sorted(all_loaded):
            request = self.local.loading.pop(request_id)
            if request.state is State.DISAGG_GENERATION_TRANS_IN_PROGRESS:
                request.state = State.CONTEXT_INIT
            self.finished_async_loading[request_id] = request
        return [self.local.saving.pop(request_id) for request_id in sorted(all_saved)]

    def should_add_sequence(self, request) -> bool:
        return request.request_id not in self.finished_async_loading


class LlmArguments(SimpleNamespace):
    """TorchLlmArgs, a pydantic model: it can be written down."""

    def model_dump(self) -> dict[str, Any]:
        sections = {
            "kv_cache_config": vars(self.kv_cache_config),
            "parallel_config": vars(self.parallel_config.to_mapping()),
        }
        return {**vars(self), **sections}


def require_attention_dp(leader: type, worker: type) -> None:
    """Refuse connector classes that do not declare attention data parallelism, as the creator of the executor does."""
    for part in (worker, leader):
        if getattr(part, "supports_attention_dp", False) is not True:
            raise NotImplementedError(f"{part.__name__} must declare supports_attention_dp=True")


def arguments(
    version: Version, *, block_tokens: int, rank_count: int, enable_attention_dp: bool = False, **more: Any
) -> Any:
    """Return the constructor's argument in the form of this version."""
    sizes = {"world_size": rank_count, "tp_size": rank_count, "pp_size": 1, "cp_size": 1}
    mapping = SimpleNamespace(**sizes, enable_attention_dp=enable_attention_dp)
    if version.takes_executor_config:
        return SimpleNamespace(mapping=mapping, tokens_per_block=block_tokens, max_beam_width=1, **more)
    cache = SimpleNamespace(tokens_per_block=block_tokens, max_attention_window=None, dtype="auto")
    parallel = SimpleNamespace(to_mapping=lambda: mapping)
    values = {"model": "", "max_beam_width": 1, "max_seq_len": 4096, "speculative_config": None, "lora_config": None}
    return LlmArguments(**{**values, "kv_cache_config": cache, "parallel_config": parallel, **more})
