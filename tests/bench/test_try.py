"""`kvbm try`: what it reads from a command, what it says before a start, its result, and how it ends early."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from bench_rig import (
    PATIENT,
    SMALL_G1_BLOCKS,
    MockEngines,
    planned,  # noqa: F401
    without_sampler,  # noqa: F401
    workload_file,
)
from gpu_engine import DEVICE_BLOCKS
from mock_engine import BLOCK
from model_configs import QWEN3, write_model

from kvbm.engines.python_probe import _probe_once  # its answers are kept as long as the process lives
from kvbm.engines.table import kind_of
from kvbm.errors import EngineError, EnvironmentProblem, ProfileError, UsageError
from kvbm.host.machine_memory import HostMemory, Room
from kvbm_cli.bench.arms import comparison_of
from kvbm_cli.bench.cells import Cell, parse_pressures
from kvbm_cli.bench.command import BenchRequest, setup_of
from kvbm_cli.bench.setup import AssumedSpeed, CellOutline, caveats_of
from kvbm_cli.doctor.command import quick_checks
from kvbm_cli.profile import auto_capacity
from kvbm_cli.profile.import_command import import_words, notes_of
from kvbm_cli.profile.machine_check import failure, warning
from kvbm_cli.profile.resolve import resolve
from kvbm_cli.terminal.crash_report import save_report
from kvbm_cli.try_ import command, forecast
from kvbm_cli.try_.command import TryRequest, try_engine

FAKE_VLLM = Path(__file__).parents[1] / "cli" / "fake_vllm.py"
GPU_ENGINE = Path(__file__).with_name("gpu_engine.py")
SECRET = "not-for-files"
LMCACHE = json.dumps({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"})
SMALL = {**QWEN3, "hidden_size": 256, "num_hidden_layers": 2}
OF_A_GPU = json.dumps({"distribution": "vllm", "version": "0.32.0", "script": None, "has_kvbm": True})


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(command, "quick_checks", lambda resolved: [])  # which take seconds; two tests have others
    monkeypatch.setattr(auto_capacity, "THIS_MACHINE", Memory())
    _probe_once.cache_clear()
    return tmp_path / "state" / "kvbm" / "tries"


class Memory(HostMemory):
    available_bytes = 64 << 30

    def room(self, node=None):
        return Room(self.available_bytes, "a test")


def small(tmp_path, **changes):
    """A trial of the demo whose requests take two seconds."""
    overrides = [f"engine.arguments.num_blocks={SMALL_G1_BLOCKS}"]
    given = {"words": ["demo"], "overrides": overrides, "workload": workload_file(tmp_path), "is_confirmed": True}
    return TryRequest(**{**given, **changes})


def of_vllm(tmp_path, *flags, program=("vllm", "serve")):
    write_model(tmp_path / "model", SMALL)
    words = [*program, str(tmp_path / "model"), *flags]
    return TryRequest(words=words, overrides=[f"engine.python={FAKE_VLLM}"])


def only(state):
    (directory,) = state.iterdir()
    return directory, json.loads((directory / "try.json").read_text())


@pytest.mark.usefixtures("planned")
def test_a_profile_ends_with_verdict_report_and_command(tmp_path, capsys, state):
    code = try_engine(small(tmp_path), limits=PATIENT)
    shown = capsys.readouterr()
    directory, content = only(state)
    summary = json.loads((directory / "summary.json").read_text())
    assert code in (0, 10, 13)  # 13: the machine was busy, and there is one run of each
    assert "3 engine starts, about " in shown.err
    *_, verdict, report, profile, keep, again, times = shown.out.splitlines()
    assert verdict == f"{summary['verdict']}: {summary['explanation']}"
    assert report == f"report: {directory}/report.html"
    assert profile == "profile: demo"
    assert keep.startswith("serve with it: kvbm serve --profile demo --set engine.arguments.num_blocks=")
    assert again.startswith("measure again, with other options: kvbm bench --profile demo --set engine.arguments.")
    assert again.endswith(" --pairs 1 --no-floor")
    assert times.startswith("took ")
    assert content["took_s"] > 0
    assert content["announced_s"] > 0
    assert (directory / "report.html").exists()


@pytest.mark.usefixtures("without_sampler")
def test_json_is_the_summary_with_the_trial(tmp_path, capsys, state):
    try_engine(small(tmp_path, as_json=True), engines=MockEngines(), limits=PATIENT)
    printed = json.loads(capsys.readouterr().out)
    directory, content = only(state)
    assert printed["try"] == {**content, "directory": str(directory)}
    assert printed["verdict"] == json.loads((directory / "summary.json").read_text())["verdict"]


class Ending(MockEngines):
    """Raises when the arm kvbm is to start."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def __call__(self, arm, log, room):
        if arm == "kvbm":
            raise self.error
        return super().__call__(arm, log, room)


