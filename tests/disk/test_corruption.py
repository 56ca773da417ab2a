"""Every kind of damage ends as a miss and a counter, never as a wrong byte and never as an exception."""

import json
import os
import shutil
import sqlite3
from contextlib import closing

import pytest
from disk_rig import HASH_BYTES, NAMESPACE, assembled, instance_of, make_hash, opened, settings_for
from xxhash import xxh3_64_hexdigest

from kvbm.tiers.disk.instance import Instance, WantedInstance
from kvbm.tiers.disk.settings import Namespace

OTHER = Namespace(bytes(reversed(range(16))), {"model": "another model"})
BLOCKS = 12
SLOT_BYTES = 8192 + 4096


def write_cache(directory):
    with opened(directory) as rig:
        assert all(rig.write(range(BLOCKS), range(BLOCKS)).is_good)
    return instance_of(directory)


def recovered_and_good(directory):
    """(numbers recovered, those that read well, the counters): of a tier that is in order after it."""
    with opened(directory) as rig:
        found = rig.recovered()
        result = rig.read(found, found.values())
        good = {number for number, is_good in zip(found, result.is_good, strict=True) if is_good}
        assert result.error is None
        assert rig.write([77], [13]).is_good == (True,)
        assert rig.read([77], [13]).is_good == (True,)
        assert rig.tier.health.is_on
        return set(found), good, rig.tier.counters


def change_bytes(path, offset, content):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def flip_bit(path, offset, bit=0):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def edit_index(directory, statements):
    """Write a cache, and change its index with SQL."""
    with closing(sqlite3.connect(write_cache(directory) / "index.sqlite")) as connection:
        connection.executescript(statements)


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 8191, 8192, SLOT_BYTES - 1, "a page of zeros"])
def test_flipped_bit_in_the_arena_costs_its_block(tmp_path, offset):
    arena = write_cache(tmp_path) / "arena"
    if offset == "a page of zeros":
        change_bytes(arena, 5 * SLOT_BYTES + 4096, bytes(4096))
    else:
        flip_bit(arena, 5 * SLOT_BYTES + offset, bit=offset % 8)
    found, good, counters = recovered_and_good(tmp_path)
    assert found - good == {5}
    assert counters.checksum_misses == 1


def test_swapped_slots_cost_both(tmp_path):
    arena = write_cache(tmp_path) / "arena"
    content = arena.read_bytes()
    change_bytes(arena, 2 * SLOT_BYTES, content[7 * SLOT_BYTES : 8 * SLOT_BYTES])
    change_bytes(arena, 7 * SLOT_BYTES, content[2 * SLOT_BYTES : 3 * SLOT_BYTES])
    found, good, _ = recovered_and_good(tmp_path)
    assert found - good == {2, 7}


@pytest.fixture
def others(tmp_path):
    """The instance of another model, whose blocks have the same hashes and lengths, and other bytes."""
    with opened(tmp_path / "others", namespace=OTHER) as rig:
        assert all(rig.write(range(BLOCKS), range(BLOCKS)).is_good)
    return instance_of(tmp_path / "others")


def test_instance_of_another_model_moved_to_this_one_is_not_used(tmp_path, others):
    (tmp_path / "cache" / NAMESPACE.digest.hex()).mkdir(parents=True, mode=0o700)
    (tmp_path / "cache").chmod(0o700)
    others.rename(tmp_path / "cache" / NAMESPACE.digest.hex() / others.name)
    found, _, _ = recovered_and_good(tmp_path / "cache")
    assert found == set()


def test_arena_and_index_of_another_model_give_no_block(tmp_path, others):
    instance = write_cache(tmp_path / "cache")
    for name in ("arena", "index.sqlite"):
        shutil.copyfile(others / name, instance / name)
    found, good, counters = recovered_and_good(tmp_path / "cache")
    assert len(found) == BLOCKS
    assert good == set()
    assert counters.checksum_misses == BLOCKS


def test_truncated_arena_keeps_what_is_in_front(tmp_path):
    os.truncate(write_cache(tmp_path) / "arena", 5 * SLOT_BYTES + 100)
    found, good, counters = recovered_and_good(tmp_path)
    assert found == good == set(range(5))
    assert counters.dropped_rows == BLOCKS - 5


