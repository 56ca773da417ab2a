"""Greedy float32 output of the embedded engine equals transformers' own `generate`, token for token, however it came
about: cold, from G1, from host memory in other blocks, in chunks, under preemption; for every architecture it runs."""

from dataclasses import dataclass
from pathlib import Path

import host_connector
import pytest
import tiny_models
from engine_rig import EngineRig, prompts_of

from kvbm.config.schema import Profile
from kvbm.engines.embedded.driver import create_connector

BLOCK = 8
NEW_TOKENS = 10
LENGTHS = [5, 16, 37, 71, 90]


@dataclass(frozen=True)
class Model:
    path: Path
    prompts: list[list[int]]
    expected: list[list[int]]

    def rig(self, **config) -> EngineRig:
        settings = {"num_blocks": 80, "block_size": BLOCK, "verify": False, "threads": 1}
        return EngineRig(self.path, **(settings | config))

    def require_equal(self, results) -> None:
        assert [result.token_ids for result in results] == self.expected


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.soak if number % 3 else ())
        for number, name in enumerate(tiny_models.ARCHITECTURES)
    ],
)
def model(request, tmp_path_factory) -> Model:
    path = tiny_models.save(request.param, tmp_path_factory.mktemp("models"))
    prompts = prompts_of(LENGTHS)
    return Model(path, prompts, tiny_models.generate(path, prompts, NEW_TOKENS))


def test_outputs_vary_enough_to_prove_anything(model):
    assert len({token for output in model.expected for token in output}) >= 12
    assert len({tuple(output) for output in model.expected}) == len(model.expected)


def test_cold_batch_and_then_g1_hits_equal_generate(model):
    with model.rig(verify=True) as rig:
        model.require_equal(rig.generate(model.prompts, max_tokens=NEW_TOKENS))
        again = rig.generate(model.prompts, max_tokens=NEW_TOKENS)
        model.require_equal(again)
        assert [r.last.num_cached_tokens for r in again] == [(n - 1) // BLOCK * BLOCK for n in LENGTHS]


def test_chunked_prefill_beside_decode_equals_generate(model):
    with model.rig(max_num_batched_tokens=21, kv_layout="layer_first") as rig:
        model.require_equal(rig.generate(model.prompts, max_tokens=NEW_TOKENS))
        assert rig.step_count > 20


def test_preemption_and_recomputation_equal_generate(model):
    order = [3, 1, 0, 2, 4]  # the first three fill G1 with their prompts, and then grow
    with model.rig(num_blocks=13, max_num_batched_tokens=32) as rig:
        results = rig.generate([model.prompts[i] for i in order], max_tokens=NEW_TOKENS)
        assert [result.token_ids for result in results] == [model.expected[i] for i in order]
        assert rig.core.scheduler.counters.preemptions > 0


def test_blocks_from_host_memory_equal_generate(model):
    connector = host_connector.create(block_size=BLOCK)
    with model.rig(connector=connector, kv_layout="layer_first") as rig:
        model.require_equal(rig.generate(model.prompts, max_tokens=NEW_TOKENS))
        rig.lose_g1()
        results = rig.generate(model.prompts, max_tokens=NEW_TOKENS)
        model.require_equal(results)
        assert [r.last.num_external_tokens for r in results] == [(n - 1) // BLOCK * BLOCK for n in LENGTHS]
        assert sum(r.last.num_cached_tokens for r in results) == 0


@pytest.mark.parametrize("kv_layout", ["block_first", "layer_first"])
def test_blocks_from_the_block_manager_equal_generate(model, kv_layout):
    profile = Profile.model_validate({"engine": {"model": str(model.path)}, "tiers": {"host": {"blocks": 200}}})
    connector = create_connector(profile.model_dump_json())
    with model.rig(connector=connector, kv_layout=kv_layout, max_num_batched_tokens=40) as rig:
        model.require_equal(rig.generate(model.prompts, max_tokens=NEW_TOKENS))
        rig.lose_g1()
        results = rig.generate(model.prompts, max_tokens=NEW_TOKENS)
        model.require_equal(results)
        found = [r.last.num_external_tokens for r in results]
        stored = [(n - 1) // BLOCK * BLOCK for n in LENGTHS]
        counters = connector[0].leader.counters
        if counters.offload_failed_blocks or counters.offload_skipped_blocks:  # copies that a busy machine delays
            assert sum(found) > 0
            assert all(one <= most for one, most in zip(found, stored, strict=True))
        else:
            assert found == stored, counters
        assert sum(r.last.num_cached_tokens for r in results) == 0
