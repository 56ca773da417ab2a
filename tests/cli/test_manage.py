"""`kvbm serve --detach`, `status`, `stop` and `logs` around the stand-in engine, as a user sees them."""

import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from recorded_runs import NOBODY, facts
from terminal import HANGS_S, PROGRAM, Outcome, assert_snapshot, environment, filtered, kvbm, kvbm_here
from test_runs import states
from test_serve import LONG_STOP, RUNS, serving, started
from test_serve import home as home  # the fixture
from waiting import eventually, is_gone

from kvbm_cli.engine.process import choose_port
from kvbm_cli.runs.run_directory import Runs
from kvbm_cli.runs.run_facts import RunState
from kvbm_cli.terminal.progress import Pace
from kvbm_cli.terminal.quantities import duration

SERVE = ("serve", "-p", "./mine.yaml", "--detach")


@pytest.fixture
def detached(home):
    """A home where `mine-1` runs in the background; nothing runs there afterwards."""
    outcome = kvbm(*SERVE, home=home)
    assert outcome.exit_code == 0, outcome.stderr
    yield home
    kvbm("stop", "--all", "--timeout", "0", home=home)


def status(home: Path, *arguments: str) -> list[dict[str, object]]:
    found = json.loads(kvbm_here("status", "--json", *arguments, home=home).stdout)
    assert isinstance(found, list)
    return found


def processes_of(home: Path) -> list[psutil.Process]:
    """The launcher of `mine-1` and all that it has started."""
    launcher = psutil.Process(int(str(status(home)[0]["pid"])))
    return [launcher, *launcher.children(recursive=True)]


def shown(outcome: Outcome, command: str) -> str:
    text = re.sub(r"^(starting|stopping) .*\n", "", outcome.text(command), flags=re.MULTILINE)
    text = re.sub(r"\b(launcher|engine|guard) \d+", r"\1 [PID]", text)
    text = re.sub(r"(healthy|ended \(\d+\)) +\d+", r"\1  [PID]", text)
    text = re.sub(r"\b\d+ s\b", "[TIME] s", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "[WHEN]", text)
    text = re.sub(r"versions .*", "versions   [VERSIONS]", text)
    return re.sub(r" {2,}", "  ", text)


def test_detached_engine_is_seen_read_and_stopped(home):
    command = "serve -p ./mine.yaml --detach"
    text = shown(kvbm(*command.split(), home=home), f"kvbm {command}")
    processes = processes_of(home)
    shows = ("status", "status mine", "logs", "logs mine-1 -n 1", "stop", "status", "status -a", "status mine-1")
    for command in (*shows, "stop"):
        text += "\n" + shown(kvbm(*command.split(), home=home), f"kvbm {command}")
    assert_snapshot("detached", text)
    assert all(is_gone(process.pid) for process in processes)


def test_detached_engine_outlives_its_terminal(detached):
    launcher, *_ = processes_of(detached)
    assert launcher.ppid() != os.getpid()
    assert os.getsid(launcher.pid) == launcher.pid
    streams = {os.readlink(f"/proc/{launcher.pid}/fd/{number}") for number in (0, 1, 2)}
    assert streams == {"/dev/null", str(detached / RUNS / "mine-1" / "kvbm.log")}
    (seen,) = status(detached)
    assert urllib.request.urlopen(f"{seen['url']}/health").status == 200


def test_json_of_a_detached_start_can_be_captured(home):
    """Nobody keeps the pipe open: whoever captures the output gets its end."""
    outcome = kvbm(*SERVE, "--json", home=home)
    ready = json.loads(outcome.stdout)
    assert ready["run"] == "mine-1"
    assert kvbm("stop", ready["run"], home=home).exit_code == 0