def test_missing_arena_is_an_empty_cache(tmp_path):
    (write_cache(tmp_path) / "arena").unlink()
    found, _, counters = recovered_and_good(tmp_path)
    assert found == set()
    assert counters.dropped_rows == BLOCKS


def test_arena_truncated_under_a_running_tier_is_a_miss(tmp_path):
    with assembled(tmp_path) as rig:
        rig.write(range(BLOCKS), range(BLOCKS))
        os.truncate(instance_of(tmp_path) / "arena", 5 * SLOT_BYTES)
        assert rig.read(range(4, 6), range(4, 6)).is_good == (True, False)
        assert rig.tier.counters.io_errors["ENODATA"] > 0
        assert rig.write([99], [11]).is_good == (True,)
        assert rig.read([99], [11]).is_good == (True,)


def test_rows_of_two_blocks_exchanged(tmp_path):
    """As a damaged page may do: each hash is there, and names the other's slot and checksum."""
    four, five = make_hash(4).hex(), make_hash(5).hex()
    edit_index(
        tmp_path,
        f"UPDATE blocks SET hash = zeroblob({HASH_BYTES}) WHERE slot = 4;"
        f"UPDATE blocks SET hash = x'{four}' WHERE slot = 5; UPDATE blocks SET hash = x'{five}' WHERE slot = 4",
    )
    found, good, counters = recovered_and_good(tmp_path)
    assert found - good == {4, 5}
    assert counters.checksum_misses == 2


NO_ROWS = {  # values of columns that no row can have
    "slot": ("16", "-1", "9223372036854775807"),
    "length": ("4096", "9223372036854775807", "-1", "'a text'"),
    "hash": ("x'0011'", "'a text'", "x''", "zeroblob(1000000)"),
    "generation": ("-5", "9223372036854775807", "4611686018427387905", "1.5e300", "2.5", "'a text'"),
    "checksum": ("'a text'", "x'00'", "zeroblob(1000000)", "NULL"),
}


@pytest.mark.parametrize(("column", "value"), [(column, one) for column, some in NO_ROWS.items() for one in some])
def test_row_that_cannot_be_is_dropped(tmp_path, column, value):
    if value == "NULL":
        with_nulls = "PRAGMA writable_schema = 1; UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '')"
        edit_index(tmp_path, with_nulls)
        with closing(sqlite3.connect(instance_of(tmp_path) / "index.sqlite")) as connection, connection:
            connection.execute("UPDATE blocks SET checksum = NULL WHERE slot = 6")
    else:
        edit_index(tmp_path, f"UPDATE blocks SET {column} = {value} WHERE slot = 6")
    found, good, counters = recovered_and_good(tmp_path)
    assert found == good == set(range(BLOCKS)) - {6}
    assert (counters.dropped_rows, counters.damaged_indexes) == (1, 0)


WITHOUT_TYPES = "CREATE TABLE other AS SELECT * FROM blocks; DROP TABLE blocks; ALTER TABLE other RENAME TO blocks;"


@pytest.mark.parametrize(
    "change",
    [
        WITHOUT_TYPES + "UPDATE blocks SET slot = NULL WHERE slot = 6",
        WITHOUT_TYPES + "UPDATE blocks SET slot = 3 WHERE slot = 4",
        "ALTER TABLE blocks RENAME COLUMN hash TO other",
        "DROP TABLE blocks; CREATE TABLE blocks (slot INTEGER)",
        "DROP TABLE blocks; CREATE VIEW blocks AS SELECT 1",
        "DROP TABLE blocks; CREATE VIEW blocks AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
        "SELECT i AS slot, x'00' AS hash, i AS generation, 1 AS length, 1 AS checksum, x'' AS tenant, 1.0 AS written "
        "FROM n",
        "read-only",  # its blocks would be found, and no new one ever written
        b"",
        b"no database",
        bytes(100),
        os.urandom(8192),
    ],
)
def test_index_of_wrong_contents_is_an_empty_cache(tmp_path, change):
    if isinstance(change, bytes):
        (write_cache(tmp_path) / "index.sqlite").write_bytes(change)
    elif change == "read-only":
        change_bytes(write_cache(tmp_path) / "index.sqlite", 18, b"\x07")
    else:
        edit_index(tmp_path, change)
    found, _, counters = recovered_and_good(tmp_path)
    assert found == set()
    assert counters.damaged_indexes == (1 if change else 0)  # an empty file is an empty index


