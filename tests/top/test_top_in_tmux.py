"""`kvbm top` in a real terminal, tmux: under load, when the engine ends, and when it starts again."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from metric_pages import FakeLeader, serving
from prometheus_client.parser import text_string_to_metric_families
from test_top import PROGRAM, WAIT_S

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux here")


class Window:
    """A window of a tmux server of its own."""

    def __init__(self, name: str, width: int, height: int, command: list[str]) -> None:
        self._tmux = ["tmux", "-L", name, "-f", "/dev/null"]
        self.width, self.height = width, height
        size = ["-x", str(width), "-y", str(height)]
        shown = f"{shlex.join(command)}; echo exit code $?; sleep 1000"
        environment = {name: value for name, value in os.environ.items() if name not in ("TMUX", "COLUMNS", "LINES")}
        subprocess.run([*self._tmux, "new-session", "-d", *size, shown], check=True, env=environment)

    def lines(self) -> list[str]:
        done = subprocess.run([*self._tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True)
        lines = done.stdout.splitlines()
        assert len(lines) <= self.height
        assert all(len(line) <= self.width for line in lines), lines
        assert "Traceback" not in done.stdout, done.stdout
        return lines

    def wait_for(self, what: Callable[[str], object]) -> str:
        end_s = time.monotonic() + WAIT_S
        while not what(text := "\n".join(self.lines())):
            assert time.monotonic() < end_s, text
            time.sleep(0.1)
        return text

    def press(self, key: str) -> None:
        subprocess.run([*self._tmux, "send-keys", key], check=True)

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True)


@contextmanager
def window(width: int, height: int, *arguments: str) -> Iterator[Window]:
    one = Window(f"kvbm-{os.getpid()}-{width}", width, height, [*PROGRAM, *arguments])
    try:
        yield one
    finally:
        one.close()


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
