"""`kvbm bench --dry-run` prints what would run, and starts nothing."""

import json
import subprocess

import pytest
from bench_rig import WORKLOAD, in_turn, workload_file

from kvbm_cli.bench import command
from kvbm_cli.bench.cells import Overrides
from kvbm_cli.bench.command import BenchRequest


@pytest.fixture
def nothing_starts(monkeypatch, tmp_path):
    def refuse(*arguments, **options):
        raise AssertionError(f"started {arguments}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr("kvbm_cli.bench.command.make_model", refuse)
    monkeypatch.setattr("kvbm_cli.bench.command.measure", refuse)
    yield
    assert {path.name for path in tmp_path.iterdir()} <= {"small.yaml"}


def dry_run(tmp_path, capsys, *, workload=WORKLOAD, as_json=True, **options):
    workloads = [workload_file(tmp_path, workload)]
    request = BenchRequest(
        **{"profiles": ("demo",), "workloads": workloads, **options}, is_dry_run=True, as_json=as_json
    )
    assert command.bench(request) == 0
    shown = capsys.readouterr().out
    return json.loads(shown) if as_json else shown


@pytest.mark.usefixtures("nothing_starts")
def test_the_plan_has_arms_order_starts_duration_and_memory(tmp_path, capsys):
    plan = dry_run(tmp_path, capsys, workload=in_turn(pairs=2, interval_s=0.5))
    (cell,) = plan["cells"]
    assert list(plan["arms"]) == ["baseline", "kvbm", "floor"]
    assert [group["arms"] for group in cell["order"]][2] == ["floor"]
    assert plan["starts"] == 1 + 5
    assert cell["duration_s"] == plan["duration_s"] == 5 * (6 * 0.5 + 20.0)
    assert cell["working_set_tokens"] == WORKLOAD.working_set_tokens
    assert cell["g1_tokens"] == 8960
    memory = {name: arm["memory_bytes"] for name, arm in plan["arms"].items()}
    assert memory["kvbm"] > memory["baseline"] > 0
    assert plan["memory_bytes_at_once"] == memory["kvbm"]


@pytest.mark.usefixtures("nothing_starts")
def test_interleaved_arms_take_their_memory_at_the_same_time(tmp_path, capsys):
    plan = dry_run(tmp_path, capsys)
    assert plan["memory_bytes_at_once"] == sum(arm["memory_bytes"] for arm in plan["arms"].values())


@pytest.mark.usefixtures("nothing_starts")
def test_the_text_names_every_arm_and_cell(tmp_path, capsys):
    shown = dry_run(tmp_path, capsys, as_json=False, workload=in_turn(pairs=1, interval_s=0.5), pressure="0.8,1.2")
    for words in (
        *("baseline        baseline  profile demo, ", "kvbm            kvbm      profile demo, "),
        *("small-x0.8: conversations, pressure 0.8", "small-x1.2: conversations, pressure 1.2"),
        *("G1 holds 8,960 tokens", "in total: 7 engine starts, ", " for the KV cache at once", "duration: about "),
    ):
        assert words in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("options", "duration_s"),
    [
        ({}, None),
        ({"schedule": Overrides(rate=2.0)}, 3 * (6 * 0.5 + 20.0)),
        ({"schedule": Overrides(duration_s=30.0)}, 3 * (30.0 + 20.0)),
        ({"schedule": Overrides(concurrency=2)}, None),
        ({"schedule": Overrides(rate=2.0, pairs=2)}, 5 * (6 * 0.5 + 20.0)),
    ],
)
def test_the_duration_follows_from_the_options(tmp_path, capsys, options, duration_s):
    workload = in_turn(pairs=1, interval_s=None)
    assert dry_run(tmp_path, capsys, workload=workload, **options)["duration_s"] == duration_s


@pytest.mark.usefixtures("nothing_starts")
def test_a_server_elsewhere_has_no_known_memory(tmp_path, capsys):
    plan = dry_run(tmp_path, capsys, compare=["baseline", "theirs=http://127.0.0.1:9"])
    assert plan["arms"]["theirs"]["memory_bytes"] is None
    assert plan["memory_bytes_at_once"] is None


@pytest.mark.usefixtures("nothing_starts")
def test_equal_commands_have_equal_plans(tmp_path, capsys):
    first = dry_run(tmp_path, capsys)
    assert dry_run(tmp_path, capsys) == first
    assert dry_run(tmp_path, capsys, schedule=Overrides(pairs=3))["digest"] != first["digest"]


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("kind", ["conversations", "vllm-cpu"])
def test_shipped_workloads_have_a_plan(kind, tmp_path, capsys):
    assert dry_run(tmp_path, capsys, workloads=[kind])["cells"][0]["name"] == kind
