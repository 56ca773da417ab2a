"""TensorRT-LLM in front of the command: how its interpreter is asked, and a start of a stand-in.

Plans, mistakes and what an interpreter must hold are in `snapshots/transcripts/trtllm.txt`.
"""

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fake_trtllm import installation, wrapper
from model_configs import write_model
from terminal import HANGS_S, kvbm, kvbm_here
from test_manage import status
from test_serve import RUNS, serving
from waiting import eventually, is_gone

from kvbm.engines.python_probe import _probe  # without the cache of `find`
from kvbm.engines.trtllm.versions import PACKAGE as TRTLLM
from kvbm_cli.engine.process import choose_port

PROFILE = """\
engine:
  kind: tensorrt-llm
  model: ./qwen
  python: ./bin/python
  arguments:
    max_seq_len: 4096
    cuda_graph_config: null
    kv_cache_config:
      free_gpu_memory_fraction: 0.8
tiers:
  host:
    capacity: 2GiB
server:
  port: auto
"""


@pytest.fixture
def home(tmp_path):
    """A working directory with a model, an interpreter and a profile of TensorRT-LLM."""
    write_model(tmp_path / "qwen")
    wrapper(tmp_path / "bin")
    (tmp_path / "mine.yaml").write_text(PROFILE)
    return tmp_path


def held(home: Path, **changed: object) -> dict[str, str]:
    """What the interpreter holds, as a variable."""
    return {"FAKE_TRTLLM": installation(home / "bin", **changed)}


@pytest.mark.parametrize("found", ["null", '{"has_kvbm": false}'])
def test_doctor_says_what_serve_says_of_the_interpreter(home, found):
    changed = json.loads(found)
    variables = {"FAKE_TRTLLM": found} if changed is None else held(home, **changed)
    outcome = kvbm("serve", "-p", "./mine.yaml", home=home, **variables)
    message = outcome.stderr.partition("\n\n")[0].removeprefix("error: ")
    examined = kvbm_here("doctor", "-p", "./mine.yaml", "--quick", "--json", home=home, **variables)
    (version,) = [one for one in json.loads(examined.stdout)["checks"] if one["name"] == "version"]
    assert (version["state"], version["finding"]) == ("failure", message)


def test_doctor_names_the_version_and_the_command(home):
    examined = kvbm_here("doctor", "-p", "./mine.yaml", "--quick", "--json", home=home, **held(home))
    found = {one["name"]: one for one in json.loads(examined.stdout)["checks"]}
    assert found["version"]["state"] == "ok"
    assert found["version"]["finding"].startswith("TensorRT-LLM 1.2.0 (not run; ")
    assert found["command"]["finding"] == str(home / "bin" / "trtllm-serve")


@pytest.mark.parametrize("arguments", [(), ("--baseline",)])
def test_serve_starts_it_and_stop_stops_it(home, arguments):
    with serving(home, *arguments) as program:
        eventually(lambda: status(home)[0]["state"] == "healthy")
        (run,) = status(home)
        directory = home / RUNS / str(run["run"])
        file = directory / "trtllm.yaml"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        options = yaml.safe_load(file.read_text())
        assert ("kv_connector_config" in options) == (not arguments)
        assert options["cuda_graph_config"] is None
        log = (directory / "engine.log").read_text()
        assert f"options {json.dumps(options)}" in log
        assert ('tiers {"host":{"capacity":"2GiB"' in log) == (not arguments)
        recorded = yaml.safe_load((directory / "profile.yaml").read_text())
        assert recorded["engine"]["arguments"]["cuda_graph_config"] is None
        assert (run["engine"], run["model"]) == ("tensorrt-llm", "qwen")
        assert run["versions"]["tensorrt_llm"] == "1.2.0"
        pid = int(str(run["pid"]))
        assert kvbm("stop", "mine", home=home).exit_code == 0
        assert program.wait(timeout=HANGS_S) == 0
        eventually(lambda: is_gone(pid))


def test_status_reads_the_metrics_of_the_connector(home):
    """The server of TensorRT-LLM has none of kvbm's."""
    with serving(home, "--set", "metrics.serve=true", "--set", f"metrics.port={choose_port('127.0.0.1', 0)}"):
        eventually(lambda: status(home)[0]["state"] == "healthy")
        assert status(home)[0]["blocks"] == {"host": {"free": 3, "evictable": 7}}


def test_printed_commands_start_the_same_engine(home):
    """The dry run is a script: it writes the file and starts the command."""
    text = kvbm_here("serve", "-p", "./mine.yaml", "--dry-run", "--port", "1", home=home).stdout
    script = text[text.index("cat > ") :].replace(str(home / "bin" / "trtllm-serve"), "echo")
    done = subprocess.run(["sh", "-c", script], cwd=home, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{home}/qwen --backend pytorch --host 127.0.0.1 --port 1 --extra_llm_api_options")
    assert yaml.safe_load((home / "trtllm.yaml").read_text())["max_seq_len"] == 4096


@pytest.mark.parametrize("interface", ["connectors/kv_cache_connector.py", "kv_cache_connector.py", None])
def test_interpreter_is_asked_without_importing_tensorrt_llm(tmp_path, monkeypatch, interface):
    package = tmp_path / "tensorrt_llm"
    executor = package / "_torch" / "pyexecutor"
    (executor / "connectors").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    if interface is not None:
        (executor / interface).write_text("")
    metadata = tmp_path / "tensorrt_llm-1.2.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 1.2.0\n")
    (metadata / "RECORD").write_text("tensorrt_llm/__init__.py,,\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    expected = {"distribution": "tensorrt_llm", "version": "1.2.0", "script": None, "has_kvbm": True, "rival": None}
    assert _probe(sys.executable, TRTLLM) == {**expected, "has_interface": interface is not None}
