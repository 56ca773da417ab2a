"""`kvbm serve` in front of the real embedded engine: it serves, stops, and leaves nothing behind, whoever is killed."""

import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from terminal import kvbm, kvbm_here
from test_serve import serving as serving_profile
from test_serve import started
from waiting import eventually, is_gone

from kvbm.engines.launch_plan import ADMIN_HEADER
from kvbm_cli.system.http_client import request

pytest.importorskip("torch")

PROFILE = """\
engine:
  model: synthetic:tiny
  arguments: {num_blocks: 64, max_model_len: 512}
tiers: {host: {capacity: 64MiB}}
server: {port: auto}
"""
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def home(tmp_path):
    (tmp_path / "tiny.yaml").write_text(PROFILE)
    return tmp_path


@contextmanager
def serving(home: Path, *overrides: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A healthy `kvbm serve` and its URL."""
    options = [f"--set={override}" for override in overrides]
    with (
        (home / "stderr").open("w") as stderr,
        serving_profile(home, *options, profile="./tiny.yaml", stderr=stderr) as program,
    ):
        assert program.url, (home / "stderr").read_text()
        yield program, program.url


def descendants(program: subprocess.Popen[Any]) -> list[psutil.Process]:
    return psutil.Process(program.pid).children(recursive=True)


def ask(url: str, prompt: str) -> dict[str, object]:
    body = {"model": "synthetic:tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_engine_serves_and_sigterm_ends_it_with_zero(home):
    with serving(home) as (program, url):
        prompt = "once upon a time " * 12
        first, second = ask(url, prompt), ask(url, prompt)
        assert first["choices"] == second["choices"]
        metrics = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
        assert "kvbm_offload_blocks_d2h" in metrics
        children = descendants(program)
        assert program.code_after(signal.SIGTERM) == 0
    assert all(is_gone(child.pid) for child in children)


@pytest.mark.parametrize("worker_process", ["false", pytest.param("true", marks=pytest.mark.soak)])
def test_killed_parent_leaves_no_process_and_no_memory(home, worker_process):
    """The short form of one with a worker process is the killed launcher of test_kill_rounds.py."""
    with serving(home, f"engine.arguments.worker_process={worker_process}") as (program, url):
        ask(url, "hello " * 30)
        children = descendants(program)
        assert len(children) >= (3 if worker_process == "true" else 2)
        mapped = {Path(region.path) for child in children for region in child.memory_maps()}
        program.kill()
        eventually(lambda: all(is_gone(child.pid) for child in children))
    assert not [path for path in mapped if path.parent == SHARED_MEMORY and path.exists()]


def test_parent_killed_while_the_engine_loads_leaves_no_process(home):
    with started(home, profile="./tiny.yaml") as program:
        eventually(lambda: len(descendants(program)) == 2)
        children = descendants(program)
        program.kill()
        eventually(lambda: all(is_gone(child.pid) for child in children))


@pytest.mark.soak
def test_too_little_memory_is_an_error_that_says_how_much_there_is(home):
    """By the engine itself, where `--force` has started it all the same."""
    too_much = ("--set", "tiers.host.capacity=900TB", "--force")
    outcome = kvbm("serve", "-p", "./tiny.yaml", *too_much, home=home, timeout_s=120)
    assert outcome.exit_code == 1
    assert outcome.stdout == ""
    assert "the engine exited before it was healthy, with exit code 1" in outcome.stderr
    assert "899,999," in outcome.stderr or "818" in outcome.stderr, outcome.stderr


def test_model_that_is_too_long_for_the_pool_is_an_error_of_the_profile(home):
    outcome = kvbm_here("serve", "-p", "./tiny.yaml", "--set", "engine.arguments.max_model_len=999999", home=home)
    assert outcome.exit_code == 2
    assert "max_model_len" in outcome.stderr


def test_token_of_a_run_empties_the_cache_and_only_its_user_reads_it(home):
    with serving(home) as (_, url):
        file = home / ".local/state/kvbm/runs/tiny-1/admin-token"
        assert file.stat().st_mode & 0o777 == 0o600
        token = file.read_text()
        for headers, status in (({}, 403), ({ADMIN_HEADER: token}, 200)):
            assert request("POST", f"{url}/reset_prefix_cache", headers=headers, timeout_s=10).status == status
        facts = (file.parent / "run.json").read_text() + (file.parent / "profile.yaml").read_text()
        assert token not in facts
        assert all(token not in " ".join(process.cmdline()) for process in descendants_of_run(home))


def descendants_of_run(home: Path) -> list[psutil.Process]:
    facts = json.loads((home / ".local/state/kvbm/runs/tiny-1/run.json").read_text())
    return [psutil.Process(one["pid"]) for one in facts["processes"].values()]
