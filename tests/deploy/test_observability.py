"""deploy/observability: rules, dashboards and targets, by themselves and with a real Prometheus and a loaded engine."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest
import yaml
from engine_process import engine
from prometheus import Prometheus, prometheus, promtool
from waiting import eventually

from kvbm.config.schema import Profile
from kvbm.metrics import BLOCKS, COUNTERS, DISK_GAUGES, HIT_RATES
from kvbm.observe.series import COUNTED, GAUGES, HISTOGRAMS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/observability"
RULES = FOLDER / "prometheus/kvbm-alerts.yaml"
RULE_TESTS = FOLDER / "prometheus/kvbm-alerts-test.yaml"
DASHBOARD = json.loads((FOLDER / "grafana/dashboards/kvbm.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SILENT = ("restart", "start-up", "absence")
# The panels of the newest dashboard of NVIDIA's KVBM.
OF_NVIDIA = (
    *("kvbm_host_cache_hit_rate", "kvbm_disk_cache_hit_rate", "kvbm_matched_tokens"),
    *("kvbm_offload_blocks_d2h", "kvbm_offload_blocks_h2d", "kvbm_offload_blocks_d2d"),
    *("kvbm_onboard_blocks_h2d", "kvbm_onboard_blocks_d2d"),
)
DOES_NOT_EXIST_EVERYWHERE = tuple(DISK_GAUGES)  # a tmpfs or a partition without statistics has no wear


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


ALERTS = {rule["alert"]: rule for rule in rules()}


def expressions(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def names_in(expression: str) -> set[str]:
    """The kvbm series of an expression, histograms without the suffix of their parts."""
    return {re.sub("_bucket$", "", name) for name in re.findall(r"\bkvbm_\w+", expression)}


def known_names() -> set[str]:
    others = {name for name, _ in (*HIT_RATES.values(), *BLOCKS.values())} | {*GAUGES, *HISTOGRAMS}
    return {f"{name}_total" for name in COUNTED} | set(COUNTERS) | set(DISK_GAUGES) | others


# -- without Prometheus ------------------------------------------------------------------------------------------------


def test_the_dashboard_is_what_its_script_writes():
    done = subprocess.run(
        [sys.executable, FOLDER / "dashboard.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_panels_have_a_unit_a_text_a_legend_and_a_place_of_their_own():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert taken.isdisjoint(cells), panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "instance", "engine"}


def test_a_series_by_tier_has_a_panel_and_a_panel_has_a_series():
    shown = set().union(*(names_in(expression) for panel in PANELS for expression in expressions(panel)))
    assert shown <= known_names()
    ours = {f"{name}_total" for name in COUNTED} | {*GAUGES, *HISTOGRAMS}
    assert ours <= shown


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panels_show_the_chosen_engines_only(panel):
    for expression in expressions(panel):
        selectors = re.findall(r"(?:kvbm_|vllm:)\w+(\{[^}]*\})?", expression)
        assert selectors
        assert all('instance=~"$instance"' in selector for selector in selectors), expression


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_has_a_runbook_that_says_what_it_means_and_what_to_do(alert):
    rule = ALERTS[alert]
    page = ROOT / rule["annotations"]["runbook"]
    assert page.stem == alert
    text = page.read_text()
    assert text.startswith(f"# {alert}\n")
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## Meaning", "## Find out", "## Act"]
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert names_in(rule["expr"]) <= known_names()


def test_every_runbook_belongs_to_an_alert():
    assert {path.stem for path in (ROOT / "docs/runbooks").glob("Kvbm*.md")} == set(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_is_tested_to_fire_and_to_stay_silent(alert):
    tests = {test["name"]: test["alert_rule_test"] for test in yaml.safe_load(RULE_TESTS.read_text())["tests"]}
    assert any(one.get("exp_alerts") for one in tests[f"{alert} fires"] if one["alertname"] == alert)
    for name in SILENT:
        silent = [one for one in tests[name] if one["alertname"] == alert]
        assert silent, f"{alert} in `{name}`"
        assert not any(one.get("exp_alerts") for one in silent)


def test_the_compose_file_mounts_what_there_is():
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    assert set(services) == {"prometheus", "grafana"}
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert not source.startswith("./") or (FOLDER / source).exists(), volume
    (source,) = yaml.safe_load((FOLDER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://127.0.0.1:9090"


# -- with promtool -----------------------------------------------------------------------------------------------------


def test_alerts_fire_and_stay_silent_as_their_tests_say():
    done = promtool("test", "rules", RULE_TESTS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SILENT)
def test_no_alert_fires_in_any_minute_of_a_silent_case(name, tmp_path):
    document = yaml.safe_load(RULE_TESTS.read_text())
    (case,) = [test for test in document["tests"] if test["name"] == name]
    # The target of a restart is down for one minute, that of a start until it has started.
    case["alert_rule_test"] = [
        {"eval_time": f"{minute}m", "alertname": alert} for alert in ALERTS for minute in range(1, 119)
    ]
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({**document, "rule_files": [str(RULES)], "tests": [case]}))
    done = promtool("test", "rules", tmp_path / "tests.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_the_rule_tests_notice_an_alert_that_never_fires(alert, tmp_path):
    document = yaml.safe_load(RULES.read_text())
    for rule in document["groups"][0]["rules"]:
        if rule["alert"] == alert:
            rule["expr"] = f"({rule['expr']}) and on() vector(0) == 1"
    (tmp_path / RULES.name).write_text(yaml.safe_dump(document))
    (tmp_path / "tests.yaml").write_text(RULE_TESTS.read_text())
    done = promtool("test", "rules", tmp_path / "tests.yaml")
    assert done.returncode == 1, done.stdout
    assert alert in done.stdout + done.stderr


def test_prometheus_accepts_the_configuration():
    done = promtool("check", "config", FOLDER / "prometheus/prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr


# -- with Prometheus and a loaded engine -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Iterator[tuple[str, Prometheus]]:
    """The address of an engine with all tiers that has answered requests from each, and a Prometheus that scraped it
    before and after."""
    directory = tmp_path_factory.mktemp("observability")
    profile = Profile.model_validate(
        {
            "engine": {"model": "synthetic:tiny"},
            "tiers": {
                "host": {"blocks": 64},
                "disk": {"directory": str(directory / "disk"), "blocks": 200},
                "shared": {"url": f"file://{directory / 'objects'}"},
            },
            "offload": {"to_disk": "always", "to_shared": "always"},
            "onboard": {"policy": "always"},
            "metrics": {"capacities": True},
        }
    )
    log = directory / "engine.log"
    flags = ("--connector", profile.model_dump_json(), "--num-blocks", "48")
    with engine(log, *flags) as (_, url):
        address = url.removeprefix("http://")
        (directory / "targets").mkdir()
        (directory / "targets/engine.json").write_text(json.dumps([{"targets": [address]}]))
        document = yaml.safe_load((FOLDER / "prometheus/prometheus.yml").read_text())
        document["global"]["scrape_interval"] = "1s"
        document["rule_files"] = [str(RULES)]
        with prometheus(directory, yaml.safe_dump(document)) as server:
            eventually(lambda: bool(server.query("kvbm_info")), "the engine is scraped")
            with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
                for number in (*range(6), *range(6)):
                    prompt = [(7 * position + 37 * number) % 250 for position in range(400)]
                    body = {"model": "synthetic:tiny", "prompt": prompt, "max_tokens": 4}
                    client.post("/v1/completions", json=body).raise_for_status()
            tokens = "sum(kvbm_prompt_tokens_total)"
            eventually(lambda: float(server.query(tokens)[0]["value"][1]) == 12 * 400, "the load is scraped")
            moved = 'sum(increase(kvbm_transfer_bytes_total{source="device"}[10s])) > 0'
            eventually(lambda: bool(server.query(moved)), "rates are there")
            yield url, server


def with_values(expression: str) -> str:
    return expression.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$engine", ".*")


def test_promtool_finds_nothing_wrong_in_the_metrics_of_a_loaded_engine(loaded):
    """Of its own series: promtool does not like the colon in vLLM's names."""
    page = httpx.get(f"{loaded[0]}/metrics", trust_env=False).text
    ours = [line for line in page.splitlines(keepends=True) if re.match(r"(# \w+ )?kvbm_", line)]
    assert len(ours) > 200
    done = promtool("check", "metrics", text="".join(ours))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_loaded_engine_has_at_most_200_series_by_tier(loaded):
    page = httpx.get(f"{loaded[0]}/metrics", trust_env=False).text
    ours = [line for line in page.splitlines() if line.startswith("kvbm_") and 'engine="0"' in line]
    assert 100 < len(ours) <= 200


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_expression_of_the_dashboard_has_samples_under_load(loaded, panel):
    for expression in expressions(panel):
        if names_in(expression).isdisjoint(DOES_NOT_EXIST_EVERYWHERE):
            assert loaded[1].query(with_values(expression)), expression


