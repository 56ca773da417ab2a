"""Numbers that only just fit into a float, from outside: nothing overflows, and JSON stays JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from metric_pages import FakeLeader, sglang_text, text_of

from kvbm_cli.bench.metrics import engine_metrics
from kvbm_cli.plan import live
from kvbm_cli.plan.advice import Prices
from kvbm_cli.system.metrics_page import MetricsPage
from kvbm_cli.terminal.console import print_json
from kvbm_cli.top import figures, screen
from kvbm_cli.top.watched import WatchedEngine

EXTREMES = ("1.7e308", "-1.7e308", "5e-324", "1e400", "nan", "1" * 5000)
RATES = "".join(
    f'kvbm_hit_rate_at{{capacity="{size}",eviction="{name}"}} 0.{size}\n' for size in (1, 2) for name in ("lru", "slru")
)


def pages(value: str) -> tuple[str, str]:
    """Return a page of an engine, and a later one with this value everywhere."""
    usual = text_of(FakeLeader()) + sglang_text(1000, device=100) + RATES
    usual += f'vllm:cache_config_info{{num_gpu_blocks="{"9" * 5000}",block_size="²"}} 1\n'
    lines = usual.splitlines()
    return usual, "\n".join(
        line if line.startswith(("#", "kvbm_info")) else f"{line.rpartition(' ')[0]} {value}" for line in lines
    )


def strict(text: str) -> Any:
    def refused(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refused)


@pytest.mark.parametrize("value", EXTREMES, ids=lambda value: value[:8])
@pytest.mark.parametrize("is_rising", [False, True])
def test_a_metric_of_any_size_is_shown(capsys: pytest.CaptureFixture[str], value: str, is_rising: bool) -> None:
    texts = pages(value) if is_rising else pages(value)[::-1]
    old, new = (figures.engines_of(MetricsPage.parse(text, figures.NAMES))["0"] for text in texts)
    pair = (figures.Reading(0.0, old), figures.Reading(1e-6, new))
    screen.page([WatchedEngine("one", list(pair))], [], screen.View(), title="t", width=80, height=None)
    print_json(figures.figures([pair]).as_data())
    strict(capsys.readouterr().out)
    if (plan := live.plan_of("one", new)) is not None:
        plan.text(Prices(1.0, 1.0))
        print_json(plan.as_data(Prices(1.0, 1.0)))
        strict(capsys.readouterr().out)
    page = MetricsPage.parse(texts[1], engine_metrics.NAMES)
    line = engine_metrics.SampleLine(
        0.0,
        0.0,
        counters=engine_metrics.read_counters(page),
        gauges=engine_metrics.read_gauges(page),
        facts=engine_metrics.read_facts(page),
    )
    strict(json.dumps(line.to_json()))
