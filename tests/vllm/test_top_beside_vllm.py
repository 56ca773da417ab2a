"""`kvbm top` in tmux beside a vLLM of `kvbm serve`: under load, after the engine was killed, and after its next start.

The rate that it shows is one that two scrapes by hand have."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import httpx
import psutil
import pytest
from kvbm_serve import QUIET, started
from prometheus_client.parser import text_string_to_metric_families
from top_window import Window, window
from traffic import tokens
from vllm_server import BLOCK_TOKENS
from waiting import eventually

from kvbm.engines.make_model import materialise
from kvbm_cli.engine.process import choose_port

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux here"),
]
INTERVAL_S = 1.0
KEPT_S = 8.0  # of the scrapes by hand; a page shows an interval within
PROFILE = """\
engine:
  kind: vllm
  model: {model}
  arguments:
    served_model_name: m
    dtype: float32
    block_size: 128
    max_model_len: 2048
    num_gpu_blocks_override: 20
    kv_cache_memory_bytes: 256M
    enforce_eager: true
tiers: {{host: {{blocks: 64}}}}
onboard: {{policy: always}}  # however fast this machine computes
server: {{port: {port}}}
"""


class Scrapes:
    """Prompt tokens by source, scraped by hand several times a second."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._found: deque[tuple[float, dict[str, float]]] = deque()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Scrapes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.2):
            with contextlib.suppress(OSError):
                self._found.append((time.monotonic(), scraped(self._url)))
            while self._found and self._found[0][0] < time.monotonic() - KEPT_S:
                self._found.popleft()

    def rates(self) -> list[float]:
        """Tokens per second between each two scrapes that are about an interval apart."""
        found = list(self._found)
        return [
            (sum(after.values()) - sum(before.values())) / (ended_s - began_s)
            for began_s, before in found
            for ended_s, after in found
            if 0.8 * INTERVAL_S < ended_s - began_s < 2 * INTERVAL_S
        ]


def scraped(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:
        text = page.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {one.labels["source"]: one.value for one in samples if one.name == "kvbm_prompt_tokens_total"}


@contextmanager
def load(url: str) -> Iterator[None]:
    """A client that repeats prompts which G1 does not hold together. It ends at a dead engine."""
    random_, ended = Random(3), threading.Event()
    prompts = [tokens(random_, 6 * BLOCK_TOKENS + 20) for _ in range(6)]

    def run() -> None:
        with (
            httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
            contextlib.suppress(httpx.TransportError),
        ):
            for prompt in itertools.cycle(prompts):
                body = {"model": "m", "prompt": prompt, "max_tokens": 1}
                if ended.is_set() or client.post("/v1/completions", json=body).status_code != 200:
                    return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def shows_what_was_scraped(screen: Window, scrapes: Scrapes) -> bool:
    """Whether the rate of a page is one that the scrapes had; a busy machine may delay a page or a scrape."""
    shown = re.search(r"prompt +([\d,]+) tokens/s", "\n".join(screen.lines()))
    rates = scrapes.rates()
    if shown is None or not rates:
        return False
    rate = float(shown[1].replace(",", ""))
    return rate > 0 and 0.9 * min(rates) <= rate <= 1.1 * max(rates) and max(rates) < 4 * min(rates)


def engine_of(program_pid: int) -> psutil.Process:
    """The process of vLLM's engine core."""
    processes = psutil.Process(program_pid).children(recursive=True)
    (core,) = (one for one in processes if "EngineCore" in " ".join(one.cmdline()))
    return core


def test_the_page_follows_a_vllm_that_is_killed_and_started_again(tmp_path: Path) -> None:
    port = choose_port("127.0.0.1", 0)
    (tmp_path / "mine.yaml").write_text(PROFILE.format(model=materialise("vllm-25m"), port=port))
    environment = {**os.environ, **QUIET, "XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        screens: list[Window] = []
        for start in range(2):
            with started(tmp_path, environment) as (program, url):
                if not screens:
                    options = ("--url", url, "--interval", str(INTERVAL_S))
                    screens += [stack.enter_context(window(*size, *options)) for size in ((80, 24), (200, 50))]
                with load(url), Scrapes(url) as scrapes:
                    for screen in screens:
                        screen.wait_for(lambda text: re.search(r"^host +\S", text, re.MULTILINE) and "tokens/s" in text)
                        eventually(lambda screen=screen: shows_what_was_scraped(screen, scrapes), "a rate")
                        screen.wait_for(lambda text: re.search(r"host [1-9]\d*%", text))
                    if start == 0:
                        engine_of(program.pid).send_signal(signal.SIGKILL)
                        program.wait()
                        for screen in screens:
                            screen.wait_for(lambda text: "refused" in text)
        for screen in screens:
            screen.press("q")
            screen.wait_for(lambda text: "exit code 0" in text)
