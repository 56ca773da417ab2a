"""Damages to a cache on disk, done while no engine runs.

    DAMAGES[name].spoil(site)                   change the files; all choices come from `site.random`
    with spoiled(damage, caches, directory, r):  the same on a copy of a cache

The next engine must start, and answer like one without cache. A damage that `keeps` leaves most blocks intact: the
engine must still find some of them on disk.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import shutil
import socket
import sqlite3
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvbm.tiers.disk.directory import ARENA, INDEX, LOCK, RATES, SUPERBLOCK

SECTOR_BYTES = 512
LOG_HEADER_BYTES, FRAME_BYTES = 32, 24 + 4096  # of SQLite's log
COLUMNS = ("slot", "hash", "generation", "length", "checksum", "tenant", "written")
NUMBERS = (-1, 0, 1, 4096, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63), 0.5, 1e300, float("inf"), -0.0)
EXTREMES = (*NUMBERS, None, "", "text", "12", b"", b"\0" * 8, b"\xff" * 16, b"x" * 100_000)
LARGEST_COMPARED_BYTES = 1 << 27
LARGEST = (2**63 - 2, 2**63 - 1, 2**63 - 1, 2**63 - 1)
JSON_TEXTS = (
    "", "[" * 4096, "{" * 4096, "null", "true", "[]", "{}", '"text"', "1e999", "-1", "{\"tokens_per_s\": 1", "\0" * 100,
    '{"tokens_per_s": NaN}', '{"a": ' * 600 + "1" + "}" * 600, '{"tokens_per_s": 1.0, "tokens_per_s": -1.0}',
)  # fmt: skip
RATES_PER_S = (5e-324, 1e-300, 1e-6, 1000.0, 1e12, 1e308)
NO_RATES = (-1.0, 0.0, -0.0, 1, 10**400, True, None, "1.0", [], {}, float("nan"), float("inf"))


@dataclass
class Site:
    """A copy of a cache. `older` is the same instance at an earlier time, `other` one of another model.

    `undo` is called before the files are removed. `may_refuse`: the directory of all instances cannot be used, so that
    the engine may refuse to start.
    """

    directory: Path
    instance: Path
    older: Path
    other: Path
    slot_bytes: int
    random: random.Random
    undo: list[Callable[[], object]] = field(default_factory=list)
    may_refuse: bool = False

    @property
    def arena(self) -> Path:
        return self.instance / ARENA

    @property
    def index(self) -> Path:
        return self.instance / INDEX

    @property
    def log(self) -> Path:
        return self.instance / f"{INDEX}-wal"

    @property
    def superblock(self) -> Path:
        return self.instance / SUPERBLOCK

    def used_slots(self) -> list[int]:
        """In the index, read from a copy of it, so that nothing changes here."""
        copy = self.directory.with_name("index-copy")
        copy.mkdir(exist_ok=True)
        for path in self.instance.glob(f"{INDEX}*"):
            shutil.copyfile(path, copy / path.name)
        with closing(sqlite3.connect(copy / INDEX)) as connection:
            return [slot for (slot,) in connection.execute("SELECT slot FROM blocks")]

    def some_slots(self, most: int) -> list[int]:
        return self.random.sample(self.used_slots(), self.random.randint(2, most))


@dataclass(frozen=True)
class Damage:
    """`area` groups damages. `needs_log`: of a cache whose engine was killed, so that SQLite's log is there. `policy`:
    the onboard policy that a damage concerns; None for all."""

    name: str
    area: str
    spoil: Callable[[Site], None]
    keeps: bool
    needs_log: bool
    is_plain_user: bool
    policy: str | None


DAMAGES: dict[str, Damage] = {}


def damage(area: str, *, keeps=False, needs_log=False, is_plain_user=False, policy=None):
    def register(spoil: Callable[[Site], None]) -> Callable[[Site], None]:
        name = spoil.__name__
        assert name not in DAMAGES, name
        DAMAGES[name] = Damage(name, area, spoil, keeps, needs_log, is_plain_user, policy)
        return spoil

    return register


def change(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def flip(path: Path, count: int, chosen: random.Random, *, start: int = 0, end: int | None = None) -> None:
    with path.open("r+b") as file:
        for _ in range(count):
            at = chosen.randrange(start, end or path.stat().st_size)
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << chosen.randrange(8)]))


@dataclass(frozen=True)
class Caches:
    """Directories with one instance each: of an engine that ended, of one that was killed, of the same at an earlier
    time, and of another model."""

    ended: Path
    killed: Path
    older: Path
    other: Path
    slot_bytes: int


def instance_of(directory: Path) -> Path:
    (path,) = [lock.parent for lock in directory.glob("*/*/lock")]
    return path


@contextmanager
def spoiled(damage: Damage, caches: Caches, directory: Path, chosen: random.Random) -> Iterator[Site]:
    """Make a damaged copy of one of the caches in `directory`, and remove it at the end."""
    was_killed = damage.needs_log or chosen.random() < 0.3
    shutil.copytree(caches.killed if was_killed else caches.ended, directory)
    own, older, other = (instance_of(one) for one in (directory, caches.older, caches.other))
    site = Site(directory, own, older, other, caches.slot_bytes, chosen)
    has_times = damage.name in ("clock_set_back", "immutable_names", "leftover_lock")
    before = fingerprint(directory, with_times=has_times)
    try:
        damage.spoil(site)
        assert fingerprint(directory, with_times=has_times) != before, "nothing was damaged"
        yield site
    finally:
        for undo in site.undo:
            undo()
        shutil.rmtree(directory)


def fingerprint(directory: Path, *, with_times: bool) -> dict[str, tuple]:
    """Everything of the files that a damage may change."""
    found = {}
    for path in [directory, *directory.rglob("*")]:
        status = path.lstat()
        content = None
        if path.is_file() and not path.is_symlink() and status.st_size < LARGEST_COMPARED_BYTES:
            content = xxhash.xxh3_64_hexdigest(path.read_bytes())
        times = (status.st_mtime_ns, status.st_ctime_ns) if with_times else ()
        found[str(path)] = status.st_mode, status.st_uid, status.st_nlink, status.st_size, content, times
    return found


# -- bytes of the arena ------------------------------------------------------------------------------------------------


@damage("arena", keeps=True)
def bits_of_blocks(site):
    for slot in site.some_slots(8):
        start = slot * site.slot_bytes
        flip(site.arena, site.random.randint(1, 3), site.random, start=start, end=start + site.slot_bytes)


@damage("arena", keeps=True)
def zeroed_sectors(site):
    for slot in site.some_slots(8):
        at = site.random.randrange(site.slot_bytes // SECTOR_BYTES)
        change(site.arena, slot * site.slot_bytes + at * SECTOR_BYTES, bytes(SECTOR_BYTES))


@damage("arena", keeps=True)
def swapped_slots(site):
    content, slots = site.arena.read_bytes(), site.some_slots(8)
    for slot, source in zip(slots, slots[1:] + slots[:1], strict=True):
        change(site.arena, slot * site.slot_bytes, content[source * site.slot_bytes :][: site.slot_bytes])


@damage("arena", keeps=True)
def duplicated_slot(site):
    first, *rest = site.some_slots(6)
    content = site.arena.read_bytes()[first * site.slot_bytes :][: site.slot_bytes]
    for slot in rest:
        change(site.arena, slot * site.slot_bytes, content)


@damage("arena", keeps=True)
def swapped_pages(site):
    """Within one block, as two rows of a tensor would be."""
    for slot in site.some_slots(6):
        pages = site.slot_bytes // 4096
        one, other = site.random.sample(range(pages), 2)
        block = site.arena.read_bytes()[slot * site.slot_bytes :][: site.slot_bytes]
        change(site.arena, slot * site.slot_bytes + one * 4096, block[other * 4096 :][:4096])
        change(site.arena, slot * site.slot_bytes + other * 4096, block[one * 4096 :][:4096])


@damage("arena")
def truncated_arena(site):
    length = site.arena.stat().st_size
    os.truncate(
        site.arena, site.random.choice([0, 1, 4095, site.slot_bytes - 1, site.random.randrange(length), length - 1])
    )


@damage("arena", keeps=True)
def extended_arena(site):
    length = site.arena.stat().st_size
    os.truncate(site.arena, length + site.random.choice([1, 4095, 4096, site.slot_bytes, 1 << 30, 1 << 40]))


@damage("arena", keeps=True)
def punched_holes(site):
    for slot in site.some_slots(8):
        subprocess.run(
            ["fallocate", "--punch-hole", "--offset", str(slot * site.slot_bytes + 4096 * site.random.randrange(8)),
             "--length", str(4096 * site.random.randint(1, 24)), site.arena],
            check=True,
        )  # fmt: skip


@damage("arena")
def zeroed_arena(site):
    change(site.arena, 0, bytes(site.arena.stat().st_size))


@damage("arena")
def arena_moved_by_bytes(site):
    content = site.arena.read_bytes()
    by = site.random.choice([1, 16, 4096, site.slot_bytes])
    site.arena.write_bytes(content[by:] + content[:by])


# -- older and other copies --------------------------------------------------------------------------------------------


@damage("copies")
def older_arena(site):
    shutil.copyfile(site.older / ARENA, site.arena)


@damage("copies")
def older_index(site):
    remove_index(site)
    copy_index(site.older, site.instance)


@damage("copies", keeps=True)
def older_superblock(site):
    content = json.loads((site.older / SUPERBLOCK).read_text().split("\n")[2])
    content["created"] -= 3600
    write_superblock(site.superblock, content)


@damage("copies")
def everything_older(site):
    older_arena(site)
    older_index(site)


@damage("copies")
def files_of_another_model(site):
    for name in site.random.sample([ARENA, INDEX, SUPERBLOCK], site.random.randint(1, 3)):
        if name == INDEX:
            remove_index(site)
            copy_index(site.other, site.instance)
        else:
            shutil.copyfile(site.other / name, site.instance / name)


@damage("copies")
def instance_of_another_model(site):
    """A whole instance, put under the namespace of this model: nothing but its superblock says whose it is."""
    copy = site.instance.with_name("f" * 16)
    shutil.copytree(site.other, copy)
    mtime_s = site.instance.joinpath(LOCK).stat().st_mtime + site.random.choice([-100, 100])
    os.utime(copy / LOCK, (mtime_s, mtime_s))


@damage("copies", keeps=True)
def instance_copied_twice(site):
    for name in ("0" * 16, "f" * 16):
        shutil.copytree(site.instance, site.instance.with_name(name))
    if site.random.random() < 0.5:
        flip(site.instance.with_name("f" * 16) / ARENA, 20, site.random)


# -- bytes of the index ------------------------------------------------------------------------------------------------


def remove_index(site: Site) -> None:
    for path in site.instance.glob(f"{INDEX}*"):
        path.unlink()


def copy_index(source: Path, target: Path) -> None:
    for path in source.glob(f"{INDEX}*"):
        shutil.copyfile(path, target / path.name)
        (target / path.name).chmod(0o600)


@damage("index bytes")
def bits_of_the_index(site):
    flip(site.index, site.random.choice([1, 5, 50, 500]), site.random)


@damage("index bytes")
def header_of_the_index(site):
    flip(site.index, site.random.randint(1, 5), site.random, end=100)


@damage("index bytes")
def truncated_index(site):
    length = site.index.stat().st_size
    shorter = [left for left in (0, 1, 99, 100, 4096, 4097, length - 1) if left < length]
    os.truncate(site.index, site.random.choice([*shorter, site.random.randrange(length)]))


@damage("index bytes")
def extended_index(site):
    with site.index.open("ab") as file:
        file.write(site.random.randbytes(site.random.choice([1, 4096, 100_000])))


@damage("index bytes")
def swapped_pages_of_the_index(site):
    content = site.index.read_bytes()
    pages = len(content) // 4096
    one, other = site.random.sample(range(pages), 2) if pages > 1 else (0, 0)
    change(site.index, one * 4096, content[other * 4096 :][:4096])
    change(site.index, other * 4096, content[one * 4096 :][:4096] if one != other else bytes(4096))


@damage("index bytes")
def zeroed_page_of_the_index(site):
    change(site.index, 4096 * site.random.randrange(max(1, site.index.stat().st_size // 4096)), bytes(4096))


@damage("index bytes")
def no_index(site):
    remove_index(site)


@damage("index bytes")
def text_as_index(site):
    site.index.write_bytes(site.random.choice([b"text", b"SQLite format 3\0", site.random.randbytes(10_000)]))


# -- SQLite's log ------------------------------------------------------------------------------------------------------


@damage("log", needs_log=True)
def no_log(site):
    site.log.unlink()


@damage("log", needs_log=True)
def cut_log(site):
    os.truncate(site.log, site.random.randrange(site.log.stat().st_size))


@damage("log", needs_log=True)
def bits_of_the_log(site):
    flip(site.log, site.random.choice([1, 5, 50]), site.random)


@damage("log", needs_log=True)
def older_log(site):
    shutil.copyfile(site.older / f"{INDEX}-wal", site.log)


@damage("log", needs_log=True)
def two_logs_mixed(site):
    """Whole frames of an earlier time, in other places."""
    old = (site.older / f"{INDEX}-wal").read_bytes()[LOG_HEADER_BYTES:]
    for _ in range(site.random.randint(1, 5)):
        frame, place = (site.random.randrange(len(old) // FRAME_BYTES) for _ in range(2))
        change(site.log, LOG_HEADER_BYTES + place * FRAME_BYTES, old[(frame - 1) * FRAME_BYTES :][:FRAME_BYTES])


@damage("log", needs_log=True)
def log_as_journal(site):
    site.log.rename(site.instance / f"{INDEX}-journal")


@damage("log")
def log_of_random_bytes(site):
    site.log.write_bytes(site.random.randbytes(40_000))
    site.log.chmod(0o600)


# -- rows of the index -------------------------------------------------------------------------------------------------


@contextmanager
def database(site: Site, *, is_loose: bool = False) -> Iterator[sqlite3.Connection]:
    """The index, opened to be edited; `is_loose`: its table has neither types nor constraints from then on."""
    with closing(sqlite3.connect(site.index, isolation_level=None)) as connection:
        if is_loose:
            connection.execute("CREATE TABLE loose AS SELECT * FROM blocks")
            connection.execute("DROP TABLE blocks")
            connection.execute("ALTER TABLE loose RENAME TO blocks")
        yield connection


def edit(column: str) -> Callable[[Site], None]:
    def spoil(site: Site) -> None:
        chosen = site.random
        with database(site, is_loose=chosen.random() < 0.5) as connection:
            slots = [slot for (slot,) in connection.execute("SELECT slot FROM blocks ORDER BY slot")]
            edited = chosen.sample(slots, chosen.choice([1, 1, 3, len(slots)]))
            other = connection.execute(f"SELECT {column} FROM blocks WHERE slot = ?", [chosen.choice(slots)]).fetchone()
            value = chosen.choice([*EXTREMES, *LARGEST, other[0], other[0]])
            for slot in edited:
                if not _update(connection, column, value, slot):  # the types of the table refuse it
                    _update(connection, column, 2**63 - 1, slot)

    spoil.__name__ = f"{column}_of_rows"
    return spoil


def _update(connection: sqlite3.Connection, column: str, value: object, slot: int) -> bool:
    try:
        connection.execute(f"UPDATE blocks SET {column} = ? WHERE slot = ?", [value, slot])
    except (sqlite3.IntegrityError, OverflowError):
        return False
    return True


for _column in COLUMNS:
    damage("rows")(edit(_column))


@damage("rows", keeps=True)
def rows_that_exchange_hashes(site):
    one, other = site.random.sample(site.used_slots(), 2)
    with database(site) as connection:
        hashes = dict(connection.execute("SELECT slot, hash FROM blocks WHERE slot IN (?, ?)", [one, other]))
        for slot, name in ((one, b"-" * 16), (other, hashes[one]), (one, hashes[other])):
            connection.execute("UPDATE blocks SET hash = ? WHERE slot = ?", [name, slot])


@damage("rows")
def rows_that_exchange_everything_but_the_slot(site):
    with database(site, is_loose=True) as connection:
        slots = [slot for (slot,) in connection.execute("SELECT slot FROM blocks ORDER BY rowid")]
        site.random.shuffle(slots)
        for row, slot in enumerate(slots, 1):
            connection.execute("UPDATE blocks SET slot = ? WHERE rowid = ?", [slot, row])


@damage("rows")
def rows_twice(site):
    with database(site, is_loose=True) as connection:
        connection.execute("INSERT INTO blocks SELECT * FROM blocks WHERE slot % 3 = 0")


@damage("rows", keeps=True)
def hashes_twice(site):
    """In free slots, with later generations: the later row counts, and its bytes do not fit."""
    with database(site) as connection:
        top = max(slot for (slot,) in connection.execute("SELECT slot FROM blocks"))
        for number, slot in enumerate(site.some_slots(6)):
            connection.execute(
                "INSERT OR REPLACE INTO blocks SELECT ?, hash, generation + ?, length, checksum, tenant, written "
                "FROM blocks WHERE slot = ?",
                [top - number, site.random.choice([1, -1, 1000]), slot],
            )


@damage("rows", keeps=True)
def rows_of_slots_beyond_the_arena(site):
    with database(site) as connection:
        for number in (10_000, 2**31, 2**32, 2**62, 2**63 - 1, -1, -(2**63)):
            connection.execute(
                "INSERT INTO blocks SELECT ?, ?, generation, length, checksum, tenant, written FROM blocks LIMIT 1",
                [number, site.random.randbytes(16)],
            )


@damage("rows", keeps=True)
def rows_for_every_hash_of_the_future(site):
    """Checksums that cannot fit, for blocks that were never written."""
    with database(site) as connection:
        for number in range(3000):
            connection.execute(
                "INSERT OR IGNORE INTO blocks SELECT ?, ?, generation, length, ?, tenant, written FROM blocks LIMIT 1",
                [number, site.random.randbytes(16), site.random.randrange(-(2**63), 2**63)],
            )


@damage("rows")
def other_table(site):
    with database(site) as connection:
        connection.execute(
            site.random.choice(
                [
                    "DROP TABLE blocks",
                    "ALTER TABLE blocks RENAME TO others",
                    "ALTER TABLE blocks RENAME COLUMN checksum TO checksums",
                    "ALTER TABLE blocks DROP COLUMN tenant",
                    "ALTER TABLE blocks ADD COLUMN extra TEXT DEFAULT 'x'",
                    "DELETE FROM blocks",
                ]
            )
        )


@damage("rows")
def hostile_schema(site):
    with database(site) as connection:
        for statement in site.random.choice(
            [
                ["CREATE TRIGGER t AFTER INSERT ON blocks BEGIN UPDATE blocks SET checksum = 0; END"],
                ["CREATE TRIGGER t BEFORE DELETE ON blocks BEGIN SELECT RAISE(IGNORE); END"],
                ["CREATE TRIGGER t BEFORE INSERT ON blocks BEGIN SELECT RAISE(ABORT, 'no'); END"],
                ["CREATE UNIQUE INDEX u ON blocks(length, slot % 2 = 0) WHERE slot < 1"],
                ["ALTER TABLE blocks RENAME TO others", "CREATE VIEW blocks AS SELECT * FROM others"],
                ["PRAGMA user_version = 2147483647", "PRAGMA application_id = 1"],
                ["PRAGMA journal_mode = DELETE", "PRAGMA page_size = 512", "VACUUM"],
                ["PRAGMA auto_vacuum = 1", "VACUUM"],
            ]
        ):
            connection.execute(statement)


@damage("rows")
def endless_view(site):
    with database(site) as connection:
        connection.execute("DROP TABLE blocks")
        connection.execute(
            "CREATE VIEW blocks AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS slot, "
            "x'00' AS hash, i AS generation, 1 AS length, 1 AS checksum, x'' AS tenant, 1.0 AS written FROM n"
        )


# -- superblock --------------------------------------------------------------------------------------------------------


def write_superblock(path: Path, content: object, *, title: str = "kvbm disk cache format 1") -> None:
    """As kvbm writes it, with the right checksums."""
    check = xxhash.xxh3_64_hexdigest
    rest = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    path.write_text(f"{title} {check(title.encode())}\n{check(rest.encode())}\n{rest}\n")
    path.chmod(0o600)


def superblock_of(site: Site) -> dict[str, object]:
    return json.loads(site.superblock.read_text().split("\n")[2])


@damage("superblock")
def bits_of_the_superblock(site):
    flip(site.superblock, site.random.choice([1, 3, 30]), site.random)


@damage("superblock")
def truncated_superblock(site):
    os.truncate(site.superblock, site.random.randrange(site.superblock.stat().st_size))


@damage("superblock")
def superblock_without_a_field(site):
    content = superblock_of(site)
    for name in site.random.sample(sorted(content), site.random.randint(1, len(content))):
        del content[name]
    write_superblock(site.superblock, content)


@damage("superblock")
def superblock_with_more_fields(site):
    content = superblock_of(site)
    write_superblock(site.superblock, content | {site.random.choice(["version", "__class__", "self", ""]): 1})


@damage("superblock")
def superblock_of_other_types(site):
    content = superblock_of(site)
    values = (None, "text", "1", [], {}, [dict(content)], 1.5, True, -1, 0, 2**63, 10**400, 1e308)
    for name in site.random.sample(sorted(content), site.random.randint(1, 3)):
        content[name] = site.random.choice(values)
    write_superblock(site.superblock, content)


@damage("superblock")
def superblock_of_other_json(site):
    write_superblock(site.superblock, site.random.choice([*JSON_TEXTS, "NaN", "x" * 2_000_000, '{"facts": ' * 5000]))


@damage("superblock")
def superblock_of_another_format(site):
    number = site.random.choice([0, 2, 99, 999_999_999])
    write_superblock(site.superblock, superblock_of(site), title=f"kvbm disk cache format {number}")


@damage("superblock")
def no_superblock(site):
    site.superblock.unlink()


@damage("superblock")
def huge_superblock(site):
    os.truncate(site.superblock, 1 << 33)


# -- rates -------------------------------------------------------------------------------------------------------------


def write_rates(site: Site, text: str) -> None:
    path = site.instance.parent / RATES
    path.write_text(text)
    path.chmod(0o600)


@damage("rates", policy="auto")
def extreme_rates(site):
    computing, reading = (site.random.choice(RATES_PER_S if site.random.random() < 0.7 else NO_RATES) for _ in range(2))
    write_rates(site, json.dumps({"tokens_per_s": computing, "blocks_per_s": reading}))


@damage("rates", policy="auto")
def rates_of_other_json(site):
    write_rates(site, site.random.choice(JSON_TEXTS))


# -- names -------------------------------------------------------------------------------------------------------------


def places(site: Site) -> list[Path]:
    """Everything that an engine opens."""
    home = site.instance.parent
    names = [LOCK, SUPERBLOCK, f"{SUPERBLOCK}.new", ARENA, INDEX, f"{INDEX}-wal", f"{INDEX}-shm", f"{INDEX}-journal"]
    return [*(site.instance / name for name in names), home / RATES]


def folders(site: Site) -> list[Path]:
    return [site.instance, site.instance.parent]


def choose(site: Site, paths: list[Path]) -> Path:
    path = site.random.choice(paths)
    site.may_refuse = path in (site.instance.parent, site.directory)
    return path


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@damage("names")
def symlink_as_file(site):
    path = site.random.choice(places(site))
    copy = site.directory.with_name("elsewhere")
    if path.exists():
        shutil.copyfile(path, copy)
    targets = [copy, "/dev/zero", "/dev/full", "/nonexistent", path, "/etc/passwd"]
    remove(path)
    path.symlink_to(site.random.choice(targets))


@damage("names")
def symlink_as_folder(site):
    path = choose(site, folders(site))
    moved = site.directory.with_name("moved")
    path.rename(moved)
    path.symlink_to(site.random.choice([moved, Path("/nonexistent"), path]))


@damage("names")
def pipe_as_file(site):
    path = site.random.choice(places(site))
    remove(path)
    os.mkfifo(path, 0o600)


@damage("names")
def socket_as_file(site):
    path = site.random.choice(places(site))
    remove(path)
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(f"/proc/self/fd/{here}/{path.name}")  # paths of sockets are short
    os.close(here)


@damage("names")
def folder_as_file(site):
    path = site.random.choice(places(site))
    remove(path)
    path.mkdir(0o700)
    if site.random.random() < 0.7:
        (path / "kept").write_text("not empty")


@damage("names")
def file_as_folder(site):
    path = choose(site, folders(site))
    remove(path)
    path.write_text("a file")
    path.chmod(0o600)


@damage("names")
def empty_file(site):
    path = site.random.choice([path for path in places(site) if path.name != LOCK])  # which is empty anyway
    remove(path)
    path.touch(0o600)


@damage("names")
def second_hard_link(site):
    path = site.random.choice([path for path in places(site) if path.exists()])
    os.link(path, site.directory.with_name("link"))


@damage("names", keeps=True)
def strange_neighbours(site):
    home = site.instance.parent
    for name in ("1" * 16, "not an instance", "\n", ".hidden", "2" * 15, "é" * 8):
        (home / name).write_text("squatted")
    (home / ("3" * 16)).mkdir(0o700)
    (home / ("4" * 16)).symlink_to(site.instance)
    (site.directory / ("5" * 32)).symlink_to(home)
    (site.directory / ("6" * 32)).mkdir(0o755)


def restore_mode(path, mode):
    """So that the files can be removed. The engine may have removed this one."""
    with suppress(FileNotFoundError):
        path.chmod(mode)


@damage("names", is_plain_user=True)
def modes(site):
    path = choose(site, [path for path in [*places(site), *folders(site), site.directory] if path.exists()])
    before = path.stat().st_mode
    path.chmod(site.random.choice([0o000, 0o200, 0o400, 0o444, 0o666, 0o777, 0o4600]))
    site.undo.append(lambda: restore_mode(path, before))


@damage("names", is_plain_user=True)
def read_only_tree(site):
    """As far as permissions go."""
    site.may_refuse = True
    for path in [site.directory, *site.directory.rglob("*")]:
        before = path.stat().st_mode
        path.chmod(before & ~0o222)
        site.undo.append(lambda path=path, before=before: restore_mode(path, before))


@damage("names", is_plain_user=True)
def other_owner(site):
    path = choose(site, [path for path in [*places(site), *folders(site)] if path.exists()])
    os.chown(path, 12345, 12345)


@damage("names")
def immutable_names(site):
    path = choose(site, [path for path in [*places(site), *folders(site)] if path.exists()])
    subprocess.run(["chattr", "+i", path], check=True)
    site.undo.append(lambda: subprocess.run(["chattr", "-i", path], check=True))


@damage("names")
def leftover_lock(site):
    """Held by a process that is not an engine, or full of bytes."""
    path = site.instance / LOCK
    if site.random.random() < 0.5:
        path.write_bytes(site.random.randbytes(100))
        return
    holder = path.open("rb")
    fcntl.flock(holder, fcntl.LOCK_EX)
    os.utime(path)
    site.undo.append(holder.close)


@damage("names")
def only_a_lock(site):
    for path in site.instance.iterdir():
        if path.name != LOCK:
            path.unlink()


@damage("names")
def one_file_missing(site):
    site.random.choice([path for path in [*places(site), *folders(site)] if path.exists()]).rename(
        site.directory.with_name("missing")
    )


# -- clock -------------------------------------------------------------------------------------------------------------


@damage("clock", keeps=True)
def clock_set_back(site):
    """The files come from the future, or from before 1970."""
    time_s = site.random.choice([0, 1, -(2**31), 2**31, 2**32 + 1e9, 2**33])
    for path in [site.directory, *site.directory.rglob("*")]:
        with suppress(OSError):  # beyond what this file system can store
            os.utime(path, (time_s, time_s))
    with database(site) as connection:
        connection.execute("UPDATE blocks SET written = ?", [site.random.choice([-1e18, 0.0, 1e18])])


AREAS = sorted({found.area for found in DAMAGES.values()})
BELOW_ENGINES = [found for found in DAMAGES.values() if not found.is_plain_user]  # root is above permissions
assert all(re.fullmatch("[a-z0-9_]+", name) for name in DAMAGES)


def cases(kinds: Sequence[Damage], count: int) -> Iterator[Any]:
    """Numbers of cases with all kinds in turn; the first of each area also runs without `-m soak`."""
    areas = set()
    for number in range(count):
        one = kinds[number % len(kinds)]
        marks = () if one.area not in areas else pytest.mark.soak
        areas.add(one.area)
        yield pytest.param(number, id=f"{number}-{one.name}", marks=marks)
