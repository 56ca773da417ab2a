"""The rules between the engine and a connector, one test each, on the simulated engine: exact, without a thread."""

import host_connector
import pytest
from engine_rig import EngineRig, prompts_of
from simulated_engine import SimulatedEngine, expected_output

BLOCK = 4
PROMPT = [n % 50 for n in range(3, 3 + 18)]  # four full blocks, and two tokens


def engine_with_host(*, latency_steps: int | None = 1, **settings) -> SimulatedEngine:
    connector = host_connector.create(block_size=BLOCK, latency_steps=latency_steps)
    return SimulatedEngine(block_size=BLOCK, connector=connector, **settings)


def warm(engine: SimulatedEngine, prompt: list[int] = PROMPT) -> None:
    """The prompt's blocks are in host memory afterwards, and in G1 no more."""
    engine.answer(prompt, max_tokens=1)
    engine.blocks.reset()
    scheduler, worker = engine.connector
    for record in (scheduler.lookups, scheduler.allocations, scheduler.steps, worker.calls):
        record.clear()


def require_right(result, prompt: list[int]) -> None:
    assert result.token_ids == expected_output(prompt, len(result.token_ids))
    assert result.is_finished


# -- lookups -----------------------------------------------------------------------------------------------------------


def test_a_request_is_looked_up_with_its_local_hit_and_not_again_while_it_computes():
    engine = engine_with_host(max_batched_tokens=5)
    engine.answer(PROMPT, max_tokens=1)
    engine.connector[0].lookups.clear()
    engine.answer([*PROMPT, 7, 7, 7, 7, 7, 7, 7], max_tokens=3, request_id="second")
    assert [(lookup.request_id, lookup.num_computed_tokens) for lookup in engine.connector[0].lookups] == [
        ("second", 16)
    ]


def test_a_preempted_request_is_looked_up_again():
    engine = engine_with_host(blocks=8)
    first = engine.add(PROMPT, max_tokens=12)
    second = engine.add(PROMPT[:7], max_tokens=12, request_id="second")
    engine.run()
    require_right(first, PROMPT)
    require_right(second, PROMPT[:7])
    lookups = [lookup for lookup in engine.connector[0].lookups if lookup.request_id == "second"]
    times = engine.scheduler.counters.preemptions
    assert times >= 1
    assert {lookup.preemptions for lookup in lookups} == set(range(times + 1))
    steps = engine.connector[0].steps
    assert [[one.request_id for one in step.preempted] for step in steps if step.preempted] == [["second"]] * times


def test_a_request_without_an_answer_does_not_hold_up_those_behind_it():
    engine = engine_with_host()
    engine.connector[0].not_yet.add("undecided")
    undecided = engine.add(PROMPT, max_tokens=2, request_id="undecided")
    behind = engine.add(PROMPT[:5], max_tokens=2)
    for _ in range(4):
        engine.step()
    require_right(behind, PROMPT[:5])
    assert not undecided.outputs
    assert undecided.request.block_ids == []
    engine.connector[0].not_yet.clear()
    engine.run()
    require_right(undecided, PROMPT)


def test_a_lookup_happens_even_where_another_prompt_takes_the_whole_step():
    engine = engine_with_host(max_batched_tokens=4)
    warm(engine)
    long_prompt = [n % 50 for n in range(40)]
    engine.add(long_prompt, max_tokens=1)
    engine.step()
    engine.add(PROMPT, max_tokens=1, request_id="hit")
    engine.step()
    assert engine.connector[1].loading_ids == ["hit"]
    engine.run()


# -- allocation --------------------------------------------------------------------------------------------------------


def test_the_blocks_of_a_load_are_told_once():
    engine = engine_with_host()
    warm(engine)
    result = engine.add(PROMPT, max_tokens=1, request_id="hit")
    engine.run()
    require_right(result, PROMPT)
    told = [(name, len(block_ids), tokens) for name, block_ids, tokens in engine.connector[0].allocations]
    assert told == [("hit", 4, 16)]
    assert (result.last.num_cached_tokens, result.last.num_external_tokens) == (0, 16)