@pytest.mark.usefixtures("without_sampler")
def test_an_interrupted_trial_continues(tmp_path, capsys, state):
    assert try_engine(small(tmp_path), engines=Ending(KeyboardInterrupt()), limits=PATIENT) == 130
    directory, content = only(state)
    assert f"kvbm try --resume {directory}\n" in capsys.readouterr().err
    engines = MockEngines()
    assert try_engine(TryRequest(resume=directory), engines=engines, limits=PATIENT) in (0, 10, 13)
    assert "recording" not in engines.started  # it has ended
    assert only(state)[1] == {**content, "took_s": only(state)[1]["took_s"]}


@pytest.mark.usefixtures("without_sampler")
def test_a_failure_says_what_was_learned(tmp_path, capsys, state):
    with pytest.raises(EngineError, match="no such device"):
        try_engine(small(tmp_path), engines=Ending(EngineError("no such device")), limits=PATIENT)
    shown = capsys.readouterr().err
    assert "before the failure, an engine without kvbm started and answered" in shown
    assert f"the logs are in {only(state)[0]}" in shown


def test_a_command_becomes_a_profile_without_its_secrets(tmp_path, capsys, state, monkeypatch):
    flags = ("--host", "0.0.0.0", "--port", "8123", "--api-key", SECRET, "--kv-transfer-config", LMCACHE)
    with pytest.raises(UsageError, match="cannot ask"):
        try_engine(of_vllm(tmp_path, "--max-model-len", "4096", *flags))
    directory, content = only(state)
    profile = yaml.safe_load((directory / "tried.yaml").read_text())
    assert profile["engine"]["model"] == str(tmp_path / "model")
    assert profile["engine"]["arguments"] == {"max_model_len": 4096}
    assert profile["server"] == {"port": 8123, "host": "0.0.0.0"}
    assert profile["tiers"]["host"]["capacity"] == "auto"
    shown = capsys.readouterr().err
    assert "the engines of the trial listen on 127.0.0.1 and free ports, not on 0.0.0.0:8123" in shown
    assert "not carried over: `--api-key`: a secret is not copied" in shown
    assert "not carried over: `--kv-transfer-config with LMCacheConnectorV1`: kvbm replaces" in shown
    assert "on a CPU, G1 is set with and without kvbm: engine.arguments.num_gpu_blocks_override=" in shown
    python, blocks, size = content["overrides"]
    assert content["serve"].endswith(f"/tried.yaml --set {python} --set {blocks} --set {size}")  # what is measured
    for path in directory.rglob("*"):
        assert path.is_dir() or SECRET not in path.read_text()
    assert SECRET not in shown


def test_a_relative_model_is_that_of_the_current_directory(tmp_path, state, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = of_vllm(tmp_path)
    with pytest.raises(UsageError, match="cannot ask"):
        try_engine(TryRequest(words=["vllm", "serve", "model"], overrides=request.overrides))
    assert f"model: {tmp_path}/model" in (only(state)[0] / "tried.yaml").read_text()


def test_a_script_is_read_and_not_run(tmp_path, state):
    write_model(tmp_path / "model", SMALL)
    script = tmp_path / "start.sh"
    script.write_text(f"touch {tmp_path}/was-run\nexec vllm serve {tmp_path}/model --max-model-len 2048\n")
    script.chmod(0o755)
    with pytest.raises(UsageError, match="cannot ask"):
        try_engine(TryRequest(words=[str(script)], overrides=[f"engine.python={FAKE_VLLM}"]))
    assert "max_model_len: 2048" in (only(state)[0] / "tried.yaml").read_text()
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ((), UsageError, "requires the command"),
        (("curl", "http://host"), ProfileError, "starts no engine"),
        (("no-such-profile",), ProfileError, "no profile is named"),
    ],
)
def test_what_starts_no_engine_is_refused_before_anything_is_written(words, error, message, state):
    with pytest.raises(error, match=message):
        try_engine(TryRequest(words=words, is_confirmed=True))
    assert not any(path.is_file() for path in state.rglob("*"))