def test_of_a_hash_that_is_there_twice_the_later_row_counts(tmp_path):
    """Here it is a damaged one: what it names is found out as wrong, and nothing else is lost."""
    same = "UPDATE blocks SET hash = (SELECT hash FROM blocks WHERE slot = 3) WHERE slot IN (4, 9)"
    edit_index(tmp_path, same)
    found, good, counters = recovered_and_good(tmp_path)
    assert found == set(range(BLOCKS)) - {4, 9}
    assert found - good == {3}
    assert (counters.damaged_indexes, counters.dropped_rows, counters.checksum_misses) == (0, 0, 1)


def test_block_that_was_written_again_elsewhere_is_read_from_there(tmp_path):
    with opened(tmp_path) as rig:
        assert rig.write([7, 8], [3, 5]).is_good == (True, True)
        assert rig.write([7], [2]).is_good == (True,)
    found, good, counters = recovered_and_good(tmp_path)
    assert found == good == {7, 8}
    assert counters.dropped_rows == 0
    with closing(sqlite3.connect(instance_of(tmp_path) / "index.sqlite")) as connection:
        assert connection.execute("SELECT slot FROM blocks ORDER BY slot").fetchall() == [(2,), (5,), (13,)]


def test_every_byte_of_the_index_may_be_wrong(tmp_path):
    """Whatever it does to the rows: what is still read well is right, and the cache is in order afterwards."""
    instance = write_cache(tmp_path / "whole")
    length = (instance / "index.sqlite").stat().st_size
    outcomes = set()
    for at in [*range(0, 200, 5), *range(200, length, 997)]:
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "whole", copy)
        flip_bit(instance_of(copy) / "index.sqlite", at, bit=at % 8)
        found, good, _ = recovered_and_good(copy)
        assert good <= set(range(BLOCKS))
        outcomes.add((len(found), len(good)))
        shutil.rmtree(copy)
    assert (0, 0) in outcomes
    assert (BLOCKS, BLOCKS) in outcomes


def test_index_whose_schema_is_not_text_is_an_empty_cache(tmp_path):
    """SQLite quotes the schema in its message, and Python's module raises no sqlite3.Error if it cannot decode that."""
    index = write_cache(tmp_path / "whole") / "index.sqlite"
    begin = index.read_bytes().index(b"CREATE TABLE")
    for at in range(begin, begin + 60, 4):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "whole", copy)
        flip_bit(instance_of(copy) / "index.sqlite", at, bit=7)
        found, _, counters = recovered_and_good(copy)
        assert found == set()
        assert counters.damaged_indexes == 1
        shutil.rmtree(copy)


@pytest.mark.parametrize("length", [0, 100, 4096, 5000, 8192])
def test_truncated_index_is_an_empty_cache_or_a_whole_one(tmp_path, length):
    os.truncate(write_cache(tmp_path) / "index.sqlite", length)
    found, good, _ = recovered_and_good(tmp_path)
    assert found == good


def test_stale_index_costs_what_has_changed_since(tmp_path):
    instance = write_cache(tmp_path)
    stale = (instance / "index.sqlite").read_bytes()
    with opened(tmp_path) as rig:
        rig.write([50, 51, 52], [0, 1, 2])
        rig.tier.forget([3])
    (instance / "index.sqlite").write_bytes(stale)
    found, good, counters = recovered_and_good(tmp_path)
    assert found == set(range(BLOCKS))
    assert good == set(range(3, BLOCKS))
    assert counters.checksum_misses == 3


def test_index_damaged_under_a_running_tier_starts_anew(tmp_path):
    with assembled(tmp_path) as rig:
        rig.write(range(8), range(8))
        index = instance_of(tmp_path) / "index.sqlite"
        rig.tier._instance.index._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        change_bytes(index, 4096, os.urandom(index.stat().st_size - 4096))
        rig.tier._instance.index._connection.execute("PRAGMA shrink_memory")  # and not from its cache
        rig.write([20], [10])
        rig.write([21], [11])
        assert rig.tier.counters.damaged_indexes == 1
        assert rig.read(range(8), range(8)).is_good == (True,) * 8
        assert rig.write([22], [12]).is_good == (True,)
    found, good, _ = recovered_and_good(tmp_path)
    assert 22 in good
    assert found == good