@pytest.mark.parametrize("name", OF_NVIDIA)
def test_every_panel_of_nvidias_dashboard_has_samples(loaded, name):
    assert loaded[1].query(name)


def test_the_picture_of_the_panels_is_drawn_from_what_prometheus_has_recorded(loaded, tmp_path):
    """With KVBM_WRITE_RESULTS it is that of the docs, after two minutes of load."""
    url, server = loaded
    minutes, output = 1, tmp_path / "dashboard.svg"
    if os.environ.get("KVBM_WRITE_RESULTS"):
        minutes, output = 2, ROOT / "docs/images/dashboard.svg"
        load_for(url, 110)
    note = "Embedded engine, model synthetic:tiny, 11 prompts of 400 tokens in turn, 2 CPU cores."
    command = [sys.executable, str(FOLDER / "draw_panels.py"), "--url", server.url, "--minutes", str(minutes)]
    subprocess.run([*command, "--note", note, "--output", str(output)], check=True, timeout=120)
    drawn = output.read_text()
    ElementTree.fromstring(drawn)
    titles = [panel["title"] for panel in PANELS if panel["type"] == "timeseries"]
    assert [title for title in titles if f">{title}<" not in drawn] == []
    assert drawn.count("<polyline") >= len(titles)
    assert "not a picture of Grafana" in drawn


