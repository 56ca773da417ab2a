"""`kvbm bench` as its user meets it: exit code, stdout, files."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from bench_rig import (
    MOCK,
    SLOW_G2_TOKEN_MS,
    SMALL_G1_BLOCKS,
    STEADY_WORKLOAD,
    MockEngines,
    measure,
    planned,  # noqa: F401
    summary_of,
    timed,
    without_sampler,  # noqa: F401
    workload_file,
)
from waiting import eventually

from kvbm.errors import EngineError
from kvbm_cli.bench import command
from kvbm_cli.bench.cells import Overrides

fast = pytest.mark.usefixtures("without_sampler")


@timed
@fast
@pytest.mark.parametrize(
    ("changes", "verdict", "exit_code"),
    [
        ({}, "faster", 0),
        ({"g2_token_ms": SLOW_G2_TOKEN_MS}, "slower", 10),
        ({"faults": {4: "http_500"}}, "invalid", 11),
        ({"faults": {4: "wrong"}}, "wrong", 12),
    ],
)
def test_exit_code_and_json_say_the_verdict(tmp_path, capsys, changes, verdict, exit_code):
    engines = MockEngines.steady().changed("kvbm", **changes)
    assert measure(tmp_path, engines, STEADY_WORKLOAD) == exit_code
    printed = json.loads(capsys.readouterr().out)
    assert printed == summary_of(tmp_path)
    assert printed["verdict"] == verdict
    assert printed["outputs_equal"] is (verdict != "wrong")
    (cell,) = printed["cells"]
    assert cell["arms"]["kvbm"]["ttft_ms"]["mean"] > 0
    assert set(cell["arms"]["kvbm"]["prompt_tokens"]) == {"g1", "g2", "g3", "g4", "computed"}
    assert printed["machine"]["cpu_count"] >= 1
    assert printed["versions"]["kvbm-cli"]
    assert printed["profile"]["name"] == "demo"


@fast
def test_the_page_fits_80_columns_and_says_verdict_load_and_where_the_files_are(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    measure(tmp_path, MockEngines.steady(), STEADY_WORKLOAD, as_json=False)
    page = capsys.readouterr().out
    lines = page.splitlines()
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 80
    text = " ".join(page.split())
    assert f"{summary_of(tmp_path)['verdict']}: " in text  # "invalid: " if the machine is too busy
    assert "arms: interleaved, all engines at the same time, 1 pair" in text
    assert "baseline was busy" in text
    assert "queue" in text
    assert str(tmp_path / "run") in page
    for word in ("baseline", "kvbm", "floor", "turn 1", "turn 2", "computed", "failed"):
        assert word in page


@fast
def test_progress_goes_to_stderr(tmp_path, capsys):
    measure(tmp_path, MockEngines())
    shown = capsys.readouterr()
    assert "preparation of small: 6 requests" in shown.err
    assert "small, run 1 of 1: baseline, kvbm, floor, 18 requests" in shown.err
    assert shown.out.startswith("{")


@fast
def test_results_have_no_path_of_this_machine(tmp_path, capsys):
    measure(tmp_path, MockEngines())
    shown = capsys.readouterr().out
    assert str(tmp_path) not in shown
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != "engine.log"]
    assert {"summary.json", "plan.json", "requests.jsonl"} <= {path.name for path in written}
    for path in written:
        text = path.read_text(errors="replace")
        assert str(tmp_path) not in text, path
        assert str(Path.home()) + "/" not in text, path


@fast
def test_an_engine_that_refuses_the_recording_marks_the_run_and_is_an_error(tmp_path):
    engines = MockEngines().changed("recording", faults={1: "http_400"})
    with pytest.raises(EngineError, match="recording turn 1 of session 1 failed: HTTP 400"):
        measure(tmp_path, engines)
    assert engines.started == ["recording"]
    assert summary_of(tmp_path)["complete"] is False


@fast
def test_an_engine_like_vllm_is_measured(tmp_path, capsys):
    engines = MockEngines()
    like_vllm = {arm: replace(options, is_like_vllm=True) for arm, options in engines.options.items()}
    assert measure(tmp_path, MockEngines(**like_vllm)) in (0, 10)
    kvbm = json.loads(capsys.readouterr().out)["cells"][0]["arms"]["kvbm"]
    assert kvbm["turns"][1]["prompt_tokens"]["g2"] is None
    assert kvbm["turns"][1]["prompt_tokens"]["computed"] > 0


@pytest.mark.usefixtures("planned")
def test_the_whole_command_with_processes(tmp_path, capsys):
    request = command.BenchRequest(
        profiles=("demo",),
        overrides=[f"engine.arguments.num_blocks={SMALL_G1_BLOCKS}"],
        workloads=[workload_file(tmp_path)],
        schedule=Overrides(rate=5.0),
        output=tmp_path / "run",
        as_json=True,
    )
    code = command.bench(request)
    summary = json.loads(capsys.readouterr().out)
    assert code in (0, 10, 11)  # 11 only if this machine made the client late
    assert summary["outputs_equal"] is True
    assert summary["cells"][0]["comparisons"][0]["has_loads"] is True
    assert summary["cells"][0]["plan"]["interval_s"] == 0.2
    assert summary["profile"]["engine"]["arguments"]["num_blocks"] == SMALL_G1_BLOCKS
    for name in ("baseline", "kvbm", "floor"):
        assert (tmp_path / "run" / "runs" / f"small.1.{name}" / "engine.log").exists()
        assert summary["cells"][0]["arms"][name]["server"][0]["prompt_tokens"]


INTERRUPTED_PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from bench_rig import in_turn, setup_of
from kvbm.config.launch_plan import LaunchPlan
from kvbm_cli.bench import command
from kvbm_cli.bench.result.directory import BenchDirectory
import kvbm.embedded.launch
def plan(profile, *, connector, port):
    url = f"http://127.0.0.1:{{port}}"
    return LaunchPlan((sys.executable, {mock!r}, "--port", str(port)), {{}}, url, "mock")
kvbm.embedded.launch.plan = plan
setup = setup_of(in_turn(interval_s=30.0))
sys.exit(command.measure(setup, BenchDirectory.create(Path({output!r})), as_json=False))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_engine_and_leaves_a_marked_run(tmp_path, number):
    program = INTERRUPTED_PROGRAM.format(tests=str(MOCK.parent), mock=str(MOCK), output=str(tmp_path / "run"))
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("small, run 1 of 3: ") and "6 requests" in line:
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait() == 130
    assert "this command continues" in rest
    eventually(lambda: not [child for child in children if Path(f"/proc/{child}").exists()], "somebody reaps them")
    assert summary_of(tmp_path)["complete"] is False


def test_importing_the_command_is_light():
    program = "import sys, kvbm_cli.bench.command; print(*sorted({'torch', 'aiohttp', 'rich'} & set(sys.modules)))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert shown.stdout.strip() == ""