def test_options_after_a_file_are_named(tmp_path, kvbm):
    (script := tmp_path / "start.sh").write_text("vllm serve x\n")
    code, _, err = kvbm("try", script, "--yes")
    assert code == 2
    assert f"error: `--yes` after `{script}`: options of `kvbm try` come first" in err


def test_a_missing_model_is_named(kvbm):
    code, _, err = kvbm("try", "--yes", "--", "vllm", "serve", "/no/model")
    assert code == 2
    assert "there is no directory `/no/model`" in err


@pytest.mark.parametrize(
    ("check", "error"),
    [
        (failure("version", "vLLM 0.20 is not supported", "install another"), "version: vLLM 0.20 is not supported"),
        (warning("huge pages", "disabled"), "cannot ask"),
    ],
)
def test_what_doctor_refuses_is_refused(check, error, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "quick_checks", lambda resolved: [check])
    with pytest.raises((EnvironmentProblem, UsageError), match=error):
        try_engine(of_vllm(tmp_path))
    assert ("warning: huge pages: disabled" in capsys.readouterr().err) == (check.name == "huge pages")


def test_the_checks_of_doctor_name_a_missing_engine(tmp_path):
    write_model(tmp_path / "model", SMALL)
    start = import_words(["vllm", "serve", str(tmp_path / "model")])
    (tmp_path / "tried.yaml").write_text(f"{start.text}tiers: {{host: {{capacity: 1GiB}}}}\n")
    resolved = resolve(str(tmp_path / "tried.yaml"), overrides=["engine.python=/bin/false"])
    found = {check.name: check for check in quick_checks(resolved)}
    assert found["version"].state == "failure"


