"""`kvbm bench` as its user meets it: exit code, stdout, files, progress, and what `--dry-run` prints."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from bench_rig import (
    MOCK,
    SLOW_G2_TOKEN_MS,
    SMALL_G1_BLOCKS,
    STEADY_WORKLOAD,
    WORKLOAD,
    MockEngines,
    in_turn,
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
from kvbm_cli.bench.command import BenchRequest
from kvbm_cli.bench.result.results import RequestRecord
from kvbm_cli.bench.show.terminal import BenchProgress

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
def test_progress_goes_to_stderr_and_the_page_to_stdout(tmp_path, capsys):
    """`snapshots/bench/reports.txt` has whole pages."""
    measure(tmp_path, MockEngines(), as_json=False)
    shown = capsys.readouterr()
    assert "preparation of small: 6 requests" in shown.err
    assert "small, run 1 of 1: baseline, kvbm, floor, 18 requests" in shown.err
    assert shown.out.startswith("\nsmall: 6 requests of 3 sessions, ")
    assert f"report: {tmp_path / 'run' / 'report.html'}" in shown.out


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
    assert measure(tmp_path, MockEngines(**like_vllm)) in (0, 10, 13)
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
    assert code in (0, 10, 11, 13)  # 11 and 13 only if this machine was busy
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
from kvbm.engines.launch_plan import LaunchPlan
from kvbm_cli.bench import command
from kvbm_cli.bench.result.directory import BenchDirectory
import kvbm.engines.embedded.launch
def plan(profile, *, connector, port):
    url = f"http://127.0.0.1:{{port}}"
    return LaunchPlan((sys.executable, {mock!r}, "--port", str(port)), {{}}, url, "mock")
kvbm.engines.embedded.launch.plan = plan
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


def dry_run(tmp_path, capsys, *, workload=WORKLOAD, **options):
    request = BenchRequest(
        **{"profiles": ("demo",), "workloads": [workload_file(tmp_path, workload)], **options},
        is_dry_run=True,
        as_json=True,
    )
    assert command.bench(request) == 0
    return json.loads(capsys.readouterr().out)


ITSELF = in_turn(pairs=1, interval_s=None).model_dump(mode="json")
AGENTS = {"kind": "agentic-coding", "agents": 2, "steps": 4, "subagent_every": 2, "subagent_steps": 3}
AGENTS |= {"system_tokens": 9, "task_tokens": 9, "tool_result_tokens": 9, "answer_tokens": 9, "context_tokens": 999}
OF_A_FILE = {"kind": "trace", "file": "t.jsonl"}
LINE = {"timestamp": 0, "input_length": 300, "output_length": 7, "hash_ids": [1]}
TRACE = [LINE, {**LINE, "timestamp": 9000}, {**LINE, "timestamp": 60_000, "hash_ids": [2]}]
TURN = {"input_length": 300, "output_length": 7, "session_id": "a"}
TURNS = [TURN, *[{**TURN, "delay": 5}] * 2]
START_S = 3 * 20.0
PROMPTS_S, ANSWERS_S = 2754 / 2000, 36 / 50  # of ITSELF at the speed that a plan assumes on a CPU
ALONE_S = PROMPTS_S + ANSWERS_S
HALF_BUSY_S = pytest.approx(3 * 2 * ALONE_S + START_S)
RAMP_S = pytest.approx(3 * (13 / 2 + 1 / 3) + START_S)


@pytest.mark.parametrize(
    ("content", "lines", "schedule", "expected"),
    [
        (ITSELF, (), {}, (6, 6, HALF_BUSY_S, 1364)),
        (ITSELF, (), {"rate": 2.0}, (6, 6, 3 * 6 * 0.5 + START_S, 1364)),
        (ITSELF, (), {"duration_s": 30.0}, (None, 6, HALF_BUSY_S, 1364)),
        (ITSELF, (), {"duration_s": 1.0}, (None, 6, pytest.approx(3 * 2 * ALONE_S / 6 * 2 + START_S), 1364)),
        (ITSELF, (), {"concurrency": 2}, (6, 6, pytest.approx(3 * (PROMPTS_S + ANSWERS_S / 2) + START_S), 1364)),
        (ITSELF, (), {"rate": 2.0, "pairs": 2}, (6, 6, 5 * (6 * 0.5 + 20.0), 1364)),
        (AGENTS, (), {}, (14, 14, pytest.approx(76.935, rel=1e-3), 171)),  # per agent 4 steps and one subagent of 3
        (AGENTS, (), {"concurrency": 2, "duration_s": 30.0}, (None, 14, 3 * 30.0 + START_S, 171)),
        (AGENTS, (), {"rate": 2.0, "duration_s": 3.0}, (6, 6, 3 * 3.0 + START_S, 171)),
        (AGENTS, (), {"rate": 1.0, "ramp_to": 3.0}, (14, 14, RAMP_S, 171)),
        (OF_A_FILE, TRACE, {}, (3, 3, 3 * 60.0 + START_S, 600)),
        ({**OF_A_FILE, "time_scale": 2}, TRACE, {"duration_s": 100.0}, (2, 2, 3 * 18.0 + START_S, 600)),
        (OF_A_FILE, TURNS, {"concurrency": 1}, (3, 3, pytest.approx(63.99, rel=1e-3), 914)),
    ],
)
def test_a_dry_run_has_the_requests_the_duration_and_the_working_set(
    tmp_path, capsys, content, lines, schedule, expected
):
    """Its text is in `snapshots/bench/commands.txt`."""
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = tmp_path / "w.yaml"
    path.write_text(yaml.safe_dump({**content, "name": "w"}))
    options = {"workloads": [str(path)], "schedule": Overrides(**{"pairs": 1, **schedule})}
    (cell,) = dry_run(tmp_path, capsys, **options)["cells"]
    assert tuple(cell[key] for key in ("requests", "most_requests", "duration_s", "working_set_tokens")) == expected


def test_equal_commands_have_equal_plans(tmp_path, capsys):
    first = dry_run(tmp_path, capsys)
    assert dry_run(tmp_path, capsys) == first
    assert dry_run(tmp_path, capsys, schedule=Overrides(pairs=3))["digest"] != first["digest"]


def record(ttft_ms: float | None, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        "cell.1.kvbm", "kvbm", "cell", 1, 0, 0, 1, "steady", intended_ms=0.0, first_token_ms=ttft_ms, error=error
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, *, columns: int = 120) -> Terminal:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    return terminal


def wait_for_refreshes(terminal: Terminal) -> None:
    """Return when the live line has been drawn twice more."""
    for _ in range(2):
        length = len(terminal.getvalue())
        eventually(lambda length=length: len(terminal.getvalue()) > length)


def test_elsewhere_than_on_a_terminal_a_phase_is_a_line(capsys):
    with BenchProgress() as progress:
        progress.phase("recording: starting the engine")
        progress.phase("kvbm: 24 requests")
        progress.request_ended(record(12.0))
    assert capsys.readouterr().err == "recording: starting the engine\nkvbm: 24 requests\n"


def test_on_a_terminal_a_live_line_shows_answers_failures_and_the_time(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    with BenchProgress() as progress:
        progress.phase("kvbm: 24 requests")
        progress.request_ended(record(12.0))
        progress.request_ended(record(None, "HTTP 503"))
        wait_for_refreshes(terminal)
    text = terminal.getvalue()
    assert re.search(r"kvbm: 24 requests · 1 answered, 1 failed · first token: kvbm 12 ms · \d+ s so far", text)


@pytest.mark.parametrize("width", [30, 60, 80, 100])
def test_the_live_line_never_wraps(width, monkeypatch):
    terminal = on_a_terminal(monkeypatch, columns=width)
    with BenchProgress() as progress:
        progress.phase("baseline, kvbm, floor: 72 requests")
        for _ in range(14):
            progress.request_ended(record(1234.0))
        progress.request_ended(record(None, "HTTP 503"))
        wait_for_refreshes(terminal)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\r", terminal.getvalue()).split("\r")
    assert max(len(line) for line in lines) < width
    last = next(line for line in reversed(lines) if line.strip())
    assert "baseline, kvbm" in last
    assert (" so far" in last) == (width >= 60)
    assert ("15 answered" in last or "14 answered, 1 failed" in last) == (width >= 80)
