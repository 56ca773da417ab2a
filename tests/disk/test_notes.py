"""Notes that a writer keeps next to its blocks: returned with exactly their block, and lost before they are wrong."""

import sqlite3
import time
from contextlib import closing
from dataclasses import replace

import pytest
from disk_rig import instance_of, make_hash, opened

from kvbm.tiers.disk import storage

NOTES = {1: b"first", 2: b"", 3: b"third" * 50}


def write(rig, notes, *, first_slot=0):
    """Write the blocks of `notes` (number -> note) to slots in this order."""
    numbers, slots = list(notes), list(range(first_slot, first_slot + len(notes)))
    for slot, number in enumerate(numbers):
        rig.fill(slot, make_hash(number))
    rig.last_ticket += 1
    order = rig.order_write([make_hash(number) for number in numbers], list(range(len(numbers))), slots)
    rig.tier.submit(replace(order, notes=tuple(notes.values())))
    assert all(rig.wait(rig.last_ticket).is_good)


def found(rig):
    """Return the note of every block that the opening has found."""
    blocks = rig.tier.recovered()
    assert blocks.is_last
    return dict(zip(blocks.hashes, blocks.notes or [b""] * len(blocks.slots), strict=True))


def in_parts(rig):
    """Return all batches of the blocks that the opening has found."""
    parts = [rig.tier.recovered()]
    while not parts[-1].is_last:
        parts.append(rig.tier.recovered())
    return parts


def stored(notes):
    return {make_hash(number): note for number, note in notes.items()}


def tables(directory):
    with closing(sqlite3.connect(instance_of(directory) / "index.sqlite")) as index:
        return [name for (name,) in index.execute("SELECT name FROM sqlite_schema ORDER BY name")]


def change(directory, statement):
    with closing(sqlite3.connect(instance_of(directory) / "index.sqlite")) as index, index:
        index.execute(statement)


def test_a_restart_returns_each_note_with_its_block(tmp_path):
    with opened(tmp_path) as rig:
        write(rig, NOTES)
    with opened(tmp_path) as rig:
        assert found(rig) == stored(NOTES)


def test_batches_of_found_blocks_keep_their_notes(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "FOUND_BATCH_BLOCKS", 2)
    with opened(tmp_path) as rig:
        write(rig, NOTES)
    with opened(tmp_path) as rig:
        parts = in_parts(rig)
    assert [len(part.notes) for part in parts] == [2, 1]
    names = [name for part in parts for name in part.hashes]
    assert dict(zip(names, [note for part in parts for note in part.notes], strict=True)) == stored(NOTES)


def test_without_notes_there_is_no_table_for_them(tmp_path):
    with opened(tmp_path) as rig:
        assert all(rig.write([1], [0]).is_good)
    assert tables(tmp_path) == ["blocks"]
    with opened(tmp_path) as rig:
        assert rig.tier.recovered().notes == ()


def test_a_slot_that_is_written_again_loses_its_note(tmp_path):
    with opened(tmp_path) as rig:
        write(rig, NOTES)
        assert all(rig.write([9], [0]).is_good)
    with opened(tmp_path) as rig:
        assert found(rig) == stored({2: b"", 3: NOTES[3], 9: b""})


def test_forgotten_blocks_lose_their_notes(tmp_path):
    with opened(tmp_path) as rig:
        write(rig, NOTES)
        rig.tier.forget([0])
    with closing(sqlite3.connect(instance_of(tmp_path) / "index.sqlite")) as index:
        assert index.execute("SELECT slot FROM notes").fetchall() == [(2,)]


def test_a_clear_leaves_no_note(tmp_path):
    with opened(tmp_path) as rig:
        write(rig, NOTES)
        rig.clear()
    with closing(sqlite3.connect(instance_of(tmp_path) / "index.sqlite")) as index:
        assert index.execute("SELECT count(*) FROM notes").fetchone() == (0,)


def test_a_clear_of_one_tenant_leaves_the_notes_of_others(tmp_path):
    with opened(tmp_path) as rig:
        write(rig, {1: b"first"})
        rig.fill(1, make_hash(2))
        rig.last_ticket += 1
        order = rig.order_write([make_hash(2)], [1], [1], [b"b"])
        rig.tier.submit(replace(order, notes=(b"second",)))
        assert all(rig.wait(rig.last_ticket).is_good)
        rig.clear(b"b")
    with closing(sqlite3.connect(instance_of(tmp_path) / "index.sqlite")) as index:
        assert index.execute("SELECT note FROM notes").fetchall() == [(b"first",)]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE notes SET note = x'00' WHERE slot = 0",
        "UPDATE notes SET note = 'text' WHERE slot = 0",
        "UPDATE notes SET checksum = checksum + 1 WHERE slot = 0",
        "UPDATE notes SET checksum = 'text' WHERE slot = 0",
        "UPDATE notes SET generation = generation + 1 WHERE slot = 0",
        "UPDATE notes SET note = (SELECT note FROM notes WHERE slot = 2) WHERE slot = 0",
        "UPDATE notes SET slot = 7 WHERE slot = 0",
        "DELETE FROM notes WHERE slot = 0",
    ],
)
def test_a_damaged_note_costs_itself_and_no_block(tmp_path, statement):
    with opened(tmp_path) as rig:
        write(rig, NOTES)
    change(tmp_path, statement)
    with opened(tmp_path) as rig:
        assert found(rig) == stored(NOTES | {1: b""})
        assert rig.tier.counters.damaged_indexes == 0


def test_notes_of_another_form_are_deleted_and_the_blocks_stay(tmp_path):
    with opened(tmp_path) as rig:
        write(rig, NOTES)
    change(tmp_path, "DROP TABLE notes")
    change(tmp_path, "CREATE TABLE notes (something TEXT)")
    with opened(tmp_path) as rig:
        assert found(rig) == dict.fromkeys(stored(NOTES), b"")
        write(rig, {4: b"fourth"}, first_slot=5)
    with opened(tmp_path) as rig:
        assert found(rig) == stored(dict.fromkeys(NOTES, b"") | {4: b"fourth"})


def test_a_restart_returns_the_tenant_and_the_age_of_each_block(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "FOUND_BATCH_BLOCKS", 2)
    owners = [b"alice", b"", b"bob"]
    with opened(tmp_path) as rig:
        assert all(rig.write([1, 2, 3], [0, 1, 2], owners).is_good)
    with opened(tmp_path) as rig:
        parts = in_parts(rig)
    names = [name for part in parts for name in part.hashes]
    known = dict(zip(names, [tenant for part in parts for tenant in part.tenants], strict=True))
    assert known == {make_hash(number): owner for number, owner in zip((1, 2, 3), owners, strict=True)}
    ages = [age for part in parts for age in part.ages_s(time.time() + 100)]
    assert all(100 <= age < 400 for age in ages)
    assert len(ages) == 3
