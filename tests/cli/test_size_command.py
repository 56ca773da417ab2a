"""Sizes that engines report, and blocks of a CPU; what `kvbm size` prints is in `snapshots/transcripts/size.txt`."""

import json
import re
import signal

import pytest
from model_configs import write_model
from terminal import FAKE_ENGINE, assert_transcript, kvbm_here, stored_entries
from test_serve import serving

from kvbm.engines.vllm.kind import VllmKind
from kvbm.identity import machine
from kvbm_cli.serve.reported_sizes import ReportedSizes, difference_text


def test_an_interval_with_which_an_installed_vllm_does_not_start_is_a_mistake(tmp_path, monkeypatch):
    monkeypatch.setattr("kvbm_cli.profile.state_check.installation_of", lambda profile: object())
    setting = "engine.arguments.prefix_cache_retention_interval=300"
    outcome = kvbm_here("profile", "check", "vllm-hybrid-cpu-demo", "--set", setting, home=tmp_path)
    assert outcome.exit_code == 2
    assert outcome.stderr.startswith(f"error: `{setting.replace('=', ': ')}` is not a multiple of the block size of ")
    assert f"\n  --set {setting}\n" in outcome.stderr


def test_a_command_judges_the_settings_of_a_profile_once(tmp_path, monkeypatch):
    asked, findings = [], VllmKind.findings
    monkeypatch.setattr(VllmKind, "findings", lambda *given: asked.append(given) or findings(*given))
    outcome = kvbm_here("profile", "check", "vllm-hybrid-cpu-demo", home=tmp_path)
    assert (outcome.exit_code, len(asked)) == (0, 1)


def test_the_check_of_a_profile_says_how_much_a_sequence_with_states_needs(tmp_path):
    settings = ("tiers.host.capacity=840MB", "engine.arguments.block_size=544")
    given = [word for one in ("engine.model=Qwen/Qwen3-Next-80B-A3B-Instruct", *settings) for word in ("--set", one)]
    outcome = kvbm_here("profile", "check", "vllm", *given, home=tmp_path)
    assert (outcome.exit_code, "so no prompt of this length has a hit" in outcome.stderr) == (0, True)
    assert "; set `tiers.host.capacity: " in outcome.stderr


def test_a_kind_that_is_set_decides_whose_rules_apply(tmp_path):
    outcome = kvbm_here("size", "synthetic:tiny", "--set", "engine.kind=embedded", home=tmp_path)
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert "a block is 16 tokens" in outcome.stdout


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("", {"CPU", "DISK"}),
        ("  host: {managed_by: engine}\n", {"DISK"}),
        ("  host: null\n", {"DISK"}),
        ("  disk: null\n", {"CPU"}),
    ],
)
def test_only_the_tiers_of_kvbm_are_named_as_variables(settings, named, tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "base.yaml").write_text(
        "engine: {kind: vllm, model: ./model, arguments: {num_gpu_blocks_override: 40}}\n"
        "tiers: {host: {capacity: 2GiB}, disk: {capacity: 8GiB}}\n"
    )
    (tmp_path / "mine.yaml").write_text(f"extends: ./base.yaml\ntiers:\n{settings or '  host: {}'}\n")
    outcome = kvbm_here("size", "-p", "mine.yaml", home=tmp_path)
    assert outcome.exit_code == 0, outcome
    assert set(re.findall(r"DYN_KVBM_(\w+)_CACHE_OVERRIDE_NUM_BLOCKS=", outcome.stdout)) == named


SERVED_PROFILE = f"""\
engine:
  kind: vllm
  model: ./model
  python: {FAKE_ENGINE.with_name("fake_vllm.py")}
  arguments: {{max_model_len: 4096, num_gpu_blocks_override: 40}}
tiers:
  host: {{capacity: 2GiB}}
server: {{port: 0}}
"""
CONNECTOR = "(Worker pid=7) INFO 11-22 [w.py:9] kvbm: rank 0 allocated {} blocks of {} bytes in host memory (2.13 GB)"
ENGINE = "(EngineCore pid=6) INFO 11-22 [k.py:1] GPU KV cache size: {} tokens"
AS_COMPUTED = "\n".join((CONNECTOR.format(113, 18_874_368), ENGINE.format("5,120")))
OTHERS = "\n".join((CONNECTOR.format(226, 9_437_184), ENGINE.format("4,992")))
DIFFERENT = (
    "warning: the engine reports sizes that differ from the computed ones: 9,437,184 bytes in a block, not 18,874,368; "
    "226 blocks in G2, not 113; 4,992 tokens in G1, not 5,120"
)


@pytest.fixture
def served_home(tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "mine.yaml").write_text(SERVED_PROFILE)
    return tmp_path


@pytest.mark.parametrize(("says", "expected"), [("", ""), (AS_COMPUTED, ""), (OTHERS, DIFFERENT)])
def test_a_difference_is_one_line(served_home, says, expected):
    with serving(served_home, "--set", f"engine.environment.FAKE_SAYS={json.dumps(says)}") as program:
        program.code_after(signal.SIGTERM)
        lines = program.stderr.read().splitlines()
    assert [line for line in lines if "the engine reports sizes" in line] == ([expected] if expected else [])


def test_the_last_engine_in_a_log_counts():
    assert ReportedSizes.of(f"{OTHERS}\n{AS_COMPUTED}") == ReportedSizes(18_874_368, 113, 5120)
    assert ReportedSizes.of("") == ReportedSizes(None, None, None)


def test_the_log_of_sglang_is_read_too():
    of_sglang = "[2026-11-28 02:30:12] max_total_num_tokens=3072, chunked_prefill_size=4096, context_len=2048"
    assert ReportedSizes.of(f"{of_sglang}\n{CONNECTOR.format(64, 4096)}") == ReportedSizes(4096, 64, 3072)


def test_the_largest_block_and_the_fewest_blocks_of_all_ranks_count():
    ranks = (CONNECTOR.format(100, 4096), CONNECTOR.format(90, 8192).replace("rank 0", "rank 1"))
    assert ReportedSizes.of("\n".join(ranks)) == ReportedSizes(8192, 90, None)


def test_unknown_sizes_are_not_compared(tmp_path):
    log = tmp_path / "log"
    log.write_text(OTHERS)
    assert difference_text(ValueError("unknown"), [log]) is None


@pytest.mark.parametrize("flag", stored_entries("cpus"))
def test_what_a_cpu_with_a_flag_decides_is_named(flag, tmp_path, monkeypatch):
    """The backend, its block, and that vLLM refuses weights of 32 bits."""
    monkeypatch.setattr(machine, "CPU_FACTS", tmp_path / "cpuinfo")
    machine.CPU_FACTS.write_text(f"processor\t: 0\nflags\t\t: fpu {flag}\n")
    assert_transcript("cpus", flag, tmp_path)
