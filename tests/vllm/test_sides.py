"""The two sides of the connector with vLLM's own classes and no engine: what is declined, told and refused."""

from __future__ import annotations

import inspect
import logging
import mmap
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch
from manual_pool import ManualPool

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import RequestStatus

from kvbm.boundary import Boundary
from kvbm.config.schema import ConnectorConfig, OffloadSection
from kvbm.core.groups import Group, StateGroup
from kvbm.engines.vllm.block_tables import GroupedTables
from kvbm.engines.vllm.cache_groups import (
    KNOWS_FAILED_REQUESTS,
    REPORTS_HIT_SOURCES,
    TransferGroup,
    cache_groups,
    decline_reason,
)
from kvbm.engines.vllm.engine_blocks import EngineBlocks
from kvbm.engines.vllm.engine_facts import VllmFacts
from kvbm.engines.vllm.request import UNLIMITED, VllmRequest
from kvbm.engines.vllm.scheduler_side import SchedulerSide
from kvbm.engines.vllm.telemetry import KvbmPromMetrics, KvbmStats, StatsSource
from kvbm.engines.vllm.weight_updates import reports_weight_updates, watch
from kvbm.engines.vllm.worker_side import Handshake, StepOrders, WordsWritten, WorkerSide
from kvbm.errors import EnvironmentProblem
from kvbm.host.processes import boot_id
from kvbm.leader.leader import Leader
from kvbm.leader.offloads import NO_BLOCK
from kvbm.leader.request import LoadResult
from kvbm.metrics import Counters, Facts
from kvbm.observe.series import SeriesCollector
from kvbm.plan import Offload, Onboard, StepPlan
from kvbm.types import SegmentInfo, Tier

CONFIG = ConnectorConfig.model_validate({"tiers": {"host": {"blocks": 8}}, "offload": {"to_host": "always"}})
SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
PLAIN = {  # of a request
    "kv_transfer_params": None,
    "lora_request": None,
    "resumable": False,
    "prompt_is_token_ids": None,
    "mm_features": [],
    "num_preemptions": 0,
    "num_computed_tokens": 0,
    "status": RequestStatus.RUNNING,
}
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=40)

needs_states = pytest.mark.skipif(not KNOWS_FAILED_REQUESTS, reason="models with states are declined before 0.30")


def engine(*, disable_cascade_attn=True, speculative_config=None, use_replayssm=False, **parallel):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(disable_cascade_attn=disable_cascade_attn),
        speculative_config=speculative_config,
        cache_config=SimpleNamespace(use_replayssm=use_replayssm),
    )


def mamba(*, mode="align", **facts):
    return MambaSpec(block_size=16, shapes=((2, 4),), dtypes=(torch.float32,), mamba_cache_mode=mode, **facts)


def scheduler_side(groups, rank_count=1, publishes_events=True, config=CONFIG):
    facts = VllmFacts(rank_count, hash_bytes=32, publishes_events=publishes_events)
    return SchedulerSide(config, groups, facts, lambda: ({}, ""))


def tracked(side, name="r"):
    """What the side knows of a request."""
    return side._requests.get(name)  # vLLM's hooks return nothing of it


def scheduled(request_id, block_ids, *, tokens, computed=0, **more):
    """vLLM's output of a step with one new request, which computes so many tokens."""
    new = SimpleNamespace(req_id=request_id, block_ids=block_ids, num_computed_tokens=computed)
    cached = dict.fromkeys(("req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens"), ())
    return SimpleNamespace(
        preempted_req_ids=None,
        num_scheduled_tokens={request_id: tokens},
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(), **cached),
        scheduled_spec_decode_tokens={},
        total_num_scheduled_tokens=tokens,
        **more,
    )


@contextmanager
def both_sides():
    """Yields the scheduler's side and a rank's side of an engine with four blocks, before their handshake."""
    description = cache(FULL, num_blocks=4)
    groups = cache_groups(description)
    worker = WorkerSide(CONFIG, description, rank=0, rank_count=1)
    worker.register_kv_caches({"layer.0": torch.zeros(4, 2, 16, 64)})
    side = scheduler_side(groups)
    side.blocks.bind_block_pool(BlockPool(4, enable_caching=True, hash_block_size=16))
    try:
        yield side, worker
    finally:
        side.close()
        worker.close()


def cache(*specs, **facts):
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer.{index}"], enable_kv_transfer=True)
        for index, spec in enumerate(specs)
    ]
    return SimpleNamespace(kv_cache_groups=groups, **facts)


# -- groups ------------------------------------------------------------------------------------------------------------


def test_groups_that_look_back_over_everything_come_first_and_keep_their_place_in_block_tables():
    assert cache_groups(cache(WINDOW, FULL)) == (
        TransferGroup(1, Group(16), ("layer.1",)),
        TransferGroup(0, Group(16, window_tokens=40), ("layer.0",)),
    )


def test_latent_and_chunked_attention_are_known():
    chunked = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)
    groups = [found.group for found in cache_groups(cache(LATENT, chunked))]
    assert groups == [Group(16), Group(16, chunk_tokens=64)]


def test_blocks_that_a_window_has_left_before_their_names_were_certain_are_not_offloaded():
    """vLLM may have given them to another request, whose KV they then have."""
    names = SimpleNamespace(certain_tokens=lambda: 0, name=lambda name, end: name)
    request = SimpleNamespace(request_id="r", num_prompt_tokens=128, block_hashes=[bytes((n,)) * 32 for n in range(8)])
    tracked = VllmRequest(request, UNLIMITED, UNLIMITED, names, block_ids=[[1, 2, 3, 4], [5, 6, 7, 8]])
    tables = GroupedTables(cache_groups(cache(WINDOW, FULL)))
    tables.bind(BlockPool(20, enable_caching=True, hash_block_size=16))
    offered = []

    def offload(request_id, chain, table, *, computed_blocks, prompt_blocks, group):
        offered.append((group, table[:computed_blocks]))
        return computed_blocks

    leader = SimpleNamespace(offload=offload)
    step = SimpleNamespace(num_scheduled_tokens={"r": 64}, scheduled_spec_decode_tokens={})
    tables.offload(leader, [(tracked, 0)], step)
    assert offered == [(0, []), (1, [])]
    names.certain_tokens = lambda: UNLIMITED
    tables.extend(tracked, [[15, 16, 17, 18], [11, 12, 13, 14]])
    tables.offload(leader, [(tracked, 64)], step)  # of 64 tokens, the next one attends to the last 39
    assert offered[2:] == [(0, [1, 2, 3, 4, 11, 12, 13, 14]), (1, [NO_BLOCK, 6, 7, 8, 15, 16, 17, 18])]


@pytest.mark.skipif(not KNOWS_FAILED_REQUESTS, reason="several groups are declined before 0.30")
def test_windows_beside_full_attention_are_served():
    assert decline_reason(engine(), cache(FULL, WINDOW)) is None


@pytest.mark.skipif(KNOWS_FAILED_REQUESTS, reason="from 0.30 on, vLLM accepts failed requests")
def test_several_groups_are_declined_where_a_failed_load_cannot_be_told():
    assert "0.30" in decline_reason(engine(), cache(FULL, WINDOW))


LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
MAY_SHARE = pytest.mark.skipif(REPORTS_HIT_SOURCES, reason="0.32 does not ask how many requests share a block")


@pytest.mark.parametrize(
    ("facts", "specs", "words"),
    [
        ({"decode_context_parallel_size": 2}, (FULL,), "decode_context_parallel_size=2"),
        ({"prefill_context_parallel_size": 4}, (FULL,), "prefill_context_parallel_size=4"),
        ({"nnodes": 2}, (FULL,), "2 nodes"),
        ({}, (), "no KV cache"),
        # The KV of cross attention belongs to one request, and vLLM's block hashes do not name it.
        ({}, (FULL, CrossAttentionSpec(**SHAPE)), "CrossAttentionSpec"),
        pytest.param({"disable_cascade_attn": False}, (FULL,), "cascade", marks=MAY_SHARE),
        pytest.param({"pipeline_parallel_size": 2}, (mamba(),), "pipeline parallelism with states", marks=needs_states),
        pytest.param({}, (LATENT, mamba()), "latent attention", marks=needs_states),
        pytest.param({}, (FULL, mamba(mode="none")), "without prefix caching", marks=needs_states),
        pytest.param({"speculative_config": object()}, (FULL, mamba()), "speculative decoding", marks=needs_states),
        pytest.param({}, (FULL, mamba(num_speculative_blocks=1)), "speculative decoding", marks=needs_states),
        pytest.param({"use_replayssm": True}, (FULL, mamba()), "`use_replayssm`", marks=needs_states),
        pytest.param(
            {}, (FULL, mamba(mamba_type=SimpleNamespace(name="SHORT_CONV"))), "SHORT_CONV", marks=needs_states
        ),
    ],
)
def test_what_was_never_run_or_cannot_be_right_is_declined_by_name(facts, specs, words):
    assert words in decline_reason(engine(**facts), cache(*specs))


@needs_states
def test_states_are_served_wherever_their_group_is():
    for specs in ((FULL, mamba()), (mamba(), mamba(), FULL), (mamba(),), (FULL, WINDOW, mamba())):
        assert decline_reason(engine(), cache(*specs)) is None
    first, second = cache_groups(cache(mamba(), FULL))
    assert (first.index, first.group, first.state_form) == (1, Group(16), "")
    assert (second.index, second.group) == (0, StateGroup(16))
    assert second.state_form == "MAMBA2 ((2, 4),) (torch.float32,)"


def test_states_are_declined_where_vllm_is_too_old_for_them(monkeypatch):
    """Before 0.30, a request whose load failed continues with the state of an earlier block."""
    monkeypatch.setattr("kvbm.engines.vllm.cache_groups.KNOWS_FAILED_REQUESTS", False)
    reason = decline_reason(engine(), cache(mamba()))
    assert reason.startswith("vLLM before 0.30 ")
    assert "states" in reason


def test_a_group_with_a_separate_block_pool_is_declined():
    description = cache(FULL)
    description.kv_cache_groups[0].host_resident = True
    assert "separate block pool" in decline_reason(engine(), description)


def test_a_group_that_is_no_part_of_transfers_is_left_out():
    description = cache(FULL, MambaSpec(block_size=16, shapes=((2, 4),), dtypes=(torch.float32,)))
    description.kv_cache_groups[1].enable_kv_transfer = False
    assert decline_reason(engine(), description) is None
    assert len(cache_groups(description)) == 1


# -- start-up ----------------------------------------------------------------------------------------------------------


def handshake(**changes):
    facts = {"config_digest": CONFIG.digest(), "boot_id": boot_id()} | changes
    return Handshake(SegmentInfo(0, 1, 3, 4096, 8, 4096, 4096, "layout"), **facts)


def doubt_of(side):
    return side.blocks._described().result()[1]  # what a disk or a store is opened with


@pytest.mark.parametrize("name", ["config_digest", "boot_id"])
def test_ranks_with_another_configuration_or_machine_are_refused_at_the_start(name):
    side = scheduler_side(cache_groups(cache(FULL)), rank_count=2)
    with pytest.raises(EnvironmentProblem, match=name):
        side.blocks.accept_handshakes([handshake(), handshake(**{name: "other"})])


def test_blocks_that_a_sibling_may_have_loaded_do_not_outlive_the_engine():
    """It may have kept them from weights that the engine no longer has."""
    side = scheduler_side(cache_groups(cache(FULL)))
    side.blocks.accept_handshakes([handshake(sibling="ExampleConnector")])
    assert "`ExampleConnector`" in doubt_of(side)


ONCE_FULL = "auto, once host memory is full: it has"


@pytest.mark.parametrize(
    ("offload", "pair", "caches", "g1_blocks", "expected"),
    [
        ("auto", False, True, 5, f"on_evict: {ONCE_FULL} 64 blocks, less than 20 times the 5 of G1"),
        ("auto", False, True, 3, "auto: when computed: host memory has 64 blocks, at least 20 times the 3 of G1"),
        ("auto", True, True, 5, "auto: when computed: this engine prefills or decodes for another one"),
        ("auto", False, False, 5, "auto: when computed: vLLM's prefix caching is off"),
        ("on_evict", True, True, 4, "on_evict"),
        ("on_evict", False, False, 5, "always: vLLM's prefix caching is off"),
        ("always", False, True, 5, "always"),
    ],
)
def test_the_engine_says_which_blocks_are_copied_and_why(offload, pair, caches, g1_blocks, expected):
    contents = {"tiers": {"host": {"blocks": 8}}, "offload": {"to_host": offload}}
    config = ConnectorConfig.model_validate(contents)
    side = scheduler_side(cache_groups(cache(FULL)), config=config)
    side.blocks.accept_handshakes([handshake(config_digest=config.digest(), is_of_pair=pair)])
    pool = BlockPool(g1_blocks, enable_caching=caches, hash_block_size=16)
    found = side.blocks._to_host(pool, 64)  # else a line of the log, at the start of a leader with such memory
    assert ": ".join(filter(None, found)) == expected


def test_a_rank_that_has_not_told_where_its_memory_lies_is_missed():
    with pytest.raises(EnvironmentProblem, match="1 of 2 ranks"):
        scheduler_side(cache_groups(cache(FULL)), rank_count=2).blocks.accept_handshakes([handshake()])


def test_ranks_that_are_told_again_find_the_same_leader_and_other_ranks_are_refused():
    with both_sides() as (side, worker):
        side.blocks.accept_handshakes([worker.handshake()])
        leader = side.blocks.leader
        side.blocks.accept_handshakes([worker.handshake()])
        assert leader is not None
        assert side.blocks.leader is leader
        with pytest.raises(EnvironmentProblem, match="different segments"):
            side.blocks.accept_handshakes([handshake()])


START_UP = ("accept_handshakes", "bind_block_pool", "register_kv_caches", "create_worker", "handshake", "clear")
SLEEP = ("unregister_kv_caches", "restore_kv_caches")
WITHIN_HOOKS = ("begin", "end", "inherit", "is_stale", "has_events")  # of SchedulerSide


