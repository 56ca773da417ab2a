"""`kvbm serve` in front of a stand-in engine: the plan, the start, signals, exit codes, and failures in seconds."""

import json
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import psutil
import pytest
from model_configs import write_model
from terminal import FAKE_ENGINE, HANGS_S, PROGRAM, assert_snapshot, environment, filtered, kvbm, kvbm_here
from waiting import eventually, is_gone

from kvbm_cli.engine.engines import launch_plan
from kvbm_cli.profile.resolve import resolve_to_start
from kvbm_cli.serve.command import _targets

RUNS = ".local/state/kvbm/runs"
LONG_STOP = "tiers.disk={capacity: 1MiB, directory: %s/cache, drain_s: 600}"  # a run has this time more to stop
MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 256,
}


@pytest.fixture
def home(tmp_path):
    """A working directory with a model and a profile whose engine is the stand-in."""
    write_home(tmp_path)
    return tmp_path


def write_home(home: Path) -> None:
    write_model(home / "model", MODEL)
    (home / "mine.yaml").write_text(
        f"engine:\n  model: ./model\n  python: {FAKE_ENGINE}\n  arguments: {{num_blocks: 64}}\n"
        "tiers: {host: {capacity: 64MiB}}\nserver: {port: auto}\n"
    )


class Serving(subprocess.Popen[str]):
    """`kvbm serve`, healthy. `url` is its first line of stdout, the rest can be read."""

    url: str
    stdout: IO[str]
    stderr: IO[str]

    def code_after(self, number: int) -> int:
        """Its exit code after this signal."""
        self.send_signal(number)
        return self.wait(timeout=HANGS_S)


@contextmanager
def started(home: Path, *args: str, profile: str = "./mine.yaml", state: str = "", **streams: Any) -> Iterator[Serving]:
    """`kvbm serve`, killed at the end of the block. `state` is its XDG_STATE_HOME; streams are pipes unless given."""
    command = [*PROGRAM, "serve", "-p", profile, *args]
    variables = environment(home, **({"XDG_STATE_HOME": state} if state else {}))
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **streams}
    with Serving(command, cwd=home, env=variables, **streams) as program:
        try:
            yield program
        finally:
            program.kill()


@contextmanager
def serving(home: Path, *arguments: str, **options: Any) -> Iterator[Serving]:
    with started(home, *arguments, **options) as program:
        program.url = program.stdout.readline().strip()
        yield program


def test_dry_run_prints_the_plan_and_starts_nothing(home):
    command = "serve --profile ./mine.yaml --dry-run --port 8123 --set engine.environment.A=1"
    assert_snapshot("serve_dry_run", kvbm(*command.split(), home=home).text(f"kvbm {command}"))
    assert not (home / ".local").exists()


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize("command", [["serve", "--dry-run", "--profile"], ["profile", "show"]], ids=["serve", "show"])
def test_what_is_shown_of_a_profile_has_no_secret(home, command, form):
    outcome = kvbm_here(*command, "./mine.yaml", "--set", "engine.environment.HF_TOKEN=hf_abc", *form, home=home)
    assert "hf_abc" not in outcome.stdout + outcome.stderr
    assert "HF_TOKEN" in outcome.stdout


def test_dry_run_as_json_has_everything(home):
    outcome = kvbm_here("serve", "-p", "./mine.yaml", "--dry-run", "--json", home=home)
    plan = json.loads(outcome.stdout)
    assert outcome.stderr == ""
    assert plan["profile"] == {"name": "mine", "path": "mine.yaml"}
    assert plan["block"] == {"tokens": 16, "bytes": 4 * 2 * 2 * 64 * 4 * 16, "ranks": 1}
    assert plan["tiers"]["G2"] == {
        "blocks": 1024,
        "tokens": 16384,
        "sequences": None,
        "bytes": 64 * 2**20,
        "rank_bytes": 64 * 2**20,
        "is_estimate": False,
    }
    assert plan["argv"][1:3] == ["-m", "kvbm.embedded"]


def test_healthy_engine_is_announced_with_a_line_to_try(home):
    with serving(home) as program:
        assert urllib.request.urlopen(f"{program.url}/health").status == 200
        assert program.code_after(signal.SIGTERM) == 0
        text = f"----- stdout -----\n{program.url}\n{program.stdout.read()}----- stderr -----\n{program.stderr.read()}"
    text = re.sub(r"^starting .*\n", "", filtered(text), flags=re.MULTILINE)
    assert_snapshot("serve", text)


def test_ready_as_json(home):
    with serving(home, "--json") as program:
        program.code_after(signal.SIGTERM)
        ready = json.loads(program.url + program.stdout.read())
    assert ready["model"] == f"{home}/model"
    assert set(ready) == {"run", "url", "model", "log", "targets"}
    assert Path(ready["targets"]).parent == Path(ready["log"]).parent
    assert not Path(ready["targets"]).exists(), "the run has ended"


