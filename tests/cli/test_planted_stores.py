"""Stores and cache directories in which somebody else has put links and other files: nothing outside is read, changed
or deleted, and the rest is listed, verified and deleted."""

import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from shared.storage_rig import make_run, opened
from terminal import Outcome, kvbm_here

from kvbm.disk.directory import InstanceLock, remove_instance
from kvbm.disk.superblock import Superblock, write_superblock
from kvbm.errors import EnvironmentProblem
from kvbm.host import tree
from kvbm_cli.doctor.probes.store import PREFIX, probe
from kvbm_cli.store.directory_access import DirectoryAccess
from kvbm_cli.store.open import open_inventory
from kvbm_cli.system import leftovers
from kvbm_cli.system.filesystem import remove_tree, write_atomically

OWN, OTHER = bytes.fromhex("aa" * 16), bytes.fromhex("bb" * 16)
COMMANDS = {
    "ls": "ls URL",
    "verify": "verify URL",
    "verify_and_delete": "verify URL --delete-bad",
    "purge": "purge URL --yes",
}
NAME = "ab" * 32


@pytest.fixture(params=["openat2", "each component"])
def way_to_open(request, monkeypatch):
    if request.param == "each component":
        monkeypatch.setattr(tree, "_has_openat2", lambda: False)


@pytest.fixture
def store(tmp_path):
    """A store with three objects of one namespace."""
    with opened(f"file://{tmp_path}/store", namespace=OWN) as rig:
        for number in range(3):
            rig.put(make_run(number))
    (tmp_path / "store" / "v1" / OWN.hex() / "namespace.json").write_text(json.dumps({"model": "Qwen3-8B"}))
    return tmp_path / "store"


@pytest.fixture
def backup(tmp_path):
    """Somebody's files, which look like a namespace, its directories and its objects."""
    backup = tmp_path / "backup"
    (backup / "data" / "ab").mkdir(parents=True)
    (backup / "data" / "ab" / NAME).write_bytes(b"years of work")
    (backup / "data" / "namespace.json").write_text("{}")
    (backup / "v1" / OTHER.hex() / "ab").mkdir(parents=True)
    (backup / "v1" / OTHER.hex() / "ab" / NAME).write_bytes(b"more of it")
    before = content(backup)
    yield backup
    assert content(backup) == before, "somebody's files have changed"


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def objects(store: Path) -> list[Path]:
    """The objects of kvbm, without those that are a link."""
    fan_outs = [path for path in sorted((store / "v1" / OWN.hex()).glob("??")) if not path.is_symlink()]
    found = (path for directory in fan_outs for path in sorted(directory.iterdir()))
    return [path for path in found if path.is_file() and not path.is_symlink()]


def run(store: Path, command: str) -> Outcome:
    words = [word.replace("URL", f"--url=file://{store}") for word in command.split()]
    return kvbm_here("cache", *words, home=store.parent)


def fan_out(store: Path) -> Path:
    return objects(store)[0].parent


