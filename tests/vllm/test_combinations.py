"""Random combinations of models, tiers, evictions, `to_host`, drafters and clients: 4,400 answers, about an hour.

A seed chooses each combination. Its answers are compared with those of an engine without cache. `nox -s soak` runs all,
`nox -s vllm -- tests/vllm/test_combinations.py -m soak -k "[3]"` one of them. `nox -s vllm_v2` instead runs 4,520 in
model runner V2: 120 of models with states, which are slow there, and 400 with two ranks. With KVBM_WRITE_RESULTS=1 the
results are written to bench/results/<machine>-vllm-combinations.json or -combinations-v2.json. Two engines of a
data-parallel server are in test_soak.py.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from draft_models import drafter, target
from engine_process import FOLLOWED_TOKENS, EngineProcess
from kept_results import KeptResults, row_of
from model_runner import IS_V2
from pairs import Faults
from state_models import BLOCK, COMMON, MODELS
from traffic import TOLERANCE, assert_equal, compare, conversations, own_noise, take_turns_in_groups, total
from vllm_server import FAULTY_CONNECTOR
from wandering_engine import WanderingEngine

from kvbm.engines.make_model import materialise

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(0)]
COMMAND = "nox -s vllm -- tests/vllm/test_combinations.py -m soak"
TALKS = conversations(25, turns=4, seed=23, block_tokens=BLOCK)
ROUNDS, AT_ONCE = 2, 20
TWO_RANKS = 70  # from this number on
PLAIN: dict[str, dict[str, Any]] = {"vllm-25m": {"dtype": "float32"}, "vllm-swa": {"dtype": "float32"}}
KINDS = PLAIN | MODELS
OF_STATES = range(len(PLAIN), len(KINDS))
NUMBERS = (
    [number for number in range(TWO_RANKS + len(PLAIN)) if number in OF_STATES or number % len(KINDS) < len(PLAIN)]
    if IS_V2
    else range(22)
)
GUESSERS = ("ngram", "eagle", "mtp", "", "draft_model", "eagle3")  # "": prompts that are given as embeddings
NGRAM = {
    "method": "ngram_gpu" if IS_V2 else "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
BLOCKS = {"vllm-25m": (30, 90), "vllm-swa": (120, 400), "vllm-mamba2": (12, 40)}  # of G1 and of host memory


class Combination:
    def __init__(self, number: int, directory: Path) -> None:
        source = Random(f"combination {number}")
        self.preset = list(KINDS)[number % len(KINDS)]
        self.model = str(materialise(self.preset))
        blocks, host = BLOCKS.get(self.preset, (40, 120))
        self.arguments: dict[str, Any] = COMMON | KINDS[self.preset] | {"num_gpu_blocks_override": blocks}
        self.arguments["enable_prefix_caching"] = True  # vLLM's default is off for a model with states alone
        self.has_priorities = source.random() < 0.4
        if self.has_priorities:
            self.arguments["scheduling_policy"] = "priority"
        self.embeddings = ""
        if self.preset == "vllm-25m":
            self._choose_guesser(number // len(KINDS))
        self.arguments.setdefault("async_scheduling", source.random() < (0.8 if IS_V2 else 0.5))
        if number >= TWO_RANKS:
            self.arguments["tensor_parallel_size"] = 2
        self.cache = _cache(source, host, directory)
        self.fail_every = source.choice((0, 0, 30))

    def _choose_guesser(self, turn: int) -> None:
        method = GUESSERS[turn % len(GUESSERS)]
        if not method:  # vLLM does not combine embeddings with drafters
            self.embeddings = str(next(Path(self.model).glob("*.safetensors")))
            self.arguments["enable_prompt_embeds"] = True
            return
        self.arguments |= {
            "async_scheduling": IS_V2,
            "speculative_config": NGRAM if method == "ngram" else drafter(method),
        }
        if method != "ngram":
            self.model = str(target(method))

    def __str__(self) -> str:
        return f"{self.preset}: {self.cache} {self.arguments} {self.fail_every}"


def _cache(source: Random, host: int, directory: Path) -> dict[str, Any]:
    eviction = source.choice(("lru", "adaptive"))
    to_host = ["auto", "always", "on_evict", *(["second_hit"] if eviction == "adaptive" else [])]
    tiers: dict[str, Any] = {"host": {"blocks": source.choice((host, 10 * host)), "eviction": eviction}}
    offload: dict[str, Any] = {"to_host": source.choice(to_host), "generated": source.random() < 0.8}
    if (below := source.choice(("", "disk", "shared"))) == "disk":
        small = source.choice((2 * host, 20 * host))
        tiers["disk"] = {"blocks": small, "directory": str(directory), "eviction": source.choice(("lru", "adaptive"))}
        offload["to_disk"] = source.choice(("always", "frequency", "on_evict"))
    elif below == "shared":
        tiers["shared"] = {"url": f"file://{directory}"}
        offload |= {"to_shared": "always", "to_host": "always"}
    return {"tiers": tiers, "offload": offload, "onboard": {"policy": "always"}}


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wandering")
    faults = Faults(directory)
    with EngineProcess(directory, faults.path, kind=WanderingEngine) as engine:
        yield engine, faults


@pytest.fixture(scope="module")
def truth(process):
    """The right answers of a model, and by how much it differs from itself."""

    def found(model, preset):
        engine = process[0]
        facts = COMMON | KINDS[preset] | {"num_gpu_blocks_override": 200, "logits_processors": [FOLLOWED_TOKENS]}
        engine.start(model, enable_prefix_caching=False, **facts)
        answers = take_turns_in_groups(engine.answer, TALKS[:3] if IS_V2 and preset in MODELS else TALKS)
        noise = own_noise(engine.answer, answers) if KINDS[preset]["dtype"] == "bfloat16" else TOLERANCE / 2
        return answers, 2 * noise

    return cache(found)


@pytest.mark.parametrize("number", NUMBERS)
def test_answers_are_those_of_an_engine_without_cache(number, process, truth, tmp_path):
    engine, faults = process
    combination = Combination(number, tmp_path)
    faults.order()
    expected, tolerance = truth(combination.model, combination.preset)
    faults.order(**({"fail_every": combination.fail_every} if combination.fail_every else {}))
    engine.start(combination.model, connector=FAULTY_CONNECTOR, cache=combination.cache, **combination.arguments)
    try:
        comparisons, hits = [], 0.0
        for turn in range(ROUNDS):
            asked = list(expected)
            options = {"has_priorities": combination.has_priorities, "embeddings": combination.embeddings}
            answers = []
            for first in range(0, len(asked), AT_ONCE):  # a call has a limit of time
                answers += engine.wander(asked[first : first + AT_ONCE], f"{number} {turn} {first}", **options)
            found = dict(zip(asked, answers, strict=True))
            if tolerance == TOLERANCE:
                comparison = assert_equal(found, expected)
            else:  # of bfloat16, a tie ends the comparison of an answer
                comparison = compare(found, expected, tolerance)
                assert not comparison.wrong, f"{comparison}\n" + "\n".join(comparison.wrong)
            comparisons.append(comparison)
            engine.rest()
            hits = engine.totals()["hits"]
            print(number, combination, comparison, f"{hits:.0f} tokens loaded")
            engine.forget_g1()
        assert hits > 0, "nothing was loaded"
        assert engine.totals().get("faults", 0) == 0
        assert sum(one.requests for one in comparisons) == len(expected) * ROUNDS
        row = {"seed": number, "model": combination.preset, **row_of(total(comparisons)), "tokens_loaded": hits}
        KeptResults("vllm-combinations", COMMAND, key="seed").add(row)
    finally:
        engine.stop()
