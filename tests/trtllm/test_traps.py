"""One test per trap of TensorRT-LLM's connector interface."""

from __future__ import annotations

import pickle
import time
from types import SimpleNamespace

import pytest
from executor import BLOCK, Engine, Request, Script, expected
from interface import (
    MAIN,
    MAIN_WITHOUT_RESETS,
    V1_1,
    V1_2,
    V1_3,
    V1_3_WITH_SALT_IDS,
    VERSIONS,
    GroupedScheduler,
    WorkerWithLayout,
    require_attention_dp,
)

from kvbm.engines.trtllm.messages import TransferOrders
from kvbm.engines.trtllm.request_key import request_key
from kvbm.errors import EnvironmentProblem, ProfileError

PROMPT = tuple(range(17))  # four blocks and one token
every_version = pytest.mark.parametrize("version", VERSIONS, ids=str)


def stored(version, *, prompt=PROMPT, **more):
    """Return an engine whose host memory has the blocks of `prompt`; G1 is empty."""
    engine = Engine(version, **more).__enter__()
    request = Script(1, prompt, 3)
    assert engine.run([request])[1] == expected(request, engine.rank_count)
    engine.wait_for_saves()
    engine.forget_device()
    return engine


@pytest.fixture
def open_engine():
    engines = []

    def opened(*args, **more):
        engines.append(stored(*args, **more))
        return engines[-1]

    yield opened
    for engine in engines:
        engine.__exit__()


def asks(engine, script, computed=0):
    return engine.leader.get_num_new_matched_tokens(Request(script), computed)


def report(engine, request_id, tokens, block_ids, position, **more):
    if engine.version.counts_scheduled:
        more = {"num_scheduled_tokens": 0, **more}
    return engine.interface.RequestData(request_id, list(tokens), list(block_ids), position, **more)


def output(new=(), cached=()):
    return SimpleNamespace(new_requests=list(new), cached_requests=list(cached))


def in_groups(version, block_ids):
    """The same ids in both layer groups, where the version has two."""
    return [block_ids, block_ids] if version.is_grouped else block_ids


def offloaded(orders):
    return [block_id for order in orders.plan.offloads for block_id in order.block_ids]


def loaded(orders):
    return [block_id for order in orders.plan.onboards for block_id in order.block_ids]


@pytest.mark.parametrize("position", [4, 16])
def test_trap_1_the_start_of_a_load_is_remembered_and_not_derived_from_a_position(open_engine, position):
    """A synchronous load reports the position without the connector's tokens (4), an asynchronous one with them."""
    engine = open_engine(V1_1)
    request = Request(Script(2, PROMPT))
    assert engine.leader.get_num_new_matched_tokens(request, BLOCK) == (3 * BLOCK, True)
    engine.leader.update_state_after_alloc(request, [9, 8, 7, 6, 5])
    data = report(engine, 2, PROMPT, [9, 8, 7, 6, 5], position)
    assert loaded(engine.leader.build_connector_meta(output([data]))) == [8, 7, 6]


@every_version
def test_trap_2_a_load_starts_although_its_request_is_in_no_report(open_engine, version):
    engine = open_engine(version)
    manager = engine.ranks[0].manager
    before = len(manager.outputs)
    assert engine.run([Script(2, PROMPT, 3)])[2] == expected(Script(2, PROMPT, 3), 1)
    first, orders = manager.outputs[before], manager.broadcasts[before]
    assert not first.new_requests
    assert [request_id for request_id, _ in orders.loads] == [2]
    assert len(loaded(orders)) == 4
    new = next(one for one in manager.outputs[before + 1 :] if one.new_requests).new_requests[0]
    assert (new.request_id, new.computed_position) == (2, 16)


