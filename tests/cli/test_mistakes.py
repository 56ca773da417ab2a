"""Every mistake of `mistakes.py`: what is said, the exit code, how long it takes, and that nothing stays behind."""

import resource
import shlex
import time
from pathlib import Path

import pytest
from mistakes import AREA_OF, AREAS, ROWS, make_files, what_lies_in
from terminal import SNAPSHOTS, Outcome, assert_entry, kvbm, kvbm_here

LIMIT_S = 2.0
AS_PROCESSES = sorted(ROWS)[::8]


@pytest.mark.parametrize("name", ROWS)
def test_mistake(name, tmp_path):
    row = ROWS[name]
    make_files(row, tmp_path)
    here, children = what_lies_in(tmp_path), child_processes()
    before = used_s()
    with row.prepare(tmp_path):
        outcome = kvbm_here(*shlex.split(row.command), home=tmp_path, **row.variables)
    taken_s = used_s() - before
    compare(name, outcome)
    assert outcome.exit_code == row.exit_code
    assert (outcome.stdout == "") != ("--json" in row.command), "stdout is for data"
    assert "Traceback" not in outcome.stderr
    assert taken_s < LIMIT_S
    assert (what_lies_in(tmp_path), child_processes()) == (here, children), "something stays behind"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", AS_PROCESSES)
def test_mistake_in_a_process_of_its_own_says_the_same(name, tmp_path):
    row = ROWS[name]
    make_files(row, tmp_path)
    begin = time.monotonic()
    with row.prepare(tmp_path):
        outcome = kvbm(*shlex.split(row.command), home=tmp_path, **row.variables)
    assert time.monotonic() - begin < 25 * LIMIT_S, "waited for something"
    compare(name, outcome)


def compare(name: str, outcome: Outcome) -> None:
    area = AREA_OF[name]
    assert_entry(f"mistakes/{area}", name, outcome.text(ROWS[name].line(area)), names=AREAS[area])


def test_there_are_many_and_no_two_say_the_same():
    assert len(ROWS) >= 60
    commands = [(row.command, str(row.files), str(row.variables)) for row in ROWS.values()]
    assert len(set(commands)) == len(ROWS)


def test_no_file_of_snapshots_is_left_over():
    elsewhere = {"cache", "doctor", "store"}  # test_cache.py, test_doctor.py, test_shared_store.py
    files = {str(path.relative_to(SNAPSHOTS / "mistakes")) for path in (SNAPSHOTS / "mistakes").rglob("*.txt")}
    assert files == {f"{area}.txt" for area in (*AREAS, *elsewhere)}
    assert sum(map(len, AREAS.values())) == len(ROWS), "a name stands in two areas"


def used_s() -> float:
    """Processor time of this process and of those that it waited for: another's load does not count."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def child_processes() -> set[str]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {child for task in tasks for child in task.read_text().split()}
