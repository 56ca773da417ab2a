"""DynamoKVBMConnectorLeader and DynamoKVBMConnectorWorker: the classes that TensorRT-LLM loads, under NVIDIA's names.

TensorRT-LLM creates the leader on rank 0 and a worker on every rank. Each hook is one call of that side; hooks that are
not defined here keep the default of the interface. If kvbm does not support an engine, it is disabled with one warning
that states the reason, and TensorRT-LLM serves without it. A configuration that can never work stops the start.

The interface exists in several versions: 1.1 and 1.2 have it in `pyexecutor.kv_cache_connector`, later ones in
`pyexecutor.connectors`. Without TensorRT-LLM the module can be imported, but its classes are of no use.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

from kvbm.boundary import Boundary, contained
from kvbm.config.connector import resolve_connector
from kvbm.engines.engine_code import module_if_installed
from kvbm.engines.trtllm.engine_facts import EngineFacts, decline_reason
from kvbm.engines.trtllm.launch import CONFIG_VARIABLE
from kvbm.engines.trtllm.leader_side import LeaderSide
from kvbm.engines.trtllm.messages import NOTHING, TransferOrders
from kvbm.engines.trtllm.pool_memory import declined_window, of_layout, of_tensor
from kvbm.engines.trtllm.rank_side import RankSide
from kvbm.engines.trtllm.request_key import SALTS
from kvbm.errors import EnvironmentProblem, ProfileError
from kvbm.host.log_queue import queue_log
from kvbm.text.reading import parse_json

if TYPE_CHECKING:
    import torch

    from kvbm.config.schema import ConnectorConfig

NEW_PATH = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"
OLD_PATH = "tensorrt_llm._torch.pyexecutor.kv_cache_connector"

log = logging.getLogger(__name__)


INTERFACE = module_if_installed(NEW_PATH) or module_if_installed(OLD_PATH)
_LeaderBase: Any = getattr(INTERFACE, "KvCacheConnectorScheduler", object)
_WorkerBase: Any = getattr(INTERFACE, "KvCacheConnectorWorker", object)
REPORTS_RESETS = hasattr(_LeaderBase, "request_reset")


class DynamoKVBMConnectorLeader(_LeaderBase):  # type: ignore[misc]  # tensorrt_llm is not there for the type checker
    """Scheduler part of the connector, on rank 0. Has no `side` if kvbm is disabled."""

    supports_attention_dp = True  # otherwise such an engine does not start, instead of running without the cache

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        config, facts = _start(llm_args, warns=True)
        self.side: LeaderSide | None = None
        if facts is not None:
            self.side = LeaderSide(config, llm_args, facts, has_salts=_has_salts())
            RankSide.leader = self.side
            weakref.finalize(self, self.side.close)  # at the exit of the process: no version calls `shutdown`

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = self.side.match(request, num_computed_tokens) if self.side is not None else 0
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        if self.side is not None:
            self.side.allocated(request, block_ids)

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids_by_layer_group: Any) -> None:
        if self.side is not None:
            self.side.allocated(request, block_ids_by_layer_group)

    def build_connector_meta(self, scheduler_output: Any) -> TransferOrders:
        return self.side.build_orders(scheduler_output) if self.side is not None else NOTHING

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        return self.side is not None and self.side.end_request(request, cache_block_ids)

    def request_finished_by_layer_group(self, request: Any, cache_block_ids_by_layer_group: Any) -> bool:
        return self.side is not None and self.side.end_request(request, cache_block_ids_by_layer_group)

    def cancel_load(self, request: Any, start_token: int, end_token: int) -> None:
        if self.side is not None:
            self.side.cancel_load(request, start_token)

    def request_reset(self, request: Any) -> None:
        if self.side is not None:
            self.side.restart(request)

    def wait_for_initialization(self) -> None:
        """Do nothing: the leader is created while the workers register their KV caches."""

    def shutdown(self) -> None:
        if self.side is not None:
            self.side.close()


class DynamoKVBMConnectorWorker(_WorkerBase):  # type: ignore[misc]
    """Worker part of the connector, on every rank. Has no `side` if kvbm is disabled."""

    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self.boundary = Boundary()
        config, self._facts = _start(llm_args, warns=False)
        self._min_priority = config.offload.min_priority
        self.side: RankSide | None = None
        if self._facts is not None:
            is_old = INTERFACE is not None and INTERFACE.__name__ == OLD_PATH
            self.side = RankSide(config, rank_count=self._facts.rank_count, saves_one_by_one=is_old)

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        if self.side is not None:
            self.side.register(of_tensor(kv_cache_tensor))

    def register_kv_cache_layout(self, layout: Any) -> None:
        if self.side is None or self._facts is None:
            return
        reason = declined_window(layout, self._facts.max_tokens)
        if not REPORTS_RESETS:  # the manager that has layouts pauses requests under every capacity policy
            reason = "this version takes blocks away from running requests and does not report it"
        if reason is not None:
            log.warning("kvbm is disabled for this engine: %s", reason)
            self.side = None
            return
        self.side.register(of_layout(layout))
        if self._min_priority and self.side.is_leading:
            log.warning(
                "kvbm: `offload.min_priority: %d` has no effect: KVCacheManagerV2 has no retention priorities; set "
                "`kv_cache_config.use_kv_cache_manager_v2` to false to have them",
                self._min_priority,
            )

    def register_forward_pass_callable(self) -> None:
        """Return no callable: `wait_for_save` starts the offloads."""

    def bind_connector_meta(self, metadata: Any) -> None:
        self._metadata = metadata  # where the interface's `get_connector_meta` reads it
        if self.side is not None and isinstance(metadata, TransferOrders):
            self.side.bind(metadata)

    def start_load_kv(self, stream: Any) -> None:
        if self.side is not None:
            self.side.start()

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Do nothing: a request is scheduled only after its load has ended."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Do nothing: blocks are copied whole, after the forward pass."""

    def wait_for_save(self, stream: Any) -> None:
        if self.side is not None:
            self.side.finish()

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        if self.side is None:
            return [], []
        ended = self.side.ended(finished_gen_req_ids, started_loading_req_ids)
        self._settle()
        return ended

    @contained()
    def _settle(self) -> None:
        if self.side is not None and self.side.is_leading and self.side.leader is not None:
            self.side.leader.settle()

    def shutdown(self) -> None:
        if self.side is not None:
            self.side.close()