@pytest.mark.parametrize("length", [16, 17])
def test_at_least_one_token_is_computed(length):
    engine = engine_with_host()
    warm(engine)
    scheduler = engine.connector[0]
    scheduler.leaves_last_block = False  # offers all of it
    result = engine.add(PROMPT[:length], max_tokens=1, request_id="hit")
    engine.run()
    require_right(result, PROMPT[:length])
    computed = sum(count for step in scheduler.steps for one, count in step.scheduled.items() if one is result.request)
    assert computed == length - result.last.num_external_tokens >= 1
    assert computed == 1


def test_a_local_hit_leaves_the_last_token_to_be_computed():
    engine = SimulatedEngine(block_size=BLOCK)
    engine.answer(PROMPT[:16], max_tokens=1)
    assert engine.answer(PROMPT[:16], max_tokens=1).last.num_cached_tokens == 12


# -- loads -------------------------------------------------------------------------------------------------------------


def test_loading_blocks_are_neither_scheduled_nor_found_before_the_load_ends():
    engine = engine_with_host(latency_steps=None)
    warm(engine)
    loading = engine.add(PROMPT, max_tokens=2, request_id="loading")
    engine.step()
    scheduler, worker = engine.connector
    scheduler.may_load = False
    other = engine.add(PROMPT, max_tokens=2, request_id="other")
    for _ in range(5):
        engine.step()
    require_right(other, PROMPT)
    assert other.last.num_cached_tokens == 0
    assert all(loading.request not in step.scheduled for step in scheduler.steps)
    worker.finish_loads()
    engine.run()
    require_right(loading, PROMPT)
    assert loading.last.num_external_tokens == 16


def test_loaded_blocks_are_found_in_g1_by_the_next_request():
    engine = engine_with_host()
    warm(engine)
    engine.answer(PROMPT, max_tokens=1)
    assert engine.answer(PROMPT, max_tokens=1).last.num_cached_tokens == 16


def test_ids_that_the_engine_does_not_know_are_ignored():
    engine = engine_with_host()
    engine.connector[1].finished.add("who")
    engine.answer(PROMPT, max_tokens=2)


@pytest.mark.parametrize("bad_blocks", [1, 3, 4])
def test_failed_blocks_that_arrive_with_the_end_of_their_load_are_computed_again(bad_blocks):
    engine = engine_with_host()
    warm(engine)
    engine.connector[1].fail_next = bad_blocks
    result = engine.answer(PROMPT, max_tokens=3)
    require_right(result, PROMPT)
    assert result.last.num_external_tokens == 0
    assert engine.answer(PROMPT, max_tokens=3).last.num_cached_tokens == 16, "what was computed again can be found"


def test_only_the_blocks_from_the_first_failed_one_are_computed_again():
    engine = engine_with_host(latency_steps=None)
    warm(engine)
    result = engine.add(PROMPT, max_tokens=2, request_id="hit")
    engine.step()
    worker = engine.connector[1]
    third = result.request.block_ids[2]
    worker.report_failure(third)  # a step before the load ends
    engine.step()
    engine.memory.spoil(third)
    worker.pending[0][0] = host_connector.Load("hit", *_without(worker.pending[0][0], third))
    worker.finish_loads()
    engine.run()
    require_right(result, PROMPT)
    assert result.last.num_external_tokens == 8


def _without(load: host_connector.Load, block_id: int) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
    kept = [pair for pair in zip(load.hashes, load.block_ids, strict=True) if pair[1] != block_id]
    return tuple(block_hash for block_hash, _ in kept), tuple(block for _, block in kept)


def test_the_lookup_is_repeated_where_a_failed_load_has_left_nothing():
    engine = engine_with_host()
    warm(engine)
    engine.connector[1].fail_next = 1
    engine.answer(PROMPT, max_tokens=1, request_id="hit")
    assert [lookup.num_computed_tokens for lookup in engine.connector[0].lookups] == [0, 0]


