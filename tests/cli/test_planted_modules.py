"""No interpreter that kvbm starts imports modules from the working directory, which may hold files of others."""

import ast
import contextlib
import json
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from doctor_machine import PATIENT
from terminal import HANGS_S, ROOT, environment
from test_pd_engines import plan_of

from kvbm.child.parent import start_child
from kvbm.engines.python_probe import _probe  # each starts another interpreter
from kvbm.engines.table import _make_elsewhere  # each starts another interpreter
from kvbm.engines.trtllm.versions import PACKAGE as TRTLLM
from kvbm.engines.vllm.versions import PACKAGE as VLLM
from kvbm.errors import EnvironmentProblem
from kvbm.tiers.disk.io.select import PROGRAM, _in_a_process  # each starts another interpreter
from kvbm_cli.bench.metrics.sampler import Sampler
from kvbm_cli.engine.process import EngineProcess
from kvbm_cli.system.answering import answers

# Python imports some of them in each of the programs below, before or after the first line of the program.
NAMES = ("socket", "random", "json", "struct", "signal", "select", "pickle", "numpy", "torch", "ctypes", "kvbm")
# Every call in the packages that starts a process, by module. A new one belongs here, and in a test below.
STARTS = {
    "kvbm.child.start": 2,  # one replaces its own program
    "kvbm_cli.engine.process": 1,
    "kvbm_cli.serve.background": 1,
}
STARTERS = {"run", "Popen", "call", "check_call", "check_output", "get_context", "Process", "fork", "forkpty"}
MODULES = {"subprocess", "multiprocessing", "os", "asyncio", "pty"}
# Their environment has PYTHONSAFEPATH=1: they are arguments of EngineProcess.
ENGINE_PLANS = {"kvbm.engines.embedded.launch", "kvbm.engines.vllm.launch", "kvbm_cli.disaggregated.plan"}


@pytest.fixture
def planted(tmp_path):
    """A working directory with modules that record who imports them. None may be imported."""
    directory, marker = tmp_path / "cwd", tmp_path / "imported"
    directory.mkdir()
    for name in NAMES:
        line = f"import sys\nopen({str(marker)!r}, 'a').write({name!r} + f' by {{sys.orig_argv}}\\n')\n"
        (directory / f"{name}.py").write_text(line)
    yield directory
    assert not marker.exists(), marker.read_text()


def source_modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((*(ROOT / "kvbm").rglob("*.py"), *(ROOT / "kvbm_cli").rglob("*.py"))):
        yield ".".join(path.relative_to(ROOT).with_suffix("").parts), ast.parse(path.read_text())


def is_start(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    name, owner = node.func.attr, node.func.value
    is_listed = name in STARTERS or name.startswith(("exec", "spawn", "posix_spawn", "create_subprocess"))
    return is_listed and ast.unparse(node.func) != "asyncio.run" and isinstance(owner, ast.Name) and owner.id in MODULES


def test_every_start_of_a_process_is_known_here():
    found = Counter(module for module, tree in source_modules() for node in ast.walk(tree) if is_start(node))
    assert dict(found) == STARTS


def test_our_own_programs_run_without_the_working_directory():
    """Every command line that begins with our interpreter continues with a flag that excludes the directory."""
    checked = 0
    for module, tree in source_modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.List | ast.Tuple) or not node.elts or module in ENGINE_PLANS:
                continue
            if ast.unparse(node.elts[0]) == "sys.executable":
                assert ast.unparse(node.elts[1]) in ("'-P'", "'-I'"), f"{module}:{node.lineno}"
                checked += 1
    assert checked >= 6


def kvbm(
    *arguments: str, cwd: Path, home: Path, program: str = "from kvbm_cli.app import main; main()"
) -> subprocess.CompletedProcess[str]:
    """The installed command: a script in a directory that is first in Python's path."""
    script = home / "kvbm"
    script.write_text(f"#!{sys.executable}\n{program}\n")
    script.chmod(0o700)
    env = {**environment(home), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [script, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL
    )


PROFILE = """\
engine: {model: synthetic:tiny, arguments: {num_blocks: 64, max_model_len: 512, worker_process: true}}
tiers: {host: {capacity: 16MiB}, disk: {capacity: 16MiB, directory: %s}}
server: {port: auto}
"""


@pytest.fixture
def profile(tmp_path):
    (tmp_path / "tiny.yaml").write_text(PROFILE % (tmp_path / "cache"))
    return tmp_path / "tiny.yaml"


@pytest.mark.slow
def test_engine_with_worker_process_and_disk_imports_nothing_from_the_working_directory(planted, profile, tmp_path):
    pytest.importorskip("torch")
    ready = kvbm("serve", "-p", str(profile), "--detach", "--json", cwd=planted, home=tmp_path)
    assert ready.returncode == 0, ready.stderr
    try:
        url = json.loads(ready.stdout)["url"]
        body = json.dumps({"prompt": "once upon a time " * 8, "max_tokens": 4}).encode()
        with urllib.request.urlopen(f"{url}/v1/completions", body, timeout=60) as answer:
            assert answer.status == 200
        assert kvbm("status", cwd=planted, home=tmp_path).returncode == 0
    finally:
        assert kvbm("stop", "--all", cwd=planted, home=tmp_path).returncode == 0


@pytest.mark.slow
def test_doctor_imports_nothing_from_the_working_directory(planted, profile, tmp_path):
    found = kvbm("doctor", "-p", str(profile), "--quick", "--json", cwd=planted, home=tmp_path, program=PATIENT[2])
    checks = {(check["group"], check["name"]): check["state"] for check in json.loads(found.stdout)["checks"]}
    assert checks["self test", "through the disk"] == "ok"


@pytest.mark.parametrize("module", ["kvbm.tiers.disk.service.server", "kvbm.tiers.shared.service.server"])
def test_child_of_the_leader_imports_nothing_from_the_working_directory(planted, module):
    with contextlib.chdir(planted):
        child, channel = start_child(module, "a child")
    channel.close()  # the child ends once its modules are imported
    assert child.wait(HANGS_S) == 0


def test_trial_of_disk_io_imports_nothing_from_the_working_directory(planted):
    with contextlib.chdir(planted):
        _in_a_process((*PROGRAM, str(planted), "no-such-queue"), 30)


def test_probe_of_the_interpreter_imports_nothing_from_the_working_directory(planted):
    with contextlib.chdir(planted):
        for package in (VLLM, TRTLLM):
            _probe(sys.executable, package)


def test_model_is_generated_without_the_working_directory(planted, tmp_path):
    with contextlib.chdir(planted), pytest.raises(EnvironmentProblem, match="presets: "):
        _make_elsewhere("unknown", tmp_path / "models" / "unknown", sys.executable)


def test_proxy_imports_nothing_from_the_working_directory(planted, tmp_path):
    plan = plan_of("", "").proxy
    with contextlib.chdir(planted), EngineProcess.start(plan, log_path=tmp_path / "log") as proxy:
        proxy.wait_healthy(30)


def test_look_at_a_file_system_imports_nothing_from_the_working_directory(planted):
    with contextlib.chdir(planted):
        assert answers(planted)


def test_sampler_of_server_metrics_imports_nothing_from_the_working_directory(planted, tmp_path):
    with contextlib.chdir(planted), Sampler.start(tmp_path / "samples", base_url="http://127.0.0.1:1"):
        pass
