"""`offload.to_host: on_evict` in a real vLLM: blocks reach host memory when vLLM is about to evict them."""

from __future__ import annotations

from random import Random

import pytest
from engine_process import EngineProcess
from traffic import Request, assert_equal, conversations, take_turns, tokens
from vllm_server import FAULTY_CONNECTOR, Answer

OFFLOADED, SKIPPED = "offload_blocks", "offload_skipped_blocks"
BLOCK_TOKENS = 32
G1_BLOCKS = 120
ENGINE = {
    "dtype": "float32",
    "block_size": BLOCK_TOKENS,
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": G1_BLOCKS,
}


def cache(blocks: int, to_host: str) -> dict[str, object]:
    return {"tiers": {"host": {"blocks": blocks}}, "offload": {"to_host": to_host}}


def start(
    engine: EngineProcess,
    *,
    host_blocks: int = 400,
    model: str = "vllm-25m",
    to_host: str = "on_evict",
    **arguments: object,
) -> None:
    engine.start(model, connector=FAULTY_CONNECTOR, cache=cache(host_blocks, to_host), **(ENGINE | arguments))


@pytest.fixture
def engine(process):
    engine, faults = process
    yield engine
    faults.order()
    engine.stop()


def prompts(count: int, blocks: int) -> list[Request]:
    return [Request(tokens(Random(f"on evict {seed}"), blocks * BLOCK_TOKENS + 7), 4) for seed in range(count)]


def ask_in_turn(engine: EngineProcess, requests: list[Request]) -> dict[Request, Answer]:
    answers = {}
    for request in requests:
        (answers[request],) = engine.answer([request])
        engine.rest()
    return answers


def test_blocks_are_copied_when_vllm_is_about_to_evict_them_and_not_before(engine):
    start(engine)
    asked = prompts(16, 10)
    truth = ask_in_turn(engine, asked[:8])  # 30 of the 119 blocks are free, as many as kvbm watches
    assert engine.totals().get(OFFLOADED, 0) == 0
    ask_in_turn(engine, asked[8:])
    copied = engine.totals()[OFFLOADED]
    assert 160 - G1_BLOCKS < copied <= 160 - G1_BLOCKS + G1_BLOCKS // 4 + 10, copied
    again = ask_in_turn(engine, asked[:4])
    assert_equal(again, {request: truth[request] for request in asked[:4]})
    assert [answer.cached for answer in again.values()] == [10 * BLOCK_TOKENS] * 4
    assert engine.totals()["hits"] == 4 * 10 * BLOCK_TOKENS
    assert engine.totals()[SKIPPED] == 0


def test_the_cache_of_vllm_itself_has_the_same_hits(engine):
    """Nothing is held, so the order in which vLLM evicts stays the same."""
    random = Random(5)
    asked = [request for _ in range(6) for request in random.sample(prompts(12, 12), 12)]
    engine.start("vllm-25m", **ENGINE)
    for request in asked:
        ask_in_turn(engine, [request])
    alone = engine.totals()["local_hits"]
    assert alone > 0
    start(engine, host_blocks=40)
    for request in asked:
        ask_in_turn(engine, [request])
    assert (engine.totals()["local_hits"], engine.totals()["hits"] > 0) == (alone, True)


@pytest.fixture(scope="module")
def truth(process):
    """Conversations, and what an engine without any cache says in them."""
    engine, _ = process
    found = {}
    for model in ("vllm-25m", "vllm-swa"):
        engine.start(model, enable_prefix_caching=False, **ENGINE)
        found[model] = take_turns(engine.answer, conversations(10, 4, seed=36, block_tokens=BLOCK_TOKENS))
        growing = [Request(tokens(Random(f"growing {seed}"), 3 * BLOCK_TOKENS + 5), 100) for seed in range(10)]
        found[model] |= zip(growing, engine.answer(growing), strict=True)
        engine.stop()
    return found


@pytest.mark.parametrize(("model", "g1_blocks"), [("vllm-25m", 36), ("vllm-swa", 70)])
def test_answers_under_churn_and_preemptions_are_those_without_a_cache(engine, truth, model, g1_blocks):
    start(engine, model=model, host_blocks=3 * g1_blocks, num_gpu_blocks_override=g1_blocks)
    expected = truth[model]
    for _ in range(2):
        assert_equal(dict(zip(expected, engine.answer(list(expected), 8), strict=True)), expected)
    totals = engine.totals()
    assert min(totals["hits"], totals[OFFLOADED], totals["preemptions"]) > 0, totals


