"""report.html without a browser: its content, that data cannot become markup, and which directories are refused."""

import base64
import hashlib
import json
import re
import statistics
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from experiments import build, report_of, summary_in, write_sample

from kvbm.errors import EnvironmentProblem, UsageError
from kvbm_cli.bench.show.elements import distribution, prose, rates, sentence_case, thinned
from kvbm_cli.bench.show.figures import CellView, by_source, by_turn, ecdf
from kvbm_cli.bench.show.load_figures import parts_of_time, timeline
from kvbm_cli.bench.show.page import LIBRARY

ECHARTS_6_1_0 = "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"
HOSTILE = "</script><img src=x onerror='alert(1)'>\"&\u2028\u202e\x1b[31m{{}}${x}\ud800"
MOST_BYTES = 5_000_000


class Document(HTMLParser):
    """Elements with their attributes, the text of scripts and styles, and the text that is shown."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, dict[str, str | None], str]] = []
        self.shown = ""
        self._inside: list[str] = []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self.raw.append((tag, dict(attributes), ""))
        if tag != "meta":
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._inside.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._inside and self._inside[-1] in ("script", "style"):
            tag, attributes, text = self.raw[-1]
            self.raw[-1] = (tag, attributes, text + data)
        else:
            self.shown += data

    @property
    def charts(self) -> dict[str, Any]:
        [text] = [text for _, attributes, text in self.raw if attributes.get("id") == "data"]
        return json.loads(text)


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    write_sample(directory, sessions=6, turns=4, pairs=2)
    return directory


@pytest.fixture
def small(tmp_path):
    """One cell, which the test may damage."""
    write_sample(tmp_path, sessions=6, turns=3, pairs=1, pressures=(None,))
    return tmp_path


def built(directory: Path) -> Document:
    return Document(build(directory).read_text(encoding="utf-8"))


def change_summary(directory: Path, **changes: Any) -> None:
    summary = json.loads((directory / "summary.json").read_text())
    (directory / "summary.json").write_text(json.dumps({**summary, **changes}))


def requests_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "requests.jsonl").read_text().splitlines()]


def view_of(directory: Path) -> CellView:
    report = report_of(directory)
    return CellView.of(report, report.cells()[0])


def test_chart_library_is_the_released_file():
    assert hashlib.sha256(LIBRARY.read_bytes()).hexdigest() == ECHARTS_6_1_0
    assert (LIBRARY.parent / "NOTICE").read_text().startswith("Apache ECharts\n")
    assert "Apache License" in (LIBRARY.parent / "LICENSE").read_text()


def test_policy_allows_exactly_the_scripts_and_the_style_of_the_page(sample):
    page = built(sample)
    [policy] = [a["content"] or "" for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split("; ")}

    def hashes(tag: str) -> list[str]:
        texts = [text for name, attributes, text in page.raw if name == tag and "type" not in attributes]
        return [f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in texts]

    assert rules["default-src"] == ["'none'"]
    assert rules["script-src"] == hashes("script")
    assert rules["style-src-elem"] == hashes("style")
    assert "connect-src" not in rules


def test_page_loads_nothing(sample):
    page = built(sample)
    assert not [tag for tag, _ in page.elements if tag in ("link", "img", "iframe", "object", "base", "form")]
    addresses = [
        value for _, attributes in page.elements for key, value in attributes.items() if key in ("src", "href")
    ]
    assert addresses
    assert all((address or "").startswith("#cell-") for address in addresses)


def test_names_from_data_are_text_everywhere(small):
    for file in ("plan.json", "summary.json", "requests.jsonl", "runs.jsonl"):
        content = (small / file).read_text().replace('"kvbm"', json.dumps(HOSTILE))
        (small / file).write_text(content.replace('"conversations"', json.dumps(HOSTILE)))
    change_summary(small, explanation=HOSTILE, caveats=[HOSTILE], reasons=[HOSTILE], hint=f"`{HOSTILE}`")
    content = build(small).read_text(encoding="utf-8")
    page = Document(content)
    assert HOSTILE in page.charts["arms"]
    assert [tag for tag, _ in page.elements].count("script") == 3
    assert not [attributes for _, attributes in page.elements if any(key.startswith("on") for key in attributes)]
    assert not re.search("[\u2028\u202e\x1b]", content.replace(LIBRARY.read_text(encoding="utf-8"), ""))
    assert "</script><img src=x onerror='alert(1)'>\"&\\u2028\\u202e\\x1b[31m{{}}${x}\\ud800" in page.shown


@pytest.mark.soak
def test_twenty_thousand_requests_fit_into_the_limit(tmp_path):
    write_sample(tmp_path, sessions=278, turns=8, pairs=3, pressures=(2.0,))
    assert build(tmp_path).stat().st_size < MOST_BYTES


def test_verdict_caveats_and_numbers_are_text(sample):
    summary = json.loads((sample / "summary.json").read_text())
    shown = built(sample).shown
    order = [shown.index(text) for text in (summary["explanation"][1:], "Results", "Caveats", "Results by workload")]
    assert order == sorted(order)
    for cell in summary["cells"]:
        paired = cell["comparisons"][0]["ttft_speedup_paired"]
        low, high = paired["interval_95"]
        assert f"{paired['geometric_mean']:.2f}× {cell['name']}, kvbm against baseline: speed-up" in shown
        assert f"95% interval {low:.2f} to {high:.2f}" in shown
    assert "p99 requires 368 samples: it is not reported." in shown
    for cell in summary["cells"]:
        assert cell["comparisons"][0]["explanation"][1:] in shown


def test_every_chart_has_words_and_a_table(sample):
    page = built(sample)
    boxes = [attributes for tag, attributes in page.elements if attributes.get("class") == "chart"]
    kinds = [chart["kind"] for chart in page.charts["charts"]]
    assert kinds == ["ladder", *["turns", "sources", "ecdf", "parts", "timeline"] * 3]
    assert [int(box["data-chart"] or "") for box in boxes] == list(range(len(kinds)))
    assert all(box["role"] == "img" and len(box["aria-label"] or "") > 60 for box in boxes)
    assert [tag for tag, _ in page.elements].count("details") == len(kinds)


def test_turns_chart_has_the_quartiles_of_the_requests(small):
    figure = by_turn(view_of(small))
    assert figure is not None
    rows = [row for row in requests_of(small) if row["arm"] == "kvbm" and row["turn"] == 2]
    low, middle, high = statistics.quantiles([row["ttft_ms"] for row in rows], n=4, method="inclusive")
    assert figure.data["arms"][1]["points"][1] == [2, round(low, 2), round(middle, 2), round(high, 2)]


def test_requests_count_for_the_source_of_most_of_their_tokens(small):
    figure = by_source(view_of(small))
    assert figure.data["sources"] == ["G1", "G2", "G3", "computed"]
    computed = [row["ttft_ms"] for row in requests_of(small) if row["arm"] == "baseline" and row["g1_tokens"] == 0]
    assert figure.data["arms"][0]["boxes"][3][2] == pytest.approx(statistics.median(computed), abs=0.01)
    assert figure.data["arms"][0]["boxes"][1] is None


def test_distribution_is_over_the_steady_requests(small):
    figure = ecdf(view_of(small))
    assert figure is not None
    steady = [r["ttft_ms"] for r in requests_of(small) if r["arm"] == "floor" and r["phase"] == "steady"]
    points = figure.data["arms"][2]["points"]
    assert [x for x, _ in points] == [round(value, 2) for value in sorted(steady)]
    assert [y for _, y in points] == [round((rank + 1) / len(steady), 4) for rank in range(len(steady))]


def test_parts_of_the_time_add_up_to_the_whole(small):
    figure = parts_of_time(view_of(small))
    assert figure is not None
    whole = statistics.fmean(row["end_to_end_ms"] for row in requests_of(small) if row["arm"] == "kvbm")
    assert sum(figure.data["rows"][1]) == pytest.approx(whole, abs=0.05)


def test_timeline_shows_the_counters_of_the_tested_arm(small):
    figure = timeline(view_of(small))
    assert figure is not None
    file = small / "runs" / "conversations.1.kvbm" / "server-metrics.jsonl"
    last = json.loads(file.read_text().splitlines()[-1])
    for tier, total in last["prompt_tokens"].items():
        assert sum(rate for _, rate in figure.data["server"]["tokens"][tier]) == pytest.approx(total, abs=0.5)
    assert "arm kvbm" in figure.note


def test_without_server_metrics_the_timeline_has_requests_only(tmp_path):
    write_sample(tmp_path, sessions=6, turns=3, pairs=1, pressures=(None,), server_metrics=False)
    charts = {chart["kind"]: chart for chart in built(tmp_path).charts["charts"]}
    assert charts["timeline"]["server"] is None
    assert charts["timeline"]["sources"] == []
    assert "Cost of the engine" not in built(tmp_path).shown


def test_cached_tokens_of_an_unknown_tier_are_a_source(small):
    unknown = dict.fromkeys(("g1_tokens", "g2_tokens", "g3_tokens", "g4_tokens"))
    rows = [{**row, **unknown} for row in requests_of(small)]
    (small / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figure = by_source(view_of(small))
    assert figure.data["sources"] == ["cached", "computed"]


def test_a_server_that_reports_no_source_has_no_chart_of_sources(small):
    tiers = (f"{tier}_tokens" for tier in ("g1", "g2", "g3", "g4", "computed", "cached"))
    unknown = dict.fromkeys(tiers)
    (small / "requests.jsonl").write_text("".join(json.dumps({**row, **unknown}) + "\n" for row in requests_of(small)))
    assert by_source(view_of(small)) is None
    built(small)


def test_one_arm_alone_has_charts_and_no_comparison(tmp_path):
    write_sample(tmp_path, arms=("kvbm",), sessions=6, turns=3, pairs=1, pressures=(None,))
    page = built(tmp_path)
    assert "Measured, nothing to compare with" in page.shown
    assert [chart["kind"] for chart in page.charts["charts"]] == ["turns", "sources", "ecdf", "parts", "timeline"]


def test_files_that_are_missing_or_cut_off_are_noted(small):
    content = (small / "requests.jsonl").read_text()
    (small / "requests.jsonl").write_text(content[:-20])
    assert "last line of requests.jsonl is incomplete and was ignored" in built(small).shown
    for name in ("requests.jsonl", "runs.jsonl"):
        (small / name).unlink()
    change_summary(small, complete=False, cells=[], compared=None, verdict="invalid", explanation="interrupted")
    page = built(small)
    assert page.charts["charts"] == []
    for text in ("requests.jsonl is missing", "runs.jsonl is missing", "incomplete: the run was interrupted"):
        assert text in page.shown
    assert "kvbm bench --profile demo --compare baseline" in page.shown


@pytest.mark.parametrize(
    ("verdict", "badge"), [("wrong", "Wrong answers"), ("invalid", "Invalid"), ("slower", "Slower")]
)
def test_reasons_of_a_bad_verdict_come_first(small, verdict, badge):
    change_summary(small, verdict=verdict, reasons=["arm kvbm answered 3 requests differently"], hint="run `x`")
    shown = built(small).shown
    assert badge in shown
    assert ("Results, not usable" in shown) == (verdict != "slower")
    assert (
        shown.index("Arm kvbm answered 3 requests differently.")
        < shown.index("What to do: run x")
        < shown.index("× speed-up")
    )


def test_failed_requests_are_counted_and_not_drawn(small):
    rows = requests_of(small)
    rows[0] |= {"error": "broken off", "first_token_ms": None, "end_ms": None}
    (small / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(view_of(small).answered) == len(rows) - 1
    built(small)


def test_a_run_without_any_answer_has_a_report(small):
    rows = [row | {"error": "broken off", "first_token_ms": None} for row in requests_of(small)]
    (small / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "No request was answered." in built(small).shown


def test_name_of_a_run_cannot_leave_the_directory(small):
    content = (small / "runs.jsonl").read_text().replace("conversations.1.kvbm", "../../elsewhere")
    (small / "runs.jsonl").write_text(content)
    with pytest.raises(UsageError, match=r"runs.jsonl, line 2: '../../elsewhere' is not the name of a run"):
        build(small)


def test_unwritable_directory_is_an_environment_problem(small):
    (small / "report.html").mkdir()
    with pytest.raises(EnvironmentProblem, match=r"cannot write `.*report.html`: is a directory"):
        build(small)


def test_ladder_has_the_paired_ratios_of_the_summary(sample):
    [chart] = [chart for chart in built(sample).charts["charts"] if chart["kind"] == "ladder"]
    cells = json.loads((sample / "summary.json").read_text())["cells"]
    paired = [cell["comparisons"][0]["ttft_speedup_paired"] for cell in cells]
    points = [
        [cell["pressure"], one["interval_95"][0], one["geometric_mean"], one["interval_95"][1]]
        for cell, one in zip(cells, paired, strict=True)
    ]
    assert chart["lines"] == [{"arm": 1, "points": points}]


def test_a_sweep_has_a_point_per_load(tmp_path):
    write_sample(tmp_path, sessions=6, turns=3, pairs=1, pressures=(None,), rates=(0.5, 1.0, 2.0))
    page = built(tmp_path)
    [chart] = [chart for chart in page.charts["charts"] if chart["kind"] == "pareto"]
    arms = [cell["arms"] for cell in summary_in(tmp_path)["cells"]]
    names = page.charts["arms"]
    assert {names[line["arm"]] for line in chart["lines"]} == {"baseline", "kvbm", "floor"}
    for line in chart["lines"]:
        own = [one[names[line["arm"]]] for one in arms]
        assert line["points"] == sorted(
            [one["throughput"]["output_tokens_per_s"], one["ttft_ms"]["p50"]] for one in own
        )
    assert "conversations-rate0.5" in page.shown


def test_without_a_sweep_there_is_no_chart_of_loads(sample):
    assert "pareto" not in {chart["kind"] for chart in built(sample).charts["charts"]}


def test_unusable_points_of_the_ladder_are_named(tmp_path):
    summary = write_sample(tmp_path, sessions=6, turns=3, pairs=1)
    summary["cells"][1]["comparisons"][0]["verdict"] = "invalid"
    change_summary(tmp_path, **summary)
    shown = built(tmp_path).shown
    assert "Not usable: pressure 1.20 (invalid)." in shown
    assert "conversations-x1.2, kvbm against baseline (invalid): speed-up" in shown


def test_interval_of_one_pair_of_runs_does_not_claim_to_cover_runs(small, sample):
    note = "it does not cover differences between runs"
    assert note in built(small).shown
    assert note not in built(sample).shown


def test_gain_beyond_the_possible_is_noise(small):
    change_summary(small, share_of_possible_gain={"value": 1.4, "interval_95": None, "is_noise": True})
    shown = built(small).shown
    assert "All of the possible gain, within the noise of this run" in shown
    assert "140%" not in shown


@pytest.mark.parametrize(
    ("sentence", "shown"),
    [
        ("the run ended", "The run ended."),
        ("p99 is unknown", "p99 is unknown."),
        ("kvbm is faster!", "kvbm is faster!"),
        ("`dtype` differs", "`dtype` differs."),
    ],
)
def test_sentences_begin_with_a_capital_unless_they_begin_with_a_name(sentence, shown):
    assert sentence_case(sentence) == shown


def test_code_in_backticks_is_escaped_too():
    assert prose("run `a<b`") == "run <code>a&lt;b</code>"
    assert prose("one ` alone") == "one ` alone"


def test_password_of_an_address_is_not_shown(small):
    arms = {
        "a": {"kind": "url", "url": "http://me:secret@127.0.0.1:1/v1"},
        "b": {"kind": "url", "url": "http://127.0.0.1:2"},
    }
    change_summary(small, arms=arms, profile=None)
    shown = built(small).shown
    assert "secret" not in shown
    assert "kvbm bench --compare a=http://127.0.0.1:1/v1 --compare b=http://127.0.0.1:2 --workload conv" in shown


def test_long_distribution_keeps_its_ends():
    points = distribution([float(value) for value in range(1000)], limit=50)
    assert len(points) == 50
    assert points[0] == (0.0, 0.001)
    assert points[-1] == (999.0, 1.0)
    assert all(share == (value + 1) / 1000 for value, share in points)


def test_thinned_points_keep_the_ends_and_a_spike():
    points = [(float(x), 500.0 if x == 433 else x % 3) for x in range(1000)]
    kept = thinned(points, 40)
    assert len(kept) == 40
    assert kept == sorted(set(kept))
    assert {points[0], points[433], points[-1]} <= set(kept)


def test_rates_of_counters_that_appear_late_or_restart():
    values = [None, None, 10, 30, 5]
    samples = [{"t_ms": 2000.0 * i, "n": value} for i, value in enumerate(values)]
    assert rates(samples, "n") == [(2.0, 0.0), (4.0, 5.0), (6.0, 10.0), (8.0, 0.0)]
    failed = [{**samples[0], "error": "timeout"}, *samples[1:]]
    assert rates(failed, "n")[0] == (4.0, 5.0)
    assert rates(samples, "missing") == []
