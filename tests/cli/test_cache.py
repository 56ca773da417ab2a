"""`kvbm cache` on caches of the disk tier and on stores: damaged, held, of another time, or with files of others.

What is done and shown is in `snapshots/cache/`. Of a transcript's lines, `blocks`, `flip` and `bind` are TOOLS.
"""

import csv
import io
import json
import mmap
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from shared.storage_rig import make_run, opened
from terminal import ROOT, Outcome, assert_transcript, environment, kvbm, kvbm_here, stored_entries, typed
from waiting import eventually

from kvbm import hashing
from kvbm.host import tree
from kvbm.tiers.disk.directory import ARENA, INDEX, LOCK, SUPERBLOCK, InstanceLock
from kvbm.tiers.disk.index import BlockIndex
from kvbm.tiers.disk.orders import Write
from kvbm.tiers.disk.settings import DiskSettings, Namespace
from kvbm.tiers.disk.storage import DiskStorage
from kvbm.tiers.disk.superblock import read_superblock, write_superblock
from kvbm.tiers.shared.protection import AesProtection, HmacProtection
from kvbm_cli.cache import store_selection, tenant_clearing
from kvbm_cli.cache.disk_verification import verify
from kvbm_cli.store.caches import index_to_read
from kvbm_cli.terminal.progress import Pace

BLOCK = 64 << 10
ALICE, BOB = "alice", "bob"
OLD, NEW = "00000000000000aa", "00000000000000bb"
HOUR, DAY = 3600, 86_400
LLAMA = {"model": "Llama-3.1-8B", "engine": "vllm", "block_tokens": 16}
QWEN = {"model": "Qwen3-8B", "engine": "embedded", "block_size": 32}
SECRET = b"sixteen bytes or more"
TENANTS = {hashing.tenant(salt): salt or "nobody" for salt in (None, ALICE, BOB)}


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