FIELDS = {
    "namespace": NAMESPACE.digest.hex(),
    "facts": {"model": "a model"},
    "hash_bytes": HASH_BYTES,
    "payload_bytes": SLOT_BYTES,
    "slot_bytes": SLOT_BYTES,
    "slot_count": 16,
    "created": 1.5,
}
OTHER_FIELDS = {
    "more": '{"more": 1}',
    "no namespace": '{"namespace": null}',
    "namespace of text": '{"namespace": "a model"}',
    "facts of text": '{"facts": "a model"}',
    "deep facts": '{"facts": {"a": ' + "[" * 400 + "]" * 400 + "}}",
    "too deep": '{"facts": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}",
    "hash of text": '{"hash_bytes": "16"}',
    "huge": '{"slot_count": 1%s}' % ("0" * 400),
    "huger than an int may be": '{"slot_count": 1%s}' % ("0" * 10_000),
    "negative": '{"payload_bytes": -1}',
    "a fraction": '{"slot_bytes": 1.5}',
    "a boolean": '{"slot_count": true}',
    "no time": '{"created": NaN}',
    "the end of time": '{"created": Infinity}',
    "a long text": '{"namespace": "%s"}' % ("a" * (2 << 20)),
}


def sealed(fields):
    """A superblock with these fields, and checksums that fit."""
    title = "kvbm disk cache format 1"
    return f"{title} {xxh3_64_hexdigest(title.encode())}\n{xxh3_64_hexdigest(fields.encode())}\n{fields}\n"


def changed(change):
    """FIELDS with those of a JSON text in place of its own."""
    if not change:
        return json.dumps(FIELDS)
    name = change[2 : change.index('"', 2)]
    rest = {key: value for key, value in FIELDS.items() if key != name}
    return json.dumps(rest)[:-1] + ", " + change[1:]


@pytest.mark.parametrize("content", [*OTHER_FIELDS, "[]", "1", "null", "{}", "not json", "[" * 100_000])
def test_superblock_of_other_fields_is_an_empty_cache(tmp_path, content, caplog):
    path = write_cache(tmp_path) / "superblock"
    path.write_text(sealed(changed(OTHER_FIELDS[content]) if content in OTHER_FIELDS else content))
    found, _, counters = recovered_and_good(tmp_path)
    assert found == set()
    assert counters.damaged_superblocks == 1
    assert len([message for message in caplog.messages if "superblock" in message]) == 1


def test_superblock_of_its_own_fields_keeps_the_cache(tmp_path):
    (write_cache(tmp_path) / "superblock").write_text(sealed(changed("")))
    found, _, counters = recovered_and_good(tmp_path)
    assert found == set(range(BLOCKS))
    assert counters.damaged_superblocks == 0


@pytest.mark.parametrize("content", [b"", b"anything", b"\xff" * 300, None])
def test_superblock_of_anything_is_an_empty_cache(tmp_path, content):
    path = write_cache(tmp_path) / "superblock"
    path.unlink() if content is None else path.write_bytes(content)
    found, _, counters = recovered_and_good(tmp_path)
    assert found == set()
    assert counters.damaged_superblocks == 1


def test_every_bit_of_the_superblock_may_be_wrong(tmp_path):
    instance = write_cache(tmp_path / "whole")
    content = (instance / "superblock").read_bytes()
    for at in range(len(content) - 1):  # the last one ends the line
        changed = bytearray(content)
        changed[at] ^= 1 << at % 7
        (instance / "superblock").write_bytes(changed)
        found = Instance.open(WantedInstance(settings_for(tmp_path / "whole"), NAMESPACE, SLOT_BYTES, HASH_BYTES))
        try:
            assert found.losses.damaged_superblocks == 1, f"byte {at}"
            assert len(found.recovered.hashes) == 0
        finally:
            found.close()


def test_cache_of_another_format_is_not_used_and_left_as_it_is(tmp_path, caplog):
    instance = write_cache(tmp_path)
    title = "kvbm disk cache format 2"
    (instance / "superblock").write_text(f"{title} {xxh3_64_hexdigest(title.encode())}\nwhatever comes then\n")
    before = {path.name: path.read_bytes() for path in instance.iterdir()}
    with opened(tmp_path) as rig:
        assert rig.tier.path != instance
        assert rig.tier.counters.unusable_instances == 1
    assert len([message for message in caplog.messages if "has cache format 2" in message]) == 1
    assert {path.name: path.read_bytes() for path in instance.iterdir()} == before
