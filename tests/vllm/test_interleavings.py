"""Changes of the weights at every point of load, schedule, forward pass and registration, with vLLM's own Scheduler.

The worker's hooks are called by the classes that call them in vLLM's model runners V1 and V2.
There is no model: the KV of a token is the version of the weights that computed it, or MIXED if a token before it has
another version. Requests with a common prefix, which is in host memory, arrive, and the weights change at one point.
A request that begins after the change may see no token of the version before, in G1 or from host memory.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from manual_pool import ManualPool

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvbm.engines.make_model import materialise
from kvbm.engines.vllm.connector import DynamoConnector
from kvbm.engines.vllm.scheduler_side import SchedulerSide
from kvbm.engines.vllm.worker_side import WorkerSide

BLOCK, BLOCKS, PREFIX = 32, 24, 96
MIXED, GENERATED = -1, 7
NEVER = 1_000_000
RUNNERS = ("V1", "V2", "V2 later")  # main starts deferred loads before it samples, and 0.32 afterwards
ENGINES = [(1, "V1"), (2, "V2"), *(pytest.param(*one, marks=pytest.mark.soak) for one in ((2, "V1"), (1, "V2")))]
CONNECTOR = {
    "kv_connector": "DynamoConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": DynamoConnector.__module__,
    "kv_connector_extra_config": {"kvbm": {"tiers": {"host": {"blocks": 64}}, "onboard": {"policy": "always"}}},
}
SPEC = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
SPECS = {"full": FullAttentionSpec(**SPEC), "window": SlidingWindowSpec(**SPEC, sliding_window=40)}
SPECS |= {"adapter": SPECS["full"], "short": SPECS["full"]}
ADAPTER = LoRARequest("mine", 1, "/adapter", load_inplace=True)  # kvbm keeps no block of it, and vLLM does
LEAST_LOADS = {"full": 4, "window": 1, "adapter": 0, "short": 3}  # blocks of the last request


@pytest.fixture(scope="module")
def configuration():
    arguments = {"dtype": "float32", "max_model_len": 512, "block_size": BLOCK, "max_num_batched_tokens": 64}
    model = str(materialise("vllm-25m"))
    found = EngineArgs(model=model, enforce_eager=True, kv_transfer_config=CONNECTOR, **arguments)
    engine = found.create_engine_config()
    engine.cache_config.num_gpu_blocks = BLOCKS
    return engine


@dataclass
class World:
    """One engine: vLLM's scheduler, the two sides of the connector, and a forward pass that writes versions.

    `depth`: how many steps are scheduled before the output of the first one is handed back.
    """

    configuration: object
    depth: int
    kind: str = "full"
    runner: str = "V1"
    version: int = 1
    held: bool = False
    live: dict[str, Request] = field(default_factory=dict)
    flights: list = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    fresh: set[str] = field(default_factory=set)

    def __post_init__(self):
        groups = [KVCacheGroupSpec(["layer.0"], SPECS[self.kind])]
        cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        made = AsyncScheduler if self.depth > 1 else Scheduler
        manager = StructuredOutputManager(self.configuration)
        self.scheduler = made(self.configuration, cache, manager, BLOCK)
        self.worker = DynamoConnector(self.configuration, KVConnectorRole.WORKER, cache)
        self.kv = torch.zeros(BLOCKS, BLOCK)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        self.caller = ActiveKVConnector(self.configuration, {"layer.0": self.kv})  # registers them, as in both runners
        self.worker.get_transfer_results = partial(self.copied, self.worker.get_transfer_results)
        self.scheduler.connector.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})
        self.side = self.scheduler.connector._scheduler  # the listener that vLLM's EngineCore would call
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(BLOCK, hash_function)

    def close(self):
        self.worker.shutdown()
        self.scheduler.shutdown()

    def add(self, name: str, tail: int, **parameters: object) -> None:
        prompt = [*range(PREFIX), *([1000 + tail] * 40)]
        if self.kind == "short":  # the first requests end their first block with what they generate
            prompt = [*range(28), *([GENERATED] * 80 if name.startswith("late") else [])]
        sampling = SamplingParams(max_tokens=12 if self.kind == "short" else 4, ignore_eos=True, **parameters)
        adapter = ADAPTER if self.kind == "adapter" else None
        request = Request(name, prompt, sampling, None, lora_request=adapter, block_hasher=self.hasher)
        self.live[name] = request
        self.fresh.add(name)
        self.scheduler.add_request(request)

    def change(self) -> None:
        """Change the weights as reload_weights does: after the forward passes that are under way."""
        while any(flight[1] is None for flight in self.flights):
            self.forward()
        if self.kind == "adapter":
            self.side.adapter_is_loaded(ADAPTER)
        else:
            self.side.weights_may_change("a test")
        self.version += 1
        self.fresh = {name for name in self.fresh if not self.has_kv(name)}

    def has_kv(self, name: str) -> bool:
        return bool(self.scheduler.kv_cache_manager.get_block_ids(name)[0])

    def schedule(self) -> None:
        self.flights.append([self.scheduler.schedule(), None])

    def forward(self) -> None:
        flight = next((one for one in self.flights if one[1] is None), None)
        if flight is None:
            return
        output = flight[0]
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        names, sampled = list(output.num_scheduled_tokens), []
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))

        def compute() -> None:
            self.run_copies()
            for name in names:
                begin, end = starts[name], starts[name] + output.num_scheduled_tokens[name]
                self.compute(name, begin, end)
                sampled.append([GENERATED] if end >= self.live[name].num_prompt_tokens else [])

        answer = (self.as_v1 if self.runner == "V1" else self.as_v2)(output, compute)
        index = {name: number for number, name in enumerate(names)}
        flight[1] = ModelRunnerOutput(names, index, sampled, kv_connector_output=answer)

    def as_v1(self, output, compute) -> KVConnectorOutput:
        self.worker.handle_preemptions(output.kv_connector_metadata)
        with (
            set_forward_context(None, self.configuration),
            KVConnectorModelRunnerMixin._get_kv_connector_output(output) as answer,
        ):
            compute()
        return answer

    def as_v2(self, output, compute) -> KVConnectorOutput:
        self.caller.set_disabled(True)  # while graphs are captured, and in the dummy steps of data parallelism
        self.caller.pre_forward(SchedulerOutput.make_empty())
        self.caller.finish_forward()
        assert self.caller.post_forward(set()) is None
        self.caller.set_disabled(False)
        self.caller.pre_forward(output)
        compute()
        if self.runner == "V2 later":
            self.caller._start_load_kv()
        self.caller.finish_forward()
        return self.caller.post_forward(output.finished_req_ids)

    def compute(self, name: str, begin: int, end: int) -> None:
        if not self.has_kv(name):
            return
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        first = max(0, begin - 39) if self.kind == "window" else 0
        seen = {float(self.kv[table[one // BLOCK], one % BLOCK]) for one in range(first, begin)}
        if name in self.fresh and seen - {float(self.version)}:
            self.broken.append(f"{name} computes with {sorted(seen)} at version {self.version}")
        value = self.version if seen <= {float(self.version)} else MIXED
        for position in range(begin, end):
            self.kv[table[position // BLOCK], position % BLOCK] = value

    def run_copies(self) -> None:
        """Run what has been ordered, unless copies are held."""
        worker = self.worker._worker._worker  # whose pools the test steps
        for pool in () if self.held else (worker._onboard_pool, worker._offload_pool):
            while pool.waiting():
                pool.run_next()

    def copied(self, found, finished_req_ids):
        self.run_copies()
        return found(finished_req_ids)

    def update(self) -> None:
        if self.flights and self.flights[0][1] is not None:
            output, answer = self.flights.pop(0)
            self.scheduler.update_from_output(output, answer)

    def moves(self):
        """Yield before each move of a step."""
        while len(self.flights) < self.depth:
            yield
            self.schedule()
        yield
        self.forward()
        yield
        self.update()

    def finish(self) -> None:
        for _ in range(60):
            if not self.scheduler.requests and not self.side.has_pending():
                break
            for _ in self.moves():
                pass
        assert not self.scheduler.requests, "a request did not end"
        while self.flights:
            self.forward()
            self.update()

    def forget_g1(self) -> None:
        assert self.scheduler.kv_cache_manager.block_pool.reset_prefix_cache()


@pytest.fixture
def world(configuration, monkeypatch):
    monkeypatch.setattr("kvbm.vllm_integration.connector.rank_of", lambda _: 0)  # there are no process groups
    monkeypatch.setattr("kvbm.device.worker.TransferPool", lambda *_, **__: ManualPool())
    worlds = []

    def make(*arguments) -> World:
        worlds.append(World(configuration, *arguments))
        return worlds[-1]

    yield make
    for one in worlds:
        one.close()


def explore(make, kind: str, depth: int, runner: str, requests: int, hold: int, point: int) -> tuple[list[str], bool]:
    """Let `requests` arrive, with their loads held for `hold` steps, and change the weights before move `point`. Return
    what was wrong, and whether there were so many moves."""
    world = make(depth, kind, runner)
    world.add("before", 0)
    world.finish()
    world.forget_g1()
    for number in range(requests):
        world.add(f"r{number}", number + 1)
    world.held = hold > 0
    count, changed = 0, False
    for step in range(14):
        world.held = step < hold
        for _ in world.moves():
            if count == point:
                world.change()
                changed = True
            count += 1
    world.held = False
    world.finish()
    for name, forgets in (("late", False), ("late-2", True), ("late-3", True)):
        if forgets:
            world.forget_g1()
        loaded = world.side.leader.counters.onboard_blocks
        world.add(name, 1)
        world.finish()
    loaded = world.side.leader.counters.onboard_blocks - loaded
    assert world.broken or loaded >= LEAST_LOADS[kind], "nothing was loaded"
    return world.broken, changed


def wrong_points(make, *case) -> list[int]:
    """Return the moves before which a change of the weights makes a later answer wrong."""
    wrong, changed, point = [], True, 0
    while changed:
        broken, changed = explore(make, *case, point)
        wrong += [point] if broken else []
        point += 1
    assert point > 30, "too few moves"
    return wrong


@pytest.mark.parametrize("hold", [0, 2])
@pytest.mark.parametrize("requests", [2, 3])
@pytest.mark.parametrize(("depth", "runner"), ENGINES)
@pytest.mark.parametrize("kind", sorted(SPECS))
def test_no_later_request_sees_kv_of_former_weights(world, kind, depth, runner, requests, hold):
    assert wrong_points(world, kind, depth, runner, requests, hold) == []


def plant_early_offloads(monkeypatch):
    bind, finish = WorkerSide.bind, WorkerSide.finish_step
    monkeypatch.setattr(WorkerSide, "bind", lambda side, orders: (bind(side, orders), finish(side)))
    monkeypatch.setattr(WorkerSide, "finish_step", lambda side: None)


def plant_loads_that_are_not_awaited(monkeypatch):
    match = SchedulerSide.match
    monkeypatch.setattr(SchedulerSide, "match", lambda *arguments: (match(*arguments)[0], False))


@pytest.mark.parametrize("runner", RUNNERS)
def test_every_order_of_calls_answers_right(world, runner):
    assert explore(world, "full", 2, runner, 2, 2, NEVER) == ([], False)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("plant", [plant_early_offloads, plant_loads_that_are_not_awaited])
def test_what_a_rank_assumes_of_the_order_of_calls_is_tested(world, monkeypatch, plant, runner):
    plant(monkeypatch)
    with contextlib.suppress(AssertionError):  # of vLLM, which has found it first
        broken, _ = explore(world, "full", 1, runner, 2, 0, NEVER)
        if not broken:
            pytest.fail("nobody notices")


def test_names_in_g1_must_be_refused_when_they_are_given(world, monkeypatch):
    monkeypatch.setattr("kvbm.engines.vllm.former_weights.FormerWeights._of_fresh", lambda _, register: register)
    assert wrong_points(world, "full", 1, "V2", 2, 2) != []


@pytest.mark.parametrize("has_changed", [False, True])
def test_kv_of_another_engine_is_kept_only_until_the_weights_change(world, has_changed):
    """The other engine may still have the weights before the change."""
    here = world(1)
    if has_changed:
        here.change()
    here.add("pulled", 1, extra_args={"kv_transfer_params": {"do_remote_prefill": True}})
    here.finish()
    named = sum(block.block_hash is not None for block in here.scheduler.kv_cache_manager.block_pool.blocks)
    assert (named > 0, here.side.leader.counters.offload_blocks > 0) == (not has_changed, not has_changed)


@pytest.mark.parametrize("has_changed", [False, True])
def test_nothing_is_offloaded_beside_a_connector_that_may_load_kv_of_former_weights(world, monkeypatch, has_changed):
    """Which blocks that connector loads is unknown. vLLM serves them from G1 as without kvbm."""
    monkeypatch.setattr("kvbm.vllm_integration.connector.loading_sibling", lambda: "ExampleConnector")
    here = world(1)
    if has_changed:
        here.change()
    here.add("first", 1)
    here.finish()
    assert (here.side.leader.counters.offload_blocks > 0) == (not has_changed)