@every_version
def test_trap_3_an_answer_is_never_zero_and_asynchronous_and_no_exception_gets_out(open_engine, version, monkeypatch):
    engine = open_engine(version)
    assert asks(engine, Script(2, (500, 501, 502, 503, 504))) == (0, False)
    assert asks(engine, Script(3, PROMPT)) == (16, True)

    def bug(*args, **more):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(type(engine.leader.side.leader.leader), "match", bug)
    assert asks(engine, Script(4, PROMPT)) == (0, False)
    assert engine.counters.faults == 1
    assert asks(engine, Script(5, PROMPT)) == (0, False)
    for call in (
        lambda: engine.leader.build_connector_meta(None),
        lambda: engine.leader.request_finished(Request(Script(3, PROMPT)), [1]),
        lambda: engine.leader.update_state_after_alloc(Request(Script(99, PROMPT)), [1]),
        lambda: engine.workers[0].bind_connector_meta(TransferOrders(None)),
        lambda: engine.workers[0].start_load_kv(None),
        lambda: engine.workers[0].wait_for_save(None),
        lambda: engine.workers[0].get_finished([7], []),
    ):
        call()


@every_version
@pytest.mark.parametrize("method", ["match", "onboard", "offload", "step", "settle", "finish"])
def test_after_an_exception_in_the_leader_requests_get_their_tokens_without_the_cache(version, method, monkeypatch):
    """An exception in `onboard` comes after the promise: it is the one that TensorRT-LLM cannot be told of."""
    with Engine(version, rank_count=2, device_blocks=22) as engine:
        prompts = [tuple(range(100 * user, 100 * user + 14)) for user in range(3)]
        engine.run([Script(1 + index, prompt) for index, prompt in enumerate(prompts)])
        engine.wait_for_saves()
        engine.forget_device()
        leader, calls = engine.leader.side.leader.leader, []
        real = getattr(leader, method)

        def fails_later(*args, **more):
            calls.append(args)
            if len(calls) == 2:
                raise ZeroDivisionError("planted")
            return real(*args, **more)

        monkeypatch.setattr(type(leader), method, lambda self, *args, **more: fails_later(*args, **more))
        scripts = [Script(11 + index, prompt, arrives=3 * index) for index, prompt in enumerate(prompts)]
        if method == "onboard":
            scripts[1] = Script(12, prompts[1], arrives=3, aborts_at=60)
        done = engine.run(scripts)
        assert all(done[script.request_id] == expected(script, 2) for script in scripts if script.aborts_at is None)
        assert engine.counters.faults == 1


@every_version
@pytest.mark.parametrize(("computed", "tokens"), [(0, 16), (4, 12), (16, 0), (3, 0), (17, 0)])
def test_trap_4_only_whole_blocks_before_the_last_token_are_offered(open_engine, version, computed, tokens):
    engine = open_engine(version)
    assert asks(engine, Script(2, PROMPT), computed) == (tokens, tokens > 0)
    assert asks(engine, Script(3, PROMPT[:16])) == (12, True)


def test_trap_5_with_a_disk_tier_and_no_host_memory_the_start_fails(tmp_path):
    """A block on disk cannot be promised, because its read may fail. So nothing would ever be loaded."""
    config = {"tiers": {"disk": {"directory": str(tmp_path), "blocks": 8}}}
    with (
        pytest.raises(EnvironmentProblem, match="a disk tier without host memory does not work with TensorRT-LLM"),
        Engine(V1_2, config=config),
    ):
        pass


@every_version
def test_trap_5_a_promised_block_stays_until_it_is_loaded(open_engine, version):
    """Between the promise and the allocation, other requests fill the whole host memory."""
    engine = open_engine(version, host_blocks=12)
    request = Request(Script(2, PROMPT))
    assert engine.leader.get_num_new_matched_tokens(request, 0) == (16, True)
    others = [Script(10 + index, tuple(range(1000 * index, 1000 * index + 20)), 2) for index in range(1, 6)]
    for other in others:
        engine.run([other])
        engine.wait_for_saves()
    assert engine.counters.evicted_blocks > 0
    groups = [[ids[block] for block in (2, 3, 4, 5, 6)] for ids in engine.caches[0].ids]
    engine.ranks[0].manager.update_state_after_alloc(request, groups)
    assert loaded(engine.leader.build_connector_meta(output())) == groups[0][:4]


