"""Resets and changes of the weights at random points, with vLLM's own Scheduler, OffloadingConnector and KvbmTier.

There is no model: the KV of a token is the version of the weights that computed it. The copier is a queue that ends
late; when it copies, and in which order, is decided by vLLM's own OffloadingConnectorWorker. Requests with common
prefixes come and go, vLLM's prefix cache and its host memory are reset, together or alone, with requests that live or
without, and the weights change. Whatever vLLM itself brings back, KvbmTier may store and load nothing of former
weights.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import TransferResult
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvbm.engines.make_model import materialise
from kvbm.engines.vllm import loads, secondary_tier, weight_updates
from kvbm.engines.vllm.secondary_tier import KvbmTier

pytestmark = pytest.mark.timeout(600)
BLOCK, BLOCKS, ROWS, ROW_BYTES, PREFIX, MIXED = 32, 32, 12, 4096, 96, -1.0


def configuration(directory):
    ours = {"tiers": {"disk": {"blocks": 200, "directory": str(directory)}}, "offload": {"to_disk": "always"}}
    tier = {"type": "KvbmTier", "module_path": "kvbm.vllm_integration.secondary_tier", "kvbm": ours}
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": ROWS * ROW_BYTES, "secondary_tiers": [tier]}
    transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    arguments = {"dtype": "float32", "max_model_len": 512, "block_size": BLOCK, "max_num_batched_tokens": 64}
    found = EngineArgs(
        model=str(materialise("vllm-25m")), enforce_eager=True, kv_transfer_config=transfer, **arguments
    ).create_engine_config()
    found.cache_config.num_gpu_blocks = BLOCKS
    loads._CONFIGS[:] = [found]  # what vLLM's executor leaves there
    return found


class LateCopier:
    """vLLM's OffloadingWorker: one queue in order; `run` copies some of it."""

    def __init__(self, kv: np.ndarray, rows: np.ndarray) -> None:
        self.kv, self.rows = kv, rows
        self.waiting: deque = deque()
        self.ended: list[TransferResult] = []

    def submit_store(self, job_id, source, target) -> bool:
        self.waiting.append((job_id, source.block_ids.tolist(), target.block_ids.tolist(), True))
        return True

    def submit_load(self, job_id, source, target) -> bool:
        self.waiting.append((job_id, target.block_ids.tolist(), source.block_ids.tolist(), False))
        return True

    def run(self, count: int) -> None:
        for _ in range(min(count, len(self.waiting))):
            job_id, blocks, rows, is_store = self.waiting.popleft()
            for block, row in zip(blocks, rows, strict=True):
                if is_store:
                    self.rows[row] = self.kv[block]
                else:
                    self.kv[block] = self.rows[row]
            self.ended.append(TransferResult(job_id, success=True))

    def wait(self, job_ids) -> None:
        while any(job_id in job_ids for job_id, *_ in self.waiting):
            self.run(1)

    def get_finished(self) -> list[TransferResult]:
        ended, self.ended = self.ended, []
        return ended

    def shutdown(self) -> None:
        pass


