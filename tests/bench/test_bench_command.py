"""`kvbm bench` as its user meets it: exit code, stdout, files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from bench_rig import (
    COMPUTED_TOKEN_MS,
    PATIENT,
    SLOW_G2_TOKEN_MS,
    SMALL_G1_BLOCKS,
    STEADY_WORKLOAD,
    WORKLOAD,
    MockEngines,
)
from kvbm_cli.bench.output_directory import OutputDirectory
from kvbm_cli.profile.workload import Schedule

from kvbm.config.launch_plan import LaunchPlan
from kvbm.errors import EngineError, ProfileError, UsageError
from kvbm_cli.bench import command
from kvbm_cli.bench.arms import ProfileEngines, with_reset, with_room
from kvbm_cli.bench.comparison import Comparison
from kvbm_cli.profile.resolve import resolve

RESOLVED = resolve("demo")
MOCK = Path(__file__).with_name("mock_engine.py")


def measure(tmp_path, engines, *, other=None, as_json=True, limits=PATIENT, workload=WORKLOAD) -> int:
    return command.measure(
        RESOLVED, workload, other=other, output=tmp_path / "run", as_json=as_json, engines=engines, limits=limits
    )


def summary_of(tmp_path):
    return json.loads((tmp_path / "run" / "summary.json").read_text())


@pytest.mark.parametrize(
    ("changes", "verdict", "exit_code"),
    [
        ({}, "faster", 0),
        ({"g2_token_ms": SLOW_G2_TOKEN_MS}, "slower", 10),
        ({"g2_blocks": 0}, "invalid", 11),
        ({"faults": {4: "wrong"}}, "wrong", 12),
    ],
)
def test_exit_code_and_json_say_the_verdict(tmp_path, capsys, changes, verdict, exit_code):
    engines = MockEngines.steady().changed("kvbm", **changes)
    assert measure(tmp_path, engines, workload=STEADY_WORKLOAD) == exit_code
    printed = json.loads(capsys.readouterr().out)
    assert printed == summary_of(tmp_path)
    assert printed["verdict"] == verdict
    assert printed["outputs_equal"] is (verdict != "wrong")
    assert printed["arms"]["kvbm"]["ttft_ms"]["p50"] > 0
    assert set(printed["arms"]["kvbm"]["prompt_tokens"]) == {"g1", "g2", "computed"}
    assert printed["machine"]["cpu_count"] >= 1
    assert printed["versions"]["kvbm-cli"]
    assert printed["profile"]["name"] == "demo"


def test_a_gain_below_the_margin_is_the_same_and_ends_with_0(tmp_path, capsys):
    from kvbm_cli.bench.verdicts.verdict import VerdictLimits

    generous = VerdictLimits(**{**{name: getattr(PATIENT, name) for name in PATIENT.__slots__}, "margin": 1000.0})
    assert measure(tmp_path, MockEngines(), limits=generous) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "same"


def test_the_page_fits_80_columns_and_says_verdict_load_and_where_the_files_are(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    measure(tmp_path, MockEngines.steady(), as_json=False, workload=STEADY_WORKLOAD)
    page = capsys.readouterr().out
    lines = page.splitlines()
    assert max(len(line) for line in lines if "every request" not in line) <= 80
    text = " ".join(page.split())
    assert "faster: from turn 2 on, the first token comes" in text
    assert "arms: interleaved, all engines at the same time, launches 0.25 s apart" in text
    assert "geometric mean over pairs" in text
    assert "over the users of this run, which does not cover differences between runs" in text
    assert "baseline load: busy" in text
    assert "output tokens per s" not in text
    assert "in its queue" in text
    assert "that of the floor" in text
    assert str(tmp_path / "run") in page
    for word in ("baseline", "kvbm", "floor", "turn 1", "turn 2", "computed", "failed"):
        assert word in page


def test_two_profiles_are_compared_under_their_names(tmp_path, capsys):
    small = resolve("demo", ["tiers.host.capacity=64MiB"])
    engines = MockEngines.steady().of_profiles("demo", "demo-2", {"g2_token_ms": SLOW_G2_TOKEN_MS})
    assert measure(tmp_path, engines, other=small, workload=STEADY_WORKLOAD) == 0
    summary = json.loads(capsys.readouterr().out)
    assert engines.started == ["recording", "demo-2", "demo", "floor"]
    assert summary["compared"] == {"measured": "demo", "reference": "demo-2"}
    assert summary["profile_differences"] == {"tiers.host.capacity": ["256MiB", "64MiB"]}
    assert "times faster with demo than with demo-2" in summary["explanation"]
    assert summary["arms"]["demo-2"]["prompt_tokens"]["g2"] > 0
    assert summary["share_of_possible_gain"] is None
    tiers = {arm: about["tiers"]["G2"]["bytes"] for arm, about in summary["compared_profiles"].items()}
    assert tiers["demo"] > tiers["demo-2"] > 0


def test_the_page_of_two_profiles_names_them_their_tiers_and_what_differs(tmp_path, capsys):
    measure(tmp_path, MockEngines().of_profiles("demo", "demo-disk"), other=resolve("demo-disk"), as_json=False)
    page = capsys.readouterr().out
    assert max(len(line) for line in page.splitlines() if "every request" not in line) <= 80
    text = " ".join(page.split())
    assert "demo: profile demo; G1 8,960, G2 32,768 tokens" in text
    assert "demo-disk: profile demo-disk; G1 8,960, G2 16,384, G3 131,072 tokens" in text
    assert "they differ in tiers.host.capacity, tiers.disk.capacity" in text
    assert "demo-disk load: busy" in text
    assert "TTFT of demo is" in text or "TTFT of demo equals that of" in text
    assert "possible gain" not in text


def test_an_invalid_run_says_nothing_of_a_gain(tmp_path, capsys):
    in_turn = WORKLOAD.model_copy(update={"schedule": Schedule(interval_s=0.12)})
    assert measure(tmp_path, MockEngines().changed("kvbm", g2_blocks=0), as_json=False, workload=in_turn) == 11
    page = capsys.readouterr().out
    assert "invalid: the result cannot be used" in page
    assert "arms: in turn, one engine after the other" in page
    assert "gain" not in page
    assert "floor (" not in page


def test_progress_goes_to_stderr(tmp_path, capsys):
    measure(tmp_path, MockEngines())
    shown = capsys.readouterr().err
    assert "recording: 6 answers without kvbm" in shown
    assert "baseline, kvbm, floor: 18 requests" in shown
    assert " left)" in shown


def test_an_output_directory_in_use_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    engines = MockEngines()
    with pytest.raises(UsageError, match="is not empty"):
        measure(tmp_path, engines)
    assert engines.started == []


def test_an_interrupted_run_is_marked_as_a_part(tmp_path, capsys):
    class Interrupting(MockEngines):
        def __call__(self, arm):
            if arm == "kvbm":
                raise KeyboardInterrupt
            return super().__call__(arm)

    in_turn = WORKLOAD.model_copy(update={"schedule": Schedule(interval_s=0.1)})
    assert measure(tmp_path, Interrupting(), workload=in_turn) == 130
    assert capsys.readouterr().out == ""
    summary = summary_of(tmp_path)
    assert (summary["complete"], summary["verdict"], summary["reasons"]) == (False, "invalid", ["interrupted"])
    assert len((tmp_path / "run" / "requests.jsonl").read_text().splitlines()) == WORKLOAD.request_count


def test_an_engine_that_refuses_the_recording_marks_the_run_and_is_an_error(tmp_path):
    with pytest.raises(EngineError, match="HTTP 400"):
        measure(tmp_path, MockEngines().changed("recording", faults={0: "http_400"}))
    assert summary_of(tmp_path)["complete"] is False


@pytest.mark.parametrize(
    ("compare", "message"),
    [
        ("basline", "--compare takes `baseline` or a profile: no profile is named `basline`"),
        ("vllm-cpu-demo", "`demo` and `vllm-cpu-demo` cannot be compared: `engine.kind` is `embedded` and `vllm`"),
        ("vllm-pd-cpu-demo", "`vllm-pd-cpu-demo` starts several engines"),
    ],
)
def test_what_cannot_be_compared_is_refused(compare, message):
    with pytest.raises(UsageError, match=message):
        command.bench("demo", [], compare=compare, workload=None, output=None, as_json=False)


def profile_file(tmp_path, text):
    path = tmp_path / "other.yaml"
    path.write_text("extends: demo\n" + text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine: {model: 'synthetic:small'}", "`engine.model` is `synthetic:tiny` and `synthetic:small`"),
        ("engine: {arguments: {served_model_name: mine}}", "`engine.arguments.served_model_name` is `synthetic:tiny`"),
    ],
)
def test_engines_that_cannot_answer_the_same_requests_are_refused(tmp_path, text, message):
    with pytest.raises(UsageError, match=message):
        command.bench("demo", [], compare=profile_file(tmp_path, text), workload=None, output=None, as_json=False)


def test_a_profile_to_compare_that_is_wrong_is_shown_with_its_line(tmp_path):
    wrong = profile_file(tmp_path, "server: {prt: 1}")
    with pytest.raises(ProfileError, match=r"unknown key `server\.prt`"):
        command.bench("demo", [], compare=wrong, workload=None, output=None, as_json=False)


def test_the_floor_has_room_for_the_working_set_and_its_prefix_cache_on():
    tight = resolve("demo", ["engine.arguments.num_blocks=100", "engine.arguments.prefix_caching=false"]).profile
    roomy = with_room(tight, WORKLOAD)
    arguments = roomy.engine.arguments
    assert arguments.num_blocks * arguments.block_size > 1.2 * WORKLOAD.working_set_tokens
    assert arguments.prefix_caching
    assert roomy.engine.model == tight.engine.model
    assert tight.engine.arguments.num_blocks == 100


def test_only_arms_of_vllm_get_its_mode_for_developers_which_can_reset():
    plan = LaunchPlan(("vllm",), {"A": "1"}, "", "", "m")
    assert with_reset(plan, resolve("vllm-cpu-demo").profile).environment == {"A": "1", "VLLM_SERVER_DEV_MODE": "1"}
    assert with_reset(plan, resolve("demo").profile) == plan


def test_an_engine_like_vllm_is_measured(tmp_path, capsys):
    engines = MockEngines()
    like_vllm = {arm: replace(options, is_like_vllm=True) for arm, options in engines.options.items()}
    assert measure(tmp_path, MockEngines(**like_vllm)) == 0
    kvbm = json.loads(capsys.readouterr().out)["arms"]["kvbm"]
    assert kvbm["prompt_tokens"]["g2"] > 0
    assert kvbm["turns"][1]["prompt_tokens"]["g2"] is None


def test_several_engines_behind_a_proxy_are_not_compared():
    with pytest.raises(UsageError, match="starts several engines"):
        command.bench("vllm-pd-cpu-demo", [], compare="baseline", workload=None, output=None, as_json=False)


@pytest.fixture
def mock_processes(monkeypatch):
    """Every engine of a profile is `mock_engine.py` in a process of its own."""

    def plan(profile, *, connector, port):
        options = {
            "g1_blocks": SMALL_G1_BLOCKS if profile.engine.arguments.num_blocks == SMALL_G1_BLOCKS else 10_000,
            "g2_blocks": 10_000 if connector else 0,
            "computed_token_ms": COMPUTED_TOKEN_MS,
        }
        base_url = f"http://127.0.0.1:{port}"
        argv = (sys.executable, str(MOCK), "--port", str(port), "--options", json.dumps(options))
        return LaunchPlan(argv, {}, base_url, f"{base_url}/health", "mock")

    monkeypatch.setattr("kvbm.embedded.launch.plan", plan)


def test_arms_are_processes_of_their_own_which_end_with_the_arm(tmp_path, mock_processes):
    profile = resolve("demo", [f"engine.arguments.num_blocks={SMALL_G1_BLOCKS}"]).profile
    directory = OutputDirectory.create(tmp_path / "run")
    directory.close()
    engines = ProfileEngines(profile, WORKLOAD, directory)
    with engines("kvbm") as engine:
        assert not engine.has_ended()
        assert engine.startup_s > 0
        assert engine.model == "mock"
    assert engine.has_ended()
    assert (tmp_path / "run" / "kvbm" / "engine.log").exists()


def test_both_profiles_run_with_the_block_manager_and_a_free_metrics_port(tmp_path, monkeypatch, mock_processes):
    from kvbm.embedded import launch

    planned, plan = [], launch.plan

    def keep(profile, *, connector, port):
        planned.append((profile.engine.arguments.num_blocks, connector, profile.metrics.port))
        return plan(profile, connector=connector, port=port)

    monkeypatch.setattr("kvbm.embedded.launch.plan", keep)
    directory = OutputDirectory.create(tmp_path / "run")
    directory.close()
    one, another = (resolve("demo", [f"engine.arguments.num_blocks={count}"]).profile for count in (60, 80))
    comparison = Comparison.of_profiles("one", "another", {})
    engines = ProfileEngines(one, WORKLOAD, directory, comparison=comparison, reference=another)
    for arm in ("recording", *comparison.arms):
        with engines(arm):
            pass
    room = planned[0][0]
    assert room > 80
    assert planned == [(room, False, 6880), (80, True, 0), (60, True, 6880), (room, False, 6880)]


def test_the_whole_command_with_processes(tmp_path, capsys, mock_processes):
    workload = tmp_path / "small.yaml"
    workload.write_text(yaml.safe_dump(WORKLOAD.model_dump()))
    code = command.bench(
        "demo",
        [f"engine.arguments.num_blocks={SMALL_G1_BLOCKS}"],
        compare="baseline",
        workload=str(workload),
        output=tmp_path / "run",
        as_json=True,
    )
    summary = json.loads(capsys.readouterr().out)
    assert code in (0, 11)  # 11 only if this machine made the client late
    assert summary["outputs_equal"] is True
    assert summary["transfers"]["proven"] is True
    assert summary["profile"]["engine"]["arguments"]["num_blocks"] == SMALL_G1_BLOCKS


INTERRUPTED_PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, {tests!r})
from bench_rig import WORKLOAD
from kvbm.config.launch_plan import LaunchPlan
from kvbm_cli.bench import command
from kvbm_cli.profile.workload import Schedule
from kvbm_cli.profile.resolve import resolve
import kvbm.embedded.launch
def plan(profile, *, connector, port):
    url = f"http://127.0.0.1:{{port}}"
    return LaunchPlan((sys.executable, {mock!r}, "--port", str(port)), {{}}, url, url + "/health", "mock")
kvbm.embedded.launch.plan = plan
slow = WORKLOAD.model_copy(update={{"schedule": Schedule(interval_s=30.0)}})
sys.exit(command.measure(resolve("demo"), slow, output=Path({output!r}), as_json=False))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_engine_and_leaves_a_marked_run(tmp_path, number):
    program = INTERRUPTED_PROGRAM.format(tests=str(MOCK.parent), mock=str(MOCK), output=str(tmp_path / "run"))
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("baseline: 6 requests"):
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait() == 130
    assert "marked as such" in rest
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    assert summary_of(tmp_path)["complete"] is False


def test_importing_the_command_is_light():
    program = "import sys, kvbm_cli.bench.command; print(*sorted({'torch', 'aiohttp', 'rich'} & set(sys.modules)))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert shown.stdout.strip() == ""
