"""The program of a worker process: `python -P -m kvbm_cli.bench.client.worker`, started by workers.py.

parent -> worker    (part, targets), then the start in nanoseconds, then the position of each target that ended
worker -> parent    READY, then lists of records, then ProcessHealth
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvbm_cli.bench.client.channel import encoded, read_message
from kvbm_cli.bench.client.drive_part import drive_part
from kvbm_cli.bench.client.health import HealthMonitor
from kvbm_cli.bench.client.launcher import Part
from kvbm_cli.bench.client.request import Target
from kvbm_cli.bench.records.request_record import RequestRecord

READY = "ready"
BATCH_INTERVAL_S = 0.1


class RecordBatches:
    """Sends records to the parent, many at once."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
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
            self._writer.write(encoded(records))
            await self._writer.drain()


async def work(output: int) -> None:
    import aiohttp  # noqa: F401  it takes 0.3 s, which must not pass after the start

    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(output, "wb"))
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    part, targets = await read_message(reader)
    monitor = HealthMonitor()
    with monitor.garbage_collector_off():
        writer.write(encoded(READY))
        start_ns = await read_message(reader)
        await _send(part, targets, start_ns, reader, writer, monitor)
    writer.write(encoded(monitor.result()))
    await writer.drain()
    writer.close()


async def _send(
    part: Part,
    targets: Sequence[Target],
    start_ns: int,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    monitor: HealthMonitor,
) -> None:
    ended: set[int] = set()
    batches = RecordBatches(writer)
    background = [asyncio.create_task(_watch(reader, ended)), asyncio.create_task(batches.run())]
    await drive_part(part, _with_ends(targets, ended), start_ns, batches.add, monitor)
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    await batches.flush()


async def _watch(reader: asyncio.StreamReader, ended: set[int]) -> None:
    while True:
        ended.add(await read_message(reader))


def _with_ends(targets: Sequence[Target], ended: set[int]) -> list[Target]:
    def end_of(number: int) -> Callable[[], bool]:
        return lambda: number in ended

    return [replace(target, has_ended=end_of(number)) for number, target in enumerate(targets)]


def main() -> None:
    output = os.dup(1)
    os.dup2(2, 1)  # nothing that a library prints may get between the messages
    asyncio.run(work(output))


if __name__ == "__main__":
    main()