@every_version
def test_trap_6_a_request_may_end_without_having_been_scheduled(open_engine, version):
    engine = open_engine(version)
    request = Request(Script(2, PROMPT))
    assert asks(engine, Script(2, PROMPT)) == (16, True)
    assert engine.leader.request_finished(request, []) is False
    assert engine.leader.request_finished(Request(Script(77, PROMPT)), []) is False
    assert engine.leader.side.leader.blocks()["G2"]["pinned"] == 0


@every_version
def test_trap_6_a_request_that_ends_while_it_loads_keeps_its_blocks(open_engine, version):
    engine = open_engine(version)
    done = engine.run([Script(2, PROMPT, aborts_at=1), Script(3, (*PROMPT, 18, 19), arrives=1)])
    assert done == {3: expected(Script(3, (*PROMPT, 18, 19)), 1)}
    assert engine.ranks[0].aborted == [2]


@every_version
def test_trap_7_chunks_of_a_prompt_are_saved(version):
    with Engine(version, budget=8) as engine:
        script = Script(1, tuple(range(26)), 2)
        assert engine.run([script])[1] == expected(script, 1)
        outputs = engine.ranks[0].manager.outputs
        assert [len(one.new_requests) for one in outputs][:4] == [1, 0, 0, 0]
        engine.wait_for_saves()
        engine.forget_device()
        assert asks(engine, Script(2, tuple(range(26)))) == (24, True)


@every_version
def test_trap_8_a_block_id_of_minus_one_is_never_copied(open_engine, version):
    engine = open_engine(version)
    request = Request(Script(2, PROMPT))
    assert engine.leader.get_num_new_matched_tokens(request, 0) == (16, True)
    engine.leader.update_state_after_alloc(request, in_groups(version, [-1, -1, 7, 6, 5]))
    assert loaded(engine.leader.build_connector_meta(output())) == [7, 6]
    tokens = range(300, 317)
    asks(engine, Script(3, tuple(tokens)))
    more = {"new_block_ids_by_layer_group": in_groups(version, [-1, 11, -1, 12, 13])} if version.is_grouped else {}
    data = report(engine, 3, tokens, [-1, 11, -1, 12, 13], 17, **more)
    assert offloaded(engine.leader.build_connector_meta(output([data]))) == [11, 12]


def test_trap_8_a_load_without_any_block_ends_at_once(open_engine):
    engine = open_engine(V1_2)
    request = Request(Script(2, PROMPT))
    assert engine.leader.get_num_new_matched_tokens(request, 0) == (16, True)
    engine.leader.update_state_after_alloc(request, [-1, -1, -1, -1, 5])
    engine.workers[0].bind_connector_meta(engine.leader.build_connector_meta(output()))
    engine.workers[0].start_load_kv(None)
    assert engine.workers[0].get_finished([], [2]) == ([], [2])


@every_version
@pytest.mark.parametrize(
    ("one", "other", "shares"),
    [
        ({"salt": "a"}, {"salt": "b"}, False),
        ({"salt": "a"}, {}, False),
        ({"salt": "a"}, {"salt": "a"}, True),
        ({"adapter": 1}, {"adapter": 2}, False),
        ({"adapter": 1}, {}, False),
        ({"media": ("x",), "has_media": True}, {"media": ("y",), "has_media": True}, False),
        ({"media": ("x",), "has_media": True}, {"media": ("x",), "has_media": True}, False),
        ({"has_media": True}, {"has_media": True}, False),
        ({"has_media": True}, {}, False),
    ],
)
def test_trap_9_salts_adapters_and_media_share_no_blocks(version, one, other, shares):
    """The model of the tests computes other KV for another adapter or image, so that a wrong hit gives wrong tokens."""
    with Engine(version) as engine:
        for request_id, facts in enumerate((one, other, one), start=1):
            script = Script(request_id, PROMPT, 3, **facts)
            before = engine.external_tokens
            assert engine.run([script])[request_id] == expected(script, 1)
            engine.wait_for_saves()
            engine.forget_device()
            if request_id == 2:
                assert (engine.external_tokens > before) == shares