@dataclass
class World:
    """An engine. `depth`: how many steps are scheduled before the output of the first one is handed back."""

    directory: object
    depth: int
    version: float = 1.0
    live: dict[str, Request] = field(default_factory=dict)
    flights: list = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    stored: int = 0  # blocks that the tier took, and loaded, after a change
    loaded: int = 0
    resumed: int = 0

    def __post_init__(self):
        config = configuration(self.directory)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)]
        )
        made = AsyncScheduler if self.depth > 1 else Scheduler
        self.scheduler = made(config, cache, StructuredOutputManager(config), BLOCK)
        self.connector = self.scheduler.connector
        manager = self.connector.connector_scheduler.manager
        (self.tier,) = manager.secondary_tiers
        self.kv = np.zeros((BLOCKS, BLOCK), np.float32)
        view = np.asarray(manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        assert view.shape == (ROWS, ROW_BYTES), view.shape
        self.rows = view.view(np.float32)[:, :BLOCK]
        spec = SimpleNamespace(replicated_layout=False)
        self.worker = OffloadingConnectorWorker(spec, config, cache)
        self.worker.worker = self.copier = LateCopier(self.kv, self.rows)
        self.watch_the_tier()
        init_none_hash(get_hash_fn_by_name("sha256"))
        self.hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
        until(lambda: self.tier._leader.step() or self.tier._leader.is_on)

    def watch_the_tier(self) -> None:
        """Look at each row that the tier takes or fills."""
        submit, end = self.tier._submit, self.tier._end

        def submitted(metadata, *, is_load, limit_s):
            submit(metadata, is_load=is_load, limit_s=limit_s)
            job = self.tier._jobs[metadata.job_id]
            if not is_load and not job.is_given_up:
                self.stored += len(job.rows)
                self.look(job.rows, f"{job.request_id} stores")

        def ended(job):
            if job.is_load and job.copied and not self.tier._cause:
                self.loaded += len(job.copied)
                self.look([job.rows[position] for position in job.copied], f"{job.request_id} loads")
            end(job)

        self.tier._submit, self.tier._end = submitted, ended

    def look(self, rows, what) -> None:
        seen = set(self.rows[rows].ravel().tolist())
        if seen != {self.version}:
            self.wrong.append(f"{what} KV of the weights {sorted(seen)}, and these are {self.version}")

    def close(self):
        self.copier.rows = self.rows = None  # vLLM cannot release a region that is in use
        self.scheduler.shutdown()

    def add(self, name: str, random: Random) -> None:
        prompt = [*([random.randrange(4)] * PREFIX), *([1000 + random.randrange(4)] * random.randrange(20, 150))]
        sampling = SamplingParams(ignore_eos=True, max_tokens=random.randrange(1, 40))
        self.live[name] = Request(name, prompt, sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(self.live[name])

    def schedule(self) -> None:
        output = self.scheduler.schedule()
        cached, tables = output.scheduled_cached_reqs, self.scheduler.kv_cache_manager.get_block_ids
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        passes = [
            (list(tables(name)[0]), starts[name], starts[name] + count)
            for name, count in output.num_scheduled_tokens.items()
        ]
        sampled = [
            [7] if end >= self.live[name].num_tokens else []
            for name, (_, _, end) in zip(output.num_scheduled_tokens, passes, strict=True)
        ]
        self.flights.append(SimpleNamespace(output=output, passes=passes, sampled=sampled, answer=None))

    def forward(self, flight, random: Random) -> None:
        output: SchedulerOutput = flight.output
        self.worker.handle_preemptions(output.kv_connector_metadata)
        self.worker.start_kv_transfers(output.kv_connector_metadata)
        for table, begin, end in flight.passes:
            known = set(self.kv[table].ravel()[:begin].tolist())
            for position in range(begin, end):
                value = self.version if known <= {self.version} else MIXED
                self.kv[table[position // BLOCK], position % BLOCK] = value
        self.worker.prepare_store_kv(output.kv_connector_metadata)
        self.copier.run(random.randrange(3))
        sent, received = self.worker.get_finished(output.finished_req_ids)
        told = self.worker.build_connector_worker_meta()
        answer = KVConnectorOutput(finished_sending=sent, finished_recving=received, kv_connector_worker_meta=told)
        index = {name: number for number, name in enumerate(output.num_scheduled_tokens)}
        flight.answer = ModelRunnerOutput(list(index), index, flight.sampled, kv_connector_output=answer)

    def step(self, random: Random) -> None:
        if len(self.flights) < self.depth:
            self.schedule()
        waiting = next((one for one in self.flights if one.answer is None), None)
        if waiting is not None:
            self.forward(waiting, random)
        if len(self.flights) >= self.depth:
            self.update()
        time.sleep(0.0005)  # for the disk
        self.live = {name: one for name, one in self.live.items() if not one.is_finished()}

    def update(self) -> None:
        flight = self.flights.pop(0)
        self.scheduler.update_from_output(flight.output, flight.answer)

    def change(self, random: Random) -> None:
        """Change the weights as `reload_weights` does: after the forward passes that are under way."""
        for flight in self.flights:
            if flight.answer is None:
                self.forward(flight, random)
        weight_updates._note_rpc(None, "reload_weights")
        self.version += 1

    def reset(self, *, connector: bool, preempts: bool) -> None:
        had_stopped = bool(self.tier._cause)
        if any(one.status is RequestStatus.WAITING_FOR_REMOTE_KVS for one in self.live.values()):
            preempts = False  # vLLM cannot do it, and says so
        # Without the connector's, vLLM would fail later: a request that was preempted loads its blocks at once.
        self.scheduler.reset_prefix_cache(preempts, connector or preempts)
        self.resumed += had_stopped and not self.tier._cause

    def rest(self, random: Random) -> None:
        """Step until vLLM has nothing to do."""
        until(lambda: self.step(random) or not (self.scheduler.has_requests() or self.copier.waiting))
        while self.flights:
            if self.flights[0].answer is None:
                self.forward(self.flights[0], random)
            self.update()


def until(condition) -> None:
    end_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"


def wander(world: World, random: Random, moves: int) -> None:
    for number in range(moves):
        move = random.random()
        if move < 0.15 and len(world.live) < 6:
            world.add(f"request {number}", random)
        elif move < 0.16:
            world.change(random)
        elif move < 0.19:
            world.reset(connector=random.random() < 0.7, preempts=random.random() < 0.5)
        elif move < 0.21 and world.live:
            world.scheduler.finish_requests(random.choice(list(world.live)), RequestStatus.FINISHED_ABORTED)
        elif move < 0.22:
            world.rest(random)
        world.step(random)
    world.rest(random)


@pytest.fixture(params=[1, 2], ids=["sync", "async"])
def world(request, tmp_path):
    made = World(tmp_path, request.param)
    yield made
    made.close()


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 10))]


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_of_former_weights_is_stored_or_loaded(world, seed):
    wander(world, Random(seed), 800)
    assert not world.wrong
    assert not world.tier.boundary.faults
    assert world.resumed > 0
    assert world.stored > 50


def test_this_notices_what_it_should(world, monkeypatch):
    """If kvbm went on at each reset, it would take KV of former weights from vLLM."""
    monkeypatch.setattr(secondary_tier, "_is_empty", lambda _: True)
    random = Random(0)
    for _ in range(20):
        wander(world, random, 300)
        if world.wrong:
            break
    assert [one for one in world.wrong if "stores" in one]


def fill(world: World, random: Random) -> None:
    for number in range(3):
        world.add(f"{world.version} {number}", random)
    world.rest(random)


def test_it_keeps_blocks_again_once_vllm_has_reset_its_caches(world):
    random = Random(1)
    fill(world, random)
    world.change(random)
    before = world.stored
    fill(world, random)
    world.reset(connector=False, preempts=False)
    fill(world, random)
    assert (world.stored, world.resumed) == (before, 0), "vLLM's host memory has KV of the former weights"
    world.reset(connector=True, preempts=False)
    fill(world, random)
    assert world.resumed == 1
    assert world.stored > before
    while not world.loaded:
        world.reset(connector=False, preempts=False)  # else vLLM finds all in its device memory
        fill(world, random)
    assert not world.wrong


def test_a_reset_beside_requests_that_hold_former_blocks_is_not_enough(world):
    random = Random(1)
    fill(world, random)
    world.change(random)
    world.add("long", random)
    while not world.scheduler.kv_cache_manager.get_block_ids("long")[0]:
        world.step(random)
    world.reset(connector=True, preempts=False)
    before = world.stored
    fill(world, random)
    assert (world.stored, world.resumed) == (before, 0)
    world.reset(connector=True, preempts=True)
    assert world.resumed == 1
    assert not world.wrong


def test_without_vllms_block_pools_it_never_resumes(world):
    world.tier.pools = ()
    world.change(Random(1))
    world.reset(connector=True, preempts=True)
    assert world.resumed == 0
    assert isinstance(world.tier, KvbmTier)