def socket_at(path: Path) -> None:
    """Binds by a short name, because the address of a socket has at most 107 bytes."""
    here = os.open(path.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


PLANTED: dict[str, Callable[[Path, Path], Path]] = {
    "namespace": lambda store, backup: link(store / "v1" / OTHER.hex(), backup / "data"),
    "fan_out": lambda store, backup: link(store / "v1" / OWN.hex() / "ab", backup / "data" / "ab"),
    "object": lambda store, backup: link(fan_out(store) / (fan_out(store).name * 32), backup / "data" / "ab" / NAME),
    "facts": lambda store, backup: link(named_namespace(store) / "namespace.json", backup / "data" / "namespace.json"),
    "relative": lambda store, backup: link(store / "v1" / OTHER.hex(), Path("../../backup/data")),
    "self": lambda store, backup: link(store / "v1" / OTHER.hex(), store / "v1" / OTHER.hex()),
    "self_object": lambda store, backup: link(fan_out(store) / "self", Path("self")),
    "parent": lambda store, backup: link(store / "v1" / OWN.hex() / "up", Path("..")),
    "dangling": lambda store, backup: link(fan_out(store) / (fan_out(store).name * 32), Path("/nonexistent")),
    "device": lambda store, backup: link(fan_out(store) / (fan_out(store).name * 32), Path("/dev/zero")),
    "fifo": lambda store, backup: made(os.mkfifo, fan_out(store) / (fan_out(store).name * 32)),
    "socket": lambda store, backup: made(socket_at, fan_out(store) / (fan_out(store).name * 32)),
}


def named_namespace(store: Path) -> Path:
    home = store / "v1" / OTHER.hex()
    home.mkdir()
    return home


def link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path


def made(make: Callable[[Path], object], path: Path) -> Path:
    make(path)
    return path


@pytest.mark.usefixtures("way_to_open")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("what", PLANTED)
def test_what_is_no_object_is_named_and_left_and_the_rest_is_done(store, backup, what, command):
    planted, before = PLANTED[what](store, backup), objects(store)
    outcome = run(store, COMMANDS[command])
    assert outcome.exit_code == 0, outcome
    assert "skipped " + str(planted.relative_to(store)) in outcome.stderr
    assert os.path.lexists(planted)
    assert objects(store) == ([] if command == "purge" else before)
    assert "3 objects" in outcome.stdout


@pytest.mark.usefixtures("way_to_open")
@pytest.mark.parametrize("command", COMMANDS)
def test_v1_itself_as_a_link_has_no_objects(store, backup, command):
    shutil.rmtree(store / "v1")
    link(store / "v1", backup / "v1")
    outcome = run(store, COMMANDS[command])
    assert outcome == Outcome(0, f"no objects in file://{store}\n", "skipped v1: a link, which kvbm does not follow\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_root_may_be_a_link_because_the_user_named_it(store, backup, command):
    named = link(store.parent / "named", store)
    outcome = run(named, COMMANDS[command])
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert "3 objects" in outcome.stdout


ODD_NAMES = {
    "escape": b"\x1b[2J\x1b]0;owned\x07",
    "newline": b"a\nb",
    "invalid": b"\xff\xfe\x80" * 85,
    "bidi": "\u202egpj".encode(),
    "long": b"x" * 255,
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_stop_no_command_and_are_shown_escaped_and_short(store, name, command):
    places = [store, store / "v1", store / "v1" / OWN.hex(), fan_out(store)]
    paths = [os.path.join(os.fsencode(place), ODD_NAMES[name]) for place in places]
    for path in paths:
        os.symlink(b"/etc", path)
    before = objects(store)
    outcome = run(store, COMMANDS[command])
    assert outcome.exit_code == 0, outcome
    assert all(map(os.path.lexists, paths))
    assert "\x1b" not in outcome.stderr + outcome.stdout
    assert all(len(line) < 300 for line in outcome.stderr.splitlines())
    assert outcome.stderr.count("\n") == 3, "one line for each below v1, whatever the name"
    assert len(objects(store)) == (0 if command == "purge" else len(before))


def test_names_of_many_links_are_not_all_shown(store):
    for number in range(30):
        link(fan_out(store) / f"link-{number}", Path("/etc"))
    outcome = run(store, "ls URL")
    assert outcome.exit_code == 0
    assert len(outcome.stderr.splitlines()) == 11
    assert outcome.stderr.endswith("skipped 20 more\n")


@pytest.mark.parametrize("command", ["verify_and_delete", "purge"])
def test_hard_link_loses_its_name_in_the_store_and_no_bytes(store, backup, command):
    fan = fan_out(store)
    os.link(backup / "data" / "ab" / NAME, planted := fan / (fan.name * 32))
    run(store, COMMANDS[command])
    assert not planted.exists()


def test_directory_in_place_of_an_object_is_left(store):
    fan = fan_out(store)
    (fan / (fan.name * 32) / "inner").mkdir(parents=True)
    outcome = run(store, "purge URL --yes")
    assert (outcome.exit_code, objects(store)) == (0, [])
    assert (fan / (fan.name * 32) / "inner").is_dir()


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
@pytest.mark.parametrize("level", ["namespace", "fan_out"])
def test_what_is_mounted_in_a_store_is_not_entered(store, backup, level):
    place = store / "v1" / (OTHER.hex() if level == "namespace" else f"{OWN.hex()}/ab")
    with mounted(backup / "data" if level == "namespace" else backup / "data" / "ab", place):
        outcome = run(store, "purge URL --yes")
    assert f"skipped {place.relative_to(store)}: on another file system" in outcome.stderr
    assert (outcome.exit_code, objects(store)) == (0, [])


@pytest.mark.parametrize("command", COMMANDS)
def test_part_that_cannot_be_read_is_named_with_exit_code_1_and_the_rest_is_done(store, command, monkeypatch):
    (closed := store / "v1" / OTHER.hex()).mkdir()
    scan = tree.Tree.scan

    def refused(directory: tree.Tree) -> object:
        if os.path.samestat(os.fstat(directory.descriptor), os.stat(closed)):
            raise PermissionError(13, "Permission denied")
        return scan(directory)

    monkeypatch.setattr(tree.Tree, "scan", refused)  # the user of this test may be the superuser
    outcome = run(store, COMMANDS[command])
    assert outcome.exit_code == 1
    assert f"skipped v1/{OTHER.hex()}: permission denied" in outcome.stderr
    assert "3 objects" in outcome.stdout
    assert bool(objects(store)) == (command != "purge")


def test_object_that_cannot_be_deleted_is_named_and_not_counted(store, monkeypatch):
    first, unlink = objects(store)[0], os.unlink

    def refused(path: str, **how: int) -> None:
        if path == first.name:
            raise PermissionError(1, "Operation not permitted")
        unlink(path, **how)

    monkeypatch.setattr(os, "unlink", refused)
    outcome = run(store, "purge URL --yes")
    assert outcome.exit_code == 1
    assert outcome.stdout.startswith("deleted 2 objects of 1 namespace")
    assert f"skipped {first.relative_to(store)}: operation not permitted" in outcome.stderr
    assert objects(store) == [first]
    assert (store / "v1" / OWN.hex() / "namespace.json").exists(), "it describes the object that is left"


@pytest.mark.usefixtures("way_to_open")
def test_directory_that_becomes_a_link_after_the_listing_is_not_entered(store, backup):
    inventory = open_inventory(f"file://{store}")
    (listed,) = inventory.namespaces(lambda _: True, lambda _: None)
    home = store / "v1" / OWN.hex()
    keys = [run.key for run in listed.extents]
    for key in keys:  # files of the same names outside
        (outside := backup / "data" / key.partition(f"{OWN.hex()}/")[2]).parent.mkdir(exist_ok=True)
        outside.write_bytes(b"also somebody's")
    before = content(backup)
    home.rename(store / "moved")
    link(home, backup / "data")
    assert [run.key for run in inventory.delete(listed.extents, lambda _: None)] == keys
    inventory.delete_facts(OWN)
    assert content(backup) == before
    assert {one.why for one in inventory.left_out} == {"a link, which kvbm does not follow"}
    for key in keys:
        (backup / "data" / key.partition(f"{OWN.hex()}/")[2]).unlink()


@pytest.mark.usefixtures("way_to_open")
def test_swaps_during_a_purge_delete_nothing_outside(store, backup):
    """A thread exchanges a directory and a link to somebody's files with the same names as fast as it can."""
    names = [f"{number:064x}" for number in range(300)]
    directory, aside, trap = (store / "v1" / OWN.hex() / name for name in ("00", "aside", "trap"))
    (outside := backup / "names").mkdir()
    for place in (directory, outside):
        place.mkdir(exist_ok=True)
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
            run(store, "purge URL --yes")
    finally:
        is_over.set()
        thread.join()
    assert sorted(path.name for path in outside.iterdir()) == names
    shutil.rmtree(outside)


def test_doctor_deletes_no_old_files_behind_a_link(store, backup):
    """The place of the doctor's objects is a link: it tests nothing there, and says why."""
    for path in backup.rglob("*"):
        os.utime(path, (0, 0))
    link(store / PREFIX, backup)
    found = probe(f"file://{store}", seconds=0.01, writes=True)
    assert found.failed == "put"
    assert os.path.lexists(store / PREFIX)


def test_doctor_deletes_what_a_killed_doctor_left_and_no_link_beside_it(store, backup):
    (left := store / PREFIX / ("ab" * 8)).mkdir(parents=True)
    (left / "small").write_bytes(b"x")
    os.utime(left / "small", (0, 0))
    for path in backup.rglob("*"):
        os.utime(path, (0, 0))
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
        assert not any(rig.get(first).is_good), "the bytes are right, but behind a link"
        before = content(outside)
        rig.put(first)
        assert content(outside) == before
        rig.put(second)
        assert all(rig.get(second).is_good)


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo"])
def test_engine_replaces_a_link_in_place_of_an_object_and_leaves_its_target(tmp_path, backup, kind):
    with opened(f"file://{tmp_path}/store") as rig:
        rig.put(one := make_run(0))
        path = tmp_path / "store" / rig.key(one)
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        else:
            link(path, backup / "data" / "ab" / NAME if kind == "link" else tmp_path / "nothing")
        assert not any(rig.get(one).is_good)
        rig.put(one)
        assert all(rig.get(one).is_good)
    assert not (tmp_path / "nothing").exists()


def test_objects_of_another_user_are_read_and_deleted(store):
    """Engines of several users may share a store; who may delete is a matter of the directory's permissions."""
    if os.geteuid() != 0:
        pytest.skip("requires the superuser, to give a file away")
    for path in objects(store):
        os.chown(path, 12345, 12345)
    with opened(f"file://{store}", namespace=OWN) as rig:
        assert all(rig.get(make_run(0)).is_good)
    assert run(store, "purge URL --yes").exit_code == 0
    assert objects(store) == []


def test_reading_stops_at_the_length_that_was_listed(store):
    access = DirectoryAccess(store)
    key = str(objects(store)[0].relative_to(store))
    assert len(access.read(key, 10)) == 10
    assert access.read(key) == (store / key).read_bytes()


NAMESPACE, INSTANCE = "cc" * 16, "dd" * 8


def make_instance(directory: Path, namespace: str = NAMESPACE, instance: str = INSTANCE) -> Path:
    """An instance that was interrupted before its superblock: it has all that `clear` deletes."""
    place = directory / namespace / instance
    place.mkdir(parents=True, mode=0o700)
    place.parent.chmod(0o700)
    for name in ("lock", "arena", "index.sqlite"):
        (place / name).touch(0o600)
        (place / name).write_bytes(b"blocks")
    return place


@pytest.fixture
def caches(tmp_path):
    make_instance(tmp_path / "caches")
    return tmp_path / "caches"


CACHE_COMMANDS = ["ls", "verify", "clear --yes"]


@pytest.mark.parametrize("command", CACHE_COMMANDS)
@pytest.mark.parametrize("level", ["namespace", "instance", "self"])
def test_link_in_a_cache_directory_is_named_and_left_and_the_rest_is_done(caches, tmp_path, level, command):
    elsewhere = make_instance(tmp_path / "elsewhere")
    planted = caches / ("ee" * 16) if level != "instance" else caches / NAMESPACE / ("ff" * 8)
    target = {"namespace": elsewhere.parent, "instance": elsewhere, "self": planted}[level]
    link(planted, target)
    before = content(tmp_path / "elsewhere")
    outcome = kvbm_here("cache", *command.split(), "--dir", str(caches), home=tmp_path)
    assert f"skipped {planted}: a link, or another file, in place of a directory" in outcome.stderr
    assert os.path.lexists(planted)
    assert content(tmp_path / "elsewhere") == before
    assert (caches / NAMESPACE / INSTANCE).exists() == (not command.startswith("clear"))
    assert outcome.exit_code == (1 if command == "verify" else 0), "its own cache is damaged"


@pytest.mark.parametrize(("what", "exit_code"), [("foreign", 0), ("open", 1)])
def test_clear_removes_its_own_caches_and_names_those_that_are_not(caches, tmp_path, what, exit_code):
    other = make_instance(caches, "ee" * 16)
    if what == "foreign" and os.geteuid() != 0:
        pytest.skip("requires the superuser, to give files away")
    if what == "foreign":
        for path in (other.parent, other, *other.iterdir()):
            os.chown(path, 12345, 12345)
    else:
        (other / "lock").chmod(0o666)
    outcome = kvbm_here("cache", "clear", "--yes", "--dir", str(caches), home=tmp_path)
    assert outcome.exit_code == exit_code, outcome
    assert outcome.stdout.startswith("removed 1 cache")
    assert f"skipped {other}: " in outcome.stderr
    assert ("belongs to user 12345" if what == "foreign" else "chmod go-rwx") in outcome.stderr
    assert (other / "arena").exists()
    assert not (caches / NAMESPACE).exists()


@pytest.mark.usefixtures("way_to_open")
@pytest.mark.parametrize("level", ["namespace", "instance"])
def test_cache_that_becomes_a_link_after_it_was_locked_is_not_removed_elsewhere(caches, tmp_path, level):
    elsewhere = make_instance(tmp_path / "elsewhere")
    lock = InstanceLock.take(caches / NAMESPACE / INSTANCE)
    assert lock is not None
    place = caches / NAMESPACE if level == "namespace" else caches / NAMESPACE / INSTANCE
    place.rename(tmp_path / "moved")
    link(place, elsewhere.parent if level == "namespace" else elsewhere)
    before = content(tmp_path / "elsewhere")
    with pytest.raises(EnvironmentProblem, match="cannot remove"):
        remove_instance(lock)
    lock.release()
    assert content(tmp_path / "elsewhere") == before
    with pytest.raises(EnvironmentProblem, match="cannot open"):
        InstanceLock.take(caches / NAMESPACE / INSTANCE)


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal"])
@pytest.mark.parametrize("command", ["verify", "clear --salt alice --yes"])
def test_index_that_is_a_link_is_not_followed(caches, tmp_path, name, command):
    (tmp_path / "somebodys").write_bytes(b"a database")
    place = caches / NAMESPACE / INSTANCE
    write_superblock(place / "superblock", Superblock(NAMESPACE, {}, 32, 4096, 4096, 1, 0.0))
    (place / name).unlink(missing_ok=True)
    link(place / name, tmp_path / "somebodys")
    outcome = kvbm_here("cache", *command.split(), "--dir", str(caches), home=tmp_path)
    assert outcome.exit_code == 1
    assert (tmp_path / "somebodys").read_bytes() == b"a database"


def test_removed_tree_takes_its_links_along_and_leaves_their_targets(tmp_path, backup):
    (inner := tmp_path / "run" / "a" / "b").mkdir(parents=True)
    (inner / "file").write_bytes(b"x")
    link(inner / "link", backup)
    link(tmp_path / "run" / "self", tmp_path / "run" / "self")
    os.mkfifo(inner / "fifo")
    assert remove_tree(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_link_is_no_tree_to_remove(tmp_path, backup):
    assert not remove_tree(link(tmp_path / "run", backup))


def test_what_is_mounted_in_a_removed_tree_stays(tmp_path, backup):
    with mounted(backup, tmp_path / "run" / "mounted"):
        (tmp_path / "run" / "file").write_bytes(b"x")
        assert not remove_tree(tmp_path / "run")
    assert not (tmp_path / "run" / "file").exists()


@pytest.mark.parametrize("kind", ["link", "hard link", "fifo"])
def test_file_that_is_replaced_has_no_planted_draft(tmp_path, backup, kind):
    """A draft that is opened as it is would truncate somebody's file."""
    draft, file = tmp_path / ".report.json", backup / "data" / "namespace.json"
    if kind == "fifo":
        os.mkfifo(draft)
    else:
        os.link(file, draft) if kind == "hard link" else link(draft, file)
    write_atomically(tmp_path / "report.json", "new")
    assert (tmp_path / "report.json").read_text() == "new"
    assert not (tmp_path / "report.json").is_symlink()
    assert not os.path.lexists(draft)


def test_guard_leaves_a_directory_in_which_something_is_mounted(tmp_path, backup):
    place = tmp_path / "engine tmpdir" / "mounted"
    with mounted(backup, place):
        leftovers._remove_tree(str(place.parent))
    assert place.is_dir()
    leftovers._remove_tree(str(place.parent))
    assert not place.parent.exists()


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