def fill(store: Path, namespace: str, facts: dict[str, object], *, runs: int, age_s: float, **how: object) -> None:
    """Writes runs, of which the second belongs to alice, as if they had been written `age_s` ago."""
    with opened(f"file://{store}", namespace=bytes.fromhex(namespace), **how) as rig:
        for number in range(runs):
            rig.put(make_run(number), tenant=hashing.tenant(ALICE if number == 1 else None))
    home = store / "v1" / namespace
    (home / "namespace.json").write_text(json.dumps(facts))
    for path in home.glob("??/*"):
        os.utime(path, (time.time() - age_s,) * 2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two caches, stores, and somebody's files that look like those of a store."""
    home = tmp_path_factory.mktemp("made")
    (home / "caches").mkdir()
    make_cache(home / "caches", OLD, model="Qwen3-8B", salts=[None, ALICE, BOB, ALICE], age_s=20 * DAY + HOUR)
    make_cache(home / "caches", NEW, model="Llama-3.1-8B", salts=[ALICE] * 3, age_s=5 * HOUR + 60)
    fill(home / "kv", "aa" * 16, LLAMA, runs=4, age_s=9 * DAY + 60)
    fill(home / "kv", "bb" * 16, QWEN, runs=2, age_s=3 * HOUR + 60)
    for name, protection in (("signed", HmacProtection(SECRET)), ("encrypted", AesProtection(SECRET))):
        fill(home / name, "aa" * 16, {"model": "m"}, runs=2, age_s=0, protection=protection)
    for place in ("backup/data/ab", f"backup/v1/{'cc' * 16}/ab"):
        (home / place).mkdir(parents=True)
        (home / place / ("ab" * 32)).write_bytes(b"years of work")
    (home / "backup/data/namespace.json").write_text("{}")
    return home


@pytest.fixture
def home(made: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    yield tmp_path
    theirs = [path.relative_to(made) for path in (made / "backup").rglob("*") if path.is_file()]
    assert all((tmp_path / path).read_bytes() == (made / path).read_bytes() for path in theirs), "they have changed"


@pytest.fixture
def caches(home: Path) -> tuple[Path, Path]:
    return next(home.glob(f"caches/*/{OLD}")), next(home.glob(f"caches/*/{NEW}"))


def one(pattern: str) -> Path:
    (found,) = Path().glob(pattern)
    return found


def flip(file: str, offset: str) -> str:
    """Change one bit of the byte at the offset."""
    content = bytearray(one(file).read_bytes())
    content[int(offset)] ^= 1
    one(file).write_bytes(content)
    return ""


def blocks(cache: str) -> str:
    """Show the rows of the index and which slots of the file have only zeros."""
    index = index_to_read(one(cache) / INDEX)
    # Tenants of the rows are read by no public method.
    rows = index._connection.execute("SELECT slot, tenant FROM blocks ORDER BY slot").fetchall()
    index.close()
    content = (one(cache) / ARENA).read_bytes()
    erased = [slot for slot in range(4) if not any(content[slot * BLOCK : (slot + 1) * BLOCK])]
    return "".join(f"block {slot} of {TENANTS[tenant]}\n" for slot, tenant in rows) + f"erased: {erased}\n"


def bind(path: str) -> str:
    """Make a socket by a short name, because its address has at most 107 bytes."""
    here = os.open(Path(path).parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{here}/{Path(path).name}")
    os.close(here)
    return ""


TOOLS = {"flip": flip, "blocks": blocks, "bind": bind}


def follow(file: str, name: str, home: Path, **how: object) -> None:
    if "chown" in stored_entries(file)[name] and os.geteuid() != 0:
        pytest.skip("requires the superuser, to give files away")
    assert_transcript(file, name, home, tools=TOOLS, **how)


CASES = [(f"cache/{file}", name) for file in ("disk", "store") for name in stored_entries(f"cache/{file}")]
CASES = [case for case in CASES if case[1] != "files"]


@pytest.mark.parametrize(("file", "name"), CASES)
def test_transcript(file, name, home):
    follow(file, name, home)


@pytest.mark.parametrize(("file", "name"), CASES[::8])
def test_program_does_the_same(file, name, home):
    follow(file, name, home, way=kvbm)


@pytest.mark.parametrize("way", ["openat2", "each component"])
@pytest.mark.parametrize("name", stored_entries("cache/planted"))
def test_what_others_have_planted_is_named_and_left_and_the_rest_is_done(name, way, home, monkeypatch):
    if way == "each component":
        monkeypatch.setattr(tree, "_has_openat2", lambda: False)
    follow("cache/planted", name, home)


@pytest.mark.parametrize("name", stored_entries("cache/held"))
def test_cache_that_an_engine_uses(name, home, caches):
    lock = InstanceLock.take(caches[0])
    follow("cache/held", name, home)
    lock.release()


def run(home: Path, command: str, **extra: str) -> Outcome:
    return kvbm_here("cache", *command.replace("URL", f"--url=file://{home}/kv").split(), home=home, **extra)


def test_json_and_exports_say_all_that_the_table_says(home, caches):
    lock = InstanceLock.take(caches[0])
    older, newer = listed = json.loads(run(home, "ls --dir caches --json").stdout)
    rows = [line.split()[-3:] for line in run(home, "ls --dir caches").stdout.splitlines()[1:3]]
    assert rows == [["process", str(os.getpid()), "Qwen3-8B"], ["h", "-", "Llama-3.1-8B"]]
    lock.release()
    assert (newer["cache"], newer["blocks"], newer["bytes"], newer["slots"]) == (NEW, 3, 3 * BLOCK, 16)
    assert (newer["is_in_use"], newer["pid"], newer["facts"]) == (False, None, {"model": "Llama-3.1-8B"})
    assert (older["is_in_use"], older["pid"]) == (True, os.getpid())
    assert older["path"] == str(caches[0].relative_to(home))
    assert abs(time.time() - older["created"] - 20 * DAY - HOUR) < 600
    exported = json.loads(run(home, "export-stats --dir caches").stdout)
    assert [one["facts"] for one in exported] == [one["facts"] for one in listed]
    found = list(csv.DictReader(io.StringIO(run(home, "export-stats --dir caches --format csv").stdout)))
    assert [(row["cache"], row["blocks"], json.loads(row["facts"])) for row in found] == [
        (OLD, "4", {"model": "Qwen3-8B"}),
        (NEW, "3", {"model": "Llama-3.1-8B"}),
    ]
    assert list(found[0]) == list(exported[0]) == list(newer)
    assert run(home, "export-stats --dir caches --output stats.json") == Outcome(0, "", "")
    assert json.loads((home / "stats.json").read_text()) == exported
    outcome = run(home, "export-stats --dir caches --output no/stats.json")
    assert outcome == Outcome(1, "", "error: cannot write `no/stats.json`: no such file or directory\n")


def test_json_of_a_store_says_more_than_the_table(home):
    qwen, _ = json.loads(run(home, "ls URL --json").stdout)
    assert (qwen["namespace"], qwen["engine"], qwen["block_tokens"]) == ("bb" * 16, "embedded", 32)
    assert qwen["bytes"] == sum(path.stat().st_size for path in home.glob("kv/v1/bb*/??/*"))
    assert abs(time.time() - 3 * HOUR - 60 - qwen["oldest"]) < 600
    assert qwen["facts"] == QWEN
    bad = next(home.glob("kv/v1/aa*/3b/*"))
    bad.write_bytes(b"bad")
    llama, _ = json.loads(run(home, "verify URL --json").stdout)
    assert [one["key"] for one in llama["bad"]] == [str(bad.relative_to(home / "kv"))]


def test_sample_reads_so_many_objects(home):
    verdicts = json.loads(run(home, "verify URL --sample 3 --json").stdout)
    assert sum(verdict["good"] for verdict in verdicts) == 3


def test_block_that_an_engine_replaced_meanwhile_is_not_called_damaged(caches):
    """The row goes while the bytes are being read, as it does when the engine uses the slot for another block."""
    instance = caches[0]
    content = bytearray((instance / ARENA).read_bytes())
    content[0] ^= 1
    content[BLOCK] ^= 1
    (instance / ARENA).write_bytes(content)

    def replace_first(done: int, total: int) -> None:
        index = BlockIndex.open(instance / INDEX)
        index.delete([0])
        index.close()

    found = verify(instance, read_superblock(instance / SUPERBLOCK), progress=replace_first)
    assert (found.good_count, found.bad, found.replaced_count) == (2, (1,), 1)


def test_bytes_of_a_tenant_are_overwritten_where_the_file_system_cannot_erase(caches, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(tenant_clearing, "fallocate", refuse)
    superblock = read_superblock(caches[1] / SUPERBLOCK)
    assert tenant_clearing.clear_tenant(caches[1], superblock, hashing.tenant(ALICE)) == 3
    assert not any((caches[1] / ARENA).read_bytes()[: 3 * BLOCK])


@pytest.mark.parametrize(("answer", "code", "left"), [("n\n", 1, 2), ("\n", 1, 2), ("y\n", 0, 0)])
def test_question_is_asked_on_a_terminal(home, answer, code, left):
    exit_code, shown = typed(answer, "cache", "clear", "--dir", "caches", home=home)
    assert shown.startswith("remove 2 caches, 2.0 MiB in caches? [y/N] ")
    assert exit_code == code
    assert len(list((home / "caches").rglob(ARENA))) == left


def test_progress_shows_rate_and_time_left(monkeypatch):
    now, pace, shown = [100.0], Pace(), []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for second in range(1, 4):
        now[0] += 1
        shown.append(pace.of(f"0123, {second} of 5 MiB"))
    assert shown == ["0123, 1 of 5 MiB", "0123, 2 of 5 MiB, 1 MiB/s, 3 s left", "0123, 3 of 5 MiB, 1 MiB/s, 2 s left"]


def test_missing_library_is_named_with_what_brings_it(home, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    outcome = run(home, "ls --url s3://kv-cache/team-a")
    assert outcome.exit_code == 1
    assert "requires the package `obstore`" in outcome.stderr
    assert "hint: run `pip install 'kvbm-cli[shared]'`" in outcome.stderr


@pytest.mark.parametrize("command", ["--help", "cache ls --dir caches", "cache ls --url file://{home}/kv"])
def test_neither_a_directory_nor_the_disk_tier_needs_the_library(command, home):
    words = command.format(home=home).split()
    program = (
        f"import sys; from kvbm_cli.app import run; run({words}); print({{'obstore', 'torch'}} & {{*sys.modules}})"
    )
    variables = {**environment(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], cwd=home, env=variables, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


def test_ages_are_whole_numbers_with_a_unit():
    for text, seconds in (("90s", 90), ("30min", 1800), ("12 h", 43_200), ("7d", 7 * DAY)):
        # The option is a text; the time is compared with the clock.
        before_s = store_selection._before(text)
        assert before_s is not None
        assert abs(time.time() - seconds - before_s) < 5
    assert re.fullmatch(store_selection.AGE, "-1d") is None


def test_error_of_a_store_has_one_line(home):
    variables = {"AWS_ACCESS_KEY_ID": "name", "AWS_SECRET_ACCESS_KEY": "hidden"}
    outcome = run(home, "ls --url s3://bucket/place", AWS_ENDPOINT_URL="http://127.0.0.1:9", **variables)
    assert outcome.exit_code != 0
    assert "Debug source" not in outcome.stderr
    assert "hidden" not in outcome.stderr
    assert len(outcome.stderr.splitlines()) <= 4, outcome.stderr
