"""`kvbm serve` with a disk is killed at random moments under load, again and again on one directory.

After each kill the next engine answers like one without cache, with hits from disk, and at the end every block is read
and verified. `pytest -m soak` does more rounds; with KVBM_WRITE_RESULTS=1 the results are written to
bench/results/<machine>-disk-engine-kills.json.
"""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from kvbm_engine import assert_same, prompt, running

PROGRAM = (sys.executable, "-c", "from kvbm_cli.app import main; main()")
RESULTS = Path(__file__).parents[2] / "bench" / "results"
WRITE_RESULTS = "KVBM_WRITE_RESULTS"
LENGTHS = [60, 120, 200, 260, 90, 150]
ANSWER_TOKENS = 8
START_LIMIT_S = 120.0

PROFILE = """\
engine:
  model: synthetic:tiny
  arguments: {{num_blocks: 40, max_model_len: 512, max_num_batched_tokens: 128}}
tiers:
  host: {{blocks: 30}}
  disk: {{blocks: 80, directory: {directory}}}
offload: {{to_disk: {to_disk}}}
onboard: {{policy: always}}
server: {{port: auto}}
"""


@contextmanager
def serving(home):
    """The URL of a `kvbm serve`, and the program; whatever is left of it is killed at the end."""
    environment = {**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1"}
    with (
        (home / "stderr").open("a") as stderr,
        subprocess.Popen(
            [*PROGRAM, "serve", "-p", "./mine.yaml"],
            cwd=home, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True,
        ) as program,
    ):  # fmt: skip
        try:
            url = program.stdout.readline().strip()
            assert url, (home / "stderr").read_text()[-3000:]
            yield url, program
        finally:
            kill(program)


def kill(program):
    """All of its processes at once."""
    with suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(program.pid).children(recursive=True), psutil.Process(program.pid)]:
            with suppress(psutil.NoSuchProcess):
                os.kill(process.pid, signal.SIGKILL)


def ask(url, tokens):
    """Tokens with their log-probabilities."""
    body = {
        "model": "synthetic:tiny", "prompt": tokens, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
        "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        choice = json.load(answer)["choices"][0]
    return list(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True))


def metric(url, name):
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def load(url, users, seed):
    """Clients that ask on and on until the server is gone."""

    def talk(user):
        chosen = random.Random(f"{seed}/{user}")
        with suppress(OSError, ValueError):  # the end of the server cuts an answer anywhere
            while True:
                ask(url, prompt(chosen.randrange(40), chosen.choice(LENGTHS), shared=48))

    return [users.submit(talk, user) for user in range(3)]


@pytest.fixture(scope="module")
def truth():
    """Of an engine without cache."""
    with running() as engine:
        return [
            engine.ask(prompt(seed, length, shared=48), ANSWER_TOKENS).said() for seed, length in enumerate(LENGTHS)
        ]


def killed_and_verified(home, truth, rounds, *, to_disk):
    """What was found: per round, blocks that came from disk."""
    (home / "mine.yaml").write_text(PROFILE.format(directory=home / "disk", to_disk=to_disk))
    chosen, found = random.Random(rounds), []
    with ThreadPoolExecutor(3) as users:
        for round_ in range(rounds + 1):
            with serving(home) as (url, program):
                answers = [ask(url, prompt(seed, length, shared=48)) for seed, length in enumerate(LENGTHS)]
                assert_same(answers, truth)
                found.append(metric(url, "kvbm_onboard_blocks_d2d"))
                assert metric(url, "kvbm_disk_checksum_failures") == 0
                if round_ == rounds:
                    break
                talking = load(url, users, round_)
                time.sleep(chosen.uniform(0.5, 2.5))
                kill(program)
                for talk in talking:
                    talk.result()
    verified = subprocess.run(
        [*PROGRAM, "cache", "verify", "--dir", str(home / "disk"), "--json"], capture_output=True, text=True, timeout=60
    )
    (verdict,) = json.loads(verified.stdout)
    assert (verified.returncode, verdict["bad"], verdict["problem"]) == (0, 0, None), verified.stdout
    assert verdict["good"] > 0
    assert sum(found[1:]) > 0, "nothing was ever found on disk"
    return {"rounds": rounds, "to_disk": to_disk, "blocks_from_disk": found, "verified_blocks": verdict["good"]}


def test_a_serving_engine_killed_under_load_leaves_no_wrong_byte(tmp_path, truth):
    """One kill; test_crashes.py in tests/disk has twenty of the disk tier alone."""
    killed_and_verified(tmp_path, truth, 1, to_disk="always")


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("to_disk", ["always", "frequency", "on_evict"])
def test_ten_kills_of_a_serving_engine(tmp_path, truth, to_disk):
    start = time.monotonic()
    row = killed_and_verified(tmp_path, truth, 10, to_disk=to_disk)
    if os.environ.get(WRITE_RESULTS):
        machine = f"{os.cpu_count()}cpu-{platform.machine().replace('_', '-')}-no-gpu"
        path = RESULTS / f"{machine}-disk-engine-kills.json"
        whole = json.loads(path.read_text()) if path.exists() else {"rows": {}}
        whole |= {
            "command": f"{WRITE_RESULTS}=1 pytest tests/embedded/test_disk_kills.py -m soak",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine,
            "versions": {name: version(name) for name in ("torch", "kvbm-cli")},
        }
        whole["rows"][to_disk] = {**row, "wrong_outputs": 0, "elapsed_s": round(time.monotonic() - start, 1)}
        path.write_text(json.dumps(whole, indent=1) + "\n")
