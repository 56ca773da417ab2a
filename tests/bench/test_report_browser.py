"""report.html in a real Chromium: `KVBM_CHROMIUM`, or the one in PATH, driven by playwright without a download.

Without Chromium or playwright these tests are skipped. With `KVBM_REQUIRE_BROWSER` they fail instead, see .ci/run.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from experiments import build, write_sample

from kvbm_cli.bench.show.page import write_page
from kvbm_cli.plan.advice import CapacityPlan, Curve, Prompts
from kvbm_cli.plan.page import page as page_of_plans

pytestmark = pytest.mark.slow
NAMES = ("chromium", "chromium-browser", "google-chrome")
PHONE, DESKTOP = (390, 844), (1440, 900)
CHARTS_OF_A_CELL = 5
DRAWN = """boxes => boxes.map(box => box.querySelectorAll("svg path").length)"""
OUTSIDE = """boxes => boxes.flatMap(box => {
  const frame = box.querySelector("svg").getBoundingClientRect();
  return [...box.querySelectorAll("svg text")].filter(text => {
    const own = text.getBoundingClientRect();
    return own.left < frame.left - 1 || own.right > frame.right + 1 || own.top < frame.top - 1
      || own.bottom > frame.bottom + 1;
  }).map(text => `${box.ariaLabel.slice(0, 20)}: ${text.textContent}`);
})"""
OVERLAPPING = """boxes => boxes.flatMap(box => {
  const texts = [...box.querySelectorAll("svg text")].map(text => [text.textContent, text.getBoundingClientRect()]);
  return texts.flatMap(([one, a], i) => texts.slice(i + 1).filter(([, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4
  ).map(([other]) => `${box.ariaLabel.slice(0, 20)}: ${one} over ${other}`));
})"""


def absent(what: str) -> None:
    if os.environ.get("KVBM_REQUIRE_BROWSER"):
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="module")
def browser():
    path = os.environ.get("KVBM_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        absent("no Chromium: install the package `chromium`, or set KVBM_CHROMIUM to its path")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("playwright is missing: install the extra `dev`")
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = playwright.chromium.launch(executable_path=path, args=[*arguments, "--disable-dev-shm-usage"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    write_sample(directory)
    return build(directory)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    write_sample(directory, sessions=6, turns=3, pairs=1, pressures=(None,), rates=(0.5, 1.0, 2.0))
    return build(directory)


class Shown:
    """An open page, its requests and everything that it complained about."""

    def __init__(self, browser: Any, file: Path, size: tuple[int, int], **options: Any) -> None:
        width, height = size
        viewport = {"width": width, "height": height}
        self.context = browser.new_context(viewport=viewport, offline=True, **options)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.goto(file.as_uri())

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def ready(self) -> Shown:
        self.page.wait_for_selector("html[data-ready]", timeout=60_000)
        return self

    def is_too_wide(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth > innerWidth"))

    def on_charts(self, script: str) -> list[Any]:
        found = self.page.eval_on_selector_all(".chart:visible", script)
        assert isinstance(found, list)
        return found

    def assert_drawn(self, count: int) -> None:
        drawn = self.on_charts(DRAWN)
        assert len(drawn) == count
        assert min(drawn) > 2
        assert self.on_charts(OUTSIDE) == []
        assert self.on_charts(OVERLAPPING) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, (768, 1024), DESKTOP], ids=lambda size: str(size[0]))
def test_page_is_drawn_without_errors_or_requests(browser, report, size, scheme):
    with Shown(browser, report, size, color_scheme=scheme).ready() as shown:
        shown.assert_drawn(1 + CHARTS_OF_A_CELL)
        assert not shown.page.get_by_text("require scripts").is_visible()
        assert not shown.is_too_wide()
        shown.page.select_option("#workload", "all")
        shown.assert_drawn(1 + 3 * CHARTS_OF_A_CELL)
        assert not shown.is_too_wide()
        assert shown.requests == [report.as_uri()]
        assert shown.complaints == []


def test_verdict_is_on_the_first_screen_of_a_phone(browser, report):
    with Shown(browser, report, PHONE).ready() as shown:
        box = shown.page.locator("h1").bounding_box()
        assert box["y"] + box["height"] < PHONE[1] / 2
        sizes = shown.page.evaluate(
            "[...document.querySelectorAll('.results li')].map(li => getComputedStyle(li).fontSize)"
        )
        assert len(sizes) == 3 + 2  # comparisons and caveats
        assert len(set(sizes)) == 1  # a caveat is as large as a gain


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "dark"), (DESKTOP, "light")])
def test_a_sweep_is_drawn(browser, swept, size, scheme):
    with Shown(browser, swept, size, color_scheme=scheme).ready() as shown:
        shown.page.select_option("#workload", "all")
        shown.assert_drawn(2 + 3 * CHARTS_OF_A_CELL)
        assert shown.page.get_by_role("img", name="by load").first.is_visible()
        assert not shown.is_too_wide()
        shown.page.emulate_media(media="print")
        shown.page.wait_for_timeout(300)
        shown.assert_drawn(2 + 3 * CHARTS_OF_A_CELL)
        assert (shown.requests, shown.complaints) == ([swept.as_uri()], [])


def test_selector_and_links_show_one_workload(browser, report):
    with Shown(browser, report, DESKTOP).ready() as shown:
        shown.page.select_option("#workload", "cell-3")
        assert shown.page.locator(".cell:visible h2").all_text_contents() == ["conversations-x2.0"]
        shown.page.get_by_role("link", name="conversations-x1.2").click()
        shown.page.wait_for_function("document.querySelector('#workload').value === 'cell-2'")
        assert shown.page.locator(".cell:visible h2").all_text_contents() == ["conversations-x1.2"]
        shown.assert_drawn(1 + CHARTS_OF_A_CELL)


def test_charts_follow_a_change_of_the_colour_scheme_and_the_width_of_the_window(browser, report):
    script = """() => [getComputedStyle(document.body).backgroundColor,
      document.querySelector('.chart svg text').getAttribute('fill')]"""
    with Shown(browser, report, DESKTOP, color_scheme="light").ready() as shown:
        light = shown.page.evaluate(script)
        shown.page.emulate_media(color_scheme="dark")
        shown.page.wait_for_timeout(200)
        dark = shown.page.evaluate(script)
        assert all(one != other for one, other in zip(light, dark, strict=True))
        shown.assert_drawn(1 + CHARTS_OF_A_CELL)
        shown.page.set_viewport_size({"width": 390, "height": 844})
        shown.page.wait_for_timeout(400)
        shown.assert_drawn(1 + CHARTS_OF_A_CELL)
        assert not shown.is_too_wide()


def test_tooltip_shows_values_and_follows_the_policy(browser, report):
    with Shown(browser, report, DESKTOP).ready() as shown:
        bar = shown.page.locator("figure.parts:visible .chart")
        box = bar.bounding_box()
        bar.hover(position={"x": box["width"] * 0.25, "y": box["height"] * 0.4})
        shown.page.wait_for_timeout(300)
        assert "first token: " in bar.inner_text()
        assert shown.complaints == []


def test_print_shows_every_chart_in_light_colours(browser, report):
    """Also before the browser takes the picture to print: without the change of the medium, and without a frame."""
    script = (
        "event => (dispatchEvent(new Event(event)), document.querySelector('.chart svg text').getAttribute('fill'))"
    )
    with Shown(browser, report, DESKTOP, color_scheme="dark").ready() as shown:
        assert shown.page.evaluate(script, "beforeprint") == "#586271"
        assert shown.page.evaluate(script, "afterprint") == "#9ca7b4"
        shown.assert_drawn(1 + CHARTS_OF_A_CELL)
        shown.page.emulate_media(media="print")
        shown.page.wait_for_timeout(300)
        shown.assert_drawn(1 + 3 * CHARTS_OF_A_CELL)
        fills = shown.on_charts("boxes => boxes.map(box => box.querySelector('svg text').getAttribute('fill'))")
        assert set(fills) == {"#586271"}
        widths = shown.on_charts("boxes => boxes.map(box => box.querySelector('svg').getBoundingClientRect().width)")
        assert set(widths) == {640}
        assert len(shown.page.pdf(format="A4")) > 50_000
        shown.page.emulate_media(media="screen")
        shown.page.wait_for_timeout(400)
        shown.assert_drawn(1 + CHARTS_OF_A_CELL)
        assert shown.complaints == []


def test_everything_is_readable_without_scripts(browser, report):
    with Shown(browser, report, PHONE, java_script_enabled=False) as shown:
        page = shown.page
        assert page.locator("h1").is_visible()
        assert page.locator("details[open] table").count() == 1 + 3 * CHARTS_OF_A_CELL
        assert page.get_by_text("The charts of this report require scripts.").is_visible()
        tables = page.locator("table")
        assert tables.count() > 3 * CHARTS_OF_A_CELL
        assert all(tables.nth(index).is_visible() for index in range(tables.count()))
        assert page.locator(".cell:visible").count() == 3
        assert page.locator(".chart:visible").count() == 0


def test_keyboard_reaches_links_with_a_visible_focus(browser, report):
    with Shown(browser, report, DESKTOP).ready() as shown:
        shown.page.keyboard.press("Tab")
        shown.page.keyboard.press("Tab")
        found = shown.page.evaluate(
            "[document.activeElement.tagName, getComputedStyle(document.activeElement).outlineStyle]"
        )
        assert found == ["A", "solid"]


@pytest.mark.soak
def test_twenty_thousand_requests_are_drawn_in_seconds(browser, tmp_path):
    write_sample(tmp_path, sessions=278, turns=8, pressures=(2.0,))
    file = build(tmp_path)
    start = time.monotonic()
    with Shown(browser, file, DESKTOP).ready() as shown:
        elapsed_s = time.monotonic() - start
        print(f"report of 20,016 requests: {file.stat().st_size} bytes, drawn after {elapsed_s:.1f} s")
        shown.assert_drawn(CHARTS_OF_A_CELL)
        assert elapsed_s < 20


def test_the_page_of_a_plan_draws_its_curves(browser, tmp_path):
    curve = Curve(("1 GiB", "2 GiB", "4 GiB"), None, {"lru": [0.1, 0.3, 0.5], "adaptive": [0.2, 0.4, 0.6]})
    write_page(tmp_path / "plan.html", page_of_plans([CapacityPlan("a trace", curve, Prompts(), {}, {})], None))
    page = browser.new_page()
    page.goto((tmp_path / "plan.html").as_uri())
    for shape, count in (("line", 5), ("path", 2), ("circle", 6), ("text", 10)):
        assert page.locator(f"svg > {shape}").count() == count
    page.close()