def load_for(url: str, seconds: float) -> None:
    """Send requests that come back, faster and slower by turns."""
    end_s = time.monotonic() + seconds
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        for number in itertools.count():
            prompt = [(7 * position + 37 * (number * number % 11)) % 250 for position in range(400)]
            body = {"model": "synthetic:tiny", "prompt": prompt, "max_tokens": 4}
            client.post("/v1/completions", json=body).raise_for_status()
            if time.monotonic() > end_s:
                return
            time.sleep(0.3 + 0.6 * (number // 40 % 2))


@pytest.mark.parametrize("alert", ALERTS)
def test_the_series_of_an_alert_exist(loaded, alert):
    """A rule on a name that nothing exports would never fire."""
    for selector in re.findall(r"(?:kvbm_\w+|up)(?:\{[^}]*\})?", ALERTS[alert]["expr"]):
        if not selector.startswith(DOES_NOT_EXIST_EVERYWHERE):
            assert loaded[1].query(selector), selector


def test_no_alert_fires_for_an_engine_that_works(loaded):
    groups = loaded[1].get("/api/v1/rules")["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == set(ALERTS)
    eventually(lambda: _are_evaluated(loaded[1]), "the rules are evaluated")
    alerts = loaded[1].get("/api/v1/alerts")["data"]["alerts"]
    # "pending": during the first requests, KvbmOffloadsWithoutUse is true, and would fire an hour later
    assert [alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"] == []


def _are_evaluated(server: Prometheus) -> bool:
    groups = server.get("/api/v1/rules")["data"]["groups"]
    return all(rule["health"] == "ok" for group in groups for rule in group["rules"])