@pytest.mark.parametrize("side", [SchedulerSide, EngineBlocks, WorkerSide])
def test_every_hook_of_vllm_is_guarded(side):
    hooks = {name for name, value in vars(side).items() if callable(value) and not name.startswith("_")}
    bare = {
        name for name in hooks - set(START_UP + SLEEP + WITHIN_HOOKS) if not hasattr(getattr(side, name), "__wrapped__")
    }
    assert bare <= {"close"}, "an exception of these would end vLLM"


def test_a_request_whose_load_could_not_start_because_of_a_bug_is_reported_as_failed(caplog):
    with both_sides() as (side, worker):
        side.blocks.accept_handshakes([worker.handshake()])
        # It has no block hashes.
        request = SimpleNamespace(request_id="r", num_tokens=64, **PLAIN)
        side.add_request(request)
        side.allocated(request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 0],)), 32)
        assert side.blocks.take_stats().data["disabled"] == 1
        assert "continues without the cache" in caplog.text
        assert side.has_pending()
        output = SimpleNamespace(finished_recving=None)
        side.build_orders(None)
        side.settle(output)
        assert not output.finished_recving
        assert [load.request_id for load in side.build_orders(None).failed_loads] == ["r"]
        assert side.blocks.take_events() == [], "nothing was announced"
        assert not side.has_pending()
        assert side.match(request, 0) == (0, False)
        assert side.blocks.reset()
        side.end_request(request)


def test_without_ranks_every_hook_does_nothing():
    side = scheduler_side(cache_groups(cache(FULL)))
    side.blocks.accept_handshakes([])
    request = SimpleNamespace(request_id="r", num_tokens=64, block_hashes=[], **PLAIN)
    side.add_request(request)
    assert side.match(request, 0) == (0, False)
    assert side.build_orders(None) == StepOrders(StepPlan(step=0))
    assert not side.has_pending()
    assert side.blocks.take_stats() is None
    side.end_request(request)


# -- a worker ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 2, 16, 64), (8, 2, 8, 64)])
def test_a_rank_takes_whole_pages_of_all_layers_once_even_where_groups_overlay_each_other(shape):
    storage = torch.zeros(2, *shape)
    layers = {f"layer.{index}": storage[index % 2] for index in range(4)}
    description = cache(FULL, FULL, WINDOW, WINDOW, num_blocks=4, needs_kv_cache_zeroing=False)
    side = WorkerSide(CONFIG, description, rank=0, rank_count=1)
    side.register_kv_caches(layers)
    try:
        assert side.handshake().segment.block_bytes == 2 * 2 * 16 * 64 * 4
        assert side.handshake().segment.slot_count == 8
    finally:
        side.close()


@pytest.fixture
def rank():
    side = WorkerSide(CONFIG, cache(FULL, num_blocks=4), rank=0, rank_count=1)
    yield side
    side.close()


def manual_pool(rank):
    rank._worker._onboard_pool = pool = ManualPool()  # the worker takes none
    return pool


def is_copying(rank):
    return rank._worker.is_busy()  # the side itself shows it a step later


def test_a_failed_load_is_repeated_by_the_rank_in_the_step_that_carries_it(rank):
    rank.bind(StepOrders(StepPlan(step=1), (LoadResult("r", (1, 2), (1, 2), True),)))
    assert rank.failed_requests() == {"r"}
    assert rank.lost_requests() == {"r"}
    assert rank.failed_blocks() == (set() if KNOWS_FAILED_REQUESTS else {1, 2})
    rank.clear()
    assert rank.failed_requests() == set()


def test_of_a_cut_load_only_the_blocks_that_did_not_arrive_are_reported_as_failed(rank):
    """A request in `lost_requests` would lose the blocks that did."""
    rank.bind(StepOrders(StepPlan(step=1), (LoadResult("r", (1, 2, 3), (2, 3), True),)))
    assert rank.failed_requests() == {"r"}
    assert rank.lost_requests() == set()
    assert rank.failed_blocks() == {2, 3}


@pytest.mark.skipif(not KNOWS_FAILED_REQUESTS, reason="kvbm declines such an engine")
def test_an_engine_with_several_groups_gets_no_failed_blocks_even_if_only_one_is_transferred():
    """vLLM ends with an exception if it does."""
    description = cache(FULL, WINDOW, num_blocks=4)
    description.kv_cache_groups[1].enable_kv_transfer = False
    side = WorkerSide(CONFIG, description, rank=0, rank_count=1)
    side.bind(StepOrders(StepPlan(step=1), (LoadResult("r", (1, 2, 3), (2, 3), True),)))
    assert side.lost_requests() == {"r"}
    assert side.failed_blocks() == set()


def test_a_rank_sends_a_message_in_every_step_in_which_a_thread_may_prove_a_load(rank):
    """Without one, vLLM does not call the scheduler side, which then finds the load a step later."""
    rank.register_kv_caches({"layer.0": torch.zeros(4, 2, 16, 64)})
    pool = manual_pool(rank)
    order = Onboard(generation=1, lane=0, slots=(0,), slot_generations=(1,), block_ids=(1,))
    rank.bind(StepOrders(StepPlan(step=1, onboards=(order,))))
    for _ in range(3):
        rank.poll()
        assert rank.take_message() == WordsWritten()
        rank.clear()
    pool.run_next()
    for message in (WordsWritten(), None):
        rank.poll()
        assert rank.take_message() == message


# -- sleep, from 0.33 on -----------------------------------------------------------------------------------------------