def test_failed_detached_start_says_what_one_in_the_foreground_says(home):
    override = ("--set", "engine.environment.FAKE=crash")
    before = kvbm("serve", "-p", "./mine.yaml", *override, home=home)
    after = kvbm(*SERVE, *override, home=home)
    assert after.exit_code == before.exit_code == 1

    def error_of(outcome: Outcome) -> str:
        return filtered(outcome.stderr[outcome.stderr.index("error:") :]).replace("mine-2", "mine-1")

    assert error_of(after) == error_of(before)
    assert status(home) == []
    assert [run["state"] for run in status(home, "--all")] == ["ended", "ended"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_of_a_detached_start_stops_it(home, number):
    with started(home, "--detach", "--set", "engine.environment.FAKE=hang") as program:
        eventually(lambda: any(b"loading" in log.read_bytes() for log in home.glob(f"{RUNS}/*/engine.log")))
        family = psutil.Process(program.pid).children(recursive=True)
        assert program.code_after(number) == 128 + number
    assert all(is_gone(process.pid) for process in family)


def test_engine_in_the_foreground_can_be_stopped_from_elsewhere(home):
    with serving(home) as program:
        assert [run["state"] for run in status(home)] == ["healthy"]
        outcome = kvbm("stop", "mine", "--json", home=home)
        assert program.wait(timeout=HANGS_S) == 0
    (stopped,) = json.loads(outcome.stdout)
    assert {**stopped, "took_s": 0} == {
        "run": "mine-1",
        "has_ended": True,
        "was_killed": False,
        "exit_code": 0,
        "took_s": 0,
    }


def test_stops_at_the_same_time_do_not_kill(home):
    """The second signal does, but nobody has asked for that."""
    with serving(home) as program:
        command = [*PROGRAM, "stop"]
        stops = [subprocess.Popen(command, cwd=home, env=environment(home), text=True, stdout=-1) for _ in range(3)]
        told = [stop.communicate(timeout=HANGS_S)[0] for stop in stops]
        assert program.wait(timeout=HANGS_S) == 0
    assert [stop.returncode for stop in stops] == [0, 0, 0]
    assert not any("killed" in text for text in told)


@pytest.mark.parametrize(("mode", "how", "code"), [("", "stopped", 0), ("stubborn", "was killed", 137)])
def test_interrupt_in_the_foreground_ends_with_what_stop_says(home, mode, how, code):
    override = ("--set", f"engine.environment.FAKE={mode}") if mode else ()
    with serving(home, *override) as program:
        for _ in range(1 + bool(mode)):
            program.send_signal(signal.SIGINT)  # a second one counts only when the first was handled
            eventually(lambda: states(home, with_ended=True) in (["stopping"], ["ended"]))
        told = program.stderr.read().splitlines()
        assert program.wait(timeout=HANGS_S) == code
    assert re.fullmatch(rf"mine-1 {how} after \d+\.\d s", told[-1])


def test_stubborn_engine_is_killed_at_the_deadline_of_the_command_line(home):
    kvbm(*SERVE, "--set", "engine.environment.FAKE=stubborn", "--set", LONG_STOP % home, home=home)
    processes = processes_of(home)
    outcome = kvbm("stop", "--timeout", "1", home=home)  # the timeout of the profile would be longer than this may take
    assert outcome.exit_code == 3
    assert re.search(r"mine-1 was killed after [1-9]\d*\.", outcome.stdout)
    assert all(is_gone(process.pid) for process in processes)


@pytest.mark.soak
def test_launcher_that_does_not_react_is_killed(home):
    kvbm(*SERVE, home=home)
    processes = processes_of(home)
    processes[0].suspend()
    program = (  # without SIGCONT the launcher stays as it is, like one that hangs
        "import kvbm_cli.runs.stop as s; s.GRACE_S = 1.0; from kvbm_cli.app import run; send = s._signal; "
        "s._signal = lambda run, number: number.name == 'SIGCONT' or send(run, number); exit(run(['stop', '-t0']))"
    )
    done = subprocess.run([PROGRAM[0], "-c", program], cwd=home, env=environment(home), capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert all(is_gone(process.pid) for process in processes)
    assert status(home) == []
    assert status(home, "--all")[0]["state"] == "dead"


@pytest.mark.soak
def test_several_engines_keep_apart(home):
    for _ in range(2):
        assert kvbm(*SERVE, home=home).exit_code == 0
    seen = status(home)
    assert [run["run"] for run in seen] == ["mine-1", "mine-2"]
    assert len({run["url"] for run in seen}) == len({run["directory"] for run in seen}) == 2
    ambiguous = kvbm("stop", home=home)
    assert (ambiguous.exit_code, ambiguous.stderr) == (
        2,
        "error: several engines are running: `mine-1`, `mine-2`\n\nhint: name one of them, or use `kvbm stop --all`\n",
    )
    assert kvbm("stop", "mine-2", home=home).exit_code == 0
    assert [run["run"] for run in status(home)] == ["mine-1"]
    assert kvbm("stop", "--all", home=home).exit_code == 0
    assert status(home) == []


@pytest.mark.soak
def test_engines_that_start_at_the_same_time_get_ports_and_names_of_their_own(home):
    command = [*PROGRAM, *SERVE]
    starts = [subprocess.Popen(command, cwd=home, env=environment(home), stderr=subprocess.DEVNULL) for _ in range(4)]
    assert [start.wait(timeout=HANGS_S) for start in starts] == [0] * 4
    seen = status(home)
    assert len({run["url"] for run in seen}) == len({run["run"] for run in seen}) == 4
    assert kvbm("stop", "--all", home=home).exit_code == 0


@pytest.mark.soak
def test_engine_that_hangs_is_told_from_a_healthy_one(detached):
    engine = next(one for one in processes_of(detached) if "kvbm.engines.embedded" in one.cmdline())
    engine.suspend()
    assert status(detached)[0]["state"] == "no answer"
    engine.resume()
    assert status(detached)[0]["state"] == "healthy"


def test_logs_are_followed_until_the_engine_ends(detached):
    command = [*PROGRAM, "logs", "-f", "-n", "1"]
    log = detached / RUNS / "mine-1" / "engine.log"
    with subprocess.Popen(command, cwd=detached, env=environment(detached), stdout=subprocess.PIPE) as following:
        assert following.stdout.readline() == b"loading the weights\n"
        with log.open("ab") as file:
            file.write(b"one more\nand a half")
        assert following.stdout.readline() == b"one more\n"
        kvbm("stop", home=detached)
        assert following.stdout.read() == b"and a half\n"
        assert following.wait(timeout=HANGS_S) == 0


def test_runs_of_another_boot_are_ended_and_never_signalled(home):
    """As after a restart of the machine: our own process id stands in the file of a run of before."""
    (home / RUNS).mkdir(parents=True)
    runs = Runs(home / ".local/state/kvbm")
    run = runs.create("old")
    run.begin(facts("old-1", replace(NOBODY, pid=os.getpid()), state=RunState.HEALTHY))
    run.close()
    assert status(home) == []
    assert [seen["state"] for seen in status(home, "--all")] == ["dead"]
    told = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "[WHEN]", kvbm("status", home=home).stderr)
    assert told == (
        "no engine is running; `kvbm status --all` also lists ended runs (1)\n"
        "old-1 died, last seen at [WHEN]: its launcher was killed or the machine was restarted; `kvbm logs old-1`\n"
    )
    outcome = kvbm("stop", "old-1", home=home)
    assert (outcome.exit_code, outcome.stderr) == (0, "old-1 has already ended\n")


def test_an_engine_that_ended_by_itself_is_told_of_until_its_profile_runs_again(detached):
    port = status(detached)[0]["url"][-5:]
    before = kvbm(*f"doctor -p ./mine.yaml --quick --set server.port={port}".split(), home=detached)
    assert "is used by `mine-1` (healthy)" in before.stdout
    os.kill(status(detached)[0]["processes"]["engine"], signal.SIGKILL)
    eventually(lambda: not status(detached))
    told = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "[WHEN]", kvbm("status", home=detached).stderr)
    assert told.splitlines()[1].startswith("mine-1 ended at [WHEN]: the engine exited unexpectedly")
    assert told.endswith("; `kvbm logs mine-1`\n")
    assert kvbm(*SERVE, home=detached).exit_code == 0
    kvbm("stop", home=detached)
    assert (
        kvbm("status", home=detached).stderr == "no engine is running; `kvbm status --all` also lists ended runs (2)\n"
    )


