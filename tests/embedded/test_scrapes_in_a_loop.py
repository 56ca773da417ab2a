"""Scrapes in a loop, of many clients: pages of metrics take a fifth of the time at most, so that streams go on."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

from server_rig import Stats

from kvbm.engines.embedded.http.metrics import EngineMetrics
from kvbm.observe.shared_page import REST

PAGE_S = 0.02


class SlowMetrics(EngineMetrics):
    """Records when pages were made, which takes PAGE_S."""

    def __init__(self) -> None:
        super().__init__("m", stats=Stats, cache_config={})  # type: ignore[arg-type]
        self.times_s: list[tuple[float, float]] = []

    def exposition(self) -> bytes:
        began_s = time.monotonic()
        time.sleep(PAGE_S)
        self.times_s.append((began_s, time.monotonic()))
        return b"%d" % len(self.times_s)


def test_scrapes_that_wait_share_a_page_that_is_made_after_them() -> None:
    metrics = SlowMetrics()

    async def scrape() -> None:
        assert await metrics.page() == b"1"
        assert await asyncio.gather(*(metrics.page() for _ in range(50))) == [b"2"] * 50
        leaving = asyncio.create_task(metrics.page())
        await asyncio.sleep(0)
        leaving.cancel()
        assert await metrics.page() == b"3"

    asyncio.run(scrape())
    rests_s = [began_s - ended_s for (_, ended_s), (began_s, _) in pairwise(metrics.times_s)]
    assert min(rests_s) > REST * PAGE_S * 0.9
