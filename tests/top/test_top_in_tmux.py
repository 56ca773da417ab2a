"""`kvbm top` in a real terminal, tmux: under load, when the engine ends, and when it starts again."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from metric_pages import FakeLeader, serving
from prometheus_client.parser import text_string_to_metric_families
from top_window import window

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux here")


@contextmanager
def load(leader: FakeLeader) -> Iterator[None]:
    """Requests that get three of four prompt tokens from host memory."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.01):
            leader.counters.prompt_host_tokens += 300
            leader.counters.prompt_computed_tokens += 100

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        text = page.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {one.labels["source"]: one.value for one in samples if one.name == "kvbm_prompt_tokens_total"}


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_the_page_follows_load_end_and_start_without_an_overflow(width, height):
    leader = FakeLeader()
    with contextlib.ExitStack() as stack:
        first = contextlib.ExitStack()
        port = first.enter_context(serving(leader))
        stack.enter_context(load(leader))
        screen = stack.enter_context(window(width, height, "--url", f"127.0.0.1:{port}", "-i", "0.5"))
        shown = screen.wait_for(lambda text: "host 75%" in text)
        before, began_s = scraped(port), time.monotonic()
        time.sleep(1)
        after, took_s = scraped(port), time.monotonic() - began_s
        increases = {source: after[source] - before[source] for source in after}
        assert increases["host"] / sum(increases.values()) == pytest.approx(0.75, abs=0.01)
        rate = float(re.search(r"prompt +([\d,]+) tokens/s", shown)[1].replace(",", ""))
        assert 0.2 < rate / (sum(increases.values()) / took_s) < 5, "the load is not even on a busy machine"
        assert "75%" in next(line for line in shown.splitlines() if line.startswith("host"))
        first.close()
        screen.wait_for(lambda text: "refused" in text)
        again = FakeLeader()
        stack.enter_context(serving(again, port))
        screen.wait_for(lambda text: "refused" not in text and "tokens/s" in text)
        screen.press("q")
        screen.wait_for(lambda text: "exit code 0" in text)
