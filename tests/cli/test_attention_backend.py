"""`size`, `profile check` and `serve --dry-run` name the attention backend that vLLM chooses on this CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
from terminal import Outcome, kvbm_here

from kvbm.identity import machine

PROFILE = """\
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
    (home / "p.yaml").write_text(PROFILE.format(more=more))
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
