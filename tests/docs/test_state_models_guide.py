"""The guide to models with states quotes the reasons for which kvbm declines them; its sizes and metrics are right."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from kvbm.config.engine import VllmArguments
from kvbm.engines.vllm.models import disabled_by
from kvbm.engines.vllm.sizing import Model, Setting, plan_of
from kvbm.metrics import COUNTERS
from kvbm.sizing.catalogue import catalogue

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs/guide/state-models.md").read_text()
SOURCE = ast.parse((ROOT / "kvbm/engines/vllm/cache_groups.py").read_text())
WITH_STATES = "_reason_of_states"
SIZES = re.findall(
    r"^\| `([\w./-]+)`.* \| ([\d.]+) MiB \| ([\d,]+) \| (\d+) of ([\d,]+) tokens \|$", GUIDE, re.MULTILINE
)


def reasons() -> list[re.Pattern[str]]:
    """Return what the function can return, with any word in place of a value, and what the table of settings says."""
    function = next(node for node in SOURCE.body if isinstance(node, ast.FunctionDef) and node.name == WITH_STATES)
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    texts = [value for value in returned if isinstance(value, ast.JoinedStr | ast.Constant)]
    own = [pattern(value) for value in texts if not (isinstance(value, ast.Constant) and value.value is None)]
    return own + [re.compile(f"^{re.escape(why)}$", re.MULTILINE) for why in settings()]


def settings() -> list[str]:
    works: dict[str, Any] = {"mode": "align", "pipeline_parallel_size": 1, "speculates": False, "replays": False}
    wrong = ({"mode": "none"}, {"mode": "all"}, {"pipeline_parallel_size": 2}, {"speculates": True}, {"replays": True})
    found = [disabled_by(**(works | one)) for one in wrong]
    return [one[1] for one in found if one is not None]


def pattern(value: ast.expr | None) -> re.Pattern[str]:
    pieces = value.values if isinstance(value, ast.JoinedStr) else [value]
    texts = [re.escape(str(one.value)) if isinstance(one, ast.Constant) else r"\w+" for one in pieces]
    return re.compile("^" + "".join(texts) + "$", re.MULTILINE)


def test_each_reason_is_quoted() -> None:
    """Except those of old versions: the guide names the version that is required."""
    quoted = GUIDE.partition("## What is declined")[2].partition("```text\n")[2].partition("```")[0]
    found = [reason for reason in reasons() if not reason.pattern.startswith("^vLLM\\ before")]
    assert len(found) == 7
    assert [reason.pattern for reason in found if not reason.search(quoted)] == []


def test_metrics_of_the_guide_exist() -> None:
    named = set(re.findall(r"`(kvbm_\w+)`", GUIDE))
    known = set(COUNTERS)
    assert "kvbm_lost_state_tokens" in named
    assert named <= known


@pytest.mark.parametrize(("model", "size", "tokens", "blocks", "block_tokens"), SIZES, ids=[row[0] for row in SIZES])
def test_a_snapshot_has_this_size(model: str, size: str, tokens: str, blocks: str, block_tokens: str) -> None:
    plan = plan_of(Model(VllmArguments(), catalogue()[model], Setting({}, on_cpu=False)))
    snapshot = plan.snapshot
    assert snapshot is not None
    assert f"{snapshot.state_bytes / 2**20:.1f}" == size
    found = (f"{snapshot.token_count:,}", f"{snapshot.block_count}", f"{plan.block_tokens:,}")
    assert found == (tokens, blocks, block_tokens)


def test_the_guide_has_sizes() -> None:
    assert len(SIZES) == 7
