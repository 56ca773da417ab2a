"""Program of a worker process of the load client: sends its part of a plan to all targets.

parent -> worker    (part, targets), then the start in nanoseconds, then the position of each target that ended
worker -> parent    READY, then lists of records, then ProcessHealth
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvbm.child.child import end_of_channel
from kvbm.child.stream import MessageStream
from kvbm_cli.bench.load.launcher import Part
from kvbm_cli.bench.load.process import READY, HealthMonitor, drive_part
from kvbm_cli.bench.load.request import Target
from kvbm_cli.bench.result.results import RequestRecord

BATCH_INTERVAL_S = 0.1


class RecordBatches:
    """Sends records to the parent, many at once."""

    def __init__(self, stream: MessageStream) -> None:
        self._stream = stream
        self._records: list[RequestRecord] = []

    def add(self, record: RequestRecord) -> None:
        self._records.append(record)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(BATCH_INTERVAL_S)
            await self.flush()

    async def flush(self) -> None:
        if self._records:
            records, self._records = self._records, []
            self._stream.send(records)
            await self._stream.drain()


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
    batches = RecordBatches(stream)
    background = [asyncio.create_task(_watch(stream, ended)), asyncio.create_task(batches.run())]
    await drive_part(part, _with_ends(targets, ended), start_ns, batches.add, monitor)
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    await batches.flush()


async def _watch(stream: MessageStream, ended: set[int]) -> None:
    while True:
        ended.add(await stream.receive())


def _with_ends(targets: Sequence[Target], ended: set[int]) -> list[Target]:
    def end_of(number: int) -> Callable[[], bool]:
        return lambda: number in ended

    return [replace(target, has_ended=end_of(number)) for number, target in enumerate(targets)]


if __name__ == "__main__":
    asyncio.run(work())