def test_a_local_hit_survives_a_failed_load():
    engine = engine_with_host()
    warm(engine)
    engine.answer(PROMPT[:9], max_tokens=1)
    engine.connector[1].fail_next = 2
    engine.connector[0].bad.clear()
    before = len(engine.connector[0].lookups)
    result = engine.answer(PROMPT, max_tokens=1)
    assert (result.last.num_cached_tokens, result.last.num_external_tokens) == (8, 0)
    assert len(engine.connector[0].lookups) == before + 1


def test_loaded_requests_give_way_to_each_other_where_a_hung_copy_keeps_blocks():
    engine = engine_with_host(blocks=16, latency_steps=None, max_batched_tokens=64)
    other = [n % 50 for n in range(100, 118)]
    prompts = [[*PROMPT, *[2] * 6], [*other, *[2] * 6]]
    warm(engine)
    warm(engine, other)
    results = [engine.add(prompt, max_tokens=2) for prompt in prompts]
    engine.step()
    assert len(engine.connector[1].loading_ids) == 2
    hung = engine.blocks.allocate(engine.blocks.available_count - 1)
    engine.connector[1].latency_steps = 1
    engine.connector[1].finish_loads()
    for _ in range(12):
        engine.step()
    for result, prompt in zip(results, prompts, strict=True):
        require_right(result, prompt)
    engine.blocks.release(hung)
    engine.run()


# -- blocks that stay --------------------------------------------------------------------------------------------------


def test_a_block_that_the_connector_holds_is_not_reused():
    engine = engine_with_host(blocks=8)
    result = engine.add(PROMPT, max_tokens=1)
    held = []
    engine.connector[0].request_finished = lambda request: held.extend(request.block_ids) or engine.blocks.hold(held)
    engine.step()
    assert result.is_finished
    assert len(held) == 5
    engine.connector[0].request_finished = lambda request: None
    other = engine.add([9] * 18, max_tokens=1)
    for _ in range(3):
        engine.step()
    assert not other.outputs, "three free blocks are too few"
    engine.blocks.release(held)
    engine.run()
    require_right(other, [9] * 18)


def test_the_engine_keeps_stepping_while_the_connector_has_something_under_way():
    engine = engine_with_host()
    engine.answer(PROMPT, max_tokens=1)
    assert not engine.core.has_work
    engine.connector[0].has_pending_work = lambda: True
    assert engine.core.has_work
    steps = len(engine.connector[0].steps)
    assert engine.step() is False
    assert len(engine.connector[0].steps) == steps + 1


def test_blocks_of_an_aborted_load_are_not_reused_before_the_copy_has_stopped():
    engine = engine_with_host(blocks=8, latency_steps=None)
    warm(engine)
    engine.add(PROMPT, max_tokens=1, request_id="aborted")
    engine.step()
    assert engine.core.abort("aborted")
    assert engine.blocks.used_count == 4, "the connector holds them"
    assert engine.core.has_work
    engine.connector[1].finish_loads()
    engine.step()
    assert engine.blocks.used_count == 0


# -- ends --------------------------------------------------------------------------------------------------------------


def _waiting(engine):
    engine.connector[0].not_yet.add("victim")
    return 1


def _loading(engine):
    engine.connector[1].latency_steps = None
    return 1


def _loaded(engine):
    """Loaded, but the batch has no room: another request takes every token of the step."""
    engine.add([7] * 60, max_tokens=1, request_id="long")
    return 5


def _prefilling(engine):
    engine.connector[0].may_load = False
    return 1


def _decoding(engine):
    return 6


STATES = {
    "waiting": (_waiting, "waiting", 16),
    "loading": (_loading, "loading", 16),
    "loaded": (_loaded, "running", 5),
    "prefilling": (_prefilling, "running", 5),
    "decoding": (_decoding, "running", 16),
}


def place_of(engine, request) -> str:
    if request.request_id in engine.scheduler._loading:
        return "loading"
    return "running" if request in engine.scheduler._running else "waiting"