class SleepingMemory:
    """A KV cache of four blocks of 8 KiB whose memory goes away in a sleep, and comes back as zeroes where it was."""

    def __init__(self):
        self._mapping = mmap.mmap(-1, 4 * 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.blocks = torch.frombuffer(self._mapping, dtype=torch.float32).view(4, 2, 16, 64)

    def free(self):
        self._mapping.madvise(mmap.MADV_DONTNEED)


def await_copies(rank):
    while is_copying(rank):
        rank.poll()
    rank.clear()


def test_after_a_sleep_blocks_are_loaded_into_the_memory_that_vllm_maps_again(rank):
    memory = SleepingMemory()
    rank.register_kv_caches({"layer.0": memory.blocks})
    for number in range(4):
        memory.blocks[number] = number + 1
    rank.bind(StepOrders(StepPlan(step=1, offloads=(Offload(generation=1, block_ids=(2,), slots=(0,)),))))
    rank.finish_step()
    rank.unregister_kv_caches()
    assert not is_copying(rank), "a copy that runs would read unmapped memory"
    rank.unregister_kv_caches()
    memory.free()
    load = Onboard(generation=2, lane=0, slots=(0,), slot_generations=(1,), block_ids=(1,))
    rank.bind(StepOrders(StepPlan(step=2, onboards=(load,))))
    assert not is_copying(rank), "nothing is copied to memory that is not there"
    rank.clear()
    for _ in range(2):
        rank.restore_kv_caches()
    rank.bind(StepOrders(StepPlan(step=3, onboards=(replace(load, generation=3),))))
    await_copies(rank)
    assert [float(block.mean()) for block in memory.blocks] == [0, 3, 0, 0]


def test_a_rank_with_a_copy_that_does_not_end_refuses_to_sleep_and_goes_on(rank, monkeypatch):
    monkeypatch.setattr("kvbm.engines.vllm.worker_side.SLEEP_PATIENCE_S", 0.01)
    rank.register_kv_caches({"layer.0": torch.zeros(4, 2, 16, 64)})
    pool = manual_pool(rank)
    load = Onboard(generation=1, lane=0, slots=(0,), slot_generations=(1,), block_ids=(1,))
    rank.bind(StepOrders(StepPlan(step=1, onboards=(load,))))
    with pytest.raises(EnvironmentProblem, match="rank 0 cannot sleep"):
        rank.unregister_kv_caches()
    pool.run_next()
    rank.poll()
    rank.bind(StepOrders(StepPlan(step=2, onboards=(replace(load, generation=2),))))
    assert is_copying(rank), "it is awake"
    pool.run_next()
    rank.poll()
    rank.unregister_kv_caches()


# -- other weights -----------------------------------------------------------------------------------------------------


class Forgetful:
    """A leader of which only resets matter."""

    def __init__(self):
        self.resets = []

    def reset(self, *, ends_persistence=False):
        self.resets.append(ends_persistence)
        return True

    def finish(self, request_id, *chains, is_preempted=False):
        pass


@pytest.fixture
def side():
    """A scheduler side whose block pool has three blocks in vLLM's prefix cache."""
    found = scheduler_side(cache_groups(cache(FULL)))
    found.blocks.bind_block_pool(BlockPool(8, enable_caching=True, hash_block_size=16))
    for index, block in enumerate(found.blocks.pool.get_new_blocks(3)):
        cached_hash = make_block_hash_with_group_id(bytes([index]) * 32, 0)
        block.set_block_hash(cached_hash) if hasattr(block, "set_block_hash") else setattr(
            block, "block_hash", cached_hash
        )
        found.blocks.pool.cached_block_hash_to_block.insert(cached_hash, block)
    found.blocks.leader = Forgetful()
    return found


def cached_blocks(side):
    return [block.block_id for block in side.blocks.pool.blocks if block.block_hash is not None]


class Core:
    """What EngineCore of vLLM does with these calls."""

    def __init__(self):
        self.calls = []

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.calls.append(method)

    def sleep(self, level=1, mode="abort", clear_connector_cache=True):
        self.calls.append(level)

    def add_lora(self, lora_request: LoRARequest):
        self.calls.append(lora_request)


@pytest.fixture
def core(monkeypatch):
    class Fresh(Core):
        collective_rpc, sleep, add_lora = Core.collective_rpc, Core.sleep, Core.add_lora

    monkeypatch.setattr("vllm.v1.engine.core.EngineCore", Fresh)
    return Fresh()


@pytest.mark.parametrize(
    ("call", "is_harmless"),
    [
        (lambda core: core.collective_rpc("reload_weights", kwargs={"weights_path": "x"}), False),
        (lambda core: core.collective_rpc("update_weights"), False),
        (lambda core: core.collective_rpc("start_weight_update"), False),
        (lambda core: core.collective_rpc("apply_model", None, (print,)), False),
        (lambda core: core.collective_rpc("update_weights_of_my_own"), False),
        (lambda core: core.collective_rpc(lambda worker: worker.model_runner.model.load_weights([])), False),
        (lambda core: core.collective_rpc(method="reload_weights"), False),
        (lambda core: core.collective_rpc("list_loras"), True),
        (lambda core: core.collective_rpc("profile", args=(True,)), True),
        (lambda core: core.sleep(), False),
        (lambda core: core.sleep(2), False),
        (lambda core: core.sleep(level=1, mode="wait"), False),
        (lambda core: core.sleep(0), True),
        (lambda core: core.sleep(1, clear_connector_cache=False), True),
        (lambda core: core.sleep(1, clear_connector_cache=True), False),
        (lambda core: core.sleep(2, clear_connector_cache=False), False),
    ],
)
def test_what_can_change_the_weights_is_noticed_before_it_happens(side, core, call, is_harmless):
    order = []
    side.blocks.leader.reset = lambda *, ends_persistence=False: order.append((ends_persistence, len(core.calls)))
    watch(side.blocks)
    watch(side.blocks)
    call(core)
    assert order == ([] if is_harmless else [(True, 0)])
    assert len(core.calls) == 1
    assert cached_blocks(side) == ([1, 2, 3] if is_harmless else [])


def test_the_wrapped_methods_keep_the_types_by_which_vllm_decodes_their_arguments(side, core):
    watch(side.blocks)
    (parameter,) = inspect.signature(core.add_lora).parameters.values()
    assert parameter.annotation in (LoRARequest, "LoRARequest")
    assert list(inspect.signature(core.collective_rpc).parameters) == ["method", "timeout", "args", "kwargs"]


def test_vllm_has_what_is_watched():
    assert reports_weight_updates()


def test_a_reset_is_taken_for_a_change_of_the_weights(side):
    assert side.blocks.reset() is True
    assert side.blocks.leader.resets == [True]
    assert cached_blocks(side) == []
    side.blocks.leader.reset = lambda **keys: False  # a disk has not deleted its blocks yet; it is off until it has
    assert side.blocks.reset() is True, "vLLM would answer 500 to a pause"


def test_an_adapter_in_doubt_is_not_cached(side, tmp_path):
    def request(name):
        adapter = LoRARequest("mine", 1, str(tmp_path))
        return SimpleNamespace(request_id=name, **PLAIN | {"lora_request": adapter})

    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    side.add_request(request("before"))
    assert side.blocks.leader.resets == []
    assert tracked(side, "before")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"other")
    side.add_request(request("after"))
    assert side.blocks.leader.resets == [True]
    assert tracked(side, "after") is None
    side.blocks.adapter_is_loaded(LoRARequest("mine", 2, str(tmp_path)))
    assert side.blocks.leader.resets == [True, True]


# -- a load that fails -------------------------------------------------------------------------------------------------


class Verdicts:
    """A leader of which only the verdicts matter."""

    def __init__(self, *results):
        self.results = list(results)

    def note_step(self, tokens, seconds):
        pass

    def settle(self):
        results, self.results = self.results, []
        return results

    def has_pending(self):
        return bool(self.results)


@pytest.mark.parametrize("is_live", [True, False])
def test_a_failed_load_is_never_told_as_a_good_one_while_vllm_has_the_request(is_live):
    """`is_live` is False too for a request that was preempted and came back in one step: vLLM still waits for it."""
    side = scheduler_side(cache_groups(cache(FULL)))
    side.add_request(SimpleNamespace(request_id="r", **PLAIN))
    side.blocks.leader = Verdicts(LoadResult("r", (1,), (1,), is_live), LoadResult("gone", (2,), (2,), False))
    output = SimpleNamespace(finished_recving=None)
    side.settle(output)
    assert output.finished_recving == {"gone"}
    assert [load.request_id for load in side._failed_loads] == ["r"]  # the next step has them in its orders
    assert side.has_pending()


