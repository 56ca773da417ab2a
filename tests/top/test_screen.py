"""The page of `kvbm top`: it fits, it shows the figures, and nothing from outside controls the terminal."""

from __future__ import annotations

import pytest
from metric_pages import FakeLeader
from test_figures import readings

from kvbm_cli.top.screen import COLUMNS, View, page
from kvbm_cli.top.watched import WatchedEngine


def engine(name: str, **counts: float) -> WatchedEngine:
    return WatchedEngine(name, list(readings(FakeLeader(), FakeLeader(**counts))))


def lines(*engines: WatchedEngine, width: int = 80, height: int | None = 24, view: View | None = None, warnings=()):
    made = page(list(engines), list(warnings), view or View(), title="t", width=width, height=height)
    return made.plain.split("\n")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (40, 10), (1, 1)])
@pytest.mark.parametrize("count", [0, 1, 3, 40])
def test_the_page_fits_into_the_window(width, height, count):
    huge = {"prompt_host_tokens": 10**12, "onboard_bytes": 10**15, "saved_prefill_s": 1e9, "disk_off": 1}
    engines = [engine(f"run-with-a-long-name-{number}", **huge) for number in range(count)]
    made = lines(*engines, width=width, height=height, warnings=["w" * 500] * 3)
    assert len(made) <= height
    assert max(map(len, made)) <= width


def test_one_engine_has_a_bar_per_tier_and_its_sources():
    text = "\n".join(lines(engine("a", prompt_host_tokens=300, prompt_computed_tokens=100, saved_prefill_s=82.0)))
    assert "prompt   200 tokens/s: device 0%, host 75%, disk 0%, computed 25%" in text
    assert "saved    41.0 s of prefill per second; hit rate 75%" in text
    assert "host     ██████████████████████▌░░░░░░░   75%" in text
    assert "disk     ░░░░" in text


def test_bars_use_the_width_of_the_window():
    assert max(line.count("█") for line in lines(engine("a"), width=200, height=50)) > 100


def test_several_engines_are_rows_that_a_key_sorts():
    engines = [engine("a", prompt_host_tokens=10), engine("b", prompt_host_tokens=30), engine("c")]
    view = View()

    def order() -> list[str]:
        return [line.split()[0] for line in lines(*engines, view=view)[2:5]]

    assert order() == ["a", "b", "c"]
    view.press("r")
    assert order() == ["c", "b", "a"]
    view.press("r")
    view.press("s")
    assert order() == ["b", "a", "c"]
    assert "*tokens/s" in lines(*engines, view=view)[1]
    for _ in COLUMNS:
        view.press("s")
    assert view.column is None


def test_an_engine_that_does_not_answer_keeps_its_row_with_the_reason():
    made = lines(engine("a"), WatchedEngine("b", problem="connection refused"))
    assert any(line.startswith("b ") and "connection refused" in line for line in made)


def test_p_pauses_and_says_so():
    view = View()
    view.press("p")
    assert lines(engine("a"), view=view)[0].endswith("paused: p continues")
    view.press("p")
    assert "paused" not in lines(engine("a"), view=view)[0]


def test_more_engines_than_fit_are_counted():
    assert any("more engines" in line for line in lines(*[engine(f"e{number}") for number in range(30)]))


def test_nothing_from_outside_controls_the_terminal():
    bad = "\x1b[2Jevil\u202e"
    one = engine(f"a{bad}")
    one.readings[1].page.series["kvbm_info"][0][0]["model"] = bad
    text = "\n".join(lines(one, WatchedEngine("b", problem=bad), warnings=[bad]))
    assert "\x1b" not in text
    assert "\u202e" not in text
