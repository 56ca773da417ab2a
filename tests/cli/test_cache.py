"""`kvbm cache` on real caches: made by the disk tier, then damaged, held, or of another time."""

import csv
import io
import json
import mmap
import os
import pty
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from terminal import (
    HANGS_S,
    PROGRAM,
    Kvbm,
    Outcome,
    assert_entry,
    assert_snapshot,
    environment,
    kvbm,
    kvbm_here,
    ways,
)
from waiting import eventually

from kvbm import hashing
from kvbm.disk.directory import ARENA, INDEX, LOCK, SUPERBLOCK, InstanceLock
from kvbm.disk.index import BlockIndex
from kvbm.disk.orders import Write
from kvbm.disk.settings import DiskSettings, Namespace
from kvbm.disk.storage import DiskStorage
from kvbm.disk.superblock import read_superblock, write_superblock
from kvbm_cli.store.caches import index_to_read
from kvbm_cli.terminal.read_progress import ReadProgress

BLOCK = 64 << 10
ALICE, BOB = "alice", "bob"
OLD, NEW = "00000000000000aa", "00000000000000bb"
HOUR = 3600


def make_cache(directory: Path, name: str, *, model: str, salts: list[str | None], age_s: float) -> Path:
    """A cache of one block per salt in 16 slots, made `age_s` ago and last used half that time ago."""
    shards = [np.frombuffer(mmap.mmap(-1, len(salts) * BLOCK), np.uint8).reshape(-1, BLOCK)]
    shards[0][:] = np.random.default_rng(1).integers(0, 256, shards[0].shape, np.uint8)
    namespace = Namespace(hashing.namespace({"model": model}), {"model": model})
    settings = DiskSettings(directory, block_count=16, o_direct=False)
    tier = DiskStorage.open(settings, namespace, shards, hash_bytes=hashing.HASH_BYTES)
    slots = list(range(len(salts)))
    hashes, tenants = [slot.to_bytes(16, "little") for slot in slots], [hashing.tenant(salt) for salt in salts]
    tier.submit(Write(1, hashes, slots, slots, tenants, generations=[0] * len(hashes)))
    results = eventually(tier.poll)
    assert all(results[0].is_good), results
    tier.close(10)
    made = next(path for path in (directory / namespace.digest.hex()).iterdir() if path.name not in (OLD, NEW))
    instance = made.rename(made.with_name(name))
    superblock = read_superblock(instance / SUPERBLOCK)
    write_superblock(instance / SUPERBLOCK, replace(superblock, created=time.time() - age_s))
    os.utime(instance / LOCK, (time.time() - age_s / 2,) * 2)
    return instance


@pytest.fixture
def home(tmp_path):
    (tmp_path / "caches").mkdir()
    disk = f"disk: {{capacity: 1GiB, directory: {tmp_path}/caches}}"
    for name, tiers in (("disk", f"{{host: {{capacity: 1GiB}}, {disk}}}"), ("host", "{host: {capacity: 1GiB}}")):
        (tmp_path / f"{name}.yaml").write_text(f"engine: {{kind: embedded, model: synthetic:tiny}}\ntiers: {tiers}\n")
    return tmp_path


@pytest.fixture
def caches(home):
    directory = home / "caches"
    older = make_cache(directory, OLD, model="Qwen3-8B", salts=[None, ALICE, BOB, ALICE], age_s=20 * 24 * HOUR + 60)
    newer = make_cache(directory, NEW, model="Llama-3.1-8B", salts=[ALICE] * 3, age_s=5 * HOUR + 60)
    return older, newer


@pytest.fixture
def held(caches):
    lock = InstanceLock.take(caches[0])
    os.utime(caches[0] / LOCK, (time.time() - 240 * HOUR - 60,) * 2)
    yield caches[0]
    lock.release()


def run(home: Path, command: str, *, way: Kvbm = kvbm_here) -> Outcome:
    return way("cache", *command.split(), home=home)


