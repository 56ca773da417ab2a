"""Program of a worker process of the load client: sends its part of a plan to all targets.

parent -> worker    (part, targets), then the start in nanoseconds, then the position of each target that ended
worker -> parent    READY, then each record when its request has ended, then ClientHealth
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvbm.child.child import end_of_channel
from kvbm.child.stream import MessageStream
from kvbm_cli.bench.load.launcher import Part
from kvbm_cli.bench.load.process import READY, HealthMonitor, drive_part
from kvbm_cli.bench.load.request import Target


async def work() -> None:
    import aiohttp  # noqa: F401  it takes 0.3 s, which must not pass after the start

    stream = await MessageStream.over(end_of_channel())
    part, targets = await stream.receive()
    monitor = HealthMonitor()
    with monitor.garbage_collector_off():
        stream.send(READY)
        start_ns = await stream.receive()
        await _send(part, targets, start_ns, stream, monitor)
    stream.send(monitor.result())
    await stream.finish()


async def _send(
    part: Part, targets: Sequence[Target], start_ns: int, stream: MessageStream, monitor: HealthMonitor
) -> None:
    ended: set[int] = set()
    watcher = asyncio.create_task(_watch(stream, ended))
    watched = [
        replace(target, has_ended=partial(operator.contains, ended, position))
        for position, target in enumerate(targets)
    ]
    await drive_part(part, watched, start_ns, stream.send, monitor)
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)


async def _watch(stream: MessageStream, ended: set[int]) -> None:
    while True:
        ended.add(await stream.receive())


if __name__ == "__main__":
    asyncio.run(work())
