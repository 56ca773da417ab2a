"""kvbm's storage beside SGLang's own backend `file`: time of a load, bytes per page, and what becomes of damaged pages.

    python bench/sglang/storage_beside_file.py --output bench/results/NAME-sglang-storage-beside-file

Run it as root with an interpreter that has SGLang 0.5.23 (`nox -s sglang` makes one). It takes a minute, and writes
NAME.json with every sample and NAME.md with the table. No server runs: both backends get the calls that SGLang's
threads make, for a host pool of the tests, and the same bytes. So it shows the storage's part of a load, not the TTFT.

    kvbm    KvbmHiCacheStorage: `batch_get_v1` copies into the host pool
    file    HiCacheFile: `batch_get` into new flat pages, which are then copied into the host pool, as SGLang does

A load is `batch_exists` and a read of 32 pages of 768 KiB. `warm`: the files are in Linux's memory, from which `file`
reads and kvbm never does (O_DIRECT). `cold`: they are not, as with a storage larger than memory.
"""

from __future__ import annotations

import hashlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from comparison import ARMS, Place, drop_from_memory, flip_bits, full_disk, parser_of, save

from kvbm.engines.sglang import cpu_server

cpu_server.prepare()

import pytest  # noqa: E402
from host_pools import SGLangHostPool, pretend_identity, storage_config  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheFile  # noqa: E402

from kvbm.engines.sglang import storage  # noqa: E402
from kvbm.engines.sglang.host_pool import HostPool, copy_out  # noqa: E402
from kvbm.tiers.disk.superblock import read_superblock  # noqa: E402

PAGE_TOKENS = 4096  # of 192 bytes
COUNT = 32
CAPACITY = "80MiB"  # on a file system of 96 MiB
MANY = 160  # pages of together 120 MiB
FLIPPED = 3
DEADLINE_S = 60.0


def keys_of(name: str, count: int) -> list[str]:
    return [hashlib.sha256(f"{name} {number}".encode()).hexdigest() for number in range(count)]


KEYS = keys_of("page", COUNT)


class Kvbm:
    name = "kvbm"

    def __init__(self, directory: Path, pool: SGLangHostPool, capacity: str = "1GB") -> None:
        disk = {"directory": str(directory), "capacity": capacity, "drain_s": 30.0}
        self._pool, self._directory = pool, directory
        self._storage = storage.KvbmHiCacheStorage(
            storage_config({"tiers": {"disk": disk}, "metrics": {"serve": False}}), {}
        )
        self._storage.register_mem_pool_host(pool)

    def close(self) -> None:
        self._storage.close()

    def write(self, keys: Sequence[str], places: Sequence[int]) -> None:
        """Write, and wait until the pages are on disk."""
        end_s = time.monotonic() + DEADLINE_S
        while not all(self._storage.batch_set_v1(keys, self._pool.indices(*places))):
            assert time.monotonic() < end_s, "kvbm stores nothing"
        tier = self._storage._thread._leader.lower_tiers[0]
        while not all(tier.contains(bytes.fromhex(key)) for key in keys):
            assert time.monotonic() < end_s, "kvbm writes nothing"
            time.sleep(0.01)

    def read(self, keys: Sequence[str], places: Sequence[int]) -> list[bool]:
        self._storage.batch_exists(keys)
        return self._storage.batch_get_v1(keys, self._pool.indices(*places))

    def forget_memory(self) -> None:
        self._storage._thread._leader.host.store.reset()

    def places(self) -> list[Place]:
        """Return where each page is that was written first."""
        (arena,) = self._directory.rglob("arena")
        shape = read_superblock(arena.with_name("superblock"))
        assert shape is not None
        return [(arena, slot * shape.slot_bytes, shape.slot_bytes) for slot in range(COUNT)]


class File:
    name = "file"

    def __init__(self, directory: Path, pool: SGLangHostPool, capacity: str = "") -> None:
        config = storage_config({})
        config.extra_config = {}
        self._pool, self._host, self._directory = pool, HostPool(pool), directory
        self._storage = HiCacheFile(config, str(directory))

    def close(self) -> None: ...

    def write(self, keys: Sequence[str], places: Sequence[int]) -> None:
        self._storage.batch_set(keys, [self._pool.kv_buffer[:, place].flatten() for place in places])

    def read(self, keys: Sequence[str], places: Sequence[int]) -> list[bool]:
        self._storage.batch_exists(keys)
        found = self._storage.batch_get(keys, [self._pool.get_dummy_flat_data_page() for _ in keys])
        for page, pieces in zip(found, self._host.pages(self._pool.indices(*places), len(keys)), strict=True):
            if page is not None:
                copy_out(page.data_ptr(), pieces)
        return [page is not None for page in found]

    def forget_memory(self) -> None: ...

    def places(self) -> list[Place]:
        return [(path, 0, path.stat().st_blocks * 512) for path in sorted(self._directory.glob("*.bin"))]


Backend = type[Kvbm] | type[File]


@contextmanager
def opened(backend: Backend, *arguments: Any) -> Iterator[Kvbm | File]:
    one = backend(*arguments)
    try:
        yield one
    finally:
        one.close()


