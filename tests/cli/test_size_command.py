"""Sizes that engines report, and blocks of a CPU; what `kvbm size` prints is in `snapshots/transcripts/size.txt`."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from model_configs import write_model
from terminal import FAKE_ENGINE, Outcome, kvbm_here
from test_serve import serving

from kvbm.identity import machine
from kvbm_cli.serve.reported_sizes import ReportedSizes, difference_text


def test_an_interval_with_which_an_installed_vllm_does_not_start_is_a_mistake(tmp_path, monkeypatch):
    monkeypatch.setattr("kvbm_cli.profile.state_check.installation_of", lambda profile: object())
    setting = "engine.arguments.prefix_cache_retention_interval=300"
    outcome = kvbm_here("profile", "check", "vllm-hybrid-cpu-demo", "--set", setting, home=tmp_path)
    assert outcome.exit_code == 2
    assert outcome.stderr.startswith(f"error: `{setting.replace('=', ': ')}` is not a multiple of the block size of ")
    assert f"\n  --set {setting}\n" in outcome.stderr


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


def test_the_largest_block_and_the_fewest_blocks_of_all_ranks_count():
    ranks = (CONNECTOR.format(100, 4096), CONNECTOR.format(90, 8192).replace("rank 0", "rank 1"))
    assert ReportedSizes.of("\n".join(ranks)) == ReportedSizes(8192, 90, None)


def test_unknown_sizes_are_not_compared(tmp_path):
    log = tmp_path / "log"
    log.write_text(OTHERS)
    assert difference_text(ValueError("unknown"), [log]) is None


DEEPSEEK = """\
engine:
  kind: vllm
  model: deepseek-ai/DeepSeek-V3
  arguments:
    {more}
  environment:
    VLLM_CPU_KVCACHE_SPACE: 4
tiers:
  host:
    blocks: 100
"""


@pytest.fixture(params=["amx_tile", "avx2"])
def block_tokens(request, tmp_path, monkeypatch):
    """The tokens in a block on a CPU with this flag."""
    monkeypatch.setattr(machine, "CPU_FACTS", tmp_path / "cpuinfo")
    machine.CPU_FACTS.write_text(f"processor\t: 0\nflags\t\t: fpu {request.param}\n")
    return 128 if request.param == "amx_tile" else 16


def told(home: Path, *arguments: str, more: str = "max_model_len: 4096") -> Outcome:
    (home / "p.yaml").write_text(DEEPSEEK.format(more=more))
    return kvbm_here(*arguments, home=home)


def data(home: Path, *arguments: str) -> Any:
    outcome = told(home, *arguments, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    return json.loads(outcome.stdout)


def test_the_commands_name_the_backend_and_its_block(tmp_path, block_tokens):
    backend = "AMX_MLA" if block_tokens == 128 else "CPU_MLA"
    said = "this CPU has AMX, so vLLM" if block_tokens == 128 else "on this CPU, which has no AMX"
    found = data(tmp_path, "size", "--profile", "p.yaml")
    assert (found["block"]["tokens"], found["attention_backend"]) == (block_tokens, backend)
    assert any(said in note for note in found["notes"])
    assert f"a block is {block_tokens} tokens" in told(tmp_path, "size", "--profile", "p.yaml").stdout
    checked = data(tmp_path, "profile", "check", "p.yaml")
    assert any(said in note and backend in note for note in checked["notes"])
    planned = told(tmp_path, "serve", "--profile", "p.yaml", "--dry-run").stdout
    assert f"a block is {block_tokens} tokens" in planned
    assert said in planned
    assert data(tmp_path, "serve", "--profile", "p.yaml", "--dry-run")["attention_backend"] == backend


def test_weights_of_32_bits_are_refused_before_the_start_where_vllm_refuses_them(tmp_path, block_tokens):
    outcome = told(tmp_path, "serve", "--profile", "p.yaml", "--dry-run", more="dtype: float32")
    assert outcome.exit_code == (2 if block_tokens == 128 else 0)
    if block_tokens == 128:
        assert "p.yaml:5:12" in outcome.stderr
        assert "AMX_MLA" in outcome.stderr
