"""Worker side of the connector: one per rank, in the process that owns the rank's part of the KV cache.

It executes the leader's orders. Control words return the results, with one exception: vLLM accepts the failure of a
load only from its workers. Therefore a later step's orders contain the failed loads, and every rank reports them.

The messages between the two sides are small and picklable, without bytes of blocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvbm.boundary import Boundary, contained
from kvbm.device.replicas import ALONE, Replicas
from kvbm.device.worker import HostCapacity, Worker
from kvbm.engines.vllm.cache_groups import KNOWS_FAILED_REQUESTS, cache_groups
from kvbm.errors import EnvironmentProblem
from kvbm.host.layout import BlockLayout, storages_of
from kvbm.host.processes import boot_id
from kvbm.observe.nvtx_ranges import COPIES, annotate
from kvbm.plan import StepPlan

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvbm.config.schema import ConnectorConfig
    from kvbm.leader.request import LoadResult
    from kvbm.types import SegmentInfo

PROGRESS_INTERVAL_S = 2.0
SLEEP_PATIENCE_S = 5.0
SLEEP_POLL_S = 0.001

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vllm is not there when types are checked
    """What each rank sends to the leader once: the location of its segment, its configuration, another connector that
    may load blocks, empty if there is none, and whether the engine prefills or decodes for another one."""

    segment: SegmentInfo
    config_digest: str
    boot_id: str
    sibling: str = ""
    is_of_pair: bool = False


@dataclass(frozen=True)
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders for every rank. `failed_loads` are loads that failed before: vLLM accepts a failure only from a
    worker. `wants_answer`: the leader has results that it can report only when this step's output arrives."""

    plan: StepPlan
    failed_loads: tuple[LoadResult, ...] = ()
    wants_answer: bool = False