@pytest.mark.parametrize(
    ("version", "more", "name"),
    [
        (V1_3, {}, "cache_salt"),
        (V1_3_WITH_SALT_IDS, {}, "cache_salt"),
        (V1_2, {"lora_config": object()}, "lora_task_id"),
    ],
)
def test_trap_9_a_request_that_does_not_show_its_salt_or_adapter_bypasses_the_cache(open_engine, version, more, name):
    engine = open_engine(version, **more)
    hidden = Request(Script(2, PROMPT))
    delattr(hidden, name)
    assert engine.leader.get_num_new_matched_tokens(hidden, 0) == (0, False)


@pytest.mark.parametrize("other", [None, 8])
def test_trap_9_numbers_of_salts_keep_tenants_apart(open_engine, other):
    """A release of 1.3 shows the salt of a request as a number only."""
    engine = open_engine(V1_3_WITH_SALT_IDS)

    def request(number, salt_id):
        made = Request(Script(number, tuple(range(100, 117)), 3))
        del made.cache_salt
        made.cache_salt_id = salt_id
        return made

    first = request(2, 7)
    assert engine.leader.get_num_new_matched_tokens(first, 0) == (0, False)
    data = report(engine, 2, first.get_tokens(0), [2, 3, 4, 5, 6], 0, num_scheduled_tokens=17)
    orders = engine.leader.build_connector_meta(output([data]))
    engine.workers[0].bind_connector_meta(orders)
    engine.workers[0].start_load_kv(None)
    engine.workers[0].wait_for_save(None)
    engine.wait_for_saves()
    assert engine.leader.get_num_new_matched_tokens(request(3, other), 0) == (0, False)
    assert engine.leader.get_num_new_matched_tokens(request(4, 7), 0) == (16, True)


@pytest.mark.parametrize(
    ("given", "is_cached"),
    [
        ({"py_multimodal_data": {"image": {"pixel_values": object()}}}, False),
        ({"py_multimodal_data": {"multimodal_embedding": [object()]}}, False),
        ({"py_multimodal_data": {"image": {"pixel_values": object()}}, "multimodal_hashes": [[1, 2]]}, False),
        ({"multimodal_hashes": [[1, 2]]}, False),
        ({"multimodal_hashes": []}, True),
        ({"py_multimodal_data": {"mrope_config": {"mrope_position_ids": object()}}}, True),
        ({"py_multimodal_data": {}}, True),
        ({"py_multimodal_data": None}, True),
    ],
)
def test_trap_9_requests_with_media_bypass_the_cache_wherever_they_show_them(given, is_cached):
    """The PyTorch backend puts them into `py_multimodal_data`. A hash of TensorRT-LLM does not cover a whole medium."""
    request = Request(Script(2, PROMPT))
    for name, value in given.items():
        setattr(request, name, value)
    assert (request_key(request, has_adapters=False, has_salts=False) is not None) == is_cached


@pytest.mark.parametrize("token", [-1, 2**32])
def test_request_with_a_token_id_that_has_no_hash_bypasses_the_cache_alone(open_engine, token):
    """TensorRT-LLM does not check the token ids of multimodal models, and some use negative ones."""
    engine = open_engine(V1_3)
    assert asks(engine, Script(2, (token, *PROMPT))) == (0, False)
    data = report(engine, 2, (token, *PROMPT), [9, 8, 7, 6, 5], 0, num_scheduled_tokens=18)
    assert not offloaded(engine.leader.build_connector_meta(output([data])))
    assert asks(engine, Script(3, PROMPT)) == (16, True)
    later = Script(4, tuple(range(600, 609)))
    assert asks(engine, later) == (0, False)
    data = report(engine, 4, (*later.prompt, token, 1, 2), [1, 2, 3], 0, num_scheduled_tokens=12)
    assert not offloaded(engine.leader.build_connector_meta(output([data])))
    assert engine.counters.faults == 0


