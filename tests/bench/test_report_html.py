"""report.html without a browser: its content, that data cannot become markup, and which directories are refused."""

import base64
import difflib
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from experiments import build, summary_in, write_sample
from terminal import assert_entry

from kvbm.errors import EnvironmentProblem, UsageError
from kvbm_cli.bench.show.elements import distribution, prose, sentence_case, thinned
from kvbm_cli.bench.show.page import LIBRARY

ECHARTS_6_1_0 = "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"
HOSTILE = "</script><img src=x onerror='alert(1)'>\"&\u2028\u202e\x1b[31m{{}}${x}\ud800"
MOST_BYTES = 5_000_000
INLINE = ("b", "code", "span", "a", "em", "strong", "option", "title")


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
        self.shown += {"td": " | ", "th": " | ", **dict.fromkeys(INLINE, "")}.get(tag, "\n")

    def handle_data(self, data: str) -> None:
        if self._inside and self._inside[-1] in ("script", "style"):
            tag, attributes, text = self.raw[-1]
            self.raw[-1] = (tag, attributes, text + data)
        else:
            self.shown += data

    @property
    def lines(self) -> list[str]:
        """The text that is shown, and the kind of each chart."""
        text = [line.strip() + "\n" for line in self.shown.splitlines() if line.strip()]
        return [*text, *(f"chart of {chart['kind']}\n" for chart in self.charts["charts"])]

    @property
    def charts(self) -> dict[str, Any]:
        """What the scripts read: the arms, and the data of each chart."""
        [text] = [text for _, attributes, text in self.raw if attributes.get("id") == "data"]
        charts = [json.loads(a["data-chart"] or "") for _, a in self.elements if "data-chart" in a]
        return {**json.loads(text), "charts": charts}


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
        (small / file).write_text(content)
    for file in ("plan.json", "summary.json"):
        content = json.loads((small / file).read_text())
        content["cells"][0]["workload"]["name"] = HOSTILE
        (small / file).write_text(json.dumps(content))
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


Change = Callable[[Path], None]


def of_summary(**changes: Any) -> Change:
    return lambda directory: change_summary(directory, **changes)


