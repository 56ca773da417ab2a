"""Mistakes that users make, as `snapshots/mistakes/` shows them: what is said, the exit code, how long it takes, and
that nothing stays behind.

An entry is a transcript that ends with the mistake. To add one, write its commands below a name, and let
`KVBM_UPDATE_SNAPSHOTS=1` write what is said. An entry of its own is worth a mistake that is answered by words of its
own. `listen PORT` and `run PROFILE STATE` are functions below.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cpu_time import children_s
from recorded_runs import NOBODY, facts
from terminal import SNAPSHOTS, Kvbm, assert_entry, kvbm, kvbm_here, steps_of, stored_entries, transcript

from kvbm_cli.runs.run_directory import Runs
from kvbm_cli.runs.run_facts import RunState

LIMIT_S = 2.0
ELSEWHERE = "doctor"  # tests/doctor/test_doctor.py
FILES = [path.stem for path in sorted((SNAPSHOTS / "mistakes").iterdir()) if path.stem != ELSEWHERE]
CASES = [(f"mistakes/{file}", name) for file in FILES for name in stored_entries(f"mistakes/{file}")]
LOCK = (".local", "state", "kvbm", "runs", "lock")  # is empty, and lies there from the first start on


@pytest.fixture
def tools(tmp_path: Path) -> Iterator[dict[str, object]]:
    """What a shell cannot do: ports that are taken, and runs that live in this process or on another machine."""
    state = tmp_path / ".local/state/kvbm"
    with ExitStack() as stack:

        def listen(port: str) -> str:
            stack.enter_context(socket.create_server(("127.0.0.1", int(port))))
            return ""

        def run(profile: str, state_or_place: str, memory_bytes: str = "0") -> str:
            (state / "runs").mkdir(parents=True, exist_ok=True)
            run = Runs(state).create(profile)
            stack.callback(run.close)
            is_here = state_or_place != "elsewhere"
            changes = {"state": RunState(state_or_place)} if is_here else {}
            run.begin(facts(run.name, None if is_here else NOBODY, memory_bytes=int(memory_bytes), **changes))
            return ""

        yield {"listen": listen, "run": run}


def what_lies_in(home: Path) -> dict[str, bytes | None]:
    """Every file with its contents, and every directory, but for the lock of the run directories."""
    expected = {str(home.joinpath(*LOCK[:depth])) for depth in range(1, len(LOCK) + 1)}
    found: dict[str, bytes | None] = {}
    for directory, directories, files in os.walk(home):
        found |= {os.path.join(directory, name): None for name in directories}
        paths = [Path(directory, name) for name in files]
        found |= {str(path): path.read_bytes() if path.is_file() else None for path in paths}
    return {path: contents for path, contents in found.items() if path not in expected or contents}


def make(file: str, name: str, home: Path, tools: dict[str, object], way: Kvbm) -> float:
    """Make a mistake, compare what is said, and return the processor time that the command takes."""
    entries = stored_entries(file)
    *before, (line, said) = steps_of(entries[name])
    shown = transcript("".join(f"$ {line}\n{said}" for line, said in before), home, tools=tools)
    here, children, used = what_lies_in(home), child_processes(), used_s()
    answer = transcript(f"$ {line}\n{said}", home, way=way)
    taken_s = used_s() - used
    assert_entry(file, name, shown + answer, names=entries)
    assert not answer.startswith(f"$ {line}\nexit code: 0")
    assert ("stdout -----\n----- stderr" in answer) != ("--json" in line), "stdout is for data"
    assert "Traceback" not in answer
    assert (what_lies_in(home), child_processes()) == (here, children), "something stays behind"
    return taken_s


@pytest.mark.parametrize(("file", "name"), CASES)
def test_mistake(file, name, tmp_path, tools):
    assert make(file, name, tmp_path, tools, kvbm_here) < LIMIT_S


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("file", "name"), CASES[::8])
def test_mistake_in_a_process_of_its_own_says_the_same(file, name, tmp_path, tools):
    begin = time.monotonic()
    make(file, name, tmp_path, tools, kvbm)
    assert time.monotonic() - begin < 25 * LIMIT_S, "waited for something"


def test_there_are_many_and_no_two_say_the_same():
    made = [[line for line, _ in steps_of(stored_entries(file)[name])] for file, name in CASES]
    contents = [[said for _, said in steps_of(stored_entries(file)[name])[:-1]] for file, name in CASES]
    assert len({str(one) for one in zip(made, contents, strict=True)}) == len(CASES) >= 60
    assert len({name for _, name in CASES}) == len(CASES), "a name stands in two files"


def used_s() -> float:
    """Processor time of this process and of those that it waited for: another's load does not count."""
    return time.process_time() + children_s()


def child_processes() -> set[str]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {child for task in tasks for child in task.read_text().split()}