@every_version
def test_load_whose_start_the_executor_skips_starts_at_the_end_of_the_iteration(open_engine, version):
    engine = open_engine(version)
    request, worker = Request(Script(2, PROMPT)), engine.workers[0]
    assert engine.leader.get_num_new_matched_tokens(request, 0) == (16, True)
    engine.leader.update_state_after_alloc(request, in_groups(version, [9, 8, 7, 6, 5]))
    worker.bind_connector_meta(engine.leader.build_connector_meta(output()))
    ended = worker.get_finished([], [2])[1]
    deadline_s = time.monotonic() + 60
    while not ended:
        assert time.monotonic() < deadline_s, "the load never starts"
        ended = worker.get_finished([], [])[1]
    assert ended == [2]


@every_version
def test_trap_10_dummy_requests_and_missing_metadata_are_tolerated(open_engine, version):
    engine = open_engine(version)
    dummy = Request(Script(0, PROMPT))
    dummy.is_dummy_request = True
    assert engine.leader.get_num_new_matched_tokens(dummy, 0) == (0, False)
    engine.leader.build_connector_meta(output([report(engine, 0, PROMPT, [1, 2, 3, 4, 5], 0)]))
    worker = engine.workers[0]
    for hook in (worker.start_load_kv, worker.wait_for_save):
        hook(None)
    worker.wait_for_layer_load(0, None)
    worker.save_kv_layer(0, None)
    worker.bind_connector_meta(None)
    worker.start_load_kv(None)
    assert worker.get_finished([], []) == ([], [])
    assert worker.side.boundary.faults == engine.leader.side.boundary.faults == 0


@every_version
def test_trap_11_only_ids_that_were_received_are_returned_and_each_once(open_engine, version):
    """The manager of the tests raises KeyError for any other id. This one asks again after the end."""
    engine = open_engine(version)
    engine.run([Script(2, PROMPT, 3)])
    engine.wait_for_saves()
    worker = engine.workers[0]
    assert worker.get_finished([2], []) == ([2], [])
    assert worker.get_finished([], []) == ([], [])
    assert worker.get_finished([], [555]) == ([], [])  # no load of this request was ordered


def test_trap_11_old_versions_release_one_request_per_iteration(open_engine):
    engine = open_engine(V1_2)
    worker = engine.workers[0]
    assert worker.get_finished([4, 5, 6], []) == ([4], [])
    assert worker.get_finished([], []) == ([5], [])
    assert worker.get_finished([], []) == ([6], [])


def test_trap_12_copies_from_a_paused_request_are_not_registered(open_engine):
    engine = open_engine(MAIN)
    tokens = range(700, 717)
    script = Script(3, tuple(tokens))
    request = Request(script)
    assert engine.leader.get_num_new_matched_tokens(request, 0) == (0, False)
    groups = [[ids[block] for block in (2, 3, 4, 5, 6)] for ids in engine.caches[0].ids]
    data = report(engine, 3, tokens, groups[0], 17, new_block_ids_by_layer_group=groups)
    orders = engine.leader.build_connector_meta(output([data]))
    assert offloaded(orders) == groups[0][:4]
    engine.leader.request_reset(request)
    engine.workers[0].bind_connector_meta(pickle.loads(pickle.dumps(orders)))
    engine.workers[0].start_load_kv(None)
    engine.workers[0].wait_for_save(None)
    engine.wait_for_saves()
    assert asks(engine, Script(4, tuple(tokens))) == (0, False)
    data = report(engine, 3, [1], [9], 17, new_block_ids_by_layer_group=[[9], [9]])
    assert offloaded(engine.leader.build_connector_meta(output((), [data]))) == []


