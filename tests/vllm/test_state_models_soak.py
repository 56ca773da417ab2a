"""Models with states: two hundred requests per model and variant of the engine, each compared with one without cache.

`nox -s vllm -- tests/vllm/test_state_models_soak.py -m soak -k granite4` runs one model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from state_models import BLOCK, MODELS, CheckedEngine, noise_of, right_answers, start_tested
from traffic import conversations

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(0)]
TALKS = conversations(50, turns=4, seed=11, block_tokens=BLOCK)


@dataclass(frozen=True)
class Variant:
    """G1 and the tiers in blocks, further arguments, orders to the copier, and the counters that must grow."""

    blocks: int = 44
    host: int = 120
    disk: int | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    concurrency: int = 4
    counters: tuple[str, ...] = ()

    def cache(self, directory: str) -> dict[str, Any]:
        tiers: dict[str, Any] = {"host": {"blocks": self.host}}
        if self.disk is None:
            return {"tiers": tiers}
        tiers["disk"] = {"blocks": self.disk, "directory": directory}
        return {"tiers": tiers, "offload": {"to_disk": "always"}, "onboard": {"policy": "always"}}


FAILED = ("offload_failed_blocks", "onboard_failed_blocks")
DISK = Variant(host=60, disk=1500, counters=("onboard_disk_blocks",))
VARIANTS = {
    "small host tier": Variant(counters=("evicted_blocks",)),
    "large host tier": Variant(host=1500),
    "one copy in a hundred fails": Variant(host=1500, faults={"fail_every": 100}, counters=FAILED),
    "one copy in ten fails": Variant(faults={"fail_every": 10}, counters=FAILED),
    "preemption": Variant(blocks=36, host=400, concurrency=8, counters=("preemptions",)),
    "disk": DISK,
    "small disk, copies fail": Variant(
        host=60, disk=150, faults={"fail_every": 100}, counters=("onboard_disk_blocks", *FAILED)
    ),
    "no batches that overlap": Variant(host=400, arguments={"async_scheduling": False}),
    "snapshots at every second block": Variant(host=400, arguments={"prefix_cache_retention_interval": 2 * BLOCK}),
    "snapshots at every block": Variant(host=400, arguments={"prefix_cache_retention_interval": BLOCK}),
}


@pytest.fixture(scope="module")
def truth(process):
    """The right answers of a model, and their noise."""

    def found(preset):
        answers = right_answers(process[0], preset, TALKS)
        return answers, noise_of(process[0], preset, answers, list(answers))

    return cache(found)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("preset", MODELS)
def test_two_hundred_answers_are_those_of_an_engine_without_cache(preset, name, process, truth, tmp_path):
    engine, faults = process
    variant = VARIANTS[name]
    expected, noise = truth(preset)
    faults.order(**variant.faults)
    start_tested(engine, preset, blocks=variant.blocks, cache=variant.cache(str(tmp_path)), **variant.arguments)
    try:
        moved = CheckedEngine(engine, faults, expected, preset, noise).check(list(expected), variant.concurrency)
    finally:
        engine.stop()
        faults.order()
    assert moved["hits"] >= 2000, moved
    assert moved["snapshots"] >= 20, moved
    for counter in variant.counters:
        assert moved[counter] > 0, counter
    assert variant.faults or not any(moved[counter] for counter in FAILED), moved