@dataclass(frozen=True)
class WordsWritten(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """A rank has written control words, or may do so before the scheduler side gets this message. It has no content: it
    makes vLLM pass the output of an otherwise empty step to the scheduler side, which then reads the words."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self


NOTHING = StepOrders(StepPlan(step=0))  # orders before the leader exists, or without a step


class WorkerSide:
    """Translates the hooks of one rank into calls of `Worker`."""

    def __init__(
        self,
        config: ConnectorConfig,
        kv_cache_config: KVCacheConfig,
        *,
        rank: int,
        rank_count: int,
        replicas: Replicas = ALONE,
    ) -> None:
        self._config = config
        self._block_count: int = kv_cache_config.num_blocks
        self._has_one_group = len(kv_cache_config.kv_cache_groups) == 1
        self._layer_names = [name for group in cache_groups(kv_cache_config) for name in group.layer_names]
        # If vLLM zeroes new blocks, it does so after `bind` and would overwrite loads that started there.
        self._starts_late = bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))
        self._rank = rank
        self._rank_count = rank_count
        self._replicas = replicas
        self._worker: Worker | None = None
        self._orders = NOTHING
        self._has_words = False
        self._is_asleep = False  # vLLM has unmapped the KV cache
        self.boundary = Boundary()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Allocate the host memory. Raises EnvironmentProblem with rank and reason, which stops the engine's start."""
        found = [kv_caches[name] for name in self._layer_names if name in kv_caches]
        tensors = [_blocks_first(tensor, self._block_count) for tensor in found]
        if not tensors:
            raise EnvironmentProblem(f"rank {self._rank} has no KV cache", hint="start vLLM without the connector")
        layout = BlockLayout.from_tensors(tensors, block_count=self._block_count, block_dim=0, shared=True)
        self._worker = self.create_worker(layout, storages_of(tensors))
        info = self._worker.info
        log.info(
            "kvbm: rank %d %s %d blocks of %d bytes in host memory (%.2f GB)",
            self._rank, "shares" if info.replica else "allocated", info.slot_count, info.block_bytes, info.length / 1e9,
        )  # fmt: skip

    def create_worker(self, layout: BlockLayout, storages: list[torch.Tensor]) -> Worker:
        host = self._config.tiers.host_memory()
        return Worker.create(
            layout,
            storages,
            HostCapacity(capacity_bytes=host.capacity_bytes, block_count=host.blocks),
            rank=self._rank,
            segment_count=self._rank_count // self._replicas.count,
            replicas=self._replicas,
            thread_count=self._config.transfer.max_concurrent,
            binds_memory=self._config.transfer.numa,
            progress=progress_log(f"of host memory for rank {self._rank}"),
            on_copier=partial(annotate, ranges=COPIES) if self._config.metrics.nvtx else None,
        )

    def handshake(self, sibling: str = "", *, is_of_pair: bool = False) -> Handshake | None:
        if self._worker is None:
            return None
        return Handshake(self._worker.info, self._config.digest(), boot_id(), sibling, is_of_pair)

    def unregister_kv_caches(self) -> None:
        """Wait for the copies that run, because vLLM is about to unmap the KV cache, and start no others. Raises
        EnvironmentProblem, which fails the sleep: a copy that runs would end the process.

        The addresses stay: vLLM maps other memory there when it wakes up. So the copiers stay too.
        """
        deadline_s = time.monotonic() + SLEEP_PATIENCE_S
        while self._worker is not None and self._worker.is_busy():
            if time.monotonic() > deadline_s:
                raise EnvironmentProblem(
                    f"rank {self._rank} cannot sleep: a copy has not ended within {SLEEP_PATIENCE_S:g} s",
                    hint="send `/sleep` again",
                )
            time.sleep(SLEEP_POLL_S)
            self._worker.poll()
        self._is_asleep = True

    def restore_kv_caches(self) -> None:
        """Allow copies again, after vLLM has mapped the KV cache at its former addresses."""
        self._is_asleep = False

    @contained()
    def bind(self, orders: StepOrders) -> None:
        """Take a step's orders and start its loads, which overlap with the forward pass."""
        self._orders = orders
        if not self._starts_late:
            self._start()

    @contained()
    def start_load(self) -> None:
        if self._starts_late:
            self._start()

    @contained()
    def finish_step(self) -> None:
        """Start the offloads: the forward pass that computes their blocks has been submitted."""
        if self._worker is not None and self._orders.plan.offloads and not self._is_asleep:
            self._worker.finish(self._orders.plan)

    @contained()
    def poll(self) -> None:
        self._has_words = self._worker is not None and (self._worker.poll() or self._worker.is_onboarding())

    @property
    def has_failed_loads(self) -> bool:
        """Whether the next three methods return anything, which is rare."""
        return bool(self._orders.failed_loads)

    @contained(set)
    def failed_requests(self) -> set[str]:
        """Return the requests whose load has ended and did not bring every block."""
        return {load.request_id for load in self._orders.failed_loads}

    @contained(set)
    def lost_requests(self) -> set[str]:
        """Return those of `failed_requests` that get nothing. vLLM frees their blocks, local hits included."""
        return {load.request_id for load in self._orders.failed_loads if not self._is_cut(load)}

    @contained(set)
    def failed_blocks(self) -> set[int]:
        """Return the blocks that vLLM computes in place. It keeps the blocks before them."""
        cut = [load for load in self._orders.failed_loads if not KNOWS_FAILED_REQUESTS or self._is_cut(load)]
        return {block_id for load in cut for block_id in load.failed_block_ids}

    @contained()
    def take_message(self) -> WordsWritten | None:
        return WordsWritten() if self._has_words or self._orders.wants_answer else None

    def clear(self) -> None:
        self._orders = NOTHING

    @contained()
    def close(self) -> None:
        if self._worker is not None:
            # The scheduler side still reads this memory, to write it to lower tiers; the end of all processes frees it.
            self._worker.stop() if self._config.tiers.has_lower else self._worker.close()

    def _is_cut(self, load: LoadResult) -> bool:
        """Return whether vLLM can use the first blocks of the load. With several KV cache groups it accepts no failed
        blocks. A load that failed whole is not cut: a copier may still write to its blocks."""
        return self._has_one_group and len(load.failed_block_ids) < len(load.block_ids)

    def _start(self) -> None:
        if self._worker is not None and not self._orders.plan.is_empty() and not self._is_asleep:
            self._worker.start(self._orders.plan)


def _blocks_first(tensor: torch.Tensor, block_count: int) -> torch.Tensor:
    """Return a view whose first dimension counts blocks. It is the first one already, or the second one after a
    dimension that separates keys from values; layers with states have no such dimension."""
    return tensor if tensor.shape[0] % block_count == 0 else tensor.movedim(1, 0)


def progress_log(what: str) -> Callable[[int, int], None]:
    """Return a callback (bytes done, bytes in total) that logs the progress of a start-up from time to time."""
    last_s = time.monotonic()

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > PROGRESS_INTERVAL_S:
            last_s = time.monotonic()
            log.info("kvbm: allocated %.1f of %.1f GB %s", done_bytes / 1e9, total_bytes / 1e9, what)

    return progress