def test_auto_copies_blocks_late_once_host_memory_is_full(engine, truth):
    start(engine, host_blocks=35, to_host="auto")
    asked = prompts(8, 10)
    ask_in_turn(engine, asked)
    assert engine.totals()[OFFLOADED] == 35
    engine.forget_g1()
    again = ask_in_turn(engine, asked[:3])
    assert [answer.cached for answer in again.values()] == [10 * BLOCK_TOKENS] * 3
    expected = truth["vllm-25m"]
    for _ in range(2):
        assert_equal(dict(zip(expected, engine.answer(list(expected), 8), strict=True)), expected)
    totals = engine.totals()
    assert min(totals["hits"], totals[OFFLOADED]) > 0, totals


def test_answers_between_aborts_resets_and_late_or_failed_copies_are_those_without_a_cache(engine, process, truth):
    _, faults = process
    start(engine, host_blocks=100, num_gpu_blocks_override=60)
    expected, random = truth["vllm-25m"], Random(3)
    asked = list(expected)
    for number in range(24):
        faults.order(**({}, {"hold": "offload"}, {"fail_every": 5})[number % 3])
        aborted = engine.add(random.choice(asked))
        engine.step(random.randrange(5))
        engine.abort(aborted)
        some = random.sample(asked, 5)
        assert_equal(dict(zip(some, engine.answer(some, 3), strict=True)), {one: expected[one] for one in some})
        if number % 6 == 5:
            faults.order()
            engine.rest()
            (engine.forget if number % 12 == 5 else engine.forget_g1)()
    totals = engine.totals()
    assert min(totals["hits"], totals[OFFLOADED], totals[SKIPPED]) > 0, totals


def test_without_the_prefix_cache_of_vllm_all_blocks_are_copied_at_once(engine):
    start(engine, enable_prefix_caching=False)
    (asked,) = prompts(1, 10)
    ask_in_turn(engine, [asked])
    assert engine.totals()[OFFLOADED] == 10


@pytest.fixture
def pool():
    """A pool of vLLM with 64 blocks, all cached and free."""
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(65, enable_caching=True, hash_block_size=16)
    for block in pool.blocks[1:]:
        block.set_block_hash(bytes((block.block_id,)))
    return pool


def test_the_queue_is_examined_again_when_an_eighth_of_what_was_seen_is_evicted(pool):
    from kvbm.engines.vllm.eviction_queue import VllmEvictionQueue

    queue = VllmEvictionQueue(pool)
    assert [block_id for block_id, _ in queue.first(32, again=False)] == list(range(1, 33))
    pool.get_new_blocks(4)
    assert list(queue.first(32, again=False)) == []
    pool.get_new_blocks(1)
    assert [block_id for block_id, _ in queue.first(32, again=False)] == list(range(6, 38))
    assert [block_id for block_id, _ in queue.first(32, again=True)] == list(range(6, 38))
    pool.touch([pool.blocks[10]])  # the fifth one; a request uses it again
    assert [block_id for block_id, _ in queue.first(32, again=False)] == [*range(6, 10), *range(11, 39)]
    assert len(list(queue.first(1000, again=True))) == 58


def test_an_evicted_block_has_another_content(pool):
    from kvbm.engines.vllm.eviction_queue import VllmEvictionQueue

    queue = VllmEvictionQueue(pool)
    before = queue.contents_of([1, 2])
    pool.get_new_blocks(1)
    assert [old is new for old, new in zip(before, queue.contents_of([1, 2]), strict=True)] == [False, True]


def test_vllm_makes_a_new_hash_whenever_it_caches_a_block():
    """So the hash of a block is another object after vLLM has used the block for something else, or again."""
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

    name = BlockHash(bytes(32))
    assert make_block_hash_with_group_id(name, 0) == make_block_hash_with_group_id(name, 0)
    assert make_block_hash_with_group_id(name, 0) is not make_block_hash_with_group_id(name, 0)
