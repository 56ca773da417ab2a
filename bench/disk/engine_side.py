"""A disk tier as in an engine: host slots in a rank's segment, and the tier in its own process or in this one."""

from __future__ import annotations

import os
import select
import threading
import time
from pathlib import Path

from kvbm.host.layout import BlockLayout
from kvbm.host.region import Region
from kvbm.host.segment import Segment
from kvbm.host.threads import allowed_cores
from kvbm.tiers.disk.orders import Open, Read, Write
from kvbm.tiers.disk.service.client import DiskClient
from kvbm.tiers.disk.settings import DiskSettings, Namespace
from kvbm.tiers.disk.storage import DiskStorage
from kvbm.types import SlotState

HASH_BYTES = 16
GENERATION = 1


class EngineSide:
    """`disk` and the `hashes` of its slots; with `is_own_process`, as in production, it has its own process."""

    def __init__(
        self,
        directory: Path,
        *,
        block_bytes: int,
        host_slots: int,
        disk_slots: int,
        io: str,
        is_own_process: bool = True,
    ) -> None:
        layout = BlockLayout.block_contiguous(block_count=1, block_bytes=block_bytes)
        self._segment = Segment.create(rank=0, layout=layout, slot_count=host_slots)
        self.region = Region.map([self._segment.info])
        self.region.shards[0][:] = 7
        self.region.write_slots(list(range(host_slots)), GENERATION, SlotState.READY)
        settings = DiskSettings(directory, block_count=disk_slots, io=io)
        namespace = Namespace(os.urandom(16), {"model": "bench"})
        before = set(threading.enumerate())
        self.disk: DiskClient | DiskStorage
        if is_own_process:
            self.disk = DiskClient()
            order = Open(settings, namespace, [self._segment.info], HASH_BYTES, frozenset(allowed_cores()))
            self.disk.start(order, directory, None, lambda: False)
        else:
            self.disk = DiskStorage.open(settings, namespace, self.region.shards, hash_bytes=HASH_BYTES)
        assert self.disk.io_name == io, self.disk.io_name
        self._own_threads = [thread.native_id for thread in threading.enumerate() if thread not in before]
        self.hashes = [os.urandom(HASH_BYTES) for _ in range(disk_slots)]

    def write(self, ticket: int, host_slots: list[int], disk_slots: list[int]) -> None:
        hashes = [self.hashes[slot] for slot in disk_slots]
        tenants, generations = [b""] * len(hashes), [GENERATION] * len(hashes)
        self.disk.submit(Write(ticket, hashes, disk_slots, host_slots, tenants, generations))

    def read(self, ticket: int, disk_slots: list[int], host_slots: list[int]) -> None:
        self.disk.submit(Read(ticket, [self.hashes[slot] for slot in disk_slots], disk_slots, host_slots))

    def wait(self, timeout_s: float) -> None:
        """The place, as results name it."""
        if isinstance(self.disk, DiskClient):
            result = select.poll()
            result.register(self.disk, select.POLLIN)
            result.poll(1000 * timeout_s)
        else:
            time.sleep(min(0.0005, timeout_s))

    def threads(self) -> list[int]:
        """All threads that move bytes."""
        if isinstance(self.disk, DiskClient):
            return [int(name) for name in os.listdir(f"/proc/{self.disk.pid}/task")]
        return self._own_threads

    def cpu_s(self) -> float:
        """CPU time of both processes."""
        own = sum(os.times()[:2])
        if isinstance(self.disk, DiskClient):
            fields = Path(f"/proc/{self.disk.pid}/stat").read_text().rpartition(")")[2].split()
            own += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return own

    def close(self) -> None:
        self.disk.close(30)
        self.region.close()
        self._segment.close()
