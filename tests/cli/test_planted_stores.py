"""Stores and cache directories in which somebody else has put links and other files while they were in use, or which
cannot be read or changed in part. Nothing outside is read, changed or deleted, and the rest is done.

What commands say of files that others have put there before is in `snapshots/cache/planted.txt`.
"""

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from shared.storage_rig import make_run, opened
from terminal import kvbm_here
from test_cache import caches, home, made, run  # noqa: F401

from kvbm.errors import EnvironmentProblem
from kvbm.host import tree
from kvbm.tiers.disk.directory import InstanceLock, remove_instance
from kvbm.tiers.shared.orders import Outcome
from kvbm_cli.doctor.probes.store import PREFIX, probe
from kvbm_cli.store.directory_access import DirectoryAccess
from kvbm_cli.store.inventory import open_inventory
from kvbm_cli.system.filesystem import remove_tree

NAME, LLAMA, OTHER = "ab" * 32, "aa" * 16, "cc" * 16
COMMANDS = ("ls URL", "verify URL", "verify URL --delete-bad", "purge URL --yes")


@pytest.fixture(params=["openat2", "each component"])
def way_to_open(request, monkeypatch):
    if request.param == "each component":
        monkeypatch.setattr(tree, "_has_openat2", lambda: False)


@pytest.fixture
def store(home):  # noqa: F811
    return home / "kv"


@pytest.fixture
def backup(home):  # noqa: F811
    """Somebody's files. The fixture `home` proves that they have not changed."""
    return home / "backup"


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def objects(store: Path) -> list[Path]:
    return sorted(store.glob("v1/*/??/*"))


def link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path