def _start(llm_args: Any, *, warns: bool) -> tuple[ConnectorConfig, EngineFacts | None]:
    """Return the configuration, and the facts of the engine unless kvbm does not support it."""
    queue_log(logging.getLogger("kvbm"), logging.getLogger())
    config = _resolved(warns=warns)
    if config.tiers.host is None:
        raise EnvironmentProblem(
            "a disk tier without host memory does not work with TensorRT-LLM, which accepts no failed load: only "
            "blocks in host memory can be promised",
            hint="set the size of host memory with `tiers.host.capacity` or `DYN_KVBM_CPU_CACHE_GB`",
        )
    reason = decline_reason(llm_args, reports_resets=REPORTS_RESETS)
    if reason is None:
        return config, EngineFacts.of(llm_args)
    if warns:
        log.warning("kvbm is disabled for this engine: %s", reason)
    return config, None


def _resolved(*, warns: bool) -> ConnectorConfig:
    """Resolve the profile in TLLM_KVBM_CONFIG, else the variables."""
    text = os.environ.get(CONFIG_VARIABLE)
    try:
        extra = {} if text is None else {"kvbm": parse_json(text)}
    except ValueError as error:
        raise ProfileError(f"`{CONFIG_VARIABLE}` is not JSON: {error}") from error
    return resolve_connector(extra, os.environ, engine="tensorrt-llm", warns=warns, place=CONFIG_VARIABLE)


def _has_salts() -> bool:
    """Whether requests of this version have cache salts: some releases of 1.3 show them in the request only."""
    data, request = getattr(INTERFACE, "RequestData", None), getattr(INTERFACE, "LlmRequest", None)
    names: set[str] = set() if data is None else {field.name for field in dataclasses.fields(data)}
    return any(name in names or hasattr(request, name) for name in SALTS)
