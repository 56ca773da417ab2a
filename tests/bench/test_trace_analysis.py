"""Numbers of traces that can be checked by hand, of the committed head of Mooncake's trace, and of the whole trace."""

import json
import os
import time
from collections import OrderedDict
from pathlib import Path

import pytest

from kvbm_cli.bench.trace.analysis import CommonPrefix, analyse, notes
from kvbm_cli.bench.trace.reader import TraceReader
from kvbm_cli.bench.trace.request import TraceFormat, Turns

HEAD = Path(__file__).parent / "data/mooncake-conversation-head.jsonl.gz"
WHOLE = Path(os.environ.get("KVBM_TRACE_DIR", "/nonexistent")) / "mooncake-conversation.jsonl.gz"


def analysed(tmp_path, *lines, **form):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return analyse(path, TraceFormat(**form))


def simulated_hit_rate(path, capacity_tokens):
    """An LRU cache over hash ids, which name prefixes in Mooncake's traces. It shares no code with the analysis."""
    cache, held, found, total = OrderedDict(), 0, 0, 0
    for request in TraceReader(path, TraceFormat()):
        blocks = [(one, min(512, request.input_tokens - 512 * i)) for i, one in enumerate(request.hash_ids)]
        total += request.input_tokens
        for block in blocks:
            if block not in cache:
                break
            found += block[1]
        for block in reversed(blocks):
            if block not in cache:
                held += block[1]
            cache[block] = True
            cache.move_to_end(block)
        while held > capacity_tokens:
            held -= cache.popitem(last=False)[0][1]
    return found / total


def test_numbers_of_a_small_trace(tmp_path):
    found = analysed(
        tmp_path,
        {"timestamp": 500, "input_length": 10, "output_length": 3, "hash_ids": [1, 2, 3]},
        {"timestamp": 2500, "input_length": 9, "output_length": 5, "hash_ids": [1, 2, 4]},
        {"timestamp": 1500, "input_length": 4, "hash_ids": [7]},
        block_tokens=4,
    )
    assert (found.requests, found.sessions, found.largest_turn, found.duration_s) == (3, 3, 1, 2.0)
    assert (found.prompt.mean, found.prompt.p50, found.prompt.max) == (pytest.approx(23 / 3), 9, 10)
    assert (found.answer.mean, found.answer.max) == (4, 5)
    assert (found.unique_blocks, found.unique_tokens, found.block_uses, found.repeated_block_uses) == (5, 15, 7, 2)
    assert found.shared == (CommonPrefix(tokens=8, requests=2),)
    assert found.curve.ideal == 8 / 23
    # The request at 1500 ms is between the other two, so its 4 tokens are newer than blocks 1 and 2; block 3 is older.
    assert found.curve.distances == [4 + 4, 4 + 4 + 4]
    assert found.curve.capacity_for(1) == 12
    assert notes(found) == []


def test_a_later_turn_adds_to_its_session(tmp_path):
    lines = [
        {"session_id": "a", "input_length": 6, "output_length": 3, "hash_ids": [1, 2]},
        {"session_id": "a", "input_length": 2, "output_length": 1, "hash_ids": [9]},
        {"session_id": "b", "input_length": 6, "hash_ids": [1, 2]},
    ]
    added = analysed(tmp_path, *lines, block_tokens=4)
    assert (added.sessions, added.largest_turn, added.prompt.max) == (2, 2, 6 + 3 + 2)
    assert added.curve.ideal == ((6 + 3) + 6) / (6 + 11 + 6)
    assert added.curve.hit_rate(6 + 3) == added.curve.ideal
    assert added.curve.hit_rate(6 + 3 - 1) == (6 + 6) / 23
    whole = analysed(tmp_path, *lines, block_tokens=4, turns=Turns.WHOLE)
    assert whole.curve.ideal == 6 / 14


def test_notes_name_what_the_numbers_leave_out(tmp_path):
    found = analysed(
        tmp_path,
        {"text_input": "x", "priority": 1},
        {"session_id": "a", "input_length": 5},
        {"session_id": "a", "input_length": 5},
    )
    text = "\n".join(notes(found))
    for part in ("field `priority` of 1 ", "1 requests hold text", "2 requests have no hash ids", "no timestamps"):
        assert part in text
    assert "--turns whole" in text


def test_a_trace_of_texts_has_no_curve(tmp_path):
    found = analysed(tmp_path, {"text_input": "x"}, {"payload": {"prompt": "p"}})
    assert (found.curve, found.prompt, found.requests, found.text_requests) == (None, None, 2, 2)


def test_content_without_ids_is_shared_by_no_line(tmp_path):
    assert analysed(tmp_path, {"input_length": 5}, {"input_length": 5}).curve.ideal == 0


@pytest.mark.parametrize("capacity", [0, 600, 100_000, 2_000_000, 3_700_000, 3_800_000, 10_000_000])
def test_curve_of_the_head_equals_a_simulation_of_hash_ids(capacity):
    curve = analyse(HEAD, TraceFormat()).curve
    assert curve.hit_rate(capacity) == pytest.approx(simulated_hit_rate(HEAD, capacity), abs=1e-12)


@pytest.mark.soak
def test_100_000_lines_are_analysed_quickly(tmp_path):
    path = tmp_path / "t.jsonl"
    with path.open("w") as file:
        for number in range(100_000):
            line = {"timestamp": number, "input_length": 2000, "output_length": 9, "hash_ids": [0, number % 999, 7, 8]}
            file.write(json.dumps(line) + "\n")
    started = time.process_time()
    assert analyse(path, TraceFormat()).curve.ideal > 0.9
    assert time.process_time() - started < 15


@pytest.mark.skipif(not WHOLE.exists(), reason="KVBM_TRACE_DIR names no directory with Mooncake's traces")
def test_mooncake_conversation_trace_has_the_published_numbers():
    started = time.process_time()
    found = analyse(WHOLE, TraceFormat())
    took_s = time.process_time() - started
    assert (found.requests, round(found.prompt.mean), round(found.curve.ideal, 3)) == (12_031, 12_035, 0.374)
    assert round(found.repeated_block_uses / found.block_uses, 4) == 0.3664
    for capacity in (2**20 // 2, 2**23, 15_644_030):
        assert found.curve.hit_rate(capacity) == pytest.approx(simulated_hit_rate(WHOLE, capacity), abs=1e-12)
    assert took_s < 5