@every_version
def test_offloads_of_a_step_without_a_forward_pass_are_not_registered(open_engine, version):
    engine = open_engine(version)
    tokens = range(700, 717)
    asks(engine, Script(3, tuple(tokens)))
    groups = [[ids[block] for block in (2, 3, 4, 5, 6)] for ids in engine.caches[0].ids]
    more = {"new_block_ids_by_layer_group": groups} if version.is_grouped else {}
    orders = engine.leader.build_connector_meta(output([report(engine, 3, tokens, groups[0], 17, **more)]))
    assert offloaded(orders)
    engine.workers[0].bind_connector_meta(orders)
    engine.workers[0].start_load_kv(None)
    engine.wait_for_saves()
    assert asks(engine, Script(4, tuple(tokens))) == (0, False)
    assert engine.counters.offload_failed_blocks == 4


def test_a_load_that_is_cancelled_before_the_allocation_ends_earlier(open_engine):
    engine = open_engine(MAIN)
    request = Request(Script(2, PROMPT))
    assert engine.leader.get_num_new_matched_tokens(request, 0) == (16, True)
    engine.leader.cancel_load(request, 8, 16)
    groups = [[ids[block] for block in (2, 3, 4, 5, 6)] for ids in engine.caches[0].ids]
    engine.leader.update_state_after_alloc_by_layer_group(request, groups)
    assert loaded(engine.leader.build_connector_meta(output())) == groups[0][:2]


def test_blocks_of_low_priority_are_not_saved():
    with Engine(V1_3, config={"offload": {"min_priority": 50}}) as engine:
        scripts = [Script(1, PROMPT, 2, priority=20), Script(2, tuple(range(50, 67)), 2, priority=80)]
        engine.run(scripts)
        engine.wait_for_saves()
        engine.forget_device()
        assert asks(engine, Script(3, PROMPT)) == (0, False)
        assert asks(engine, Script(4, tuple(range(50, 67)))) == (16, True)


def test_the_second_manager_has_no_priorities_so_all_blocks_are_saved_with_a_warning(caplog):
    with Engine(MAIN, config={"offload": {"min_priority": 50}}) as engine:
        wait_for_log(caplog, "`offload.min_priority: 50` has no effect")
        engine.run([Script(1, PROMPT, 2, priority=20)])
        engine.wait_for_saves()
        engine.forget_device()
        assert asks(engine, Script(3, PROMPT)) == (16, True)


@every_version
def test_a_match_takes_microseconds(open_engine, version):
    """It runs under a lock of the engine. 8192 tokens: the hashes of 256 blocks of 32 tokens."""
    import time

    engine = open_engine(version)
    side = engine.leader.side
    side._size = 32
    request = Request(Script(5, tuple(range(8192))))
    best = min(_timed(side, request, number, time.perf_counter) for number in range(20, 40))
    assert best < 0.002


def _timed(side, request, request_id, clock):
    request.request_id = request_id
    begin = clock()
    assert side.match(request, 0) == 0
    return clock() - begin


def wait_for_log(caplog, text):
    """A thread writes the log."""
    deadline_s = time.monotonic() + 60
    while text not in caplog.text:
        assert time.monotonic() < deadline_s, caplog.text
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"max_beam_width": 2}, "beam width"),
        ({"speculative_config": object()}, "speculative configuration"),
        ({"ray_worker_extension_cls": "tensorrt_llm.llmapi.rlhf_utils.WorkerExtension"}, "change its weights"),
        ({"sleep_config": object()}, "change its weights"),
        ({"enable_sleep": True}, "change its weights"),
        ({"orchestrator_type": "ray"}, "change its weights"),
    ],
)
def test_an_engine_that_is_not_supported_serves_without_the_cache(more, reason, caplog):
    with Engine(V1_2, **more) as engine:
        wait_for_log(caplog, reason)
        assert engine.run([Script(1, PROMPT, 3)])[1] == expected(Script(1, PROMPT, 3), 1)
        assert engine.leader.side is None


