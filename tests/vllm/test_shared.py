"""Two vLLM engines share blocks through a store (G4): the second loads what the first has computed.

The first engine ends before the second starts; the soak test lets two servers run at the same time.
"""

import time
from pathlib import Path
from random import Random

import pytest
from traffic import Request, assert_equal, conversations, take_turns, tokens
from vllm_server import BLOCK_TOKENS, CONNECTOR

pytestmark = pytest.mark.timeout(600)
PRESET = "vllm-25m"
RUN_TOKENS = 2 * BLOCK_TOKENS  # in an object
TALKS = conversations(6, turns=2, seed=18)
LONG = Request(tokens(Random("shared"), 7 * BLOCK_TOKENS + 9), 8)
ENGINE = {"dtype": "float32", "block_size": BLOCK_TOKENS, "max_model_len": 2048, "num_gpu_blocks_override": 40}


def cache(url, **shared):
    return {
        "tiers": {"host": {"blocks": 200}, "shared": {"url": url, **shared}},
        "offload": {"to_shared": "always"},
        "onboard": {"policy": "always"},  # however slow a busy machine reads
    }


def started(engine, url, **options):
    engine.start(PRESET, connector=CONNECTOR, cache=cache(url, **options), **ENGINE)
    return engine


def objects_of(url):
    return [path for path in Path(url.removeprefix("file://")).rglob("*") if path.is_file() and not path.suffix]


def answered(engine, requests):
    return dict(zip(requests, engine.answer(requests), strict=True))


@pytest.fixture(scope="module")
def truth(process):
    """What an engine without any cache says."""
    engine, _ = process
    engine.start(PRESET, enable_prefix_caching=False, **ENGINE)
    said = take_turns(engine.answer, TALKS) | answered(engine, [LONG])
    engine.stop()
    return said


@pytest.fixture(scope="module")
def url(process, truth, tmp_path_factory):
    """A store that one engine has filled."""
    engine, _ = process
    url = f"file://{tmp_path_factory.mktemp('store')}/objects"
    started(engine, url)
    assert_equal(answered(engine, list(truth)), truth)
    runs = {one.prompt[:end] for one in truth for end in range(RUN_TOKENS, len(one.prompt) + 1, RUN_TOKENS)}
    assert len(runs) >= 10
    deadline_s = time.monotonic() + 120
    while len(objects_of(url)) < len(runs):  # on a busy machine the tier may have been off for a moment
        assert time.monotonic() < deadline_s, f"{len(objects_of(url))} of {len(runs)} objects"
        engine.answer(list(truth))
    engine.stop()
    return url


def test_another_engine_loads_what_the_first_has_computed(process, truth, url):
    engine, _ = process
    for _ in range(3):  # on a busy machine the tier may have been off, or late to answer, for a moment
        started(engine, url)
        assert_equal(answered(engine, [LONG]), {LONG: truth[LONG]})
        of_one = engine.totals()
        assert_equal(answered(engine, list(truth)), truth)
        totals = engine.totals()
        engine.stop()
        assert totals["shared_bad_objects"] == 0, totals
        if totals["onboard_shared_blocks"] >= 12 and of_one["hits"]:
            break
    assert totals["onboard_shared_blocks"] >= 12, totals
    assert of_one["hits"] == 6 * BLOCK_TOKENS, "three whole runs; the seventh block fills none"


def test_another_block_size_finds_nothing_there(process, truth, url):
    engine, _ = process
    engine.start(PRESET, connector=CONNECTOR, cache=cache(url), **ENGINE | {"block_size": 256})
    assert_equal(answered(engine, [LONG]), {LONG: truth[LONG]})
    assert engine.totals()["hits"] == 0
    engine.stop()


def test_damaged_objects_are_computed(process, truth, url):
    engine, _ = process
    for number, path in enumerate(objects_of(url)):
        content = bytearray(path.read_bytes())
        if number % 3 == 0:
            content[Random(number).randrange(len(content))] ^= 1
        elif number % 3 == 1:
            del content[-(number + 1) :]
        path.write_bytes(content)
    started(engine, url, write=False)
    assert_equal(answered(engine, list(truth)), truth)
    totals = engine.totals()
    assert totals["shared_bad_objects"] >= 2, totals
    engine.stop()
