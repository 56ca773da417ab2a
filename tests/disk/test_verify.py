"""Reading a cache that somebody else is writing to."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from disk_rig import instance_of, opened

from kvbm.tiers.disk.index import BlockIndex, IndexRow
from kvbm.tiers.disk.superblock import read_superblock
from kvbm_cli.cache.disk_verification import verify
from kvbm_cli.store.caches import index_to_read


def row(slot: int) -> IndexRow:
    return IndexRow(slot, slot.to_bytes(16, "little"), slot, 4096, slot, b"", 0.0)


def test_index_is_loaded_as_of_one_moment_while_rows_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    path.touch(0o600)
    writer = BlockIndex.open(path)
    writer.change([row(slot) for slot in range(5000)], ())
    is_over = threading.Event()

    def write() -> None:
        slot = 5000
        while not is_over.is_set():
            writer.change([row(slot)], [slot - 2] if slot % 2 else ())
            slot += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        reader = index_to_read(path)
        for _ in range(40):
            found = reader.load(16)
            assert len(found.hashes) == len(found.slots) >= 5000
            assert found.slots.tolist() == [int.from_bytes(name, "little") for name in found.hashes.tolist()]
        reader.close()
    finally:
        is_over.set()
        thread.join()
        writer.close()


def test_block_whose_hash_has_another_length_is_bad(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.write(range(8), range(8))
    instance = instance_of(tmp_path)
    with sqlite3.connect(instance / "index.sqlite") as connection:
        connection.execute("UPDATE blocks SET hash = x'0011' WHERE slot = 6")
    connection.close()
    superblock = read_superblock(instance / "superblock")
    assert superblock is not None
    found = verify(instance, superblock, progress=lambda done, total: None)
    assert (found.good_count, found.bad, found.replaced_count) == (7, (6,), 0)