def test_an_engine_serves_if_the_file_for_prometheus_cannot_be_written(home):
    """The file is written as soon as that is possible."""
    with serving(home, "--set", "engine.environment.FAKE=obstructs") as program:
        path = home / ".local/state/kvbm/runs/mine-1/prometheus-targets.json"
        while not (line := program.stderr.readline()).startswith("warning"):
            assert line, "the program has ended"
        assert line == (
            f"warning: cannot write `{path}`: is a directory; the engine continues, but Prometheus does not find it by "
            "this file\n"
        )
        assert urllib.request.urlopen(f"{program.url}/health").status == 200
        path.rmdir()
        eventually(path.is_file)
        assert program.code_after(signal.SIGTERM) == 0
        assert not path.exists(), "the run has ended"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_reaches_the_engine_and_its_exit_code_is_ours(home, number):
    with serving(home) as program:
        assert program.code_after(number) == 0


def test_second_interrupt_kills_an_engine_that_does_not_stop(home):
    with serving(home, "--set", "engine.environment.FAKE=stubborn") as program:
        family = psutil.Process(program.pid).children()
        program.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(timeout=0.5)
        assert program.code_after(signal.SIGINT) == 128 + signal.SIGKILL
    assert all(is_gone(member.pid) for member in family)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["hang", "unhealthy", "mute"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_during_the_start_is_not_a_failed_start(home, mode, number):
    with started(home, "--set", f"engine.environment.FAKE={mode}") as program:
        eventually(lambda: any(b"loading" in log.read_bytes() for log in home.glob(f"{RUNS}/*/engine.log")))
        assert program.code_after(number) == 128 + number
        assert "error:" not in program.stderr.read()


@pytest.mark.parametrize("mode", ["busy", "keyed"])
def test_engine_is_ready_when_it_has_given_a_first_token(home, mode):
    """It answers 503 at first; it wants the key that its environment has."""
    variables = ["--set", f"engine.environment.FAKE={mode}", "--set", "engine.environment.VLLM_API_KEY=secret"]
    with serving(home, *variables) as program:
        assert program.code_after(signal.SIGTERM) == 0
        assert "refused" not in program.stderr.read()


def test_engine_that_takes_no_such_request_is_served_with_a_warning(home):
    with serving(home, "--set", "engine.environment.FAKE=refuses") as program:
        assert program.code_after(signal.SIGTERM) == 0
        warning = "warning: the engine is healthy, but a completion of one token was refused: 404: asked for"
        assert warning in program.stderr.read()


# Refusals before the start are rows of mistakes.py, and what last words tell is in test_failure_reason.py.
FAILURES = {
    "crash": ["--set", "engine.environment.FAKE=crash"],
    "dies": ["--set", "engine.environment.FAKE=dies"],
    "ends": ["--set", "engine.environment.FAKE=ends"],
    "killed": ["--set", "engine.environment.FAKE=killed"],
    "own_words": ["--set", "engine.environment.FAKE=own_words"],
    "broken_answer": ["--set", "engine.environment.FAKE=broken"],
    "hangs": ["--set", "engine.environment.FAKE=hang", "--set", "transfer.init_timeout_s=2"],
    "stays_unhealthy": ["--set", "engine.environment.FAKE=unhealthy", "--set", "transfer.init_timeout_s=2"],
    "gives_no_token": ["--set", "engine.environment.FAKE=mute", "--set", "transfer.init_timeout_s=2"],
    "no_model": ["--set", "engine.model=Qwen/Qwen3-0.6B"],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAILURES)
def test_failed_serve(home, name):
    command = f"serve --profile ./mine.yaml {' '.join(FAILURES[name])}"
    text = kvbm(*command.split(), home=home).text(f"kvbm {command}")
    assert_snapshot(f"serve_{name}", re.sub(r"^starting .*\n", "", text, flags=re.MULTILINE))


def test_log_goes_to_a_temporary_directory_where_there_is_no_home(home):
    command = ["serve", "-p", "./mine.yaml", "--set", "engine.environment.FAKE=crash"]
    outcome = kvbm(*command, home=home, XDG_STATE_HOME="/dev/null", TMPDIR=str(home))
    (log,) = home.glob("kvbm-*/runs/mine-1/engine.log")
    assert f"  {log}, last lines:" in outcome.stderr


def test_log_never_goes_into_the_profile(home):
    before = (home / "mine.yaml").read_text()
    (home / "link").symlink_to("mine.yaml")
    for name in ("mine.yaml", "link"):
        outcome = kvbm_here("serve", "-p", "./mine.yaml", "--log", name, home=home)
        assert (outcome.exit_code, outcome.stdout) == (2, "")
        assert outcome.stderr.startswith(f"error: `--log {name}` is the profile itself\n")
    assert (home / "mine.yaml").read_text() == before


@pytest.mark.parametrize(
    ("name", "expected"), [("sglang", ["127.0.0.1:6880", "127.0.0.1:8000"]), ("vllm", ["127.0.0.1:8000"])]
)
def test_prometheus_finds_the_metrics_of_an_engine_that_lacks_those_of_kvbm_at_two_addresses(name, expected):
    profile = resolve_to_start(name, overrides=["metrics.serve=true"]).profile
    plan = launch_plan(profile, connector=True, port=8000)
    assert _targets(plan, SimpleNamespace(profile=profile)) == expected
