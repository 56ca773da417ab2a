"""A disk tier below host memory. Blocks on disk are never promised: they are read into host memory, verified, and found
by a later lookup. A disk that fails costs hits and no token."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from bookkeeping import tier_of
from executor import BLOCK, Engine, Request, Script, expected
from interface import MAIN, V1_2, VERSIONS, arguments
from test_tokens import assert_right, conversations, drawn, everywhere
from test_traps import output

from kvbm.engines.trtllm.identity import identity
from kvbm.identity import code, loading
from kvbm.identity.description import describe
from kvbm.types import Tier

HOUR_NS = 3_600_000_000_000
PROMPTS = [tuple(range(100 * user, 100 * user + 26)) for user in range(1, 5)]  # six blocks and two tokens each


def config(directory: Path, **disk: object) -> dict[str, object]:
    tiers = {"host": {"blocks": 12}, "disk": {"directory": str(directory), "blocks": 400, **disk}}
    return {"tiers": tiers, "offload": {"to_disk": "always"}}


def leader_of(engine: Engine):
    return engine.leader.side.leader.leader


def idle(engine: Engine, is_done, *, limit_s: float = 20.0) -> None:
    """Let iterations without requests pass on rank 0 until a condition holds, as requests of others make them."""
    deadline = time.monotonic() + limit_s
    while not is_done():
        assert time.monotonic() < deadline, leader_of(engine).blocks()
        engine.leader.build_connector_meta(output())
        engine.leader.side.settle()
        time.sleep(0.001)


def reads_ahead(engine: Engine) -> bool:
    # the counters know reads that have ended
    reads = leader_of(engine)._prefetches
    return any(reads._wanted.values()) or bool(reads._open)  # what waits, and what is being read


def settled(engine: Engine) -> None:
    """Wait until the disk has written and read what is due."""
    disk = tier_of(leader_of(engine), Tier.DISK)
    idle(engine, lambda: not (disk.is_writing() or reads_ahead(engine)) or not disk.is_on)


def run_all(engine: Engine, prompts, first_id: int) -> None:
    for number, prompt in enumerate(prompts, start=first_id):
        script = Script(number, prompt, 3)
        assert engine.run([script])[number] == expected(script, engine.rank_count)
        engine.wait_for_saves()
        settled(engine)


def asks(engine: Engine, prompt, request_id: int) -> int:
    """A lookup whose request then ends without having been computed, such as one that its client gave up."""
    request = Request(Script(request_id, prompt))
    tokens, is_async = engine.leader.get_num_new_matched_tokens(request, 0)
    assert is_async == (tokens > 0)
    engine.leader.request_finished(request, [])
    return tokens


@pytest.mark.sampled(3)
@everywhere
def test_blocks_on_disk_are_hits_after_they_have_been_read_ahead(tmp_path, version, ranks, overlaps):
    with Engine(version, rank_count=ranks, overlaps=overlaps, host_blocks=12, config=config(tmp_path)) as engine:
        run_all(engine, PROMPTS, 1)
        assert engine.counters.evicted_blocks > 0
        engine.forget_device()
        assert asks(engine, PROMPTS[0], 50) == 0, "its blocks are on disk only"
        settled(engine)
        assert engine.counters.disk.fetched_blocks == 6
        before = engine.counters.onboard_blocks
        script = Script(51, PROMPTS[0], 3)
        assert engine.run([script])[51] == expected(script, ranks)
        assert engine.counters.onboard_blocks == before + 6
        assert engine.counters.faults == engine.counters.onboard_failed_blocks == 0


@pytest.mark.sampled(3)
@everywhere
def test_conversations_larger_than_host_memory_get_the_right_tokens(tmp_path, version, ranks, overlaps):
    with Engine(
        version, rank_count=ranks, overlaps=overlaps, device_blocks=22, host_blocks=12, config=config(tmp_path)
    ) as engine:
        results = conversations(engine, users=4)
        engine.wait_for_saves()
        settled(engine)
        engine.forget_device()
        for number, (script, _) in enumerate(results):  # given up by their clients, and then repeated
            asks(engine, script.prompt, 1000 + number)
        again = [Script(50 + index, script.prompt, 5, arrives=3 * index) for index, (script, _) in enumerate(results)]
        done = engine.run(again)
        assert_right(results, ranks)
        assert_right([(script, done[script.request_id]) for script in again], ranks)
        settled(engine)
        assert engine.counters.disk.offload_blocks > 0
        assert engine.counters.disk.fetched_blocks > 0
        assert engine.counters.faults == 0


def damage(engine: Engine, directory: Path) -> None:
    """Overwrite the bytes of all blocks on disk. The file has no name if it does not outlive the engine: it is reached
    through the process that has it open."""
    opened = [fd for fd in Path(f"/proc/{disk_pid(engine)}/fd").iterdir() if str(directory) in os.readlink(fd)]
    arena = max((fd for fd in opened if fd.is_file()), key=lambda fd: fd.stat().st_size)
    size = arena.stat().st_size
    with open(arena, "r+b") as file:
        for start in range(0, size, 1 << 20):
            file.seek(start)
            file.write(b"\xa5" * min(1 << 20, size - start))
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.sampled(3)
@everywhere
def test_damaged_blocks_cost_hits_and_no_token(tmp_path, version, ranks, overlaps):
    with Engine(version, rank_count=ranks, overlaps=overlaps, host_blocks=12, config=config(tmp_path)) as engine:
        run_all(engine, PROMPTS, 1)
        engine.forget_device()
        damage(engine, tmp_path)
        assert asks(engine, PROMPTS[0], 50) == 0
        settled(engine)
        assert engine.counters.disk.checksum_failures > 0
        assert asks(engine, PROMPTS[0], 51) == 0, "a damaged block is not promised"
        run_all(engine, PROMPTS, 60)
        assert engine.counters.faults == 0


@pytest.mark.sampled(3)
@everywhere
def test_disk_process_that_is_killed_costs_hits_and_no_token(tmp_path, version, ranks, overlaps):
    with Engine(version, rank_count=ranks, overlaps=overlaps, host_blocks=12, config=config(tmp_path)) as engine:
        run_all(engine, PROMPTS, 1)
        engine.forget_device()
        asks(engine, PROMPTS[0], 50)
        os.kill(disk_pid(engine), signal.SIGKILL)
        scripts = [Script(60 + index, prompt, 4, arrives=index) for index, prompt in enumerate(PROMPTS)]
        done = engine.run(scripts)
        assert_right([(one, done[one.request_id]) for one in scripts], ranks)
        idle(engine, lambda: engine.counters.disk.restarts > 0)
        assert engine.counters.faults == 0


def disk_pid(engine: Engine) -> int:
    return int(tier_of(leader_of(engine), Tier.DISK).disk.process.pid)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("version", VERSIONS, ids=str)
def test_random_traffic_with_a_disk_gets_the_right_tokens(tmp_path, version, seed):
    import random

    draw = random.Random(f"{seed}/{version}")
    prefixes = [tuple(draw.randrange(1000) for _ in range(24)) for _ in range(4)]
    ranks, overlaps = draw.choice([1, 2]), draw.random() < 0.5
    with Engine(
        version, rank_count=ranks, overlaps=overlaps, device_blocks=20, host_blocks=12, config=config(tmp_path)
    ) as engine:
        for wave in range(4):
            scripts = [drawn(draw, 100 * wave + index, prefixes) for index in range(10)]
            done = engine.run(scripts)
            assert_right([(one, done[one.request_id]) for one in scripts if one.request_id in done], ranks)
            engine.forget_device()
            engine.wait_for_saves()
            settled(engine)
            for number, prefix in enumerate(prefixes):
                asks(engine, prefix, 1000 + 10 * wave + number)
            settled(engine)
        assert engine.counters.disk.fetched_blocks > 0
        assert not engine.leader.side.boundary.is_off


# -- the next start ----------------------------------------------------------------------------------------------------


def roomy(directory: Path, blocks: int = 100) -> dict[str, object]:
    made = config(directory)
    return {**made, "tiers": {**made["tiers"], "host": {"blocks": blocks}}}  # type: ignore[dict-item]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("version", VERSIONS[1:], ids=str)
def test_blocks_of_an_earlier_engine_are_in_host_memory_at_the_start(tmp_path, model, version, ranks):
    for number in range(2):
        with Engine(version, rank_count=ranks, model=model, config=roomy(tmp_path / "cache")) as engine:
            found = asks(engine, PROMPTS[0], 50)
            assert found == (24 if number else 0)
            run_all(engine, PROMPTS, 1)
            assert (engine.counters.onboard_blocks > 0) == bool(number)


KV = [{"dtype": "bfloat16"}, {"attn_backend": "FLASHINFER"}, {"quant_config": {"kv_cache_quant_algo": "FP8"}}]
NO_KV = [{"max_seq_len": 64}, {"max_batch_size": 7}, {"max_num_tokens": 99}, {"revision": None}]


@pytest.mark.parametrize("changed", [*KV, *NO_KV], ids=str)
def test_arguments_share_blocks_unless_they_change_kv(tmp_path, model, changed):
    with Engine(V1_2, model=model, revision=None, config=roomy(tmp_path / "cache")) as engine:
        run_all(engine, PROMPTS[:1], 1)
    with Engine(V1_2, model=model, config=roomy(tmp_path / "cache"), **{"revision": None, **changed}) as engine:
        assert asks(engine, PROMPTS[0], 50) == (24 if changed in NO_KV else 0)
        assert (engine.counters.disk.fetched_blocks > 0) == (changed in NO_KV)


def test_a_start_reads_the_blocks_that_were_used_last_and_no_more_than_host_memory_holds(tmp_path, model):
    with Engine(V1_2, model=model, config=roomy(tmp_path / "cache")) as engine:
        run_all(engine, PROMPTS, 1)
    with Engine(V1_2, model=model, config=roomy(tmp_path / "cache", 14)) as engine:
        assert engine.counters.disk.fetched_blocks == 14, "two prompts with seven blocks each"
        assert engine.counters.evicted_blocks == 0
        assert leader_of(engine).blocks()["G2"]["pinned"] == 0
        assert [asks(engine, prompt, 50 + number) for number, prompt in enumerate(PROMPTS)] == [0, 0, 24, 24]
        run_all(engine, PROMPTS, 10)


def test_blocks_read_for_an_unknown_tenant_are_not_written_again_before_a_request_has_them(tmp_path, model):
    """Their rows on disk have a tenant, which the leader does not know; without it, they could not be deleted by it."""
    salted = [Script(1, PROMPTS[0], 3, salt="a")]
    with Engine(MAIN, model=model, config=roomy(tmp_path / "cache")) as engine:
        engine.run(salted)
        engine.wait_for_saves()
        settled(engine)
    with Engine(MAIN, model=model, config=roomy(tmp_path / "cache")) as engine:
        tier = tier_of(leader_of(engine), Tier.DISK)
        hashes = leader_of(engine).host.store.oldest(100)
        assert tier._unowned == set(hashes)
        tier.store.forget(hashes)
        tier._enqueue(hashes)
        assert not tier._queue
        request = Request(Script(2, PROMPTS[0], salt="a"))
        assert engine.leader.get_num_new_matched_tokens(request, 0)[0] == 24
        chain = engine.leader.side._requests[2].hashes[:6]
        assert not tier._unowned & set(chain)
        tier._enqueue(chain)
        slots = leader_of(engine)._requests["2"].promised.slots
        tenants = set(leader_of(engine).host.labels.tenants_of(slots))
        assert tenants == {leader_of(engine)._tenant_of("2")} != {b""}


def facts_of(model: str | Path, **more: object) -> dict[str, object]:
    """What identifies an engine, without the name that users see."""
    made = arguments(V1_2, block_tokens=BLOCK, rank_count=1, model=str(model), **more)
    facts, doubt = describe(*identity(made)).result()
    assert doubt == ""
    return {name: value for name, value in facts.items() if name != "model"}


def test_equal_copies_of_a_model_have_equal_facts_without_paths(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "elsewhere" / "renamed")
    drafts = [shutil.copytree(model, tmp_path / name) for name in ("draft", "draft-2")]

    def facts(place, draft):
        return facts_of(place, tokenizer=str(place), draft={"dir": str(draft)}, table=f"{place}/config.json")

    one, two = facts(model, drafts[0]), facts(copy, drafts[1])
    assert one == two
    assert str(tmp_path) not in json.dumps(one)
    (drafts[1] / "config.json").write_text('{"a": 1}')
    assert facts(copy, drafts[1]) != two


def test_the_maximum_length_counts_for_models_whose_kv_depends_on_it(model):
    assert facts_of(model, max_seq_len=10) == facts_of(model, max_seq_len=20)
    (Path(model) / "config.json").write_text('{"rope_scaling": {"type": "longrope"}}')
    assert facts_of(model, max_seq_len=10) != facts_of(model, max_seq_len=20)


@pytest.mark.parametrize(("trust_remote_code", "counts"), [(True, True), (False, False)])
def test_every_file_counts_if_the_code_of_the_model_runs(model, trust_remote_code, counts):
    before = facts_of(model, trust_remote_code=trust_remote_code)
    (Path(model) / "scales.dat").write_bytes(b"1")
    assert (facts_of(model, trust_remote_code=trust_remote_code) != before) == counts


def test_a_model_class_of_the_user_counts_by_content(model, tmp_path, monkeypatch):
    monkeypatch.setattr(code, "process_start_ns", lambda pid=None: time.time_ns() + HOUR_NS)
    (tmp_path / "own_code.py").write_text("class Own: ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_code", None)
    plain = facts_of(model)
    models = {"Own": importlib.import_module("own_code").Own}
    name = "tensorrt_llm._torch.models.modeling_utils"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(MODEL_CLASS_MAPPING=models))
    first = facts_of(model)
    (tmp_path / "own_code.py").write_text("class Own: pass")
    assert "code" not in plain
    assert first["code"] != facts_of(model)["code"]


DOUBTS = {
    "no files": ({"model": "/no/such/model"}, "`/no/such/model` has no local files"),
    "adapters": ({"lora_config": object()}, "a block's hash covers the number of an adapter, not its content"),
    "dummy weights": ({"load_format": "dummy"}, "load format `dummy` does not read files that kvbm knows"),
    "an object": ({"speculation": object()}, "an argument of type `object` has no text form"),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_blocks_do_not_outlive_an_engine_that_cannot_be_identified(tmp_path, model, monkeypatch, name):
    changed, reason = DOUBTS[name]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = arguments(V1_2, block_tokens=BLOCK, rank_count=1, **{"model": model, **changed})
    if "lora_config" in changed:
        made.model_dump = lambda: {"lora_config": "x"}
    assert reason in identity(made)[1]
    made = arguments(V1_2, block_tokens=BLOCK, rank_count=1, model=model)
    assert identity(made)[1] == ""
    monkeypatch.setattr(loading, "process_start_ns", lambda: time.time_ns() - HOUR_NS)
    assert "changed after the engine was started" in identity(made)[1]


def test_a_lookup_with_a_disk_takes_microseconds(tmp_path):
    """It runs under a lock of the engine, also while all blocks are on disk."""
    with Engine(V1_2, host_blocks=12, config=config(tmp_path)) as engine:
        run_all(engine, PROMPTS, 1)
        engine.forget_device()
        best = min(timed(engine, 100 + number) for number in range(20))
        assert best < 0.002


def timed(engine: Engine, request_id: int) -> float:
    request = Request(Script(request_id, PROMPTS[0]))
    begin = time.perf_counter()
    engine.leader.get_num_new_matched_tokens(request, 0)
    took = time.perf_counter() - begin
    engine.leader.request_finished(request, [])
    return took