@contextmanager
def mounted(source: Path, place: Path) -> Iterator[None]:
    place.mkdir(parents=True)
    if subprocess.run(["mount", "--bind", source, place], capture_output=True).returncode != 0:
        pytest.skip("requires the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.usefixtures("way_to_open")
@pytest.mark.parametrize(("place", "source"), [(OTHER, "data"), (f"{LLAMA}/ab", "data/ab")])
def test_what_is_mounted_in_a_store_is_not_entered(store, backup, place, source):
    with mounted(backup / source, store / "v1" / place):
        outcome = run(store.parent, "purge URL --yes")
    assert f"skipped v1/{place}: on another file system" in outcome.stderr
    assert (outcome.exit_code, objects(store)) == (0, [])


@pytest.mark.parametrize("command", COMMANDS)
def test_part_that_cannot_be_read_is_named_with_exit_code_1_and_the_rest_is_done(store, command, monkeypatch):
    (closed := store / "v1" / OTHER).mkdir()
    scan = tree.Tree.scan

    def refused(directory: tree.Tree) -> object:
        if os.path.samestat(os.fstat(directory.descriptor), os.stat(closed)):
            raise PermissionError(13, "Permission denied")
        return scan(directory)

    monkeypatch.setattr(tree.Tree, "scan", refused)  # the user of this test may be the superuser
    outcome = run(store.parent, command)
    assert outcome.exit_code == 1
    assert f"skipped v1/{OTHER}: permission denied" in outcome.stderr
    assert "4 objects" in outcome.stdout or "6 objects of 2 namespaces" in outcome.stdout
    assert len(objects(store)) == (0 if "purge" in command else 6)


def test_object_that_cannot_be_deleted_is_named_and_not_counted(store, monkeypatch):
    first, unlink = objects(store)[0], os.unlink

    def refused(path: str, **how: int) -> None:
        if path == first.name:
            raise PermissionError(1, "Operation not permitted")
        unlink(path, **how)

    monkeypatch.setattr(os, "unlink", refused)
    outcome = run(store.parent, "purge URL --yes")
    assert outcome.exit_code == 1
    assert outcome.stdout.startswith("deleted 5 objects of 2 namespaces")
    assert f"skipped {first.relative_to(store)}: operation not permitted" in outcome.stderr
    assert objects(store) == [first]
    assert [path.parent.name for path in store.rglob("namespace.json")] == [LLAMA], "it describes what is left"


@pytest.mark.usefixtures("way_to_open")
def test_directory_that_becomes_a_link_after_the_listing_is_not_entered(store, backup):
    inventory = open_inventory(f"file://{store}")
    (listed,) = inventory.namespaces(lambda namespace: namespace.hex() == LLAMA, lambda _: None)
    keys = [run.key for run in listed.extents]
    place = store / "v1" / LLAMA
    shutil.copytree(place, backup / "data", dirs_exist_ok=True, ignore=lambda *_: ["namespace.json"])
    before = content(backup)
    place.rename(store / "moved")
    link(place, backup / "data")
    assert [run.key for run in inventory.delete(listed.extents, lambda _: None)] == keys
    inventory.delete_facts(bytes.fromhex(LLAMA))
    assert content(backup) == before
    assert {one.why for one in inventory.left_out} == {"a link, which kvbm does not follow"}


@pytest.mark.usefixtures("way_to_open")
def test_swaps_during_a_purge_delete_nothing_outside(store, backup):
    """A thread exchanges a directory and a link to somebody's files with the same names as fast as it can."""
    names = [f"{number:064x}" for number in range(300)]
    directory, aside, trap = (store / "v1" / LLAMA / name for name in ("00", "aside", "trap"))
    for place in (directory, outside := backup / "names"):
        place.mkdir()
        for name in names:
            (place / name).write_bytes(b"x")
    link(trap, outside)
    is_over = threading.Event()

    def swap() -> None:
        while not is_over.is_set():
            directory.rename(aside)
            trap.rename(directory)
            directory.rename(trap)
            aside.rename(directory)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(3):
            run(store.parent, "purge URL --yes")
    finally:
        is_over.set()
        thread.join()
    assert sorted(path.name for path in outside.iterdir()) == names


def test_doctor_deletes_nothing_behind_a_link_and_what_a_killed_doctor_left(store, backup):
    for path in backup.rglob("*"):
        os.utime(path, (0, 0))
    link(store / PREFIX, backup)
    assert probe(f"file://{store}", seconds=0.01, writes=True).failed == "put", "its place is a link"
    (store / PREFIX).unlink()
    (left := store / PREFIX / ("ab" * 8)).mkdir(parents=True)
    (left / "small").write_bytes(b"x")
    os.utime(left / "small", (0, 0))
    link(left / "0", backup / "data" / "ab" / NAME)
    link(store / PREFIX / ("cd" * 8), backup / "data" / "ab")
    assert probe(f"file://{store}", seconds=0.01, writes=True).failed is None
    assert not (left / "small").exists()


@pytest.mark.usefixtures("way_to_open")
def test_engine_neither_reads_nor_writes_through_a_link(tmp_path):
    store, outside = tmp_path / "store", tmp_path / "outside"
    with opened(f"file://{store}") as rig:
        first, second = make_run(0), make_run(1)
        rig.put(first)
        path = store / rig.key(first)
        path.parent.rename(outside)
        link(path.parent, outside)
        assert rig.get(first).outcome is not Outcome.GOOD, "the bytes are right, but behind a link"
        before = content(outside)
        rig.put(first)
        assert content(outside) == before
        rig.put(second)
        assert rig.get(second).outcome is Outcome.GOOD


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo"])
def test_engine_replaces_a_link_in_place_of_an_object_and_leaves_its_target(store, backup, kind):
    with opened(f"file://{store}") as rig:
        rig.put(one := make_run(0))
        path = store / rig.key(one)
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        else:
            link(path, backup / "data" / "ab" / NAME if kind == "link" else store / "nothing")
        assert rig.get(one).outcome is not Outcome.GOOD
        rig.put(one)
        assert rig.get(one).outcome is Outcome.GOOD
    assert not (store / "nothing").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="requires the superuser, to give a file away")
def test_engine_reads_objects_of_another_user(store):
    """Engines of several users may share a store; who may delete is a matter of the directory's permissions."""
    for path in objects(store):
        os.chown(path, 12345, 12345)
    with opened(f"file://{store}", namespace=bytes.fromhex(LLAMA)) as rig:
        assert rig.get(make_run(0)).outcome is Outcome.GOOD