# -- states ------------------------------------------------------------------------------------------------------------


class StateLeader:
    """Records what a model with states orders. `found` and `lost`: what every lookup finds, in tokens."""

    def __init__(self, found=0, lost=0):
        self.found, self.lost, self.has_room = found, lost, True
        self.snapshots, self.offloads, self.loads, self.failed = [], [], [], []

    def match_groups(self, request_id, chains, start, end):
        return self.found

    def lost_state_tokens(self, request_id):
        return self.lost

    def offload(self, request_id, hashes, block_ids, *, computed_blocks, prompt_blocks, group):
        self.offloads.append((group, computed_blocks))
        return computed_blocks

    def offload_snapshot(self, request_id, hashes, block_ids):
        self.snapshots.append((list(hashes), tuple(block_ids)))
        return self.has_room

    def onboard(self, request_id, hashes, start, block_ids, *, tokens):
        self.loads.append((list(hashes), list(block_ids), tokens))

    def fail_load(self, request_id, block_ids):
        self.failed.append(list(block_ids))

    def reset(self, *, ends_persistence=False):
        return True

    def finish(self, request_id, *chains, is_preempted=False):
        pass

    def step(self):
        return StepPlan(step=1)

    def needs_settle(self):
        return False


def hashed(index, group=None):
    """The hash of block `index`, or its name in the cache of a group."""
    return bytes([index]) * 32 + (b"" if group is None else bytes([group]))


def name_block(pool, block_id, index, group):
    """Let a block have the name of this position in vLLM's prefix cache."""
    block, found = pool.blocks[block_id], make_block_hash_with_group_id(hashed(index), group)
    if len(inspect.signature(block.set_block_hash).parameters) > 1:
        block.set_block_hash(found, (index + 1) * 16)
    else:
        block.set_block_hash(found)
    pool.cached_block_hash_to_block.insert(found, block)


class StateEngine:
    """The scheduler's side of an engine with two state groups, 0 and 2, and attention in group 1; blocks of 16 tokens,
    one request `r` with a prompt of 70 tokens."""

    def __init__(self, *, limits=None, config=CONFIG, **found):
        self.side = scheduler_side(cache_groups(cache(mamba(), FULL, mamba())), config=config)
        self.pool = BlockPool(32, enable_caching=True, hash_block_size=16)
        self.side.blocks.bind_block_pool(self.pool)
        self.leader = self.side.blocks.leader = StateLeader(**found)
        self.request = SimpleNamespace(
            request_id="r",
            num_tokens=70,
            num_prompt_tokens=70,
            block_hashes=[hashed(index) for index in range(8)],
            shared_prefix_boundary=0,
            **PLAIN | {"kv_transfer_params": limits},
        )
        self.side.add_request(self.request)

    def allocate(self, *tables, local=0, external=0):
        self.side.match(self.request, local)
        self.side.allocated(self.request, SimpleNamespace(get_block_ids=lambda: tables), external)

    def step(self, *offers, tokens=70, tables=((0, 0, 0, 0, 1), (2, 3, 4, 5, 6), (0, 0, 0, 0, 7))):
        """The first step of the request, in which vLLM offers (group, block, tokens)."""
        offers = {"r": list(offers), "unknown": [(0, 9, 16)]}
        states = SimpleNamespace(boundary_state_offloads=offers)
        blocks = tuple(map(list, tables))
        output = scheduled("r", blocks, tokens=tokens, kv_connector_block_state=states)
        self.side.build_orders(output)
        assert not self.side.boundary.is_off


@needs_states
def test_a_snapshot_is_offloaded_when_every_state_group_offers_it_at_the_end_of_a_block():
    engine = StateEngine()
    engine.step((0, 11, 64), (2, 12, 64), (0, 13, 32), (2, 14, 32), (0, 15, 48), (0, 16, 70), (2, 17, 70))
    assert engine.leader.snapshots == [
        ([hashed(3, 0), hashed(3, 2)], (11, 12)),
        ([hashed(1, 0), hashed(1, 2)], (13, 14)),
    ]
    assert engine.leader.offloads == [(0, 4)], "of a state group, no block of the table"


@needs_states
def test_blocks_that_no_snapshot_serves_stay_in_g1():
    engine = StateEngine()
    engine.request.num_prompt_tokens = 64
    engine.step(tokens=64)
    assert engine.leader.offloads == [(0, 3)], "the snapshot is before the last token of the prompt"
    engine.step((0, 11, 64), (2, 12, 64), tokens=64)
    assert engine.leader.offloads[1:] == [(0, 4)]


@needs_states
@pytest.mark.parametrize(("limit", "snapshots", "blocks"), [(63, 1, 2), (31, 0, 0), (64, 2, 4), (0, 0, 0)])
def test_nothing_is_offloaded_beyond_the_last_snapshot_within_the_limit_of_a_client(limit, snapshots, blocks):
    engine = StateEngine(limits={"max_offload_tokens": limit})
    engine.step((0, 11, 64), (2, 12, 64), (0, 13, 32), (2, 14, 32))
    assert (len(engine.leader.snapshots), engine.leader.offloads) == (snapshots, [(0, blocks)])


@needs_states
def test_blocks_before_a_snapshot_that_found_no_room_are_not_offloaded():
    for has_room in (True, False):
        engine = StateEngine()
        engine.leader.has_room = has_room
        engine.step((0, 13, 80), (2, 14, 80), tokens=80)
        ((_, blocks),) = engine.leader.offloads
        assert blocks == (5 if has_room else 4)


@needs_states
def test_snapshots_of_generated_tokens_follow_the_profile():
    for is_wanted in (True, False):
        engine = StateEngine(config=CONFIG.model_copy(update={"offload": OffloadSection(generated=is_wanted)}))
        engine.step((0, 11, 64), (2, 12, 64), (0, 13, 80), (2, 14, 80))
        assert [blocks for _, blocks in engine.leader.snapshots] == [(11, 12), (13, 14)][: 1 + is_wanted]


@needs_states
def test_a_request_with_the_state_of_former_weights_offloads_none():
    engine = StateEngine()
    engine.step()
    engine.side.blocks.weights_may_change("a test")
    engine.step((0, 11, 64), (2, 12, 64))
    assert engine.leader.snapshots == []
    engine.side.end_request(engine.request)
    engine.side.add_request(engine.request)
    engine.step((0, 11, 64), (2, 12, 64))
    assert len(engine.leader.snapshots) == 1


@needs_states
def test_the_snapshot_of_a_hit_in_g1_is_offloaded_if_vllm_has_it_under_that_name():
    tables = ([0, 8], [9, 10], [0, 11])
    engine = StateEngine()
    engine.allocate(*tables, local=32)
    assert engine.leader.snapshots == [], "no block has a name"
    name_block(engine.pool, 8, 1, 0)
    name_block(engine.pool, 11, 0, 2)
    engine.allocate(*tables, local=32)
    assert engine.leader.snapshots == [], "one has that of another position"
    name_block(engine.pool, 12, 1, 2)
    for others in (([0, 8], [9, 10], [0, 0]), ([0, 8], [9, 10], [0])):
        engine.allocate(*others, local=32)
    engine.allocate([0, 8], [9, 10], [0, 12], local=0)
    engine.allocate([0, 8], [9, 10], [0, 12], local=24)
    assert engine.leader.snapshots == []
    engine.allocate([0, 8], [9, 10], [0, 12], local=32)
    assert engine.leader.snapshots == [([hashed(1, 0), hashed(1, 2)], (8, 12))]
    assert not engine.side.boundary.is_off


