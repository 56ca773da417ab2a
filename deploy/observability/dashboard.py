"""Write the Grafana dashboard: `python deploy/observability/dashboard.py`; `--check` compares only.

A row answers one question. A panel has a title, a unit, what its figures mean, and expressions with their legends.
Expressions use `$engines` for the selector of the chosen instances and engines, and `$window` for Grafana's interval.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TARGETS = (HERE / "grafana/dashboards/kvbm.json", HERE.parent / "helm/kvbm/dashboards/kvbm.json")
UID = "kvbm-block-manager"
WIDTH = 24  # Grafana's grid
HEIGHT = 8
ENGINES = 'instance=~"$instance", engine=~"$engine"'
INSTANCES = 'instance=~"$instance"'  # for series without the label `engine`
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """`queries` are (expression, legend). `kind` is a type of Grafana's panels."""

    title: str
    unit: str
    about: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 8
    is_stacked: bool = False
    most: float | None = None


def p99(name: str, by: str) -> str:
    return _quantile(0.99, name, by)


def p50(name: str, by: str) -> str:
    return _quantile(0.5, name, by)


def _quantile(share: float, name: str, by: str) -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({name}_bucket{{$engines}}[$window])))"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Does it pay?",
        (
            Panel(
                "Prefill saved",
                "s",
                "Seconds of prefill that loaded tokens saved, per second and over all engines: 2 s means that two "
                "more engines would be busy with prefill. The time of loading is not subtracted.",
                (("sum(rate(kvbm_saved_prefill_seconds_total{$engines}[$window]))", "saved per second"),),
            ),
            Panel(
                "Prompt tokens not computed",
                "percentunit",
                "Share of the prompt tokens of completed requests whose KV came from a cache: device memory, or kvbm.",
                (
                    (
                        'sum(rate(kvbm_prompt_tokens_total{$engines, source!="computed"}[$window]))'
                        " / sum(rate(kvbm_prompt_tokens_total{$engines}[$window]))",
                        "all caches",
                    ),
                    (
                        'sum(rate(kvbm_prompt_tokens_total{$engines, source=~"host|disk|object"}[$window]))'
                        " / sum(rate(kvbm_prompt_tokens_total{$engines}[$window]))",
                        "kvbm",
                    ),
                ),
                most=1,
            ),
            Panel(
                "Time to first token",
                "s",
                "vLLM's own measure, over all requests of the chosen instances.",
                tuple(
                    (
                        f"histogram_quantile({share}, sum by (le) "
                        "(rate(vllm:time_to_first_token_seconds_bucket{$instances}[$window])))",
                        name,
                    )
                    for share, name in ((0.5, "p50"), (0.99, "p99"))
                ),
            ),
        ),
    ),
    (
        "Where do prompt tokens come from?",
        (
            Panel(
                "Prompt tokens by source",
                "short",
                "Prompt tokens per second of completed requests, by where their KV was. `computed`: in no cache.",
                (("sum by (source) (rate(kvbm_prompt_tokens_total{$engines}[$window]))", "{{source}}"),),
                is_stacked=True,
            ),
            Panel(
                "Aborted prompt tokens",
                "short",
                "Prompt tokens per second of aborted requests. For vLLM's engine, a stop string is an abort.",
                (("sum(rate(kvbm_aborted_prompt_tokens_total{$engines}[$window]))", "aborted"),),
            ),
            Panel(
                "Lookups by result",
                "reqps",
                "Requests per second that looked up blocks, by what they got of those that were not on the device.",
                (("sum by (result) (rate(kvbm_matches_total{$engines}[$window]))", "{{result}}"),),
                is_stacked=True,
            ),
            Panel(
                "Time of a lookup",
                "s",
                "Time that a lookup takes in the engine's scheduler.",
                ((p50("kvbm_match_seconds", ""), "p50"), (p99("kvbm_match_seconds", ""), "p99")),
            ),
            Panel(
                "Hints without effect",
                "reqps",
                "Hints of clients per second that had no effect, or less. `share`: they gave way to other hints.",
                (("sum by (part, reason) (rate(kvbm_dropped_hints_total{$engines}[$window]))", "{{part}} {{reason}}"),),
            ),
        ),
    ),
    (
        "Is a tier too small?",
        (
            Panel(
                "Used share of a tier",
                "percentunit",
                "A full tier is normal: it evicts the blocks that were used least recently.",
                (
                    (
                        "sum by (tier) (kvbm_tier_used_bytes{$engines})"
                        " / sum by (tier) (kvbm_tier_capacity_bytes{$engines})",
                        "{{tier}}",
                    ),
                ),
                most=1,
            ),
            Panel(
                "Evictions",
                "short",
                "Blocks per second that left a tier. If many leave host memory and few tokens come from it, it is "
                "smaller than what is used again.",
                (("sum by (tier, reason) (rate(kvbm_evictions_total{$engines}[$window]))", "{{tier}} {{reason}}"),),
            ),
            Panel(
                "Blocks rejected",
                "short",
                "Blocks per second that a tier did not take. `room`: none was free; `policy`: not "
                "used often enough; `evicted`: they left host memory before they were written.",
                (
                    (
                        'sum by (tier, reason) (rate(kvbm_admissions_total{$engines, decision="rejected"}[$window]))',
                        "{{tier}} {{reason}}",
                    ),
                ),
            ),
            Panel(
                "Queues",
                "short",
                "Blocks that wait for a transfer, or move.",
                (("sum by (queue) (kvbm_queue_blocks{$engines})", "{{queue}}"),),
            ),
            Panel(
                "Oldest transfer",
                "s",
                "How long the oldest transfer of a queue has been waiting or moving.",
                (("max by (queue) (kvbm_queue_oldest_seconds{$engines})", "{{queue}}"),),
            ),
            Panel(
                "Hit rate with other host memory",
                "percentunit",
                "What host memory of another size, as a multiple of its own, would find for the last requests if each "
                "block were offered to it. Only with `metrics.capacities: true`.",
                (
                    (
                        "avg by (capacity, eviction) (kvbm_hit_rate_at{$engines})",
                        "{{capacity}} x {{eviction}}",
                    ),
                ),
                most=1,
            ),
            Panel(
                "Capacity",
                "bytes",
                "Bytes of blocks that fit into the tiers of all engines.",
                (("sum by (tier) (kvbm_tier_capacity_bytes{$engines})", "{{tier}}"),),
            ),
        ),
    ),
    (
        "How fast are transfers?",
        (
            Panel(
                "Bandwidth",
                "Bps",
                "Bytes per second between two tiers.",
                (
                    (
                        "sum by (source, target) (rate(kvbm_transfer_bytes_total{$engines}[$window]))",
                        "{{source}} to {{target}}",
                    ),
                ),
                width=12,
            ),
            Panel(
                "Time of a transfer",
                "s",
                "From the order of a transfer to the engine step that sees its end.",
                (
                    (p50("kvbm_transfer_seconds", "source, target"), "p50 {{source}} to {{target}}"),
                    (p99("kvbm_transfer_seconds", "source, target"), "p99 {{source}} to {{target}}"),
                ),
                width=12,
            ),
        ),
    ),
    (
        "Is something broken?",
        (
            Panel(
                "Failed transfers",
                "short",
                "Blocks per second whose transfer failed. The engine computed them: no answer is wrong.",
                (
                    (
                        "sum by (source, target, reason) (rate(kvbm_transfer_failures_total{$engines}[$window]))",
                        "{{source}} to {{target}}: {{reason}}",
                    ),
                ),
            ),
            Panel(
                "Off",
                "bool",
                "1 while a tier, or the whole cache, is off.",
                (
                    ("max by (instance) (kvbm_disabled{$instances})", "cache of {{instance}}"),
                    ("max by (instance) (kvbm_disk_off{$instances})", "disk of {{instance}}"),
                    ("max by (instance) (kvbm_shared_off{$instances})", "object store of {{instance}}"),
                ),
            ),
            Panel(
                "Restarts and exceptions",
                "short",
                "Events in the interval: restarts of the disk or object process, and exceptions that kvbm stopped.",
                (
                    ("sum(increase(kvbm_disk_restarts{$instances}[$window]))", "disk process"),
                    ("sum(increase(kvbm_shared_restarts{$instances}[$window]))", "object process"),
                    ("sum(increase(kvbm_faults{$instances}[$window]))", "exceptions"),
                ),
            ),
        ),
    ),
    (
        "What does the SSD pay?",
        (
            Panel(
                "Written and read",
                "Bps",
                "Bytes of blocks per second.",
                (
                    ('sum(rate(kvbm_transfer_bytes_total{$engines, target="disk"}[$window]))', "written"),
                    ('sum(rate(kvbm_transfer_bytes_total{$engines, source="disk"}[$window]))', "read"),
                ),
            ),
            Panel(
                "Drive writes per day",
                "short",
                "How often per day the whole drive would be written at the current rate. Data-centre drives are "
                "warranted for 1 to 3.",
                (("max by (instance) (kvbm_disk_drive_writes_per_day{$instances})", "{{instance}}"),),
            ),
            Panel(
                "Write amplification",
                "short",
                "Bytes that all processes wrote to the drive, per byte of blocks.",
                (("max by (instance) (kvbm_disk_write_amplification{$instances})", "{{instance}}"),),
            ),
        ),
    ),
    (
        "What is running?",
        (
            Panel(
                "Engines",
                "none",
                "Version, engine and model of each engine.",
                (("kvbm_info{$engines}", "{{instance}}"),),
                kind="table",
                width=16,
            ),
            Panel(
                "Start",
                "s",
                "Time of each phase of the last start.",
                (("max by (phase) (kvbm_startup_seconds{$engines})", "{{phase}}"),),
                kind="bargauge",
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    return {
        "uid": UID,
        "title": "kvbm block manager",
        "description": "Generated by deploy/observability/dashboard.py.",
        "schemaVersion": 42,
        "tags": ["kvbm"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [],
        "annotations": {"list": []},
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}
    for name, label, query in (
        ("instance", "Instance", "label_values(kvbm_info, instance)"),
        ("engine", "Engine", 'label_values(kvbm_info{instance=~"$instance"}, engine)'),
    ):
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": DATA_SOURCE,
            "definition": query,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": ["All"], "value": ["$__all"]},
            "sort": 1,
        }


def _panels() -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for title, panels in ROWS:
        number += 1
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        x, y = 0, y + 1
        for panel in panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + HEIGHT
            number += 1
            yield _panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": HEIGHT})
            x += panel.width
        y += HEIGHT


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    limits: dict[str, float] = {"min": 0} if panel.most is None else {"min": 0, "max": panel.most}
    stacking = {"mode": "normal" if panel.is_stacked else "none", "group": "A"}
    custom = {"fillOpacity": 30 if panel.is_stacked else 0, "showPoints": "never", "stacking": stacking}
    options: dict[str, Any] = {}
    if panel.kind == "timeseries":
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    is_table = panel.kind == "table"
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATA_SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, **limits, "custom": custom if panel.kind == "timeseries" else {}},
            "overrides": [],
        },
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATA_SOURCE,
                "expr": _expanded(expression),
                "legendFormat": legend,
                "instant": is_table,
                "range": not is_table,
                "format": "table" if is_table else "time_series",
            }
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _expanded(expression: str) -> str:
    expression = expression.replace("$engines", ENGINES).replace("$instances", INSTANCES)
    return expression.replace("$window", "$__rate_interval")


def main() -> int:
    text = json.dumps(dashboard(), indent=2) + "\n"
    old = [path for path in TARGETS if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in old:
            print(f"out of date: {path.relative_to(HERE.parents[1])}; run `python deploy/observability/dashboard.py`")
        return bool(old)
    for path in old:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