def run_elsewhere(home: Path, command: str) -> Outcome:
    """In a process of its own, as a command is that meets a cache which this process holds."""
    return run(home, command, way=kvbm)


def text(outcome: Outcome, command: str) -> str:
    shown = outcome.text(f"kvbm cache {command}")
    return re.sub(r"(process |\"pid\": )\d+", r"\1[PID]", shown)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def rows(instance: Path) -> list[tuple[int, bytes]]:
    index = index_to_read(instance / INDEX)
    found = index._connection.execute("SELECT slot, tenant FROM blocks ORDER BY slot").fetchall()
    index.close()
    return found


OUTPUTS = {
    "ls": "ls --dir caches",
    "ls_of_a_profile": "ls --profile ./disk.yaml",
    "verify": "verify --dir caches",
    "clear": "clear --dir caches --yes",
    "clear_of_a_tenant": "clear --dir caches --salt alice --yes",
    "clear_of_an_unknown_tenant": "clear --dir caches --salt carol --yes",
}
MISTAKES = {
    "two_directories": "ls --dir caches --profile ./disk.yaml",
    "no_directory": "ls --dir nowhere",
    "a_file": "verify --dir disk.yaml",
    "no_disk_tier": "clear --profile ./host.yaml",
    "nobody_to_ask": "clear --dir caches",
    "unknown_format": "export-stats --dir caches --format xml",
}


@pytest.mark.parametrize(("name", "way"), ways(OUTPUTS))
def test_output(home, caches, name, way):
    assert_snapshot(f"cache_{name}", text(run(home, OUTPUTS[name], way=way), OUTPUTS[name]))


@pytest.mark.parametrize(("name", "way"), ways(MISTAKES))
def test_mistake(home, caches, name, way):
    outcome = run(home, MISTAKES[name], way=way)
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert_entry("mistakes/cache", name, text(outcome, MISTAKES[name]), names=MISTAKES)


@pytest.mark.parametrize("command", ["ls", "verify", "clear --yes", "export-stats"])
def test_directory_inside_a_cache_is_not_taken_for_an_empty_one(home, caches, command):
    for inside in (caches[0], caches[0].parent):
        outcome = run(home, f"{command} --dir {inside}")
        assert (outcome.exit_code, outcome.stdout) == (2, "")
        assert outcome.stderr.split("\n")[:4] == [
            f"error: `--dir {inside}` is inside a cache of Qwen3-8B",
            "",
            f"hint: use `--dir {home / 'caches'}`",
            "",
        ]
    assert all(cache.is_dir() for cache in caches)


@pytest.mark.parametrize("command", ["ls", "verify", "clear"])
def test_empty_directory_is_no_mistake(home, command):
    assert run(home, f"{command} --dir caches") == Outcome(0, "no caches in caches\n", "")
    assert run(home, command) == Outcome(0, f"no caches in {home}/.cache/kvbm\n", "")
    assert run(home, "export-stats") == Outcome(0, "[]\n", "")


def test_json_says_all_that_the_table_says(home, held):
    newer, older = json.loads(run_elsewhere(home, "ls --dir caches --json").stdout)
    assert (newer["cache"], newer["blocks"], newer["bytes"], newer["slots"]) == (NEW, 3, 3 * BLOCK, 16)
    assert (newer["is_in_use"], newer["pid"], newer["facts"]) == (False, None, {"model": "Llama-3.1-8B"})
    assert (older["is_in_use"], older["pid"], older["path"]) == (
        True,
        os.getpid(),
        str(Path("caches", *held.parts[-2:])),
    )
    assert abs(time.time() - older["created"] - 20 * 24 * HOUR - 60) < 60


def test_cache_in_use_is_listed_with_its_process(home, held):
    newer, older = run_elsewhere(home, "ls --dir caches").stdout.splitlines()[1:3]
    assert newer.split()[-2:] == ["-", "Llama-3.1-8B"]
    assert older.endswith(f"10 d  process {os.getpid()}  Qwen3-8B")