@needs_states
def test_a_load_brings_all_attention_blocks_and_one_block_per_state_group():
    engine = StateEngine(found=48)
    engine.allocate([0, 8, 0, 0, 9], [10, 11, 12, 13, 14], [0, 15, 0, 0, 16], local=32, external=48)
    assert engine.leader.loads == [
        ([hashed(2, 1), hashed(3, 1), hashed(4, 1), hashed(4, 0), hashed(4, 2)], [12, 13, 14, 9, 16], 48)
    ]


@needs_states
def test_a_load_without_a_place_for_the_state_fails():
    """The request would continue with the state of another one."""
    engine = StateEngine(found=32)
    engine.allocate([0, 8], [10, 11], [0, 0], external=32)
    assert (engine.leader.loads, engine.leader.failed) == ([], [[8, 10, 11]])
    assert not engine.side.boundary.is_off


@needs_states
@pytest.mark.parametrize(
    ("found", "lost", "own", "asked"),
    [(0, 0, 0, 0), (32, 0, 0, 48), (32, 16, 0, 64), (0, 32, 0, 48), (32, 0, 64, 64), (None, 0, 32, 32)],
)
def test_vllm_is_asked_for_a_snapshot_where_the_request_leaves_what_is_stored(found, lost, own, asked):
    engine = StateEngine(found=found, lost=lost)
    engine.request.shared_prefix_boundary = own
    engine.side.match(engine.request, 16)
    assert engine.request.shared_prefix_boundary == asked