class Measurement:
    """One backend in a directory, with a host pool whose first pages hold what was computed."""

    def __init__(self, backend: Backend, home: Path) -> None:
        self.backend, self.home, self.directory = backend, home, home / "storage"
        self.pool = SGLangHostPool("page_first_direct", page_size=PAGE_TOKENS, pages=2 * COUNT)
        for place in range(COUNT):
            self.pool.fill(place, place)
        self.right = [self.pool.content(place) for place in range(COUNT)]
        self.load_ms: dict[str, list[float]] = {"warm": [], "cold": []}
        self.rows: dict[str, Any] = {}

    def load(self, one: Kvbm | File, keys: Sequence[str] = KEYS) -> tuple[float, dict[str, int]]:
        """Read into other places; return the milliseconds, and how many pages were there and right."""
        places = range(COUNT, 2 * COUNT)
        self.pool.kv_buffer[:, COUNT:].zero_()
        began_s = time.monotonic()
        are_there = one.read(keys, places)
        taken_ms = (time.monotonic() - began_s) * 1000
        pages = zip(are_there, places, self.right, strict=True)
        right = [bool((self.pool.content(place) == known).all()) for is_there, place, known in pages if is_there]
        return taken_ms, {"found": sum(are_there), "right": sum(right), "wrong": len(right) - sum(right)}

    def again(self) -> dict[str, int]:
        with opened(self.backend, self.directory, self.pool) as one:
            return self.load(one)[1]


def measure_loads(all_of: Sequence[Measurement], rounds: int) -> None:
    """Alternately, in random order within a round."""
    chosen, open_ones = random.Random(1), []
    for one in all_of:
        open_ones.append(one.backend(one.directory, one.pool))
        open_ones[-1].write(KEYS, range(COUNT))
        one.rows["page_bytes"] = round(statistics.mean(size for *_, size in open_ones[-1].places()))
    for _ in range(rounds):
        for kind in ("warm", "cold"):
            for index in chosen.sample(range(len(all_of)), len(all_of)):
                open_ones[index].forget_memory()
                if kind == "cold":
                    drop_from_memory(all_of[index].directory)
                taken_ms, found = all_of[index].load(open_ones[index])
                if found["right"] == COUNT:  # on a busy machine, a load may exceed kvbm's deadline
                    all_of[index].load_ms[kind].append(taken_ms)
    for one in open_ones:
        one.close()


def damage(one: Measurement) -> dict[str, int]:
    with opened(one.backend, one.directory, one.pool) as closed_again:
        places = closed_again.places()
    flip_bits(random.Random(2).sample(places, FLIPPED))
    # kvbm gives up the rest of a load behind a damaged page, so each page is read alone
    total = {"found": 0, "right": 0, "wrong": 0}
    with opened(one.backend, one.directory, one.pool) as damaged:
        for number, key in enumerate(KEYS):
            one.pool.kv_buffer[:, COUNT:].zero_()
            (is_there,) = damaged.read([key], [COUNT])
            is_right = bool((one.pool.content(COUNT) == one.right[number]).all())
            total["found"] += is_there
            total["right" if is_right else "wrong"] += is_there
    return total


def fill_a_disk(one: Measurement) -> dict[str, int]:
    """Write more than fits, and read what was written last."""
    with full_disk(one.home / "full") as directory, opened(one.backend, directory, one.pool, CAPACITY) as full:
        keys = keys_of("many", MANY)
        for begin in range(0, MANY, COUNT):
            full.write(keys[begin : begin + COUNT], range(COUNT))
        return one.load(full, keys[-COUNT:])[1]


def words(row: dict[str, int]) -> str:
    return f"{row['found']} of {COUNT} pages found, {row['wrong']} of them wrong"


def rows_of(all_of: Sequence[Measurement]) -> Iterator[tuple[str, ...]]:
    for kind, what in (
        ("cold", "load of 32 pages of 768 KiB, no file in memory"),
        ("warm", "the same, files in memory"),
    ):
        yield f"{what}, ms", *(f"{statistics.median(one.load_ms[kind]):.1f}" for one in all_of)
    yield "bytes on disk per page", *(f"{one.rows['page_bytes']:,}" for one in all_of)
    for name, what in (
        ("restart", "after a restart"),
        ("flipped", f"a flipped bit in {FLIPPED} pages"),
        ("other_weights", "other weights under the same name, same directory"),
        ("full_disk", "the newest pages after more writes than fit"),
    ):
        yield what, *(words(one.rows[name]) for one in all_of)


def main() -> int:
    options = parser_of(__doc__, rounds=15).parse_args()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="kvbm-sglang-") as home:
        identity = pretend_identity(patch)
        patch.setattr(storage, "replica", lambda: 0)  # no scheduler has said which one this is
        all_of = []
        for backend in (Kvbm, File):
            (own := Path(home, backend.name)).mkdir()
            all_of.append(Measurement(backend, own))
        assert [one.backend.name for one in all_of] == list(ARMS)
        measure_loads(all_of, options.rounds)
        for one in all_of:
            one.rows["restart"] = one.again()
            one.rows["flipped"] = damage(one)
            identity["weights"] = "b"  # other weights compute other bytes, so whatever is found is wrong
            one.rows["other_weights"] = one.again()
            one.rows["other_weights"]["wrong"] = one.rows["other_weights"]["found"]
            identity["weights"] = "a"
            one.rows["full_disk"] = fill_a_disk(one)
    backends = {one.backend.name: {**one.rows, "load_ms": one.load_ms} for one in all_of}
    save(options.output, {"benchmark": "sglang_storage_beside_file", "backends": backends}, list(rows_of(all_of)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
