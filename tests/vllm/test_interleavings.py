"""Changes of the weights at every point of load, schedule, forward pass and registration, with vLLM's own Scheduler.

The worker's hooks are called by the classes that call them in vLLM's model runners V1 and V2.
There is no model: the KV of a token is the token, and the version of the weights that computed it, or MIXED if a token
before it has another version. Requests with a common prefix, which is in host memory, arrive, and the weights change at
one point. A request that begins after the change may see no token of the version before, in G1 or from host memory.
"""

from __future__ import annotations

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

from kvbm.device.worker import Worker
from kvbm.engines.make_model import materialise
from kvbm.engines.vllm.connector import DynamoConnector
from kvbm.engines.vllm.engine_blocks import EngineBlocks
from kvbm.engines.vllm.scheduler_side import SchedulerSide
from kvbm.engines.vllm.worker_side import WorkerSide
from kvbm.errors import TransferError
from kvbm.types import SlotState

BLOCK, BLOCKS, PREFIX = 32, 24, 96
MIXED, GENERATED, STOP = -1, 7, 8
NEVER = 1_000_000
# With a draft model, V1 asks for results before it ends saves. vLLM 0.32 starts deferred loads after it samples; main
# does so before.
RUNNERS = ("V1", "V1 drafts", "V2", "V2 later")
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
class Flight:
    """A step from its schedule to its output."""

    output: SchedulerOutput
    passes: list[tuple[str, list[int], int, int]]  # name of a request, its blocks, first token, end
    sampled: list[list[int]]
    answer: ModelRunnerOutput | None = None  # once it has been submitted
    fence: int = 0