@pytest.mark.skipif(not REPORTS_HIT_SOURCES, reason="the arguments of vLLM's own classes are those of 0.32")
@pytest.mark.parametrize("is_asked", [True, False])
def test_vllm_keeps_a_loaded_snapshot_for_other_requests_only_if_it_is_asked(is_asked):
    """Else each request with that prefix would load it again. Loaded blocks are offered too; kvbm has them already."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    padded = mamba(page_size_padded=FULL.page_size_bytes)
    groups = [KVCacheGroupSpec(["state"], padded), KVCacheGroupSpec(["attention"], FULL)]
    description = KVCacheConfig(
        num_blocks=60, kv_cache_tensors=[], kv_cache_groups=groups, prefix_cache_retention_interval=0
    )
    manager = KVCacheManager(description, max_model_len=1024, scheduler_block_size=16, hash_block_size=16)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    loads, follows = (
        Request(name, [*range(64), *range(first, first + 36)], SamplingParams(), None, block_hasher=hasher)
        for name, first in (("loads", 100), ("follows", 200))
    )
    loads.shared_prefix_boundary = 64 if is_asked else 0
    manager.allocate_slots(loads, 0, num_external_computed_tokens=64, delay_cache_blocks=True)
    assert [block_id > 0 for block_id in manager.get_block_ids("loads")[0]] == [False, False, False, True]
    loads.num_computed_tokens = 64
    manager.cache_blocks(loads, 64)
    manager.new_step_starts()
    manager.allocate_slots(loads, 32)
    assert [tokens for _, _, tokens in manager.take_boundary_state_offloads()["loads"]] == [64, 96][not is_asked :]
    loads.num_computed_tokens = 96
    assert manager.get_computed_blocks(follows)[1] == (64 if is_asked else 0)


# -- a reset of vLLM's prefix cache ------------------------------------------------------------------------------------


class Engine:
    """Both sides, a real block pool, and one request of two blocks whose offload a step has ordered."""

    def __init__(self, *, publishes_events=True):
        description = cache(FULL, num_blocks=12)
        groups = cache_groups(description)
        self.worker = WorkerSide(CONFIG, description, rank=0, rank_count=1)
        self.worker.register_kv_caches({"layer.0": torch.zeros(12, 2, 16, 64)})
        self.pool = BlockPool(12, enable_caching=True, hash_block_size=16)
        self.scheduler = scheduler_side(groups, publishes_events=publishes_events)
        self.scheduler.blocks.bind_block_pool(self.pool)
        self.scheduler.blocks.accept_handshakes([self.worker.handshake()])
        self.request = self.add("r", 2)
        self.blocks = self.pool.get_new_blocks(2)

    def add(self, request_id, blocks):
        hashes = [bytes((index + 1,)) * 32 for index in range(blocks)]
        tokens = list(range(16 * blocks + 1))
        facts = PLAIN | {"cache_salt": None, "num_prompt_tokens": 16 * blocks, "all_token_ids": tokens}
        request = SimpleNamespace(request_id=request_id, num_tokens=16 * blocks + 1, block_hashes=hashes, **facts)
        self.scheduler.add_request(request)
        return request

    def step(self):
        output = scheduled("r", ([block.block_id for block in self.blocks],), tokens=32)
        self.worker.bind(self.scheduler.build_orders(output))
        self.worker.finish_step()

    def end_request(self):
        self.scheduler.end_request(self.request)
        self.pool.free_blocks(self.blocks)

    def answer(self):
        """One step, the last one: no further step runs, and its copy still holds blocks when vLLM resets its cache."""
        self.step()
        self.end_request()
        assert self.pool.reset_prefix_cache() is True

    def close(self):
        self.scheduler.close()
        self.worker.close()


@pytest.fixture
def fake_engine():
    engine = Engine()
    yield engine
    engine.close()


def of_events(events):
    return [(type(event).__name__, list(event.block_hashes), getattr(event, "token_ids", None)) for event in events]


def test_offloaded_blocks_are_announced_with_their_tokens_and_again_after_a_reset_of_g1(fake_engine):
    side = fake_engine.scheduler
    fake_engine.answer()  # the event of the reset means every tier of this engine
    assert side.has_pending(), "vLLM publishes events in steps only"
    names = [int.from_bytes(bytes((one,)) * 8, "big") for one in (1, 2)]
    stored, gone = ("BlockStored", names, list(range(32))), ("BlockRemoved", names, None)
    assert of_events(side.blocks.take_events()) == [stored, gone, stored]
    assert not side.has_pending()
    side.blocks.reset()
    assert side.has_pending()
    assert of_events(side.blocks.take_events()) == [gone]
    assert not side.has_pending()


def test_a_cache_that_is_turned_off_removes_what_it_has_announced(fake_engine, monkeypatch):
    side = fake_engine.scheduler
    fake_engine.answer()
    side.blocks.take_events()
    monkeypatch.setattr(Leader, "step", lambda self: 1 / 0)
    side.blocks.leader.step()
    assert side.has_pending()
    side.blocks.leader.step()  # the next step learns that no copy is in flight, and only the events are left
    assert side.has_pending()
    assert [kind for kind, *_ in of_events(side.blocks.take_events())] == ["BlockRemoved"]
    assert not side.has_pending()


def test_without_kv_events_nothing_is_described():
    quiet = Engine(publishes_events=False)
    try:
        quiet.step()
        assert quiet.scheduler.blocks.take_events() == []
        assert quiet.scheduler.blocks.leader.leader._settings.traits.publishes_events is False
    finally:
        quiet.end_request()
        quiet.close()


def test_a_copy_that_hangs_delays_a_reset_and_does_not_prevent_it(fake_engine, monkeypatch):
    monkeypatch.setattr("kvbm.engines.vllm.engine_blocks.RESET_PATIENCE_S", 0.05)
    hung = threading.Event()
    copier = fake_engine.worker._worker.copier
    monkeypatch.setattr(copier, "offload", lambda *_: hung.wait())
    fake_engine.answer()
    hung.set()
    deadline = time.monotonic() + 10
    while fake_engine.scheduler.blocks.leader.blocks()[Tier.HOST]["moving"]:
        assert time.monotonic() < deadline
        fake_engine.scheduler.blocks.leader.settle_offloads()
    assert fake_engine.scheduler.match(fake_engine.add("again", 2), 0) == (0, False)
    assert fake_engine.pool.get_num_free_blocks() == 11


def test_a_reset_waits_for_copies_that_hold_no_blocks(fake_engine, monkeypatch):
    fake_engine.pool.free_blocks(fake_engine.blocks)
    are_running = [True, True, False]
    monkeypatch.setattr(fake_engine.scheduler.blocks.leader, "settle_offloads", lambda: are_running.pop(0))
    assert fake_engine.pool.reset_prefix_cache() is True
    assert are_running == []


def test_a_reset_under_a_running_request_fails_at_once_and_drops_nothing(fake_engine):
    fake_engine.step()
    began_s = time.monotonic()
    assert fake_engine.pool.reset_prefix_cache() is False
    assert time.monotonic() - began_s < 1.0
    fake_engine.end_request()
    assert fake_engine.pool.reset_prefix_cache() is True
    assert fake_engine.scheduler.match(fake_engine.add("again", 2), 0) == (32, True)


# -- numbers -----------------------------------------------------------------------------------------------------------


class CountingLeader(Leader):
    is_moving = False

    def __init__(self):
        self.counters = Counters()

    def has_pending(self):
        return self.is_moving

    def blocks(self):
        return {Tier.HOST: {"free": 3, "evictable": 1}}

    def wear(self):
        return {}

    def queues(self):
        return {"offload": (2, 0.5)}

    facts = Facts(block_bytes=100, has_shared=False, info={"model": "m"}, startup_s={"map": 0.1})


def test_totals_are_told_when_they_change_and_the_newest_replace_older_ones():
    leader, source = CountingLeader(), StatsSource()
    first = source.take(leader, has_requests=False)
    assert source.take(leader, has_requests=False) is None
    leader.counters.offload_blocks = 5
    leader.counters.hit_window.append((3, 0, 0, 4))
    leader.counters.finished_requests += 1
    second = source.take(leader, has_requests=False)
    assert first.aggregate(second).reduce() == {
        "host hit rate": 0.75,
        "matched tokens": 0,
        "offloaded blocks": 5,
        "onboarded blocks": 0,
        "failed blocks": 0,
    }
    assert KvbmStats().is_empty()
    assert second.aggregate(KvbmStats()) is second


@pytest.mark.parametrize("busy_with", ["transfers", "requests"])
def test_totals_that_change_in_every_step_are_told_twice_per_second_and_at_the_end(busy_with):
    now_s = [0.0]
    leader, source = CountingLeader(), StatsSource(lambda: now_s[0])
    leader.is_moving, told = busy_with == "transfers", []
    for step in range(1, 26):
        now_s[0] = 0.05 * step
        leader.counters.offload_blocks = step
        stats = source.take(leader, has_requests=busy_with == "requests")
        told += [] if stats is None else [stats.data["offload_blocks"]]
    assert told == [1, 11, 21]
    leader.is_moving = False
    assert source.take(leader, has_requests=False).data["offload_blocks"] == 25


def test_series_of_two_engines_reach_the_process_that_serves_them():
    collected = KvbmPromMetrics.__new__(KvbmPromMetrics)
    # its own construction registers with the process's Prometheus
    collected.boundary, collected._latest, collected._counters = Boundary(), {}, Counters()
    for engine in (0, 1):
        leader = CountingLeader()
        leader.counters.offload_bytes = 700 + engine
        leader.counters.durations["device-host"].observe(0.001)
        message = msgspec.msgpack.encode(StatsSource().take(leader, has_requests=False).data)  # how vLLM sends it
        collected.observe(msgspec.msgpack.decode(message), engine)
    found = {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for metric in SeriesCollector(collected._reports).collect()
        for sample in metric.samples
    }
    assert collected.boundary.faults == 0
    assert found["kvbm_transfer_bytes_total", "0", "device", "host"] == 700
    assert found["kvbm_transfer_bytes_total", "1", "device", "host"] == 701
    assert found["kvbm_transfer_seconds_count", "1", "device", "host"] == 1
    assert found["kvbm_tier_used_bytes", "0", "host"] == 100
    assert found["kvbm_queue_oldest_seconds", "1", "offload"] == 0.5
    assert found["kvbm_startup_seconds", "1", "map"] == 0.1


@pytest.mark.parametrize(
    ("params", "limit"),
    [
        *(({"max_load_tokens": value}, "max_load_tokens") for value in (-1, "many", True, 1.5)),
        ({"max_load_tokens": None}, UNLIMITED),
        ({"max_load_tokens": 0}, 0),
        *((value, UNLIMITED) for value in ("text", ["max_load_tokens"], 5)),
    ],
)
def test_a_token_limit_is_a_number_and_what_is_none_is_ignored(caplog, params, limit):
    """With a warning that has its name. A client can set them through `vllm_xargs`, which vLLM does not check."""
    logging.getLogger("kvbm").propagate = True
    side = scheduler_side([])
    side.add_request(SimpleNamespace(request_id="r", **PLAIN | {"kv_transfer_params": params}))
    assert tracked(side).max_load_tokens == (limit if isinstance(limit, int) else UNLIMITED)
    assert isinstance(limit, int) or limit in caplog.text


# -- what names a block ------------------------------------------------------------------------------------------------


def limits(side, **facts):
    side.add_request(SimpleNamespace(request_id="r", **PLAIN | facts))
    return tracked(side).max_load_tokens, tracked(side).max_offload_tokens


def test_requests_whose_hashes_do_not_cover_their_tokens_bypass_the_cache():
    """A session whose tokens can change, and a prompt of tokens and embeddings: which is which is in no hash."""
    assert limits(scheduler_side([]), resumable=True) == (0, 0)
    assert limits(scheduler_side([]), prompt_is_token_ids=[True, False]) == (0, 0)
    assert limits(scheduler_side([])) == (UNLIMITED, UNLIMITED)


def test_a_request_that_reads_no_cache_is_not_looked_up_and_its_blocks_are_kept():
    engine = StateEngine()
    engine.leader.match = lambda *_: pytest.fail("it was looked up")
    engine.request.skip_reading_prefix_cache = True
    assert engine.side.match(engine.request, 0) == (0, False)
    engine.step()
    assert engine.leader.offloads


@pytest.mark.parametrize(("own", "doubt"), [("", ""), ("other weights", "other weights")])
def test_a_doubt_of_the_connector_ends_with_the_engine(own, doubt, tmp_path):
    tiers = {"host": {"blocks": 8}, "disk": {"blocks": 8, "directory": str(tmp_path)}}
    side = scheduler_side(cache_groups(cache(FULL)), config=ConnectorConfig.model_validate({"tiers": tiers}))
    side.blocks.doubt = own
    assert doubt_of(side) == doubt
    assert side.blocks._keeps_blocks == (not doubt)  # else a warning at the first change of weights only


# -- media -------------------------------------------------------------------------------------------------------------


class MediaLeader:
    """A leader that finds every block, and notes which names it is asked for and given."""

    def __init__(self):
        self.lookups, self.offloads = [], []

    def match(self, request_id, hashes, start, end):
        self.lookups.append(list(hashes[start:end]))
        return end - start

    def match_groups(self, request_id, chains, start, end):
        self.lookups += [list(chain[: end // 16]) for chain in chains]
        return end // 16 * 16

    def offload_all(self, completed):
        self.offloads += [list(hashes[:blocks]) for _, hashes, _, blocks, _ in completed]
        return [blocks for _, _, _, blocks, _ in completed]

    def offload(self, request_id, hashes, table, *, computed_blocks, prompt_blocks, group):
        self.offloads.append(list(hashes[:computed_blocks]))
        return computed_blocks

    def finish(self, *_):
        pass

    def close(self):
        pass


HASHES = [bytes([index]) * 32 for index in range(8)]


def image(value, identifier="picture", offset=40):
    """Without a value, one whose data is not there."""
    pixels = MultiModalFieldElem(data=torch.full((2, 3), value or 0.0), field=MultiModalBatchedField())
    return MultiModalFeatureSpec(
        data=None if value is None else MultiModalKwargsItem({"pixel_values": pixels}),
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=20),
    )


class MediaEngine:
    """The scheduler of an engine whose requests have 8 blocks."""

    def __init__(self, *specs):
        self.side = scheduler_side(cache_groups(cache(*specs)), publishes_events=False)
        self.side._tables.bind(SimpleNamespace(null_block=SimpleNamespace(block_id=0), hash_block_size=16))
        self.leader = self.side.blocks.leader = MediaLeader()
        self.group_count = len(specs)

    def add(self, name, *features, **facts):
        request = SimpleNamespace(
            request_id=name,
            num_tokens=130,
            num_prompt_tokens=130,
            block_hashes=HASHES,
            **PLAIN | {"mm_features": list(features)} | facts,
        )
        self.side.add_request(request)
        return request

    def match(self, request):
        """Asks until the digests are known, as vLLM does."""
        deadline_s = time.monotonic() + 60
        while (found := self.side.match(request, 0)) == (None, False):
            assert time.monotonic() < deadline_s
        return found

    def schedule(self, request, computed=0, tokens=128):
        blocks = [[*range(1, 9)]] * self.group_count
        output = scheduled(request.request_id, blocks, tokens=tokens - computed, computed=computed)
        before = len(self.leader.offloads)
        self.side._finish_and_offload(self.leader, output)
        assert not self.side.boundary.is_off
        return self.leader.offloads[before:]

    def names(self, request):
        """What is kept of a request: the names of its blocks, by group."""
        self.match(request)
        return self.schedule(request)


@pytest.fixture(params=["plain", "groups"])
def media_engine(request):
    engine = MediaEngine(*((FULL,) if request.param == "plain" else (FULL, WINDOW)))
    yield engine
    engine.side.close()


def suffixes(engine):
    """Of the names of blocks, by group; windows come after full attention."""
    return [b""] if engine.group_count == 1 else [b"\0", b"\1"]


def test_blocks_behind_an_image_are_kept_under_its_content_and_looked_up_under_the_same_names(media_engine):
    first = media_engine.names(media_engine.add("a", image(1.0)))
    assert [len(names) for names in first] == [8] * len(suffixes(media_engine))
    for names, suffix in zip(first, suffixes(media_engine), strict=True):
        assert names[:2] == [one + suffix for one in HASHES[:2]], "text in front of the image has its own names"
        assert not {one[:32] for one in names[2:]} & set(HASHES)
        assert {len(one) for one in names} == {32 + len(suffix)}
    media_engine.leader.lookups.clear()
    assert media_engine.names(media_engine.add("b", image(1.0))) == first
    assert media_engine.leader.lookups == first


def test_another_image_under_the_same_identifier_is_neither_looked_up_nor_kept(media_engine):
    media_engine.names(media_engine.add("a", image(1.0)))
    media_engine.leader.lookups.clear()
    for value in (2.0, 1.0):
        kept = media_engine.names(media_engine.add(f"{value}", image(value)))
        assert [len(names) for names in kept] == [2] * len(kept)
    assert {len(names) for names in media_engine.leader.lookups} == {2}


def test_an_image_without_data_is_neither_looked_up_nor_kept(media_engine):
    request = media_engine.add("a", image(None, "0a" * 32))
    assert media_engine.side.match(request, 0) == (32, True)
    assert [len(names) for names in media_engine.schedule(request)] == [2] * len(suffixes(media_engine))


def test_blocks_that_were_named_are_not_kept_once_their_image_is_in_doubt(media_engine):
    """Another image came while the request was computed: vLLM may have taken the encoding of that one."""
    request = media_engine.add("a", image(1.0))
    assert media_engine.match(request) == (128, True)
    media_engine.add("b", image(2.0), resumable=True)
    media_engine.match(media_engine.add("c", image(1.0)))
    assert [len(names) for names in media_engine.schedule(request)] == [2] * len(suffixes(media_engine))


def test_kv_that_another_connector_has_loaded_is_not_kept_behind_an_image(media_engine):
    request = media_engine.add("a", image(1.0))
    media_engine.match(request)
    assert [len(names) for names in media_engine.schedule(request, computed=64)] == [2] * len(suffixes(media_engine))
    text = media_engine.add("text")
    media_engine.match(text)
    assert [len(names) for names in media_engine.schedule(text, computed=64)] == [8] * len(suffixes(media_engine))


def test_a_request_that_is_not_cached_still_counts_for_its_identifiers(media_engine, tmp_path):
    adapter = LoRARequest("a", 1, str(tmp_path), load_inplace=True)
    media_engine.add("a", image(1.0), lora_request=adapter)
    media_engine.match(media_engine.add("r", image(2.0)))
    assert tracked(media_engine.side).named_tokens(UNLIMITED) == 40


def test_without_media_nothing_is_named_anew(media_engine):
    kept = media_engine.names(media_engine.add("a"))
    assert kept == [[one + suffix for one in HASHES] for suffix in suffixes(media_engine)]
