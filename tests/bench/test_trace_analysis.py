"""Numbers of traces, the hit-rate curve against simulated LRU caches, and `kvbm bench trace` as a user sees it.

The numbers can be checked by hand, or are those of Mooncake's trace: of its committed head, and of the whole.
"""

import json
import os
import re
import time
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_pages import HEAD

from kvbm_cli.bench.trace import command
from kvbm_cli.bench.trace.analysis import analyse, collect
from kvbm_cli.bench.trace.hit_rates import PrefixTree, Simulation, Use, hit_curve
from kvbm_cli.bench.trace.reader import TraceReader
from kvbm_cli.bench.trace.request import TraceFormat, Turns

WHOLE = Path(os.environ.get("KVBM_TRACE_DIR", "/nonexistent")) / "mooncake-conversation.jsonl.gz"


def analysed(tmp_path, *lines, **form):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return analyse(path, TraceFormat(**form))


def test_numbers_of_a_small_trace(tmp_path):
    found = analysed(
        tmp_path,
        {"timestamp": 500, "input_length": 10, "output_length": 3, "hash_ids": [1, 2, 3]},
        {"timestamp": 2500, "input_length": 9, "output_length": 5, "hash_ids": [1, 2, 4]},
        {"timestamp": 1500, "input_length": 4, "hash_ids": [7]},
        block_tokens=4,
    )
    assert (found["requests"], found["sessions"], found["largest_turn"], found["duration_s"]) == (3, 3, 1, 2.0)
    prompt, answer = found["prompt_tokens"], found["answer_tokens"]
    assert (prompt["mean"], prompt["p50"], prompt["max"]) == (pytest.approx(23 / 3), 9, 10)
    assert (answer["mean"], answer["max"], found["pauses_s"]) == (4, 5, None)
    blocks = [found[name] for name in ("unique_blocks", "unique_tokens", "block_uses", "repeated_block_uses")]
    assert blocks == [5, 15, 7, 2]
    assert found["shared_prefixes"] == [{"tokens": 8, "requests": 2}]
    assert found["ideal_hit_rate"] == 8 / 23
    # The request at 1500 ms is between the other two, so its 4 tokens are newer than blocks 1 and 2; block 3 is older.
    rates = rates_of(found)
    assert (rates[4 + 4 - 1], rates[4 + 4], rates[4 + 4 + 4 - 1], rates[4 + 4 + 4]) == (0, 4 / 23, 4 / 23, 8 / 23)
    assert found["capacity_for_share_of_ideal"][-1]["tokens"] == 12
    assert found["notes"] == []


def rates_of(found):
    return {one["tokens"]: one["hit_rate"] for one in found["curve"]}


def test_a_later_turn_adds_to_its_session(tmp_path):
    lines = [
        {"session_id": "a", "input_length": 6, "output_length": 3, "hash_ids": [1, 2]},
        {"session_id": "a", "input_length": 2, "output_length": 1, "hash_ids": [9]},
        {"session_id": "b", "input_length": 6, "hash_ids": [1, 2]},
    ]
    added = analysed(tmp_path, *lines, block_tokens=4)
    assert (added["sessions"], added["largest_turn"], added["prompt_tokens"]["max"]) == (2, 2, 6 + 3 + 2)
    assert added["ideal_hit_rate"] == ((6 + 3) + 6) / (6 + 11 + 6)
    rates = rates_of(added)
    assert rates[6 + 3] == added["ideal_hit_rate"]
    assert rates[6 + 3 - 1] == (6 + 6) / 23
    whole = analysed(tmp_path, *lines, block_tokens=4, turns=Turns.WHOLE)
    assert whole["ideal_hit_rate"] == 6 / 14


@pytest.mark.soak
def test_100_000_lines_are_analysed_quickly(tmp_path):
    path = tmp_path / "t.jsonl"
    with path.open("w") as file:
        for number in range(100_000):
            line = {"timestamp": number, "input_length": 2000, "output_length": 9, "hash_ids": [0, number % 999, 7, 8]}
            file.write(json.dumps(line) + "\n")
    started = time.process_time()
    assert analyse(path, TraceFormat())["ideal_hit_rate"] > 0.9
    assert time.process_time() - started < 15


@pytest.mark.skipif(not WHOLE.exists(), reason="KVBM_TRACE_DIR names no directory with Mooncake's traces")
def test_mooncake_conversation_trace_has_the_published_numbers():
    started = time.process_time()
    found = analyse(WHOLE, TraceFormat())
    took_s = time.process_time() - started
    mean, ideal = found["prompt_tokens"]["mean"], found["ideal_hit_rate"]
    assert (found["requests"], round(mean), round(ideal, 3)) == (12_031, 12_035, 0.374)
    assert round(found["repeated_block_uses"] / found["block_uses"], 4) == 0.3664
    assert took_s < 5


BLOCK = 4


def simulated(tree, uses, capacity):
    """Tokens found by an LRU cache that evicts block by block; a hit ends at the first block that is missing."""
    cache, held, found = OrderedDict(), 0, 0
    for use in uses:
        path = tree.path(use.prompt)
        for node in reversed(path):
            if node not in cache:
                break
            found += tree.tokens[node]
        for node in tree.path(use.kept):
            if node not in cache:
                held += tree.tokens[node]
            cache[node] = True
            cache.move_to_end(node)
        while held > capacity:
            held -= tree.tokens[cache.popitem(last=False)[0]]
    return found


