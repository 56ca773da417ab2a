"""A shared tier below host memory. Blocks in the store are never promised: they are read into host memory, verified,
and found by a later lookup, as those of the disk are."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from bookkeeping import tier_of
from executor import BLOCK, Engine, Script, expected
from interface import V1_2, VERSIONS
from test_disk_of_trtllm import asks, idle, leader_of, reads_ahead

from kvbm.types import Tier

RUN_TOKENS = 256  # blocks of the executor are small: a run has as many as it may
PROMPT = tuple(range(1000, 1000 + RUN_TOKENS + 2))


def engine_on(store: Path, model: str, version=V1_2, ranks: int = 1) -> Engine:
    store.mkdir(exist_ok=True)
    tiers = {"host": {"blocks": 100}, "shared": {"url": f"file://{store}"}}
    return Engine(
        version,
        rank_count=ranks,
        model=model,
        device_blocks=400,
        budget=64,
        config={"tiers": tiers, "offload": {"to_shared": "always"}},
    )


def objects(store: Path) -> list[Path]:
    return [path for path in store.rglob("*") if path.is_file() and path.name != "namespace.json"]


def run(engine: Engine, number: int) -> None:
    script = Script(number, PROMPT, 20)
    assert engine.run([script])[number] == expected(script, engine.rank_count)
    engine.wait_for_saves()


def filled(store: Path, model: str, version=V1_2, ranks: int = 1) -> None:
    """Let an engine compute a run, which it writes at its end at the latest."""
    with engine_on(store, model, version, ranks) as engine:
        run(engine, 1)
    assert len(objects(store)) == 1


def prefetched(engine: Engine) -> int:
    """Ask for the prompt, let what is known of it be read, and return how many of its tokens are found then."""
    shared = tier_of(leader_of(engine), Tier.SHARED)
    idle(engine, lambda: len(shared.presence) > 0)
    assert asks(engine, PROMPT, 50) == 0, "its blocks are in the store only"
    idle(engine, lambda: not (reads_ahead(engine) or shared.is_busy()))
    return asks(engine, PROMPT, 51)


@pytest.mark.parametrize(("version", "ranks"), list(zip(VERSIONS[1:], (2, 1, 2), strict=True)), ids=str)
def test_another_engine_finds_what_the_first_computed(tmp_path, model, version, ranks):
    filled(tmp_path / "store", model, version, ranks)
    with engine_on(tmp_path / "store", model, version, ranks) as engine:
        assert prefetched(engine) == RUN_TOKENS
        run(engine, 52)
        assert engine.counters.onboard_blocks == RUN_TOKENS // BLOCK
        assert engine.counters.faults == engine.counters.onboard_failed_blocks == 0


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_object_is_computed(tmp_path, model, damage):
    filled(tmp_path / "store", model)
    (path,) = objects(tmp_path / "store")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content[:-1] if damage == "cut" else content)
    with engine_on(tmp_path / "store", model) as engine:
        assert prefetched(engine) == 0
        assert engine.counters.shared.bad_objects == 1
        run(engine, 52)
        assert engine.counters.onboard_blocks == 0


def test_other_arguments_find_nothing(tmp_path, model):
    filled(tmp_path / "store", model)
    (Path(model) / "model.safetensors").write_bytes(b"\x03\0\0\0\0\0\0\0{ }")
    with engine_on(tmp_path / "store", model) as engine:
        run(engine, 52)
        assert engine.counters.onboard_blocks == 0
    assert len({path.parents[1] for path in objects(tmp_path / "store")}) == 2, "two namespaces"


def test_a_killed_process_costs_hits_and_no_token(tmp_path, model):
    filled(tmp_path / "store", model)
    with engine_on(tmp_path / "store", model) as engine:
        shared = tier_of(leader_of(engine), Tier.SHARED)
        os.kill(shared.client.process.pid, signal.SIGKILL)
        run(engine, 52)
        idle(engine, lambda: shared.client.restarts > 0)
        assert engine.counters.faults == 0
