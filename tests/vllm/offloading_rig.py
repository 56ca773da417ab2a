"""vLLM's own TieringOffloadingManager with a KvbmTier below its host memory, without a model and without a device.

A test plays the parts of vLLM's scheduler and of its copier: `store` fills rows of the region and hands them over,
`load` asks until vLLM has an answer. The bytes of a block follow from its key, so that each row can be checked.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from kvbm.engines.make_model import materialise
from kvbm.engines.vllm import loads, secondary_tier
from kvbm.engines.vllm.secondary_tier import KvbmTier

ROW_BYTES = 8192
BLOCK_TOKENS = 128
NAMES = itertools.count()


@functools.cache
def vllm_config(*, enable_lora: bool = False):
    tier = {"type": "KvbmTier", "module_path": "kvbm.vllm_integration.secondary_tier"}
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [tier]},
    )
    arguments = EngineArgs(
        model=str(materialise("vllm-25m")),
        dtype="float32",
        max_model_len=2048,
        kv_transfer_config=transfer,
        enable_lora=enable_lora,
    )
    return arguments.create_engine_config()


def key_of(number: int, group: int = 0) -> bytes:
    return make_offload_key(hashlib.sha256(b"%d" % number).digest(), group)


@functools.lru_cache(maxsize=1000)
def bytes_of(key: bytes) -> np.ndarray:
    """What a block with this key contains; no part of it is like another one."""
    seed = np.frombuffer(hashlib.sha256(key).digest(), np.uint32)
    return np.random.default_rng(seed).integers(0, 256, ROW_BYTES, np.uint8)


def offloading_config(engine_id: str) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(BLOCK_TOKENS, ("layers.0",), 0),),
        worker_kv_bytes_per_block=ROW_BYTES,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id=engine_id,
        model=OffloadingModelConfig("model", "float32"),
        cache=OffloadingCacheConfig(BLOCK_TOKENS, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )


class Offloading:
    """A manager, its region of `rows` rows, and the tier. As a context manager it is shut down at the end."""

    def __init__(
        self,
        directory: Path,
        *,
        rows: int = 8,
        disk_blocks: int = 200,
        host_blocks: int | None = None,
        host: dict[str, object] | None = None,
        shared: str = "",
        enable_lora: bool = False,
    ) -> None:
        name = f"rig-{time.time_ns()}-{next(NAMES)}"
        region = SharedOffloadRegion(name, rows, None, ROW_BYTES, ROW_BYTES)
        self.primary = CPUPrimaryTierOffloadingManager(rows, region)
        config = vllm_config(enable_lora=True) if enable_lora else vllm_config()
        loads._CONFIGS[:] = [config]  # what vLLM's executor leaves there
        tiers = {"disk": {"blocks": disk_blocks, "directory": str(directory)}} if disk_blocks else {}
        if shared:
            tiers["shared"] = {"url": shared}
        if host_blocks is not None:
            host = {"blocks": host_blocks}
        if host is not None:
            tiers["host"] = host
        options = {"tiers": tiers, "offload": {"to_disk": "always", "to_shared": "always"}}
        self.tier = KvbmTier(
            SimpleNamespace(config=offloading_config(name)), self.primary.get_kv_memoryview(), "KvbmTier", kvbm=options
        )
        self.manager = TieringOffloadingManager(self.primary, [self.tier])
        self.rows = np.asarray(self.primary.get_kv_memoryview()).view(np.uint8)
        self.numbers = itertools.count()
        self.contents = bytes_of  # of a block, by its key
        self.settle()  # the disk is off until the files of the model are identified

    @property
    def leader(self):
        return self.tier._leader  # vLLM sees nothing of it

    @property
    def shared(self):
        return self.leader.lower_tiers[-1]

    @property
    def jobs(self):
        """Those that vLLM waits for."""
        return self.manager._jobs  # `has_pending_work` covers the tier's own work too

    def __enter__(self) -> Offloading:
        return self

    def __exit__(self, *_: object) -> None:
        self.rows = None  # vLLM cannot release a region that is in use
        self.manager.shutdown()

    def request(self, keys: Sequence[bytes] = (), **facts: object) -> ReqContext:
        """A new request for blocks with these keys; `facts` are attributes of vLLM's request."""
        context = ReqContext(f"request-{next(self.numbers)}")
        for at, key in enumerate(keys):
            context.set_offload_key_position(key, BLOCK_TOKENS * (at + 1))
        plain = {"lora_request": None, "mm_features": [], "resumable": False, "prompt_is_token_ids": None}
        plain |= {"kv_transfer_params": None, "kv_hints": None, "session_id": None}
        secondary_tier._note_request(
            SimpleNamespace(connector_scheduler=SimpleNamespace(manager=self.manager)),
            SimpleNamespace(request_id=context.req_id, **plain | facts),
        )
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self, timeout_s: float = 60.0) -> None:
        """Step until neither vLLM nor the tier has work, and the tier is on or cannot be opened."""
        self.step()
        end_s = time.monotonic() + timeout_s
        while self.manager.has_pending_work() or not (
            self.tier.boundary.is_off or self.tier._cause or self.leader.is_on or self.cannot_open()
        ):
            assert time.monotonic() < end_s, f"still busy: {self.jobs}"
            self.step()
            time.sleep(0.001)

    def cannot_open(self) -> bool:
        """Whether files are there that the disk process refuses, or this engine uses no tier."""
        services = [getattr(tier, "disk", None) or tier.client for tier in self.leader.lower_tiers]
        return not services or any(service._last_error for service in services)

    def settle_jobs(self, timeout_s: float = 60.0) -> None:
        """Step until vLLM waits for no job of the tier."""
        self.step()
        end_s = time.monotonic() + timeout_s
        while self.jobs:
            assert time.monotonic() < end_s, f"still busy: {self.jobs}"
            self.step()
            time.sleep(0.001)

    def begin_store(self, keys: Collection[bytes], **facts: object) -> ReqContext:
        """Put blocks into vLLM's host memory, from where they go to the tier, in any order as in vLLM."""
        context = self.request(list(keys), **facts)
        output = self.manager.prepare_store(list(keys), context)
        assert output is not None, "vLLM has no room"
        for key, row in zip(output.keys_to_store, output.store_spec.block_ids, strict=True):
            self.rows[row] = self.contents(key)
        if output.keys_to_store:
            self.manager.complete_store(set(output.keys_to_store), context)
        return context

    def store(self, keys: Collection[bytes], **facts: object) -> None:
        context = self.begin_store(keys, **facts)
        self.settle()
        self.manager.on_request_finished(context)

    def store_on_disk(self, keys: Collection[bytes]) -> None:
        """Like `store`, one block after the other: a host tier of few blocks drops those that the disk is late for."""
        (disk,) = self.leader.lower_tiers
        for key in keys:
            self.store([key])
            end_s = time.monotonic() + 60
            while not disk.contains(key):
                assert time.monotonic() < end_s, "the disk has not got the block"
                self.step()
                time.sleep(0.001)

    def forget_host(self) -> None:
        """Empty vLLM's host memory and kvbm's own, without telling the tier."""
        self.settle()
        self.primary.reset_cache()
        self.leader.host.store.reset()

    def ask(self, keys: Sequence[bytes], context: ReqContext) -> list[LookupResult]:
        """Look keys up as vLLM's scheduler does: up to the first that is missing."""
        found = []
        for key in keys:
            found.append(self.manager.lookup(key, context))
            if found[-1] is LookupResult.MISS:
                break
        return found

    def load(self, keys: Sequence[bytes], timeout_s: float = 60.0, **facts: object) -> int:
        """Return how many blocks a new request finds in vLLM's host memory in the end, each with the right bytes."""
        context, end_s = self.request(keys, **facts), time.monotonic() + timeout_s
        found = self.ask(keys, context)
        while LookupResult.HIT_PENDING in found or LookupResult.RETRY in found:
            assert time.monotonic() < end_s, found
            self.step()
            time.sleep(0.001)
            found = self.ask(keys, context)
        good = list(keys[: found.count(LookupResult.HIT)])
        spec = self.manager.prepare_load(good, context)
        for key, row in zip(good, spec.block_ids, strict=True):
            assert np.array_equal(self.rows[row], bytes_of(key)), f"wrong bytes in row {row}"
        self.manager.complete_load(good, context)
        self.manager.on_request_finished(context)
        return len(good)
