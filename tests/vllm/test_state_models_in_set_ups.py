"""A model with states in other set-ups than the plain one: conversations get the answers of a server without cache.

The model is Granite 4 (Mamba-2). Chunks are blocks, because vLLM for CPUs keeps no states from inside a chunk.
"""

from dataclasses import dataclass, field

import pytest
from pairs import MAX_MODEL_LEN, NO_CACHE, ONBOARDED, ONBOARDS_FAILED, Faults, Pair
from traffic import asker, conversations, hold
from vllm_server import BLOCK_TOKENS, EXTERNAL_HITS, FAULTS_FILE, FAULTY_CONNECTOR, VllmServer, host_blocks

from kvbm_cli.make_model import materialise

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(900)]
TALKS = conversations(8, turns=3, seed=3)
ONE_BLOCK = ("--block-size", str(BLOCK_TOKENS), "--max-num-batched-tokens", str(BLOCK_TOKENS))
RETAIN = "--prefix-cache-retention-interval"


@dataclass(frozen=True)
class SetUp:
    """A tested server: its arguments and environment, and the orders to its copier."""

    arguments: tuple[str, ...] = ()
    cores: str = "0"
    environment: dict[str, str] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)


SET_UPS = {
    "copies fail": SetUp(faults={"fail_every": 7}),
    "tensor parallel": SetUp(("--tensor-parallel-size", "2"), cores="0|1"),
    "tensor parallel, copies fail": SetUp(("--tensor-parallel-size", "2"), cores="0|1", faults={"fail_every": 7}),
    "batches that overlap": SetUp(("--async-scheduling",)),
    "batches that overlap, copies fail": SetUp(("--async-scheduling",), faults={"fail_every": 7}),
    "no batches that overlap": SetUp(("--no-async-scheduling",)),
    "a snapshot at every block": SetUp((RETAIN, str(BLOCK_TOKENS))),
    "a snapshot wherever vLLM has one": SetUp((RETAIN, "None")),
    "states and convolutions in the layout of NIXL": SetUp(environment={"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}),
}


@pytest.fixture(scope="module")
def truth():
    with VllmServer(materialise("vllm-granite4"), NO_CACHE, *ONE_BLOCK, max_model_len=MAX_MODEL_LEN) as server:
        return hold(asker(server), TALKS)


@pytest.mark.parametrize("name", SET_UPS)
def test_answers_are_those_of_a_server_without_cache(name, truth, tmp_path):
    set_up, faults = SET_UPS[name], Faults(tmp_path)
    faults.order(**set_up.faults)
    with VllmServer(
        materialise("vllm-granite4"),
        *ONE_BLOCK,
        *set_up.arguments,
        blocks=60,
        connector=FAULTY_CONNECTOR,
        cores=set_up.cores,
        environment=host_blocks(1000) | {FAULTS_FILE: str(faults.path)} | set_up.environment,
        max_model_len=MAX_MODEL_LEN,
    ) as tested:
        pair = Pair(None, tested, faults)
        pair.check_against(truth)
        pair.forget_g1()
        _, moved = pair.check_against(truth)
        assert moved[ONBOARDED] >= 20, str(moved)
        assert moved[EXTERNAL_HITS] > 0, str(moved)
        assert bool(moved[ONBOARDS_FAILED]) == bool(set_up.faults), str(moved)