def of_requests(count: int | None = None, **changes: Any) -> Change:
    """Other values in the first requests, or in all."""

    def change(directory: Path) -> None:
        rows = [
            row | changes if count is None or number < count else row
            for number, row in enumerate(requests_of(directory))
        ]
        (directory / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return change


def cut_off(directory: Path) -> None:
    path = directory / "requests.jsonl"
    path.write_text(path.read_text()[:-20])


def without_files(directory: Path) -> None:
    for name in ("requests.jsonl", "runs.jsonl"):
        (directory / name).unlink()
    change_summary(directory, complete=False, cells=[], compared=None, verdict="invalid", explanation="interrupted")


WRONG = {"reasons": ["arm kvbm answered 3 requests differently"], "hint": "run `x`"}
URLS = {
    "a": {"kind": "url", "url": "http://me:secret@127.0.0.1:1/v1"},
    "b": {"kind": "url", "url": "http://127.0.0.1:2"},
}
TIERS = ("g1_tokens", "g2_tokens", "g3_tokens", "g4_tokens")
# How the sample is made, and what then happens to its directory.
CASES: dict[str, tuple[dict[str, Any], Change]] = {
    "a run": ({}, of_summary()),
    "wrong answers": ({}, of_summary(verdict="wrong", **WRONG)),
    "an invalid run": ({}, of_summary(verdict="invalid", **WRONG)),
    "a slower arm": ({}, of_summary(verdict="slower", **WRONG)),
    "a gain beyond the possible is noise": (
        *({}, of_summary(share_of_possible_gain={"value": 1.4, "interval_95": None, "is_noise": True})),
    ),
    "the password of an address is not shown": ({}, of_summary(arms=URLS, profile=None)),
    "a failed request is counted and not drawn": (
        *({}, of_requests(1, error="broken off", first_token_ms=None, end_ms=None)),
    ),
    "no request was answered": ({}, of_requests(error="broken off", first_token_ms=None)),
    "cached tokens of an unknown tier are a source": ({}, of_requests(**dict.fromkeys(TIERS))),
    "a server that reports no source": ({}, of_requests(**dict.fromkeys((*TIERS, "computed_tokens", "cached_tokens")))),
    "without server metrics": ({"server_metrics": False}, of_summary()),
    "one arm alone": ({"arms": ("kvbm",)}, of_summary()),
    "a last line that is cut off": ({}, cut_off),
    "files that are missing": ({}, without_files),
}


@pytest.mark.parametrize("name", CASES)
def test_page(tmp_path_factory, name):
    """The text of a run and the data of its charts; of others what is new on their page, and which charts it lacks."""
    pages = []
    for changes, change in (CASES["a run"], CASES[name]):
        directory = tmp_path_factory.mktemp("run")
        write_sample(directory, **{"sessions": 6, "turns": 3, "pairs": 1, "pressures": (None,), **changes})
        change(directory)
        pages.append(built(directory))
    known, page = pages
    if name == "a run":
        lines = [*page.lines, *(f"{json.dumps(chart)}\n" for chart in page.charts["charts"])]
    else:
        differences = difflib.unified_diff(known.lines, page.lines, n=0)
        lines = [line for line in differences if re.match(r"\+(?!\+\+)|-(chart of|Cost of)", line)]
    assert_entry("bench/pages", name, "".join(lines), names=CASES)


def test_every_chart_has_a_title_and_a_table(sample):
    page = built(sample)
    boxes = [attributes for tag, attributes in page.elements if attributes.get("class") == "chart"]
    kinds = [chart["kind"] for chart in page.charts["charts"]]
    assert kinds == ["ladder", *["turns", "sources", "ecdf", "parts", "timeline"] * 3]
    assert len(boxes) == len(kinds)
    for box in boxes:
        words = re.fullmatch(r"Chart: (.+)\. The table below has the numbers\.", box["aria-label"] or "")
        assert box["role"] == "img"
        assert words is not None
        assert page.lines.count(f"{words[1]}\n") >= 2  # above the chart and above its table
    assert [tag for tag, _ in page.elements].count("details") == len(kinds)


def test_an_arm_without_costs_has_dashes_in_their_table(small):
    cells = json.loads((small / "summary.json").read_text())["cells"]
    cells[0]["arms"]["baseline"]["cost"] = None
    change_summary(small, cells=cells)
    lines = built(small).lines
    table = lines[lines.index("Cost of the engine's processes\n") :]
    assert table[2] == "baseline | – | – | – | – | – | – |\n"


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


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_sweep_has_a_point_per_load(tmp_path, ranks):
    summary = write_sample(tmp_path, sessions=6, turns=3, pairs=1, pressures=(None,), rates=(0.5, 1.0, 2.0))
    summary["arms"]["kvbm"] |= {"ranks": ranks} if ranks > 1 else {}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    page = built(tmp_path)
    charts = [chart for chart in page.charts["charts"] if chart["kind"] == "pareto"]
    assert [chart["y"] for chart in charts] == ["TTFT p50, ms", "ITL p50, ms"]
    assert {chart["x"] for chart in charts} == {"output tokens per second" + (" and GPU" if ranks > 1 else "")}
    arms = [cell["arms"] for cell in summary_in(tmp_path)["cells"]]
    names = page.charts["arms"]
    for chart, metric in zip(charts, ("ttft_ms", "itl_ms"), strict=True):
        assert {names[line["arm"]] for line in chart["lines"]} == {"baseline", "kvbm", "floor"}
        for line in chart["lines"]:
            own = [one[names[line["arm"]]] for one in arms]
            share = ranks if names[line["arm"]] == "kvbm" else 1
            assert line["points"] == sorted(
                [one["throughput"]["output_tokens_per_s"] / share, one[metric]["p50"]] for one in own
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


def test_long_distribution_keeps_its_ends():
    points = distribution([float(value) for value in range(1000)], limit=50)
    assert len(points) == 50
    assert points[0] == (0.0, 0.001)
    assert points[-1] == (999.0, 1.0)
    assert all(share == (value + 1) / 1000 for value, share in points)


def test_thinned_points_keep_the_ends_and_a_spike():
    points = [(float(x), 500.0 if x == 433 else x % 3) for x in range(1000)]
    kept = thinned(points, 40)
    assert 38 <= len(kept) <= 42
    assert kept == sorted(set(kept))
    assert {points[0], points[433], points[-1]} <= set(kept)