@every_version
def test_an_engine_with_attention_data_parallelism_serves_without_the_cache(version, caplog):
    """From `main` on, TensorRT-LLM refuses to start it with a connector that does not declare to support it."""
    with Engine(version, enable_attention_dp=True) as engine:
        wait_for_log(caplog, "attention data parallelism")
        assert engine.run([Script(1, PROMPT, 3)])[1] == expected(Script(1, PROMPT, 3), 1)
        assert engine.leader.side is None


def test_a_connector_that_does_not_declare_attention_data_parallelism_is_refused():
    with pytest.raises(NotImplementedError, match="supports_attention_dp"):
        require_attention_dp(GroupedScheduler, WorkerWithLayout)


def test_a_rank_that_cannot_start_stops_all_ranks(monkeypatch):
    from kvbm.device.worker import Worker

    create = Worker.create

    def fails(*args, rank, **more):
        if rank == 1:
            raise MemoryError("planted")
        return create(*args, rank=rank, **more)

    monkeypatch.setattr(Worker, "create", fails)
    with pytest.raises(EnvironmentProblem, match="rank 1: MemoryError: planted"), Engine(V1_2, rank_count=2):
        pass


def test_a_layout_with_a_sliding_window_disables_the_cache(open_engine, caplog):
    engine = open_engine(MAIN)
    layout = engine.caches[0].layout()
    layout.groups[1].window_size = 8
    worker = engine.connector.DynamoKVBMConnectorWorker(engine.leader._llm_args)
    worker.register_kv_cache_layout(layout)
    wait_for_log(caplog, "sliding window of 8 tokens")
    assert worker.get_finished([1], [2]) == ([], [])


def test_a_version_that_takes_blocks_away_silently_disables_the_cache(caplog):
    """It pauses requests under every capacity policy, and a copy would read what other requests write."""
    with Engine(MAIN_WITHOUT_RESETS) as engine:
        wait_for_log(caplog, "takes blocks away from running requests")
        assert engine.run([Script(1, PROMPT, 3)])[1] == expected(Script(1, PROMPT, 3), 1)
        assert engine.workers[0].side is None
        assert engine.leader.get_num_new_matched_tokens(Request(Script(2, PROMPT, 3)), 0) == (0, False)


def test_the_connector_can_be_imported_without_tensorrt_llm():
    import subprocess
    import sys

    script = "import sys, kvbm.trtllm_integration.connector; print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "`TLLM_KVBM_CONFIG` is not JSON"),
        ("[]", "`TLLM_KVBM_CONFIG` must be a mapping"),
        ('{"tiers": {"host": {"blcks": 3}}}', "blcks"),
    ],
)
def test_a_mistake_in_the_configuration_stops_the_start(monkeypatch, text, message):
    with Engine(V1_2) as engine:
        monkeypatch.setenv("TLLM_KVBM_CONFIG", text)
        for part in (engine.connector.DynamoKVBMConnectorLeader, engine.connector.DynamoKVBMConnectorWorker):
            with pytest.raises(ProfileError, match=message) as caught:
                part(engine.leader._llm_args)
            assert "kv_connector_extra_config" not in str(caught.value)


def test_without_a_resolved_profile_the_variables_of_nvidia_count(monkeypatch):
    with Engine(V1_2) as engine:
        monkeypatch.delenv("TLLM_KVBM_CONFIG")
        monkeypatch.setenv("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", "77")
        worker = engine.connector.DynamoKVBMConnectorWorker(engine.leader._llm_args)
        assert worker.side._config.tiers.host.blocks == 77
        monkeypatch.setenv("TLLM_KVBM_CONFIG", "{}")