@pytest.mark.soak
def test_profile_of_a_run_serves_again(detached):
    again = kvbm_here("profile", "show", f"{RUNS}/mine-1/profile.yaml", "--json", home=detached)
    before = kvbm_here("profile", "show", "./mine.yaml", "--json", home=detached)

    def values(outcome: Outcome) -> dict[str, object]:
        return {key: entry["value"] for key, entry in json.loads(outcome.stdout).items()}

    assert values(again) == values(before)


def test_pasted_command_of_a_dry_run_starts_the_same_engine(home):
    variables = {"DYN_KVBM_CPU_CACHE_GB": "0.05", "ABC": "1"}
    plan = kvbm("serve", "-p", "./mine.yaml", "--dry-run", "--port", "0", home=home, **variables).stdout
    port = choose_port("127.0.0.1", 0)
    line = plan.strip().splitlines()[-1].replace("--port 0", f"--port {port}")
    surroundings = {**environment(home), **variables}
    with subprocess.Popen(["sh", "-c", f"exec {line}"], cwd=home, env=surroundings, stdout=subprocess.PIPE) as pasted:
        try:
            assert pasted.stdout.readline() == b"loading the weights\n"
            by_hand = _seen_by(psutil.Process(pasted.pid))
        finally:
            pasted.kill()
    assert kvbm(*SERVE, home=home, **variables).exit_code == 0
    by_us = _seen_by(next(one for one in processes_of(home) if "kvbm.engines.embedded" in one.cmdline()))
    kvbm("stop", home=home)
    assert by_hand == by_us