def built(prompts):
    """`prompts` are lists of ids with the tokens of the last block, and the tokens of an answer, 0 for none."""
    tree, uses = PrefixTree(), []
    for ids, last, answer in prompts:
        prompt = tree.add(0, tuple(ids), token_count=(len(ids) - 1) * BLOCK + last, block_tokens=BLOCK)
        uses.append(Use(prompt, tree.append(prompt, answer) if answer else prompt))
    return tree, uses


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, BLOCK), st.sampled_from([0, 0, 3])),
    min_size=1,
    max_size=25,
)


@given(PROMPTS)
def test_curve_equals_the_simulation_at_every_capacity(prompts):
    tree, uses = built(prompts)
    curve = hit_curve(tree, uses)
    total = sum(tree.depth_tokens[use.prompt] for use in uses)
    for capacity in range(sum(tree.tokens) + 2):
        assert curve.hit_rate(capacity) == simulated(tree, uses, capacity) / total
    assert curve.ideal == simulated(tree, uses, 10**9) / total


@given(PROMPTS, st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_capacity_for_a_share_is_the_smallest_one(prompts, share):
    curve = hit_curve(*built(prompts))
    capacity = curve.capacity_for(share)
    if capacity is None:
        assert curve.ideal == 0
    else:
        assert curve.hit_rate(capacity) >= share * curve.ideal - 1e-12
        assert curve.hit_rate(capacity - 1) < share * curve.ideal


def test_a_block_after_another_prefix_is_another_block():
    tree, uses = built([([1, 2], 4, 0), ([3, 2], 4, 0), ([2], 4, 0)])
    assert hit_curve(tree, uses).ideal == 0
    assert len(tree) == 1 + 5


def test_a_shorter_last_block_is_another_block():
    assert hit_curve(*built([([1], 4, 0), ([1], 3, 0)])).ideal == 0
    assert hit_curve(*built([([1], 3, 0), ([1], 3, 0)])).ideal == 0.5


def test_an_answer_takes_room():
    prompts = [([1], 4, 3), ([2], 4, 3), ([1], 4, 3)]
    curve = hit_curve(*built(prompts))
    assert (curve.hit_rate(4 + 3 + 3), curve.hit_rate(4 + 4 + 3)) == (0, pytest.approx(1 / 3))


def test_use_counts_are_the_requests_of_each_prefix():
    tree, uses = built([([1, 2], 4, 0), ([1, 3], 4, 0), ([1, 2], 4, 0)])
    assert list(tree.use_counts(use.prompt for use in uses)) == [3, 3, 2, 1]


def test_json_has_the_numbers_of_the_page(kvbm, monkeypatch):
    monkeypatch.setattr(command, "PROGRESS_AFTER_S", 3600)
    code, out, err = kvbm("bench", "trace", HEAD, "--bytes-per-token", "128KiB", "--json")
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert (data["file"], data["requests"], data["sessions"], data["bytes_per_token"]) == (HEAD.name, 400, 400, 131072)
    assert data["ideal_hit_rate"] == pytest.approx(0.13687, abs=1e-5)
    [ninety] = [one for one in data["capacity_for_share_of_ideal"] if one["share"] == 0.9]
    assert ninety["bytes"] == ninety["tokens"] * 131072
    assert ninety["hit_rate"] >= 0.9 * data["ideal_hit_rate"]
    assert data["curve"][-1]["hit_rate"] == data["ideal_hit_rate"]
    rates = [one["hit_rate"] for one in data["curve"]]
    assert rates == sorted(rates)
    trace = collect(TraceReader(HEAD, TraceFormat()))
    simulation = Simulation(trace.tree, trace.timed_uses())
    assert [one["policy"] for one in data["evictions"]] == ["lru", "adaptive"]
    for one in data["evictions"]:
        wanted, blocks = 0.9 * one["curve"][-1]["hit_rate"], one["capacity_for_share_of_hits"]["blocks"]
        assert simulation.rate(one["policy"], blocks) >= wanted > simulation.rate(one["policy"], round(0.97 * blocks))
        assert one["curve"][2]["hit_rate"] == simulation.rate(one["policy"], one["curve"][2]["blocks"])


def test_an_unknown_model_gets_the_error_of_kvbm_size(kvbm):
    code, out, err = kvbm("bench", "trace", HEAD, "--model", "no/such-model")
    assert (code, out, err) == (*kvbm("size", "no/such-model")[:2], kvbm("size", "no/such-model")[2])
    assert code in (1, 2)


def test_progress_appears_on_stderr_after_a_while(kvbm, monkeypatch):
    arguments = ("bench", "trace", HEAD, "--limit", "60")
    assert kvbm(*arguments)[2] == ""
    monkeypatch.setattr(command, "PROGRESS_AFTER_S", 0)
    assert re.search(r"trace +0\.\d s  reading, 0\.0 of 0\.0 MiB", kvbm(*arguments)[2])