def test_a_state_directory_that_cannot_be_written(tmp_path, kvbm, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    code, _, err = kvbm("try", "--yes", "demo")
    assert code == 1
    assert f"error: cannot use `{tmp_path}/file" in err


@pytest.mark.parametrize(("gib", "is_enough"), [(2, False), (64, True)])
def test_host_memory_is_what_the_machine_can_spare(gib, is_enough, tmp_path, monkeypatch, state, capsys):
    monkeypatch.setattr(Memory, "available_bytes", gib << 30)
    request = of_vllm(tmp_path)
    with pytest.raises(UsageError, match="cannot ask"):
        try_engine(replace(request, overrides=[*request.overrides, "offload.to_host=always"]))
    directory, _ = only(state)
    profile = yaml.safe_load((directory / "tried.yaml").read_text())
    assert profile["tiers"]["host"] == {"capacity": "auto"}
    assert json.loads((directory / "requests.yaml").read_text())["schedule"]["arms"] == "in_turn"
    shown = capsys.readouterr().err
    assert re.search(rf"kvbm uses [\d.]+ [GM]iB of host memory: .*{gib}\.0 GiB available \(a test", shown)
    assert ("so it adds little" in shown) is not is_enough


def test_below_an_engine_with_host_memory_of_its_own_kvbm_sizes_a_disk(tmp_path, state, monkeypatch, capsys):
    held = {"distribution": "sglang", "version": "0.5.23", "script": None, "has_kvbm": True}
    monkeypatch.setenv("FAKE_VLLM", json.dumps(held))
    monkeypatch.setattr(command, "gpus", lambda visible: ())
    write_model(tmp_path / "model", SMALL)
    words = ["python", "-m", "sglang.launch_server", "--model-path", str(tmp_path / "model"), "--tp", "2"]
    with pytest.raises(UsageError, match="cannot ask"):
        try_engine(TryRequest(words=words, overrides=[f"engine.python={FAKE_VLLM}"]))
    directory, _ = only(state)
    assert yaml.safe_load((directory / "tried.yaml").read_text())["tiers"] == {"disk": {"capacity": "auto"}}
    assert re.search(r"kvbm uses [\d.]+ .iB of disk: ", capsys.readouterr().err)


def nvidia_smi(tmp_path, monkeypatch, used_mib):
    (program := tmp_path / "bin" / "nvidia-smi").parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '0, 81559, {used_mib}, 9.0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_VLLM", OF_A_GPU)


def test_a_gpu_in_use_is_reported_before_anything_is_started(tmp_path, monkeypatch):
    nvidia_smi(tmp_path, monkeypatch, used_mib=70_000)
    with pytest.raises(EnvironmentProblem, match=r"GPU 0 is in use: 11\.3 GiB of 79\.6 GiB are free"):
        try_engine(of_vllm(tmp_path, "--gpu-memory-utilization", ".85"))


def test_a_free_gpu_is_measured_in_turn_with_pressure(tmp_path, monkeypatch, state, capsys):
    nvidia_smi(tmp_path, monkeypatch, used_mib=500)
    monkeypatch.setattr(Memory, "available_bytes", (2 << 30) + (256 << 20))  # bench looks at this machine, too
    with pytest.raises(UsageError, match="cannot ask"):
        try_engine(of_vllm(tmp_path))
    directory, content = only(state)
    assert 0 < parse_pressures(content["pressure"]).values[0] < 1  # G1 has millions of tokens of this model
    assert json.loads((directory / "requests.yaml").read_text())["schedule"]["arms"] == "in_turn"
    shown = capsys.readouterr().err
    assert "num_gpu_blocks_override" not in shown
    assert "note: too short to exceed G1: in 30 min, the working set is " in shown


@pytest.mark.usefixtures("without_sampler")
def test_an_engine_that_knows_its_g1_only_after_its_start(tmp_path, monkeypatch, state, capsys):
    """It takes the whole device, as on a GPU, and refuses a G1 that is too small or too large."""
    monkeypatch.setenv("GPU_STARTS", str(tmp_path / "starts"))
    monkeypatch.setattr(forecast, "_cpu_rate", lambda: 1e11)  # the forecast is the same on a slow or busy machine
    monkeypatch.setattr(forecast, "load_average", lambda: 0.0)
    flags = ("--max-model-len", "1024", "--block-size", str(BLOCK))
    overrides = [f"engine.python={GPU_ENGINE}", "metrics.port=0"]
    words = ["vllm", "serve", "someone/a-model-elsewhere", *flags]
    code = try_engine(TryRequest(words=words, overrides=overrides, minutes=60, is_confirmed=True), limits=PATIENT)
    assert code in (0, 10, 13)
    directory, content = only(state)
    summary = json.loads((directory / "summary.json").read_text())
    (cell,) = summary["cells"]
    assert cell["g1_tokens"] == DEVICE_BLOCKS * BLOCK
    assert cell["pressure"] >= forecast.LEAST_PRESSURE
    assert cell["working_set_tokens"] == pytest.approx(cell["pressure"] * DEVICE_BLOCKS * BLOCK, rel=0.15)
    assert (summary["complete"], list(cell["arms"])) == (True, ["baseline", "kvbm"])
    starts = [json.loads(line) for line in (tmp_path / "starts").read_text().splitlines()]
    assert len(starts) <= content["starts"]
    assert {blocks for _, blocks in starts} == {None}  # its own G1, always
    assert {has_kvbm for has_kvbm, _ in starts} == {False, True}
    shown = capsys.readouterr()
    assert "the plan assumes that G1 holds 400,000 tokens; the first engine reports it" in shown.err
    assert f"serve with it: kvbm serve --profile {directory}/tried.yaml" in shown.out


def test_of_old_trials_only_the_profile_remains(tmp_path, state):
    for number in range(command.KEPT_TRIALS + 1):
        (old := state / f"2026-01-01T00-00-{number:02}-x").mkdir(parents=True)
        (old / "runs").mkdir()
        for name in ("tried.yaml", "try.json", "runs/engine.log"):
            (old / name).touch()
    with pytest.raises(UsageError, match="cannot ask"):
        try_engine(of_vllm(tmp_path))
    first, second, third, *_ = sorted(state.iterdir())
    assert [sorted(path.name for path in one.iterdir()) for one in (first, second)] == [["tried.yaml"]] * 2
    assert sorted(path.name for path in third.iterdir()) == ["runs", "tried.yaml", "try.json"]
    with pytest.raises(UsageError, match="which only the newest 20 trials keep") as caught:
        try_engine(TryRequest(resume=first))
    assert caught.value.hint == f"`kvbm try {first}/tried.yaml` measures its profile again"


def test_a_container_is_not_started():
    start = import_words(["docker", "run", "vllm/vllm-openai:latest", "--model", "Qwen/Qwen3-8B"])
    assert notes_of(start)[0].startswith("the engine that is installed here is started, not the image")
    assert "model: Qwen/Qwen3-8B" in start.text


def test_a_trace_replaces_the_conversations(tmp_path, state):
    trace = Path(__file__).with_name("data") / "mooncake-conversation-head.jsonl.gz"
    with pytest.raises(UsageError, match="cannot ask"):
        try_engine(TryRequest(words=["demo"], trace=trace, minutes=2))
    directory, content = only(state)
    assert json.loads((directory / "requests.yaml").read_text())["file"] == str(trace)
    assert content["pressure"] == "none"
    assert content["duration_s"] >= 60


SPEED = AssumedSpeed(10.0, 1000.0, 160.0)


@pytest.mark.parametrize(
    ("minutes", "pairs", "pressures"),
    [(2, 1, (0.2, 0.9)), (7, 1, (1.2, 2)), (20, 2, "auto"), (None, 1, (1.2, 2))],
)
def test_more_minutes_allow_more_pressure_and_runs(minutes, pairs, pressures):
    found = forecast.forecast(SPEED, 33_000, 4096, minutes=minutes)
    total_s = forecast.total_s(
        SPEED, 1 + 2 * found.pairs, 2 * found.pairs * CellOutline.of(Cell("try", found.workload), SPEED).duration_s
    )
    assert total_s <= 66 * (minutes or forecast.USUAL_MINUTES)
    assert found.pairs == pairs
    (pressure,) = parse_pressures(found.pressure).values
    if pressures == "auto":
        assert found.pressure == pressures
    else:
        assert pressures[0] <= pressure <= pressures[1]
    assert (found.note is None) == (pressure >= forecast.LEAST_PRESSURE)


@pytest.mark.parametrize("g1_tokens", [9_000, 400_000, 4_000_000])
@pytest.mark.parametrize("minutes", [1, 3, None])
def test_a_note_names_the_minutes_that_exceed_g1(minutes, g1_tokens):
    found = forecast.forecast(SPEED, g1_tokens, 4096, minutes=minutes)
    if found.note is None:
        assert parse_pressures(found.pressure).values[0] >= forecast.LEAST_PRESSURE
        return
    enough = int(re.search(r"`--minutes (\d+)`", found.note)[1])
    assert enough > (minutes or forecast.MOST_MINUTES)
    assert forecast.forecast(SPEED, g1_tokens, 4096, minutes=enough).note is None


def test_without_minutes_a_trial_takes_longer_only_to_exceed_g1():
    found = forecast.forecast(SPEED, 150_000, 4096, minutes=None)
    assert (found.pressure, found.note) == ("auto:1.2", None)
    assert forecast.forecast(SPEED, 150_000, 4096, minutes=10).note is not None


@pytest.mark.parametrize(("capacity", "interleaved"), [("auto", False), ("1GiB", True)])
def test_arms_that_take_the_memory_that_is_free_run_in_turn(capacity, interleaved):
    setup, _, _ = setup_of(BenchRequest(profiles=("demo",), overrides=(f"tiers.host.capacity={capacity}",)))
    (cell,) = setup.cells
    assert cell.schedule.arms == "interleaved"
    assert setup.interleaved(cell) is interleaved
    found = [one for one in caveats_of(setup) if "takes most of the memory or disk space that is free" in one]
    assert len(found) == (not interleaved)


def test_an_arm_by_command_line_keeps_its_own_cache(capsys):
    variables = "LMCACHE_MAX_LOCAL_CPU_SIZE=60"
    command = (
        f"lmcache={variables} vllm serve Qwen/Qwen3-8B --max-model-len 32768 --port 9 --kv-transfer-config '{LMCACHE}'"
    )
    comparison = comparison_of(("vllm",), (), (command,))
    (arm,) = comparison.references
    assert comparison.measured.name == "kvbm"
    assert (arm.name, arm.kind, arm.has_kvbm) == ("lmcache", "baseline", False)
    assert arm.resolved is not None
    plan = kind_of(arm.resolved.profile).launch_plan(arm.resolved.profile, connector=False, port=1)
    assert json.loads(plan.argv[plan.argv.index("--kv-transfer-config") + 1]) == json.loads(LMCACHE)
    assert plan.environment["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "60"
    assert capsys.readouterr().err == ""


def test_what_an_arm_by_command_line_lacks_is_listed(capsys):
    variables = "LMCACHE_CONFIG_FILE=a.yaml LMCACHE_MAX_LOCAL_CPU_SIZE=$SIZE"
    engine = f"vllm serve Qwen/Qwen3-8B --config x.yaml --api-key {SECRET} --kv-transfer-config '{LMCACHE}'"
    comparison_of(("vllm",), (), (f"lmcache={variables} {engine}",))
    found = capsys.readouterr().err
    assert re.findall("note: arm lmcache: not carried over: `([^` ]+)", found) == [
        *("--config", "--api-key", "LMCACHE_MAX_LOCAL_CPU_SIZE"),
    ]
    assert SECRET not in found


def test_a_variable_without_a_value_in_the_command_of_an_arm_is_listed(capsys):
    command = "x=vllm serve Qwen/Qwen3-8B --seed $SEED --max-model-len ${LENGTH} --served-model-name '$NAME'"
    with pytest.raises(UsageError, match=r"`engine.arguments.served_model_name` is"):
        comparison_of(("vllm",), (), (command,))
    comparison_of(("vllm",), (), (command.rpartition(" --served")[0],))
    found = capsys.readouterr().err
    assert re.findall("note: arm x: not carried over: `([^`]+)`", found) == [
        "--seed $SEED",
        "--max-model-len ${LENGTH}",
    ]


def test_what_the_command_of_a_refused_arm_does_not_set_is_named(capsys):
    with pytest.raises(ProfileError, match=r"`engine.model` is missing"):
        comparison_of(("vllm",), (), ("x=vllm serve $MODEL",))
    assert capsys.readouterr().err == "note: arm x: not carried over: `--model $MODEL`: the command does not set it\n"
    with pytest.raises(ProfileError, match=r"`engine.model` is missing"):
        comparison_of(("vllm",), (), ("x=A=1\nvllm serve $MODEL",))
    assert "`--model $MODEL` (line 2): the command does not set it" in capsys.readouterr().err


def test_an_arm_by_command_line_may_write_the_connector_as_several_flags():
    flag = "--kv-transfer-config"
    command = f"x=vllm serve Qwen/Qwen3-8B {flag}.kv_connector X {flag}.kv_connector_extra_config.a=5"
    (arm,) = comparison_of(("vllm",), (), (command,)).references
    plan = kind_of(arm.resolved.profile).launch_plan(arm.resolved.profile, connector=False, port=1)
    config = json.loads(plan.argv[plan.argv.index(flag) + 1])
    assert config == {"kv_connector": "X", "kv_connector_extra_config": {"a": 5}}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("lmcache=vllm serve 'x", "cannot read the command: line 1: a quote is not closed"),
        ("vllm serve Qwen/Qwen3-8B \\", "the command ends with a backslash, and nothing follows"),
        ("vllm serve other/model", "`engine.model` is"),
        ("x=vllm serve Qwen/Qwen3-8B --kv-transfer-config {", "must be a JSON object"),
        ("echo vllm", "starts no engine"),
        ("x=vllm serve Qwen/Qwen3-8B --kv-offloading-size 40", "cannot have a cache by `--kv-offloading-size`"),
        ("bash -c 'vllm serve Qwen/Qwen3-8B --kv_offloading_backend=native'", "by `--kv_offloading_backend`"),
        ("python -m sglang.launch_server --model a --hicache-storage-backend file", "by `--hicache-storage-backend`"),
    ],
)
def test_a_wrong_arm_by_command_line_is_refused(command, message):
    with pytest.raises((UsageError, ProfileError), match=message):
        comparison_of(("vllm",), (), (command,))


def test_secrets_of_a_command_are_in_no_record_and_no_crash_report():
    compared = f"a=vllm serve x --api-key {SECRET}"
    assert SECRET not in " ".join(BenchRequest(compare=[compared]).words())
    report = save_report(ValueError("x"), ["try", "--", "vllm", "serve", "x", "--api-key", SECRET])
    assert report is not None
    assert SECRET not in report.read_text()