def test_damaged_cache_is_listed_with_what_is_wrong(home, caches):
    flip(caches[0] / SUPERBLOCK, 60)
    (caches[1] / INDEX).write_bytes(b"no database" * 1000)
    assert_snapshot("cache_ls_damaged", text(run(home, "ls --dir caches"), "ls --dir caches"))


def test_a_cache_without_its_files_has_no_age(home, caches):
    """As one whose creation was cut short."""
    for file in caches[0].iterdir():
        file.unlink()
    listed = json.loads(run(home, "ls --dir caches --json").stdout)
    cache = next(one for one in listed if one["cache"] == OLD)
    assert (cache["created"], cache["last_used"]) == (None, None)
    row = next(line for line in run(home, "ls --dir caches").stdout.splitlines() if line.startswith(caches[0].name))
    assert row.split()[1:] == ["-", "-", "0", "B", "-", "-", "-", "-"]


def test_damaged_blocks_are_dropped_once(home, caches):
    flip(caches[0] / ARENA, BLOCK + 17)
    flip(caches[0] / ARENA, 3 * BLOCK)
    first = run(home, "verify --dir caches")
    assert_snapshot("cache_verify_damaged", text(first, "verify --dir caches"))
    assert [slot for slot, _ in rows(caches[0])] == [0, 2]
    assert run(home, "verify --dir caches").exit_code == 0