OWN = ("TMPDIR", "PWD", "_", "KVBM_ADMIN_TOKEN", "KVBM_CONTROL_DIRECTORY")  # each process has its own


def _seen_by(engine: psutil.Process) -> tuple[list[str], dict[str, str], str]:
    words = [re.sub(r'("port":|^)\d{5}', r"\1[PORT]", word) for word in engine.cmdline()]
    variables = {name: value for name, value in engine.environ().items() if name not in OWN}
    return words, variables, engine.cwd()


def test_port_of_a_starting_engine_is_taken_before_it_listens(home):
    port = choose_port("127.0.0.1", 0)
    with started(home, "--detach", "--port", str(port), "--set", "engine.environment.FAKE=hang") as program:
        eventually(lambda: [run["state"] for run in status(home)] == ["starting"])
        outcome = kvbm("serve", "-p", "./mine.yaml", "--port", str(port), home=home)
        assert outcome.stderr == (
            f"error: port {port} is used by `mine-1` (starting)\n\n"
            "hint: choose a free port with `--port 0`, or stop the other engine with `kvbm stop mine-1`\n"
        )
        kvbm("stop", "--all", home=home)
        assert program.wait(timeout=HANGS_S) == 128 + signal.SIGTERM


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (2e5, "2 d")])
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_counted_progress_has_a_rate_and_the_time_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("kvbm_cli.terminal.progress.time.monotonic", lambda: now[0])
    pace = Pace()
    assert pace.of("loading the weights") == "loading the weights"
    assert pace.of("taking space, 0 of 1000 MiB") == "taking space, 0 of 1000 MiB"
    now[0] += 2
    assert pace.of("taking space, 200 of 1000 MiB") == "taking space, 200 of 1000 MiB, 100 MiB/s, 8 s left"
    assert pace.of("taking memory, 200 of 1000 MiB") == "taking memory, 200 of 1000 MiB"