def test_reading_stops_at_the_length_that_was_listed(store):
    access = DirectoryAccess(store)
    key = str(objects(store)[0].relative_to(store))
    assert len(access.read(key, 10)) == 10
    assert access.read(key) == (store / key).read_bytes()


@pytest.mark.usefixtures("way_to_open")
@pytest.mark.parametrize("level", ["namespace", "instance"])
def test_cache_that_becomes_a_link_after_it_was_locked_is_not_removed_elsewhere(caches, tmp_path, level):  # noqa: F811
    place = caches[0].parent if level == "namespace" else caches[0]
    shutil.copytree(place, outside := tmp_path / "outside")
    lock = InstanceLock.take(caches[0])
    assert lock is not None
    place.rename(tmp_path / "moved")
    link(place, outside)
    before = content(outside)
    with pytest.raises(EnvironmentProblem, match="cannot remove"):
        remove_instance(lock)
    lock.release()
    assert content(outside) == before
    with pytest.raises(EnvironmentProblem, match="cannot open"):
        InstanceLock.take(caches[0])


@pytest.mark.parametrize("kind", ["foreign", "open"])
def test_clear_removes_its_own_caches_and_names_those_that_are_not(caches, tmp_path, kind):  # noqa: F811
    other, mine = caches
    if kind == "open":
        (other / "lock").chmod(0o666)
    elif os.geteuid() != 0:
        pytest.skip("requires the superuser, to give files away")
    else:
        for path in (other.parent, other, *other.iterdir()):
            os.chown(path, 12345, 12345)
    outcome = kvbm_here("cache", "clear", "--yes", "--dir", f"{tmp_path}/caches", home=tmp_path)
    assert (outcome.exit_code, outcome.stdout[:15]) == (int(kind == "open"), "removed 1 cache")
    assert f"skipped {other}: " in outcome.stderr
    assert ("chmod go-rwx" if kind == "open" else "belongs to user 12345") in outcome.stderr
    assert (other / "arena").exists()
    assert not mine.exists()


def test_removed_tree_takes_its_links_along_and_leaves_their_targets(tmp_path, backup):
    (inner := tmp_path / "run" / "a" / "b").mkdir(parents=True)
    (inner / "file").write_bytes(b"x")
    link(inner / "link", backup)
    link(tmp_path / "run" / "self", tmp_path / "run" / "self")
    os.mkfifo(inner / "fifo")
    assert remove_tree(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not remove_tree(link(tmp_path / "run", backup))


def test_what_is_mounted_in_a_removed_tree_stays(tmp_path, backup):
    """Neither the one who removes a run nor the guard of an engine enters it."""
    place = tmp_path / "run" / "mounted"
    with mounted(backup, place):
        (tmp_path / "run" / "file").write_bytes(b"x")
        assert not remove_tree(tmp_path / "run")
        assert (tmp_path / "run" / "file").exists()
        assert not remove_tree(place)
    assert remove_tree(tmp_path / "run")


@pytest.mark.usefixtures("way_to_open")
def test_engine_lists_nothing_behind_a_link_and_deletes_no_remains_there(tmp_path):
    """Remains of a killed engine are deleted after an hour, in the store only."""
    outside, remains = tmp_path / "outside", f"{NAME}#12345"
    outside.mkdir()
    with opened(f"file://{tmp_path}/store") as rig:
        rig.put(one := make_run(0))
        home = (tmp_path / "store" / rig.key(one)).parent.parent
        for place in (outside, (tmp_path / "store" / rig.key(one)).parent):
            (place / NAME).write_bytes(b"x")
            (place / remains).write_bytes(b"x")
            os.utime(place / remains, (0, 0))
        link(home / "ab", outside)
        link(home / "self", Path("self"))
        prefix = rig.key(one).rpartition("/")[0].rpartition("/")[0]
        listed = {key for page in rig.store.keys(prefix) for key in page}
        assert listed == {rig.key(one), f"{rig.key(one).rpartition('/')[0]}/{NAME}"}
        assert not (tmp_path / "store" / rig.key(one)).with_name(remains).exists()
        assert (outside / remains).exists()
        home.rename(tmp_path / "moved")
        link(home, tmp_path / "moved")
        assert list(rig.store.keys(prefix)) == []
        assert rig.storage.off_because is None