@dataclass
class World:
    """One engine: vLLM's scheduler, the two sides of the connector, and a forward pass that writes versions and tokens.

    `depth`: how many steps are scheduled before the output of the first one is handed back.
    """

    configuration: object
    depth: int
    kind: str = "full"
    runner: str = "V1"
    blocks: int = BLOCKS
    slow: int = 0  # if not 0: offloads end every so many steps, and not in the step that orders them
    version: int = 1
    held: bool = False
    failing: int = 0  # how many loads fail
    preemptions: int = 0
    ends: dict[str, int] = field(default_factory=dict)  # where a request stops, which is not known before
    live: dict[str, Request] = field(default_factory=dict)
    flights: list[Flight] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    fresh: set[str] = field(default_factory=set)
    device: list = field(default_factory=list)  # forward passes that have been submitted
    computed: int = 0  # how many of them have run

    def __post_init__(self):
        groups = [KVCacheGroupSpec(["layer.0"], SPECS[self.kind])]
        cache = KVCacheConfig(num_blocks=self.blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        made = AsyncScheduler if self.depth > 1 else Scheduler
        manager = StructuredOutputManager(self.configuration)
        self.scheduler = made(self.configuration, cache, manager, BLOCK)
        self.worker = DynamoConnector(self.configuration, KVConnectorRole.WORKER, cache)
        self.kv = torch.zeros(self.blocks, BLOCK, 2)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        self.caller = ActiveKVConnector(self.configuration, {"layer.0": self.kv})  # registers them, as in both runners
        worker = self.worker._worker._worker
        worker.copier = DeviceQueue(self, worker.copier)
        self.worker.get_transfer_results = partial(self.copied, self.worker.get_transfer_results)
        self.scheduler.connector.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})
        self.side = self.scheduler.connector._scheduler  # the listener that vLLM's EngineCore would call
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(BLOCK, hash_function)

    def close(self):
        self.worker.shutdown()
        self.scheduler.shutdown()

    def add(self, name: str, tail: int, prefix: int = PREFIX, **parameters: object) -> None:
        prompt = [*range(prefix), *([1000 + tail] * 40)]
        if self.kind == "short":  # the first requests end their first block with what they generate
            prompt = [*range(28), *([GENERATED] * 80 if name.startswith("late") else [])]
        parameters = {"max_tokens": 12 if self.kind == "short" else 4, **parameters}
        sampling = SamplingParams(ignore_eos=True, **parameters)
        adapter = ADAPTER if self.kind == "adapter" else None
        request = Request(name, prompt, sampling, None, lora_request=adapter, block_hasher=self.hasher)
        self.live[name] = request
        self.fresh.add(name)
        self.scheduler.add_request(request)

    def change(self) -> None:
        """Change the weights as reload_weights does: after the forward passes that are under way."""
        while any(flight.answer is None for flight in self.flights):
            self.forward()
        self.wait_for_device(len(self.device))
        if self.kind == "adapter":
            self.side.blocks.adapter_is_loaded(ADAPTER)
        else:
            self.side.blocks.weights_may_change("a test")
        self.version += 1
        self.fresh = {name for name in self.fresh if not self.has_kv(name)}

    def has_kv(self, name: str) -> bool:
        return bool(self.scheduler.kv_cache_manager.get_block_ids(name)[0])

    def schedule(self) -> None:
        output = self.scheduler.schedule()
        cached, tables = output.scheduled_cached_reqs, self.scheduler.kv_cache_manager.get_block_ids
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.preemptions += len(output.preempted_req_ids or ())
        passes = [
            (name, list(tables(name)[0]), starts[name], starts[name] + count)
            for name, count in output.num_scheduled_tokens.items()
        ]
        sampled = [[self.sample(name, end)] if end >= self.live[name].num_tokens else [] for name, *_, end in passes]
        self.flights.append(Flight(output, passes, sampled))

    def sample(self, name: str, position: int) -> int:
        return STOP if position >= self.ends.get(name, NEVER) else GENERATED

    def forward(self) -> None:
        flight = next((one for one in self.flights if one.answer is None), None)
        if flight is None:
            return
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker

        def submit() -> None:
            self.run_copies(between_steps=False)
            self.device.append(partial(self.compute, flight.passes))

        answer = (self.as_v1 if self.runner.startswith("V1") else self.as_v2)(flight.output, submit)
        index = {name: number for number, (name, *_) in enumerate(flight.passes)}
        flight.answer = ModelRunnerOutput(list(index), index, flight.sampled, kv_connector_output=answer)
        flight.fence = len(self.device)

    def compute(self, passes: list) -> None:
        for name, table, begin, end in passes:
            self.compute_one(name, table, begin, end)

    def wait_for_device(self, count: int) -> None:
        """Run what has been submitted, up to the `count`-th forward pass."""
        while self.computed < count:
            self.computed += 1
            self.device[self.computed - 1]()

    def as_v1(self, output, submit) -> KVConnectorOutput:
        self.run_copies(between_steps=True)
        self.worker.handle_preemptions(output.kv_connector_metadata)
        with (
            set_forward_context(None, self.configuration),
            KVConnectorModelRunnerMixin._get_kv_connector_output(output, self.runner == "V1 drafts") as answer,
        ):
            submit()
        if self.runner == "V1 drafts":
            KVConnectorModelRunnerMixin.finalize_kv_connector()
        return answer

    def as_v2(self, output, submit) -> KVConnectorOutput:
        self.caller.set_disabled(True)  # while graphs are captured, and in the dummy steps of data parallelism
        self.run_copies(between_steps=True)
        self.caller.pre_forward(SchedulerOutput.make_empty())
        self.caller.finish_forward()
        assert self.caller.post_forward(set()) is None
        self.caller.set_disabled(False)
        self.caller.pre_forward(output)
        submit()
        if self.runner == "V2 later" and self.caller._pending_load_kwargs is not None:
            self.caller._start_load_kv()
        self.caller.finish_forward()
        return self.caller.post_forward(output.finished_req_ids)

    def compute_one(self, name: str, table: list[int], begin: int, end: int) -> None:
        first = max(0, begin - 39) if self.kind == "window" else 0
        tokens = [*self.live[name].prompt_token_ids, *[GENERATED] * end]
        known = self.kv[table].reshape(-1, 2)[first:begin]
        seen = set(known[:, 0].tolist())
        if name in self.fresh and seen - {float(self.version)}:
            self.broken.append(f"{name} computes with {sorted(seen)} at version {self.version}")
        if known[:, 1].tolist() != tokens[first:begin]:
            self.broken.append(f"{name} computes with KV of other tokens")
        value = self.version if seen <= {float(self.version)} else MIXED
        for position in range(begin, end):
            self.kv[table[position // BLOCK], position % BLOCK] = torch.tensor([value, tokens[position]])

    def run_copies(self, *, between_steps: bool) -> None:
        """Run what has been ordered, unless copies are held. Slow loads end at once in every second step alone."""
        worker, step = self.worker._worker._worker, len(self.device)  # whose pools the test steps
        loads, offloads = not between_steps, not between_steps
        if self.slow:
            loads, offloads = between_steps or step % 2 == 0, between_steps and step % self.slow == 0
        for pool, ends in ((worker._onboard_pool, loads), (worker._offload_pool, offloads)):
            while ends and not self.held and pool.waiting():
                pool.run_next()

    def copied(self, found, finished_req_ids):
        self.run_copies(between_steps=False)
        return found(finished_req_ids)

    def update(self) -> None:
        if self.flights and self.flights[0].answer is not None:
            flight = self.flights.pop(0)
            self.wait_for_device(flight.fence)
            self.scheduler.update_from_output(flight.output, flight.answer)

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

    def step_ahead(self) -> None:
        """Submit a step before the device has run the former one, as asynchronous scheduling does."""
        self.schedule()
        self.forward()
        if len(self.flights) >= self.depth:
            self.update()

    def forget_g1(self) -> None:
        assert self.scheduler.kv_cache_manager.block_pool.reset_prefix_cache()


class DeviceQueue:
    """The copier of a rank: each copy first waits until the device has run what was submitted before its fence."""

    def __init__(self, world: World, copier: object) -> None:
        self.world, self.copier = world, copier

    def fence(self) -> int:
        return len(self.world.device)

    def offload(self, block_ids, slots, fence) -> None:
        self.world.wait_for_device(fence)
        self.copier.offload(block_ids, slots, None)

    def onboard(self, slots, block_ids, fence) -> None:
        self.world.wait_for_device(fence)
        self.world.failing -= 1
        if self.world.failing >= 0:
            raise TransferError("a load that fails")
        self.copier.onboard(slots, block_ids, None)


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
        loaded = world.side.blocks.leader.counters.onboard_blocks
        world.add(name, 1)
        world.finish()
    loaded = world.side.blocks.leader.counters.onboard_blocks - loaded
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


@pytest.mark.parametrize("runner", RUNNERS)
def test_every_order_of_calls_answers_right(world, runner):
    assert explore(world, "full", 2, runner, 2, 2, NEVER) == ([], False)


def crowd(make, runner: str, slow: int) -> None:
    """Let requests preempt each other, and come again. The first load fails, and offloads end every `slow` steps. Each
    forward pass is submitted before the device has run the former one."""
    world = make(2, "full", runner, 14, slow)
    world.failing = 1
    for again in range(2):
        for number in range(6):
            world.ends[f"r{number}-{again}"] = 80 + 40 * number
            world.add(f"r{number}-{again}", number, prefix=0, max_tokens=300, stop_token_ids=[STOP])
        step = 0
        while world.scheduler.requests or world.side.has_pending():
            assert step < 600, "a request did not end"
            world.step_ahead()
            assert not world.broken, world.broken
            step += 1
        while world.flights:
            world.update()
        world.forget_g1()
    assert world.failing < 0, "nothing was loaded"
    assert world.preemptions > 10, "too few preemptions"


@pytest.mark.parametrize(("runner", "slow"), [("V2", 1), *((runner, 40) for runner in RUNNERS)])
def test_every_order_of_calls_answers_right_when_requests_preempt_each_other(world, runner, slow):
    crowd(world, runner, slow)


def plant_loads_that_are_not_awaited(monkeypatch):
    match = SchedulerSide.match
    monkeypatch.setattr(SchedulerSide, "match", lambda *arguments: (match(*arguments)[0], False))


def plant_preemptions_that_wait_for_the_bound_orders(monkeypatch):
    """Wait for the copies of the bound orders instead of holding their blocks. vLLM binds the orders afterwards."""

    def wait(connector, _):
        side = connector._worker
        while side._orders.plan.offloads and side._worker._offload_pool.waiting():
            side._worker._offload_pool.run_next()

    monkeypatch.setattr(DynamoConnector, "handle_preemptions", wait)
    at_once = "late copies hold no blocks"
    monkeypatch.setattr("kvbm.engines.vllm.engine_blocks.reason_to_copy_at_once", lambda *_, **__: at_once)
    monkeypatch.setattr(EngineBlocks, "_hold", lambda *_: None)
    monkeypatch.setattr(EngineBlocks, "_release", lambda *_: None)


def plant_early_offloads(monkeypatch):
    bind, finish = WorkerSide.bind, WorkerSide.finish_step
    monkeypatch.setattr(WorkerSide, "bind", lambda side, orders: (bind(side, orders), finish(side)))
    monkeypatch.setattr(WorkerSide, "finish_step", lambda side: None)


def plant_offloads_that_end_with_the_step(monkeypatch):
    """Take `wait_for_save` at its word: prove each offload there. The copy still runs."""
    finish = Worker.finish

    def finish_and_prove(worker, plan):
        finish(worker, plan)
        for order in plan.offloads:
            worker._segment.write_slots(order.slots, order.generation, SlotState.READY)

    monkeypatch.setattr(Worker, "finish", finish_and_prove)


def plant_orders_that_end_with_the_saves(monkeypatch):
    finish = WorkerSide.finish_step
    monkeypatch.setattr(WorkerSide, "finish_step", lambda side: (finish(side), side.clear()))


def plant_copies_that_require_vllm_to_have_a_connector(monkeypatch):
    """Fail copies that end in a dummy step, for which V2 disables the connector."""
    offload = Worker._run_offload

    def run(*given):
        kv_transfer_state.get_kv_transfer_group()
        offload(*given)

    monkeypatch.setattr(Worker, "_run_offload", run)


def plant_loads_that_do_not_wait_for_the_device(monkeypatch):
    onboard = Worker._run_onboard
    monkeypatch.setattr(Worker, "_run_onboard", lambda *given: onboard(*given[:-1], 0))


def plant_offloads_that_do_not_wait_for_the_device(monkeypatch):
    offload = Worker._run_offload
    monkeypatch.setattr(Worker, "_run_offload", lambda *given: offload(*given[:-1], 0))


WRONG = "computes with"
PLANTS = [  # each with what notices it, how slow offloads are, and the runners that make the assumption matter
    (plant_loads_that_are_not_awaited, f"{WRONG}|^$", 1, RUNNERS),  # vLLM may assert first, without a text
    (plant_preemptions_that_wait_for_the_bound_orders, WRONG, 40, RUNNERS),
    (plant_early_offloads, WRONG, 1, RUNNERS),
    (plant_offloads_that_end_with_the_step, WRONG, 40, RUNNERS),
    # With a draft model, V1 has asked for the results by then.
    (plant_orders_that_end_with_the_saves, "did not end", 1, ("V1", "V2", "V2 later")),
    # V1 never disables a connector.
    (plant_copies_that_require_vllm_to_have_a_connector, "nothing was loaded", 1, ("V2", "V2 later")),
    (plant_loads_that_do_not_wait_for_the_device, WRONG, 1, RUNNERS),
    (plant_offloads_that_do_not_wait_for_the_device, WRONG, 1, RUNNERS),
]


@pytest.mark.parametrize(
    ("plant", "noticed", "slow", "runner"), [(*given, runner) for *given, runners in PLANTS for runner in runners]
)
def test_what_a_rank_assumes_of_the_order_of_calls_is_tested(world, monkeypatch, plant, noticed, slow, runner):
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=noticed):
        crowd(world, runner, slow)


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
    assert (named > 0, here.side.blocks.leader.counters.offload_blocks > 0) == (not has_changed, not has_changed)


@pytest.mark.parametrize("has_changed", [False, True])
def test_nothing_is_offloaded_beside_a_connector_that_may_load_kv_of_former_weights(world, monkeypatch, has_changed):
    """Which blocks that connector loads is unknown. vLLM serves them from G1 as without kvbm."""
    monkeypatch.setattr("kvbm.vllm_integration.connector.loading_sibling", lambda: "ExampleConnector")
    here = world(1)
    if has_changed:
        here.change()
    here.add("first", 1)
    here.finish()
    assert (here.side.blocks.leader.counters.offload_blocks > 0) == (not has_changed)
