"""DynamoConnector: the class that vLLM loads, under the class name and module path of NVIDIA's connector.

vLLM creates one instance in its scheduler's process and one in each worker. Each hook is one call of that side; hooks
that this class does not define keep vLLM's default. If kvbm does not support an engine, it is disabled with one warning
that states the reason, and vLLM serves without it.

The API server imports this module for the class methods: importing it uses no device and allocates no memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvbm.config.connector import resolve_connector
from kvbm.device.replicas import ALONE
from kvbm.engines.vllm.beginning import log_as_vllm_does, refuse_rival
from kvbm.engines.vllm.cache_groups import cache_groups, decline_reason
from kvbm.engines.vllm.engine_facts import VllmFacts, rank_count_of, rank_of
from kvbm.engines.vllm.identity import identity
from kvbm.engines.vllm.idle_engine import watch_cores
from kvbm.engines.vllm.placement import is_of_pair, loading_sibling, require_parent, require_role
from kvbm.engines.vllm.replicas import replicas_of
from kvbm.engines.vllm.scheduler_side import SchedulerSide
from kvbm.engines.vllm.telemetry import KvbmPromMetrics, KvbmStats
from kvbm.engines.vllm.waiting_requests import preempt_before_resets
from kvbm.engines.vllm.weight_updates import watch
from kvbm.engines.vllm.worker_side import NOTHING, WorkerSide
from kvbm.observe.nvtx_ranges import RANK_HOOKS, SCHEDULER_HOOKS, annotate

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvbm.config.schema import ConnectorConfig
    from kvbm.engines.vllm.worker_side import Handshake

log = logging.getLogger(__name__)


class DynamoConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vllm is not there for the type checker
    """One side of the block manager inside vLLM: has `_scheduler` or `_worker`, or neither if kvbm is disabled."""

    requires_kv_delivery = False  # a missing copy is only a cache miss

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        log_as_vllm_does()
        refuse_rival()
        transfer_config = vllm_config.kv_transfer_config
        transfer_config.kv_load_failure_policy = "recompute"
        require_role(transfer_config)
        if role is KVConnectorRole.WORKER:
            require_parent()
        extra_config = transfer_config.kv_connector_extra_config
        config = _resolved(extra_config, warns=role is KVConnectorRole.SCHEDULER)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        reason = decline_reason(vllm_config, kv_cache_config)
        if reason is not None:
            if role is KVConnectorRole.SCHEDULER:
                log.warning("kvbm is disabled for this engine: %s", reason)
            return
        if role is KVConnectorRole.SCHEDULER:
            facts = VllmFacts.of(vllm_config)
            groups = cache_groups(kv_cache_config)
            self._scheduler = SchedulerSide(config, groups, facts, partial(identity, vllm_config))
            if config.metrics.nvtx:
                annotate(self._scheduler, SCHEDULER_HOOKS)
            watch(self._scheduler.blocks)
            watch_cores()
            preempt_before_resets(DynamoConnector)
        else:
            self._sibling, self._is_of_pair = loading_sibling(), is_of_pair()
            self._worker = self.worker_side_class()(
                config,
                kv_cache_config,
                rank=rank_of(vllm_config),
                rank_count=rank_count_of(vllm_config),
                replicas=replicas_of(vllm_config, kv_cache_config) if config.transfer.share_equal_kv else ALONE,
            )
            if config.metrics.nvtx:
                annotate(self._worker, RANK_HOOKS)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Validate the configuration: on a GPU, vLLM calls this before it starts any process of the engine."""
        _resolved(extra_config, warns=False)
        return bool(super().requires_piecewise_for_cudagraph(extra_config))

    @classmethod
    def worker_side_class(cls) -> type[WorkerSide]:
        return WorkerSide

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Let vLLM unmap the KV cache (from 0.33 on, whose default of `supports_sleep_mode` is True)."""
        if self._worker is not None:
            self._worker.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        if self._worker is not None:
            self._worker.restore_kv_caches()

    def get_handshake_metadata(self) -> Handshake | None:
        return None if self._worker is None else self._worker.handshake(self._sibling, is_of_pair=self._is_of_pair)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.bind(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are copied whole, after the forward pass."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.finish_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        self._worker.poll()
        return None, self._worker.failed_requests() if self._worker.has_failed_loads else None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return loads of which nothing arrived. Used from 0.30 on; earlier versions accept failures by block id
        only."""
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None and self._worker.has_failed_loads:
            results.failed_recving = self._worker.lost_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.failed_blocks() if self._worker is not None and self._worker.has_failed_loads else set()

    def build_connector_worker_meta(self) -> Any:
        return self._worker.take_message() if self._worker is not None else None

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        if self._worker is not None:
            self._worker.clear()

    def set_xfer_handshake_metadata(self, metadata: dict[Any, Handshake]) -> None:
        if self._scheduler is not None:
            self._scheduler.blocks.accept_handshakes(metadata.values())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Handshake]) -> None:
        self.set_xfer_handshake_metadata(metadata)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self._scheduler is not None:
            self._scheduler.blocks.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.add_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens) if self._scheduler is not None else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        disk, shared = self._scheduler.lower_tier_tokens(request) if self._scheduler is not None else (0, 0)
        disk = min(num_external_tokens, disk)
        shared = min(num_external_tokens - disk, shared)
        sources = {
            CacheHitSource.HOST: num_external_tokens - disk - shared,
            CacheHitSource.DISK: disk,
            CacheHitSource.EXTERNAL_UNSPECIFIED: shared,
        }
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.build_orders(scheduler_output) if self._scheduler is not None else NOTHING

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            self._scheduler.settle(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.end_request(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pending()

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler.blocks.take_events() if self._scheduler is not None else ()

    def reset_cache(self) -> bool | None:
        return self._scheduler.blocks.reset() if self._scheduler is not None else True

    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()

    def get_kv_connector_stats(self) -> KvbmStats | None:
        return self._scheduler.blocks.take_stats() if self._scheduler is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvbmStats:
        return KvbmStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> KvbmPromMetrics:
        return KvbmPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _resolved(extra_config: dict[str, Any], *, warns: bool) -> ConnectorConfig:
    return resolve_connector(extra_config, os.environ, engine="vllm", warns=warns)


def _register() -> None:
    """Register our class names with vLLM, unless they are already registered.

    A MultiConnector rebuilds the statistics of its children by name in the API server; an unknown name would end the
    server's output loop.
    """
    for name in ("DynamoConnector", "PdConnector"):
        with contextlib.suppress(ValueError):
            KVConnectorFactory.register_connector(name, __name__, name)


_register()


def __getattr__(name: str) -> Any:
    """Import PdConnector, upstream's second connector at this path, only on use: its imports are optional."""
    if name == "PdConnector":
        from kvbm.engines.vllm.pd import PdConnector

        return PdConnector
    raise AttributeError(name)