@pytest.mark.parametrize("state", STATES)
def test_an_abort_in_any_state_ends_the_request_once_and_leaks_nothing(state):
    prepare, place, budget = STATES[state]
    engine = engine_with_host(max_batched_tokens=budget)
    warm(engine)
    steps = prepare(engine)
    victim = engine.add(PROMPT, max_tokens=8, request_id="victim")
    for _ in range(steps):
        engine.step()
    assert place_of(engine, victim.request) == place
    assert engine.core.abort("victim")
    assert victim.last.finish_reason == "abort"
    assert not engine.core.abort("victim")
    engine.connector[1].finish_loads()
    engine.run()
    assert engine.connector[0].finished["victim"] == 1
    engine.connector[0].not_yet.clear()
    engine.connector[1].latency_steps = 1
    engine.answer(PROMPT, max_tokens=3)


def test_an_abort_after_a_preemption_ends_the_request_once():
    engine = engine_with_host(blocks=8)
    first = engine.add(PROMPT, max_tokens=12)
    second = engine.add(PROMPT[:7], max_tokens=12, request_id="second")
    while not engine.scheduler.counters.preemptions:
        engine.step()
    assert place_of(engine, second.request) == "waiting"
    assert engine.core.abort("second")
    engine.run()
    require_right(first, PROMPT)
    assert engine.connector[0].finished["second"] == 1


def test_every_request_that_ends_by_itself_is_reported_once_before_its_blocks_are_freed():
    engine = engine_with_host()
    free_before = []
    ask = engine.connector[0].request_finished
    engine.connector[0].request_finished = lambda request: (
        free_before.append((engine.blocks.used_count, len(request.block_ids))) or ask(request)
    )
    engine.answer(PROMPT, max_tokens=2, request_id="one")
    assert engine.connector[0].finished == {"one": 1}
    assert free_before == [(5, 5)]


# -- resets ------------------------------------------------------------------------------------------------------------


def test_a_reset_forgets_g1_and_the_connector():
    engine = engine_with_host()
    engine.answer(PROMPT, max_tokens=1)
    assert engine.scheduler.reset_prefix_cache() is True
    assert engine.connector[0].resets == 1
    result = engine.answer(PROMPT, max_tokens=1)
    assert (result.last.num_cached_tokens, result.last.num_external_tokens) == (0, 0)


def test_a_reset_says_whether_the_connector_could():
    engine = engine_with_host()
    engine.connector[0].reset_cache = lambda: False
    assert engine.scheduler.reset_prefix_cache() is False


def test_what_was_computed_before_a_reset_is_not_found_after_it():
    engine = engine_with_host()
    engine.connector[0].may_load = False
    running = engine.add(PROMPT, max_tokens=12)
    engine.step()
    engine.scheduler.reset_prefix_cache()
    engine.run()
    require_right(running, PROMPT)
    assert engine.answer(PROMPT, max_tokens=1).last.num_cached_tokens == 0
    continued = engine.answer([*PROMPT, *running.token_ids], max_tokens=1)
    assert continued.last.num_cached_tokens == 16, "the prompt as computed after the reset, and nothing older behind it"


# -- the worker connector's step ---------------------------------------------------------------------------------------


def test_the_worker_connector_is_called_in_order_also_in_an_empty_step():
    connector = host_connector.create(block_size=BLOCK)
    with EngineRig("synthetic:tiny", num_blocks=16, block_size=BLOCK, connector=connector, verify=False) as rig:
        rig.add(prompts_of([6])[0], max_tokens=1)
        rig.step()
        rig.step()
        assert connector[1].calls == ["start_load", "wait_for_save", "take_results"] * 2


def test_metadata_crosses_as_bytes():
    engine = engine_with_host()
    made = []
    build = engine.connector[0].build_connector_meta
    engine.connector[0].build_connector_meta = lambda output: made.append(build(output)) or made[-1]
    bound = []
    start = engine.connector[1].start_load_kv
    engine.connector[1].start_load_kv = lambda meta: bound.append(meta) or start(meta)
    engine.answer(PROMPT, max_tokens=1)
    assert made == bound
    assert all(ours is not theirs for ours, theirs in zip(made, bound, strict=True))
