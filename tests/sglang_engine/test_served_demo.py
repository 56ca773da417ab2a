"""The profile `sglang-cpu-demo` with `kvbm serve` and the commands for a running server, as in its guide.

`nox -s sglang` runs it.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib import metadata

import pytest
import yaml
from kvbm_serve import PROGRAM, started
from sglang_server import PAGE, REST_S, free_port

from kvbm_cli.serve.reported_sizes import ReportedSizes

try:
    metadata.version("sglang")
except metadata.PackageNotFoundError:
    pytest.skip("requires SGLang: `nox -s sglang`", allow_module_level=True)

PROMPT = [random.Random("demo").randrange(10, 4000) for _ in range(700)]
HIT = len(PROMPT) // PAGE * PAGE
STOP_S = 120

pytestmark = pytest.mark.timeout(1500)


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=240) as answer:
        return answer.read()


def ask(url):
    """Return the text, and the tokens that came from the storage."""
    sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = json.loads(post(f"{url}/generate", {"input_ids": PROMPT, "sampling_params": sampling}))
    details = answer["meta_info"].get("cached_tokens_details") or {}
    return answer["text"], sum(details.get(name, 0) for name in ("device", "host")), details.get("storage", 0)


def flush(url):
    """Empty device and host memory. SGLang refuses that while something runs."""
    end_s = time.monotonic() + REST_S
    while True:
        try:
            return post(f"{url}/flush_cache", {})
        except urllib.error.HTTPError:
            assert time.monotonic() < end_s, "SGLang has no rest"
            time.sleep(0.2)


def until_stored(url):
    """Ask with empty device and host memory until the storage has all full pages."""
    end_s = time.monotonic() + REST_S
    while True:
        assert time.monotonic() < end_s, "the pages are not stored"
        time.sleep(1)
        flush(url)
        text, _, stored = ask(url)
        if stored == HIT:
            return text


@pytest.fixture
def home(tmp_path):
    """A directory with the demo as `mine.yaml`, on free ports and a disk of its own."""
    profile = {
        "extends": "sglang-cpu-demo",
        "server": {"port": free_port()},
        "metrics": {"serve": True, "port": free_port()},
        "tiers": {"disk": {"directory": str(tmp_path / "disk")}},
        "engine": {"python": sys.executable},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(profile))
    return tmp_path


def environment(home):
    return {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(home), "XDG_STATE_HOME": str(home / "state")}


def test_the_same_prompt_after_a_restart_comes_from_disk(home):
    answers = []
    for _ in range(2):
        with started(home, environment(home)) as (program, url):
            answers.append(ask(url))
            again = until_stored(url)
            shown = of_top(home)
            program.terminate()
            assert program.wait(STOP_S) == 0, (home / "stderr").read_text()[-3000:]
        assert again == answers[0][0]
    assert answers[0][1:] == (0, 0), "the first start knows the prompt"
    assert answers[1] == (answers[0][0], 0, HIT)
    assert shown["requests"] == {"running": 0, "waiting": 0}
    assert {"device", "host", "disk", "computed"} == shown["prompt_tokens_per_s"].keys()


def test_commands_show_clear_and_stop_the_running_server(home):
    with started(home, environment(home)) as (program, url):
        text = ask(url)[0]
        until_stored(url)
        (row,) = json.loads(ran(home, "status", "--json").stdout)
        assert (row["run"], row["state"], row["url"]) == ("mine-1", "healthy", url)
        assert ReportedSizes.of(ran(home, "logs").stdout) == sizes(home)
        assert "the engine reports sizes" not in (home / "stderr").read_text()
        shown = ran(home, "cache", "ls", "mine").stdout
        assert "model vllm-25m, blocks of 64 tokens" in shown
        assert re.search(r"G3 has \d{2} of 953 blocks", shown), shown
        assert "0 damaged" in ran(home, "cache", "verify", "-p", "./mine.yaml").stdout
        refused = ran(home, "cache", "clear", "-p", "./mine.yaml", "--yes", code=1)
        assert "is in use by process" in refused.stderr
        ran(home, "cache", "clear", "mine", "--yes")
        flush(url)
        assert ask(url) == (text, 0, 0), "the pages are still there"
        ran(home, "stop", "mine")
        program.wait(STOP_S)  # `kvbm stop` kills a launcher that lingers on a busy machine


def sizes(home):
    """What `kvbm size` computes for this profile."""
    found = json.loads(ran(home, "size", "-p", "./mine.yaml", "--json").stdout)
    return ReportedSizes(found["block"]["bytes"], found["tiers"]["G2"]["blocks"], found["tiers"]["G1"]["tokens"])


def ran(home, *words, code=0):
    done = subprocess.run([*PROGRAM, *words], cwd=home, env=environment(home), capture_output=True, text=True)
    assert done.returncode == code, (words, done.stdout, done.stderr)
    return done


def of_top(home):
    (engine,) = json.loads(ran(home, "top", "--json").stdout)["engines"]
    return engine


def doctor(home, *options):
    command = [*PROGRAM, "doctor", "--quick", "--json", "--profile", "./mine.yaml", *options]
    done = subprocess.run(command, cwd=home, env=environment(home), capture_output=True, text=True)
    checks = json.loads(done.stdout)["checks"]
    return done.returncode, {one["name"]: one for one in checks if one["state"] == "failure"}


@pytest.mark.parametrize(
    ("setting", "check"),
    [
        ("engine.arguments.hicache_size=100000", "SGLang's memory"),
        ("engine.arguments.hicache_mem_layout=page_first_kv_split", "arguments"),
        ("engine.python=/usr/bin/python3", "version"),
        ("tiers.disk.capacity=900TB", "free space"),
    ],
)
def test_doctor_finds_a_trap(home, setting, check):
    assert doctor(home) == (0, {})
    code, found = doctor(home, "--set", setting)
    assert code != 0
    assert list(found) == [check]