def test_blocks_behind_the_end_of_a_cut_arena_are_dropped(home, caches):
    os.truncate(caches[1] / ARENA, BLOCK + BLOCK // 2)
    verdicts = json.loads(run(home, "verify --dir caches --json").stdout)
    assert [(verdict["good"], verdict["bad"], verdict["dropped"]) for verdict in verdicts] == [(1, 2, 2), (4, 0, 0)]
    assert [slot for slot, _ in rows(caches[1])] == [0]


def test_cache_in_use_is_verified_without_a_change(home, held):
    flip(held / ARENA, 0)
    before = rows(held)
    assert_snapshot("cache_verify_in_use", text(run_elsewhere(home, "verify --dir caches"), "verify --dir caches"))
    assert rows(held) == before


def test_block_that_an_engine_replaced_meanwhile_is_not_called_damaged(caches):
    """The row goes while the bytes are being read, as it does when the engine uses the slot for another block."""
    from kvbm_cli.cache.disk_verification import verify

    instance = caches[0]
    flip(instance / ARENA, 0)
    flip(instance / ARENA, BLOCK)

    def replace_first(done: int, total: int) -> None:
        index = BlockIndex.open(instance / INDEX)
        index.delete([0])
        index.close()

    found = verify(instance, read_superblock(instance / SUPERBLOCK), progress=replace_first)
    assert (found.good_count, found.bad, found.replaced_count) == (2, (1,), 1)


def test_what_is_damaged_as_a_whole_is_reported(home, caches):
    (caches[1] / SUPERBLOCK).unlink()
    (caches[0] / ARENA).unlink()
    outcome = run(home, "verify --dir caches")
    assert outcome.exit_code == 1
    assert_snapshot("cache_verify_without_files", text(outcome, "verify --dir caches"))


def test_clear_removes_every_file(home, caches):
    flip(caches[0] / SUPERBLOCK, 60)
    assert run(home, "clear --dir caches --yes").exit_code == 0
    assert os.listdir(home / "caches") == []


def test_clear_is_refused_as_a_whole_while_one_cache_is_in_use(home, held):
    outcome = run_elsewhere(home, "clear --dir caches --yes")
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert_snapshot("cache_clear_in_use", text(outcome, "clear --dir caches --yes"))
    assert run_elsewhere(home, "clear --dir caches --salt alice --yes").exit_code == 1
    assert len(rows(held)) == 4
    assert len(list((home / "caches").rglob(ARENA))) == 2


def test_one_tenant_is_removed_with_the_bytes_and_nobody_else(home, caches):
    before = (caches[0] / ARENA).read_bytes()
    run(home, "clear --dir caches --salt alice --yes")
    after = (caches[0] / ARENA).read_bytes()
    assert rows(caches[0]) == [(0, b""), (2, hashing.tenant(BOB))]
    assert rows(caches[1]) == []
    assert len(after) == len(before)
    for slot, is_erased in enumerate([False, True, False, True]):
        mine = slice(slot * BLOCK, (slot + 1) * BLOCK)
        assert after[mine] == (bytes(BLOCK) if is_erased else before[mine])
    assert run(home, "verify --dir caches").exit_code == 0


def test_bytes_of_a_tenant_are_overwritten_where_the_file_system_cannot_erase(caches, monkeypatch):
    from kvbm_cli.cache import tenant_clearing as clear

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(clear, "fallocate", refuse)
    assert clear.clear_tenant(caches[1], read_superblock(caches[1] / SUPERBLOCK), hashing.tenant(ALICE)) == 3
    assert not any((caches[1] / ARENA).read_bytes()[: 3 * BLOCK])


def test_tenant_of_a_cache_without_an_index_cannot_be_told(home, caches):
    (caches[0] / INDEX).write_bytes(b"no database" * 1000)
    outcome = run(home, "clear --dir caches --salt alice --yes")
    assert outcome.exit_code == 1
    assert_snapshot("cache_clear_without_an_index", text(outcome, "clear --salt alice --yes"))
    assert len(rows(caches[1])) == 3


def test_cache_of_another_format_is_left_alone(home, caches):
    import xxhash

    title = "kvbm disk cache format 2"
    (caches[0] / SUPERBLOCK).write_text(f"{title} {xxhash.xxh3_64_hexdigest(title.encode())}\nnobody knows\n")
    outcome = run(home, "clear --dir caches --yes")
    assert_snapshot("cache_clear_of_another_format", text(outcome, "clear --dir caches --yes"))
    assert [path.parent for path in (home / "caches").rglob(ARENA)] == [caches[0]]


@pytest.mark.parametrize(("answer", "code", "left"), [("n\n", 1, 2), ("\n", 1, 2), ("y\n", 0, 0)])
def test_question_is_asked_on_a_terminal(home, caches, answer, code, left):
    leader, follower = pty.openpty()
    os.write(leader, answer.encode())
    done = subprocess.run(
        [*PROGRAM, "cache", "clear", "--dir", "caches"],
        cwd=home,
        env=environment(home),
        stdin=follower,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    os.close(leader)
    os.close(follower)
    assert done.stderr.startswith("remove 2 caches, 2.0 MiB in caches? [y/N] ")
    assert done.returncode == code
    assert len(list((home / "caches").rglob(ARENA))) == left


def test_stats_are_exported_for_other_programs(home, caches):
    listed = json.loads(run(home, "ls --dir caches --json").stdout)
    assert json.loads(run(home, "export-stats --dir caches").stdout) == listed
    found = list(csv.DictReader(io.StringIO(run(home, "export-stats --dir caches --format csv").stdout)))
    assert [(row["cache"], row["blocks"], json.loads(row["facts"])) for row in found] == [
        (NEW, "3", {"model": "Llama-3.1-8B"}),
        (OLD, "4", {"model": "Qwen3-8B"}),
    ]
    assert list(found[0]) == list(listed[0])


def test_stats_go_to_a_file(home, caches):
    assert run(home, "export-stats --dir caches --output stats.json") == Outcome(0, "", "")
    assert len(json.loads((home / "stats.json").read_text())) == 2
    outcome = run(home, "export-stats --dir caches --output no/stats.json")
    assert outcome == Outcome(1, "", "error: cannot write `no/stats.json`: no such file or directory\n")


def test_progress_shows_rate_and_time_left(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = ReadProgress("0123")
    for second in range(1, 6):
        now[0] += 1
        progress(second << 30, 5 << 30)
    assert capsys.readouterr().err == (
        "0123  2.0 GiB of 5.0 GiB, 1.0 GiB/s, 3 s left\n0123  4.0 GiB of 5.0 GiB, 1.0 GiB/s, 1 s left\n"
    )
