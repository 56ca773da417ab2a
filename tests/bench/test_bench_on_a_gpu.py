"""`kvbm bench` with an engine that takes the whole device and knows its G1 only after its start, as on a GPU."""

import json
from pathlib import Path

import pytest
from bench_rig import WORKLOAD, lines_of, workload_file
from bench_rig import without_sampler as without_sampler  # the fixture
from gpu_engine import DEVICE_BLOCKS
from mock_engine import BLOCK

from kvbm.errors import UsageError
from kvbm_cli.bench import command
from kvbm_cli.bench.cells import Overrides
from kvbm_cli.bench.command import BenchRequest

pytestmark = pytest.mark.usefixtures("without_sampler")
ENGINE = Path(__file__).with_name("gpu_engine.py")
LONGEST = 1024
PROFILE = f"""\
extends: vllm
engine:
  model: someone/a-model-elsewhere
  python: {ENGINE}
  arguments: {{block_size: {BLOCK}, max_model_len: {LONGEST}}}
tiers: {{host: {{capacity: 16MiB}}}}
metrics: {{port: 0}}
"""
OWN = None  # the engine was started with its own G1


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """Runs the command into `run`. Returns its exit code, the JSON on stdout, and every start: has kvbm, blocks."""
    starts = tmp_path / "starts"
    monkeypatch.setenv("GPU_STARTS", str(starts))
    (tmp_path / "mine.yaml").write_text(PROFILE)

    def run(**options):
        starts.write_text("")
        output = {} if options.get("is_dry_run") or "resume" in options else {"output": tmp_path / "run"}
        given = {"workloads": [workload_file(tmp_path)], "schedule": Overrides(rate=50, pairs=1), **output, **options}
        capsys.readouterr()
        code = command.bench(BenchRequest(profiles=(str(tmp_path / "mine.yaml"),), as_json=True, **given))
        found = [tuple(json.loads(line)) for line in starts.read_text().splitlines()]
        return code, json.loads(capsys.readouterr().out), found

    return run


def test_by_default_the_working_set_is_twice_g1_and_a_floor_that_does_not_fit_is_left_out(bench, tmp_path):
    code, summary, starts = bench()
    assert code in (0, 10, 11, 13)
    (cell,) = summary["cells"]
    assert (cell["name"], cell["pressure"], cell["g1_tokens"]) == ("small-x2", 2.0, DEVICE_BLOCKS * BLOCK)
    assert cell["working_set_tokens"] == pytest.approx(2 * DEVICE_BLOCKS * BLOCK, rel=0.1)
    assert list(cell["arms"]) == ["baseline", "kvbm"]
    (caveat,) = [one for one in cell["caveats"] if one.startswith("no floor: with a G1 that holds everything, ")]
    assert caveat.endswith("; out of GPU memory")
    assert any("arms ran in turn although `schedule.arms` is `interleaved`" in one for one in summary["caveats"])
    assert summary["complete"] is True
    assert starts[:2] == [(False, OWN), (False, OWN)]  # reads G1, records
    (floor,) = [one for one in starts if one[1] is not OWN]
    assert floor[1] > 2 * DEVICE_BLOCKS
    assert sorted(starts[2:], key=str) == sorted([(False, OWN), floor, (True, OWN)], key=str)
    code, again, starts = bench(resume=tmp_path / "run")
    assert (starts, again["digest"]) == ([], summary["digest"])


def test_a_floor_that_fits_into_its_own_g1_is_started_as_it_is(bench, tmp_path):
    _, summary, starts = bench(pressure="0.4")
    assert list(summary["cells"][0]["arms"]) == ["baseline", "kvbm", "floor"]
    assert {blocks for _, blocks in starts} == {OWN}
    assert not (tmp_path / "run" / "left-out.jsonl").exists()


def test_a_larger_g1_holds_the_longest_sequence(bench, tmp_path):
    """An override of fewer blocks than `max_model_len` takes is what vLLM refuses."""
    _, summary, starts = bench(pressure="1", overrides=("engine.arguments.num_gpu_blocks_override=64",))
    assert summary["cells"][0]["g1_tokens"] == LONGEST
    assert list(summary["cells"][0]["arms"]) == ["baseline", "kvbm", "floor"]
    floor = max(blocks for _, blocks in starts)
    assert LONGEST // BLOCK + 2 < floor <= DEVICE_BLOCKS
    assert (lines_of(tmp_path, "runs.jsonl")[-1]["engine_ended"]) is False


def test_without_a_floor_nothing_is_started_for_it(bench):
    _, summary, starts = bench(pressure="none", has_floor=False)
    assert summary["cells"][0]["name"] == WORKLOAD.name
    assert starts[0] == (False, OWN)  # records
    assert sorted(starts[1:]) == [(False, OWN), (True, OWN)]


def test_a_dry_run_plans_for_a_machine_that_is_not_here(bench):
    overrides = ("engine.python=/opt/vllm/bin/python", "tiers.host.capacity=100TB")
    code, plan, starts = bench(is_dry_run=True, overrides=overrides)
    assert (code, starts) == (0, [])
    assert plan["starts"] == 5
    assert plan["duration_s"] > 5 * 60
    (cell,) = plan["cells"]
    assert (cell["name"], cell["working_set_tokens"]) == ("small-x2", pytest.approx(800_000, rel=0.01))
    lacking = [note for note in plan["notes"] if note.startswith("not on this machine: ")]
    assert any("/opt/vllm/bin/python" in note for note in lacking)
    assert any("100TB" in note or "90.9 TiB" in note for note in lacking)
    assert any("assumes that G1 holds 400,000 tokens" in note for note in plan["notes"])
    assert not any("does not report" in note for note in plan["notes"])


def test_a_mistake_is_an_error_of_a_dry_run_too(bench):
    with pytest.raises(UsageError, match="different numbers above 0"):
        bench(is_dry_run=True, pressure="much")
