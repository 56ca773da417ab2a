"""Two hundred requests per variant of the engine, each compared with a server without cache. Half an hour and more.

`nox -s soak` runs all of it, `nox -s vllm -- tests/vllm -m soak -k guessed` one variant. With KVBM_WRITE_RESULTS=1 the
results are written to bench/results/<machine>-vllm-soak.json.
"""

import json
from dataclasses import dataclass, field
from functools import cache
from time import monotonic

import pytest
from kept_results import KeptResults, row_of
from pairs import (
    MAX_MODEL_LEN,
    OFFLOADED,
    OFFLOADS_FAILED,
    ONBOARDED,
    ONBOARDS_FAILED,
    PREEMPTIONS,
    Faults,
    Pair,
    assert_cache_was_used,
)
from traffic import asker, conversations, hold
from vllm_server import EXTERNAL_HITS, FAULTS_FILE, FAULTY_CONNECTOR, LOCAL_HITS, VllmServer, host_blocks

from kvbm.engines.make_model import materialise

pytestmark = [pytest.mark.soak, pytest.mark.slow]

TALKS = conversations(50, turns=4, seed=7)
GUESS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@dataclass(frozen=True)
class Variant:
    """A tested server: the model, G1 and G2 in blocks, further arguments, and the orders to its copier."""

    preset: str = "vllm-25m"
    blocks: int = 40
    host: int = 1000
    arguments: tuple[str, ...] = ()
    faults: dict[str, int] = field(default_factory=dict)
    preempts: bool = False
    adapter: str | None = None


VARIANTS = {
    "one group": Variant(),
    "one copy in a hundred fails": Variant(faults={"fail_every": 100}),
    "small host tier": Variant(host=150),
    "preemption": Variant(blocks=24, preempts=True),
    "small chunks": Variant(arguments=("--max-num-batched-tokens", "256")),
    "no prefix caching": Variant(arguments=("--no-enable-prefix-caching",)),
    "tensor parallel": Variant(arguments=("--tensor-parallel-size", "2")),
    "tensor parallel, copies fail": Variant(arguments=("--tensor-parallel-size", "2"), faults={"fail_every": 100}),
    "data parallel": Variant(blocks=24, arguments=("--data-parallel-size", "2")),
    "sliding window": Variant("vllm-swa", blocks=100, host=3000),
    "sliding window, copies fail": Variant("vllm-swa", blocks=100, host=3000, faults={"fail_every": 100}),
    "guessed tokens": Variant(arguments=("--speculative-config", json.dumps(GUESS))),
    "an adapter": Variant(adapter="a"),
    "an adapter, copies fail": Variant(adapter="a", faults={"fail_every": 100}),
    "batches that overlap": Variant(arguments=("--async-scheduling",)),
    "batches that overlap, copies fail": Variant(arguments=("--async-scheduling",), faults={"fail_every": 100}),
}


@cache
def truth(preset, adapter):
    arguments = ("--no-enable-prefix-caching", *adapter_arguments(adapter))
    with VllmServer(materialise(preset), *arguments, max_model_len=MAX_MODEL_LEN) as server:
        return hold(asker(server, **asked_model(adapter)), TALKS)


def adapter_arguments(adapter):
    if adapter is None:
        return ()
    directory = materialise(f"vllm-25m-lora-{adapter}")
    return ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{adapter}={directory}")


def asked_model(adapter):
    return {} if adapter is None else {"model": adapter}


@pytest.fixture(scope="module")
def results():
    return KeptResults("vllm-soak", "nox -s soak")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", VARIANTS)
def test_two_hundred_answers_are_those_of_a_server_without_cache(name, results, tmp_path):
    variant, faults = VARIANTS[name], Faults(tmp_path)
    expected = truth(variant.preset, variant.adapter)
    faults.order(**variant.faults)
    with VllmServer(
        materialise(variant.preset),
        *variant.arguments,
        *adapter_arguments(variant.adapter),
        blocks=variant.blocks,
        connector=FAULTY_CONNECTOR,
        environment=host_blocks(variant.host) | {FAULTS_FILE: str(faults.path)},
        max_model_len=MAX_MODEL_LEN,
    ) as tested:
        start = monotonic()
        comparison, moved = Pair(None, tested, faults).check_against(expected, **asked_model(variant.adapter))
        elapsed = monotonic() - start
        assert_cache_was_used(moved, at_least_blocks=100)
        assert bool(moved[OFFLOADS_FAILED]) == bool(variant.faults), str(moved)
        assert bool(moved[ONBOARDS_FAILED]) == bool(variant.faults), str(moved)
        assert moved[PREEMPTIONS] > 0 or not variant.preempts
        counters = (OFFLOADED, ONBOARDED, OFFLOADS_FAILED, ONBOARDS_FAILED, EXTERNAL_HITS, LOCAL_HITS, PREEMPTIONS)
        results.add(
            {
                "variant": name,
                **row_of(comparison),
                "elapsed_s": round(elapsed, 1),
                **{counter: moved[counter] for counter in counters},
            }
        )
