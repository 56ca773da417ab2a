"""Every mistake of `mistakes.py`: what is said, the exit code, how long it takes, and that nothing stays behind."""

from __future__ import annotations

import os
import resource
import shlex
import time
from pathlib import Path

import pytest
from mistakes import ROWS, make_files, what_lies_in
from terminal import Outcome, assert_snapshot, environment, kvbm

from kvbm_cli.app import run

LIMIT_S = 2.0
AS_PROCESSES = sorted(ROWS)[::8]


@pytest.mark.parametrize("name", ROWS)
def test_mistake(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = ROWS[name]
    make_files(row, tmp_path)
    here, children = what_lies_in(tmp_path), child_processes()
    monkeypatch.chdir(tmp_path)
    for variable in set(os.environ) - {"PYTEST_CURRENT_TEST", "KVBM_UPDATE_SNAPSHOTS"}:
        monkeypatch.delenv(variable)
    for variable, value in environment(tmp_path, **row.variables).items():
        monkeypatch.setenv(variable, value)
    before = used_s()
    with row.prepare(tmp_path):
        exit_code = run(shlex.split(row.command))
    taken_s = used_s() - before
    shown = capsys.readouterr()
    assert_snapshot(f"mistakes/{name}", Outcome(exit_code, shown.out, shown.err).text(f"kvbm {row.command}"))
    assert exit_code == row.exit_code
    assert (shown.out == "") != ("--json" in row.command), "stdout is for data"
    assert "Traceback" not in shown.err
    assert taken_s < LIMIT_S
    assert (what_lies_in(tmp_path), child_processes()) == (here, children), "something stays behind"


@pytest.mark.parametrize("name", AS_PROCESSES)
def test_mistake_in_a_process_of_its_own_says_the_same(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    make_files(row, tmp_path)
    begin = time.monotonic()
    with row.prepare(tmp_path):
        outcome = kvbm(*shlex.split(row.command), home=tmp_path, **row.variables)
    assert time.monotonic() - begin < 10 * LIMIT_S, "waited for something"
    assert_snapshot(f"mistakes/{name}", outcome.text(f"kvbm {row.command}"))


def test_there_are_many_and_no_two_say_the_same() -> None:
    assert len(ROWS) >= 60
    commands = [(row.command, str(row.files), str(row.variables)) for row in ROWS.values()]
    assert len(set(commands)) == len(ROWS)


def test_no_snapshot_is_left_over() -> None:
    stored = {path.stem for path in (Path(__file__).parent / "snapshots" / "mistakes").glob("*.txt")}
    assert stored == set(ROWS)


def used_s() -> float:
    """Processor time of this process and of those that it waited for: another's load does not count."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def child_processes() -> set[str]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {child for task in tasks for child in task.read_text().split()}
