"""The agent in docs/reference/hints.md, against the real engine with the real block manager."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
from engine_process import engine

from kvbm.config.schema import Profile

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "hints.md"
LIMIT_S = 60


def agent() -> str:
    found = re.search(r"<!-- the agent -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def counted(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return {line.split("{")[0].split()[0]: float(line.split()[-1]) for line in lines if line.startswith("kvbm_h")}


def test_the_agent_of_the_page_sends_hints(tmp_path):
    program = agent()
    assert len([line for line in program.splitlines() if line.strip()]) <= 25
    (tmp_path / "agent.py").write_text(program)
    tiers = {"host": {"blocks": 200, "eviction": "adaptive"}}
    profile = Profile.model_validate({"engine": {"kind": "embedded", "model": "synthetic:tiny"}, "tiers": tiers})
    with engine(tmp_path / "log", "--connector", profile.model_dump_json()) as (_, url):
        model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
        command = [sys.executable, str(tmp_path / "agent.py"), url, model]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert ended.returncode == 0, ended.stderr
        found = counted(url)
        assert (found["kvbm_hinted_requests"], found["kvbm_hints_off"]) == (4, 0)
