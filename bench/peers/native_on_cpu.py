"""vLLM's own offloading on a CPU: only the copier is replaced, by one that copies with the CPU.

vLLM 0.32 refuses CPU platforms because its copier submits to CUDA streams. This out-of-tree spec replaces the copier,
so that the unchanged connector, tiering manager and host region can be measured:

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
        {"spec_name": "NativeOnCpu", "spec_module_path": "native_on_cpu", "cpu_bytes_to_use": 1073741824}}'

This directory must be on PYTHONPATH. As with CUDA streams, there is one queue per direction, and its copies end in the
order of submission. A copy is one memmove per page (a block's part of one layer), which releases the GIL. The groups of
a hybrid model overlay each other in the same tensors. As vLLM's copier does, this one copies only the layers of the
group that a block belongs to, without the padding of a page.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

Pages = Sequence[tuple[int, int]]  # (address of page 0, bytes from page to page), per tensor
Side = tuple[Pages, BlockIDsLoadStoreSpec]


class NativeOnCpu(TieringOffloadingSpec):
    """The tiering spec with `CpuCopier` instead of the CUDA copier."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            assert self.blocks_per_chunk == 1, self.blocks_per_chunk
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuCopier(kv_caches, region)
            print(f"{type(self).__name__}: {self.num_chunks} chunks of {self.kv_bytes_per_chunk} bytes", flush=True)
        return self._worker


class CpuCopier(OffloadingWorker):
    """Two threads, one per direction. `submit_*`, `get_finished` and `wait` are called by the engine's thread."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._tensors = [cache.tensor for cache in kv_caches.tensors]
        self._groups = [[(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in kv_caches.group_data_refs]
        self._device = [pages_of(cache.tensor, cache.page_size_bytes) for cache in kv_caches.tensors]
        self._host = [
            pages_of(region.create_next_worker_view(cache.page_size_bytes), cache.page_size_bytes)
            for cache in kv_caches.tensors
        ]
        self._directions = {name: ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("store", "load")}
        self._jobs: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        return self._submit("store", job_id, src_spec.group_sizes, (self._host, dst_spec), (self._device, src_spec))

    def submit_load(self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit("load", job_id, dst_spec.group_sizes, (self._device, dst_spec), (self._host, src_spec))

    def get_finished(self) -> list[TransferResult]:
        ended = [job_id for job_id, future in self._jobs.items() if future.done()]
        return [self._jobs.pop(job_id).result() for job_id in ended]

    def wait(self, job_ids: set[int]) -> None:
        wait([self._jobs[job_id] for job_id in job_ids if job_id in self._jobs])

    def shutdown(self) -> None:
        for threads in self._directions.values():
            threads.shutdown()
        self._region.cleanup()

    def _submit(self, direction: str, job_id: int, group_sizes: Sequence[int], target: Side, source: Side) -> bool:
        assert len(group_sizes) == len(self._groups), (group_sizes, len(self._groups))
        moves = pairs(self._groups, group_sizes, target, source)
        self._jobs[job_id] = self._directions[direction].submit(copy, job_id, moves)
        return True


def pairs(
    groups: Sequence[Sequence[tuple[int, int]]], group_sizes: Sequence[int], target: Side, source: Side
) -> Iterator[tuple[int, int, int]]:
    """(target address, source address, bytes) of every page. The block ids of a side are ordered by group."""
    (target_pages, target_spec), (source_pages, source_spec) = target, source
    ids = zip(target_spec.block_ids.tolist(), source_spec.block_ids.tolist(), strict=True)
    for layers, block_count in zip(groups, group_sizes, strict=True):
        blocks = list(itertools.islice(ids, block_count))
        for tensor, page_bytes in layers:
            (target_start, target_stride), (source_start, source_stride) = target_pages[tensor], source_pages[tensor]
            for target_id, source_id in blocks:
                yield target_start + target_id * target_stride, source_start + source_id * source_stride, page_bytes


def copy(job_id: int, moves: Iterator[tuple[int, int, int]]) -> TransferResult:
    started, moved = time.perf_counter(), 0
    for target, source, length in moves:
        ctypes.memmove(target, source, length)
        moved += length
    return TransferResult(job_id, success=True, transfer_size=moved, transfer_time=time.perf_counter() - started)


def pages_of(tensor: torch.Tensor, page_bytes: int) -> tuple[int, int]:
    assert (tensor.shape[1], tensor.stride(1), tensor.element_size()) == (page_bytes, 1, 1)
    return tensor.data_ptr(), tensor.stride(0)
