"""Which cache an engine gets, what it costs, and that nobody else can read it."""

import errno
import gc
import os
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disk_rig import HASH_BYTES, NAMESPACE, instance_of, left_in, make_shards, opened, settings_for
from xxhash import xxh3_64_hexdigest

from kvbm.errors import EnvironmentProblem
from kvbm.tiers.disk import files
from kvbm.tiers.disk import instance as instance_module
from kvbm.tiers.disk.directory import InstanceLock, reclaim_oldest
from kvbm.tiers.disk.files import Arena, NoRoom
from kvbm.tiers.disk.index import BlockIndex
from kvbm.tiers.disk.instance import Instance, WantedInstance
from kvbm.tiers.disk.settings import Namespace
from kvbm.tiers.disk.storage import DiskStorage
from kvbm_cli.store.caches import index_to_read, list_caches

OTHER = Namespace(bytes(16), {"model": "another model"})


def fill(directory, count=4, **keys):
    with opened(directory, **keys) as rig:
        assert all(rig.write(range(count), range(count)).is_good)


# whose it is


def test_everything_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        with opened(tmp_path / "cache") as rig:
            rig.write([1], [0])
            paths = sorted((tmp_path / "cache").rglob("*"))
            assert {path.name for path in paths} >= {"arena", "index.sqlite", "index.sqlite-wal", "lock", "superblock"}
            for path in (tmp_path / "cache", *paths):
                found = path.stat()
                assert stat.S_IMODE(found.st_mode) == (0o700 if path.is_dir() else 0o600), path
                assert found.st_uid == os.geteuid()
    finally:
        os.umask(before)


FILES = ["arena", "index.sqlite", "superblock", "lock"]
SIDE_FILES = ["index.sqlite-wal", "index.sqlite-journal"]


def content_of(instance):
    """What is there, and of what kind, without following links."""
    return {
        path.name: (path.lstat().st_mode, path.read_bytes() if path.is_file() else None)
        for path in (instance, *instance.iterdir())
    }


def require_another_is_used(directory, instance, caplog, *, is_untouched=True):
    """An engine starts with another instance, warns once, counts it, and leaves the files as they are."""
    before = content_of(instance)
    caplog.clear()
    with opened(directory) as rig:
        assert rig.tier.path != instance
        assert rig.recovered() == {}
        assert rig.write([1], [0]).is_good == (True,)
        assert rig.tier.counters.damaged_files == rig.tier.counters.unusable_instances == 1
    assert not is_untouched or content_of(instance) == before
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"cannot use the disk cache {instance}, using another one" in warning
    return warning


@pytest.mark.parametrize("name", [*FILES, *SIDE_FILES])
def test_cache_with_a_file_that_is_a_link_is_not_used(tmp_path, name, caplog):
    fill(tmp_path / "cache")
    instance = instance_of(tmp_path / "cache")
    target = tmp_path / "of-somebody"
    target.write_bytes(b"")
    if (instance / name).exists():
        os.rename(instance / name, target)
    (instance / name).symlink_to(target)
    before = target.read_bytes()
    require_another_is_used(tmp_path / "cache", instance, caplog)
    assert target.read_bytes() == before


@pytest.mark.parametrize("name", FILES)
def test_cache_with_a_file_with_two_names_is_not_used(tmp_path, name, caplog):
    fill(tmp_path / "cache")
    instance = instance_of(tmp_path / "cache")
    os.link(instance / name, tmp_path / "other")
    assert "single hard link" in require_another_is_used(tmp_path / "cache", instance, caplog)


@pytest.mark.parametrize("kind", ["directory", "FIFO", "socket"])
@pytest.mark.parametrize("name", [*FILES, *SIDE_FILES])
def test_cache_with_something_else_in_place_of_a_file_is_not_used(tmp_path, name, kind, caplog, monkeypatch):
    fill(tmp_path)
    instance = instance_of(tmp_path)
    (instance / name).unlink(missing_ok=True)
    if kind == "directory":
        (instance / name).mkdir(0o700)
    elif kind == "FIFO":
        os.mkfifo(instance / name, 0o600)
    else:
        monkeypatch.chdir(instance)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name)
    require_another_is_used(tmp_path, instance, caplog)


@pytest.mark.parametrize("name", [*FILES, "."])
def test_cache_that_others_may_read_is_not_used(tmp_path, name, caplog):
    fill(tmp_path)
    instance = instance_of(tmp_path)
    (instance / name).chmod(0o755)
    warning = require_another_is_used(tmp_path, instance, caplog)
    assert "mode 0755" in warning
    assert f"run `chmod go-rwx {instance / name}`" in warning


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", [*FILES, "."])
def test_cache_that_belongs_to_another_user_is_not_used(tmp_path, name, caplog):
    """As one of `root` after a run with `sudo`."""
    fill(tmp_path)
    instance = instance_of(tmp_path)
    os.chown(instance / name, 65534, -1)
    warning = require_another_is_used(tmp_path, instance, caplog)
    assert "belongs to user 65534" in warning
    assert "sudo chown -R 0" in warning


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("name", [*FILES, "."])
def test_cache_that_this_user_may_not_open_is_not_used(name, caplog):
    with tempfile.TemporaryDirectory() as path:
        directory = Path(path)
        directory.chmod(0o711)
        (directory / "cache").mkdir(0o700)
        os.chown(directory / "cache", 65534, 65534)
        os.seteuid(65534)
        try:
            fill(directory / "cache")
            instance = instance_of(directory / "cache")
            (instance / name).chmod(0)
            caplog.clear()
            with opened(directory / "cache") as rig:
                assert rig.tier.path != instance
                assert rig.tier.counters.unusable_instances == 1
            assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
        finally:
            os.seteuid(0)
            (instance / name).chmod(0o700)


@pytest.mark.parametrize("name", FILES)
def test_cache_with_a_file_that_cannot_be_changed_is_not_used(tmp_path, name, caplog):
    fill(tmp_path)
    path = instance_of(tmp_path) / name
    if subprocess.run(["chattr", "+i", path], capture_output=True).returncode:
        pytest.skip("cannot make a file immutable here")
    try:
        require_another_is_used(tmp_path, path.parent, caplog, is_untouched=False)
    finally:
        subprocess.run(["chattr", "-i", path], check=True)


@pytest.mark.parametrize("kind", ["file", "link", "others"])
def test_namespace_in_which_no_cache_can_be_made_is_a_clear_error(tmp_path, kind):
    home = tmp_path / NAMESPACE.digest.hex()
    if kind == "file":
        home.write_text("")
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir(0o700)
        home.symlink_to("elsewhere")
    else:
        home.mkdir()
        home.chmod(0o755)
    with pytest.raises(EnvironmentProblem, match=str(home)), opened(tmp_path):
        pass


def test_name_of_a_cache_that_something_else_has_is_not_used(tmp_path):
    fill(tmp_path)
    instance = instance_of(tmp_path)
    os.rename(instance, tmp_path / "aside")
    instance.symlink_to(tmp_path / "aside")
    (instance.parent / "0123456789abcdef").write_text("")
    with opened(tmp_path) as rig:
        assert rig.recovered() == {}
        assert rig.tier.path != instance


def test_several_unusable_caches_are_counted_and_a_usable_one_is_found_among_them(tmp_path):
    with opened(tmp_path) as first, opened(tmp_path) as second, opened(tmp_path) as third:
        paths = [rig.tier.path for rig in (first, second, third)]
        second.write([1], [0])
    for age, path in enumerate(paths):
        os.utime(path / "lock", (100 - age, 100 - age))
    for path in (paths[0], paths[2]):
        (path / "arena").chmod(0o644)
    with opened(tmp_path) as rig:
        assert rig.tier.path == paths[1]
        assert rig.recovered() == {1: 0}
        assert rig.tier.counters.unusable_instances == 1
    assert len(list_caches(tmp_path)) == 3


def test_cache_that_cannot_be_opened_for_an_unforeseen_reason_is_not_used(tmp_path, monkeypatch, caplog):
    fill(tmp_path)
    instance, load = instance_of(tmp_path), Instance._load_index

    def fails_once(self, slot_count):
        if self.path == instance:
            raise ValueError("planted")
        return load(self, slot_count)

    monkeypatch.setattr(Instance, "_load_index", fails_once)
    with opened(tmp_path) as rig:
        assert rig.tier.path != instance
        assert rig.tier.counters.unusable_instances == 1
    assert "ValueError: planted" in caplog.text


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("load", sqlite3.SQLITE_IOERR),
        ("load", sqlite3.SQLITE_CORRUPT),
        ("__init__", sqlite3.SQLITE_IOERR),
    ],
    ids=["unreadable", "damaged", "unreadable-notes"],
)
def test_an_index_that_cannot_be_read_is_closed_at_once(tmp_path, monkeypatch, name, code):
    """SQLite's lock would otherwise last until the garbage collector finds the connection, which is in a cycle."""
    fill(tmp_path)

    def fails(*_):
        error = sqlite3.OperationalError("planted")
        error.sqlite_errorcode = code
        raise error

    monkeypatch.setattr(BlockIndex, name, fails)
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(EnvironmentProblem, match="planted") as caught, opened(tmp_path):
        pass
    assert set(os.listdir("/proc/self/fd")) == before
    assert caught.tb is not None  # keeps what failed alive


def test_directory_that_is_a_link_or_open_to_all_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(EnvironmentProblem, match="which is not followed"), opened(tmp_path / "link"):
        pass
    (tmp_path / "real").chmod(0o777)
    with pytest.raises(EnvironmentProblem, match="writable by everyone"), opened(tmp_path / "real"):
        pass
    (tmp_path / "real").chmod(0o1777)
    with opened(tmp_path / "real"):
        pass


# who gets which


def test_instance_used_last_is_taken_over_first(tmp_path):
    with opened(tmp_path) as first, opened(tmp_path) as second:
        first.write([1], [0])
        second.write([2], [0])
        older, newer = first.tier.path, second.tier.path
    os.utime(older / "lock", (1, 1))
    with opened(tmp_path) as rig:
        assert rig.tier.path == newer
        assert rig.recovered() == {2: 0}


def test_engines_that_start_together_get_caches_of_their_own(tmp_path):
    def open_one(_):
        return Instance.open(WantedInstance(settings_for(tmp_path), NAMESPACE, 12288, HASH_BYTES))

    for _ in range(3):
        with ThreadPoolExecutor(6) as executor:
            instances = list(executor.map(open_one, range(6)))
        assert len({instance.path for instance in instances}) == 6
        for instance in instances:
            instance.close()
    assert len(list_caches(tmp_path)) == 6


def test_another_namespace_is_another_cache(tmp_path):
    fill(tmp_path)
    assert left_in(tmp_path, namespace=OTHER) == {}
    assert len(list_caches(tmp_path)) == 2


def test_lock_ends_with_its_process(tmp_path):
    script = """
        import pathlib, signal, sys
        from kvbm.tiers.disk.directory import InstanceLock
        lock = InstanceLock.take(pathlib.Path(sys.argv[1]))
        assert lock is not None
        print("held", flush=True)
        signal.pause()
    """
    fill(tmp_path)
    instance = instance_of(tmp_path)
    command = [sys.executable, "-c", textwrap.dedent(script), str(instance)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        assert InstanceLock.take(instance) is None
        assert [cache.is_locked for cache in list_caches(tmp_path)] == [True]
        process.kill()
        process.wait()
        lock = InstanceLock.take(instance)
        assert lock is not None
        lock.release()


def test_blocks_of_another_size_are_not_recovered(tmp_path):
    fill(tmp_path)
    with opened(tmp_path, shard_bytes=(4096, 4096)) as rig:
        assert rig.recovered() == {}
        assert rig.write([1], [0]).is_good == (True,)


# how much it takes


def test_growing_keeps_all_blocks(tmp_path):
    fill(tmp_path, 12)
    with opened(tmp_path, block_count=40) as rig:
        found = rig.recovered()
        assert found == {number: number for number in range(12)}
        assert all(rig.read(found, found.values()).is_good)
        assert rig.write([90], [39]).is_good == (True,)
    assert (instance_of(tmp_path) / "arena").stat().st_size == 40 * 12288 + 4096


def test_shrinking_keeps_what_is_in_front_and_gives_space_back(tmp_path):
    fill(tmp_path, 12)
    with opened(tmp_path, block_count=5) as rig:
        found = rig.recovered()
        assert found == {number: number for number in range(5)}
        assert all(rig.read(found, found.values()).is_good)
    assert (instance_of(tmp_path) / "arena").stat().st_size == 5 * 12288 + 4096
    with opened(tmp_path, block_count=12) as rig:
        assert set(rig.recovered()) == set(range(5))


def test_capacity_in_bytes_is_rounded_down_and_a_count_wins(tmp_path):
    with opened(tmp_path / "a", block_count=None, capacity_bytes=3 * 12288 + 12287) as rig:
        assert rig.tier.slot_count == 3
    with opened(tmp_path / "b", block_count=2, capacity_bytes=1 << 40) as rig:
        assert rig.tier.slot_count == 2
    with pytest.raises(EnvironmentProblem, match="smaller than one block"), opened(tmp_path / "c", block_count=None):
        pass


def test_space_is_taken_in_advance_with_progress(tmp_path):
    seen = []
    shards = make_shards(4, 4096)
    settings = settings_for(tmp_path, block_count=100)
    tier = DiskStorage.open(
        settings, NAMESPACE, shards, hash_bytes=HASH_BYTES, progress=lambda *amounts: seen.append(amounts)
    )
    tier.close(10)
    arena = instance_of(tmp_path) / "arena"
    assert arena.stat().st_blocks * 512 >= 100 * 4096
    assert seen[-1] == (arena.stat().st_size, arena.stat().st_size)


def break_fallocate(monkeypatch, number, after=0):
    """fallocate that fails, and the real one before that."""
    calls, real = [], files.fallocate

    def fallocate(*arguments):
        calls.append(arguments)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        real(*arguments)

    monkeypatch.setattr(files, "fallocate", fallocate)


def test_without_fallocate_the_setting_is_named_and_zeros_are_written_when_it_is_set(tmp_path, monkeypatch):
    break_fallocate(monkeypatch, errno.EOPNOTSUPP)
    with pytest.raises(EnvironmentProblem) as caught, opened(tmp_path):
        pass
    assert "tiers.disk.zerofill" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
    fill(tmp_path, zerofill=True)
    arena = instance_of(tmp_path) / "arena"
    assert arena.stat().st_blocks * 512 >= 16 * 12288


def test_failed_start_gives_all_space_back(tmp_path, monkeypatch):
    monkeypatch.setattr("kvbm.tiers.disk.files.FALLOCATE_BYTES", 64 << 10)
    break_fallocate(monkeypatch, errno.ENOSPC, after=2)
    with pytest.raises(NoRoom, match="ENOSPC") as caught, opened(tmp_path):
        pass
    assert "tiers.disk.capacity" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_failed_growth_leaves_the_cache_as_it_was(tmp_path, monkeypatch):
    fill(tmp_path, 12)
    with monkeypatch.context() as patch:
        patch.setattr("kvbm.tiers.disk.files.FALLOCATE_BYTES", 64 << 10)
        break_fallocate(patch, errno.EDQUOT, after=2)
        with pytest.raises(NoRoom, match="EDQUOT"), opened(tmp_path, block_count=400):
            pass
    assert (instance_of(tmp_path) / "arena").stat().st_size == 16 * 12288 + 4096
    with opened(tmp_path) as rig:
        found = rig.recovered()
        assert set(found) == set(range(12))
        assert all(rig.read(found, found.values()).is_good)


def test_oldest_unused_caches_make_room_only_if_that_is_allowed(tmp_path, monkeypatch, caplog):
    fill(tmp_path)
    oldest = instance_of(tmp_path)
    fill(tmp_path, namespace=OTHER)
    os.utime(oldest / "lock", (1, 1))
    real = files.fallocate

    def room_for_two(*arguments):
        if len(list(tmp_path.glob("*/*/arena"))) > 2:
            raise OSError(errno.ENOSPC, "full")
        real(*arguments)

    monkeypatch.setattr(files, "fallocate", room_for_two)
    third = Namespace(b"\1" * 16, {})
    with pytest.raises(NoRoom) as caught, opened(tmp_path, namespace=third):
        pass
    assert "tiers.disk.reclaim" in caught.value.hint
    assert len(list_caches(tmp_path)) == 2
    with opened(tmp_path, namespace=third, reclaim=True):
        assert not oldest.exists()
        assert len(list_caches(tmp_path)) == 2
    assert f"removed the unused disk cache {oldest}" in caplog.text


def test_locked_caches_and_those_of_another_format_are_never_reclaimed(tmp_path):
    fill(tmp_path)
    title = "kvbm disk cache format 7"
    superblock = instance_of(tmp_path) / "superblock"
    superblock.write_text(f"{title} {xxh3_64_hexdigest(title.encode())}\n")
    with opened(tmp_path, namespace=OTHER):
        assert not reclaim_oldest(tmp_path)
    assert reclaim_oldest(tmp_path)
    assert [cache.path for cache in list_caches(tmp_path)] == [superblock.parent]


# direct I/O


@pytest.mark.parametrize("allocator", ["default", "open-direct"])
def test_refused_direct_io_names_the_setting(tmp_path, monkeypatch, allocator):
    def refuse(self, allocator):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(Arena, "use_direct_io", refuse)
    with pytest.raises(EnvironmentProblem, match=r"O_DIRECT.*EINVAL") as caught, opened(tmp_path, allocator=allocator):
        pass
    assert "tiers.disk.o_direct" in caught.value.hint
    with opened(tmp_path, allocator=allocator, o_direct=False):
        pass


def test_direct_io_that_lies_is_found_by_the_first_page(tmp_path, monkeypatch):
    real = os.preadv

    def lie(fd, buffers, offset):
        count = real(fd, buffers, offset)
        memoryview(buffers[0])[0] ^= 1
        return count

    monkeypatch.setattr("kvbm.tiers.disk.files.os.preadv", lie)
    with pytest.raises(EnvironmentProblem, match="the bytes read differ from the bytes written"), opened(tmp_path):
        pass


# what `kvbm cache` sees


def test_list_tells_what_is_there_while_an_engine_uses_it(tmp_path):
    fill(tmp_path, 3)
    with opened(tmp_path) as rig:
        rig.write([8], [8])
        (cache,) = list_caches(tmp_path)
        assert cache.is_locked
        assert (cache.block_count, cache.superblock.slot_count, cache.superblock.payload_bytes) == (4, 16, 12288)
        assert cache.facts == {"model": "a model"}
        assert cache.problem is None
        assert cache.arena_bytes >= 16 * 12288
        assert cache.last_written >= cache.superblock.created
    (cache,) = list_caches(tmp_path)
    assert not cache.is_locked
    assert list_caches(tmp_path / "nothing") == []


def test_list_tells_of_damage(tmp_path):
    fill(tmp_path)
    (instance_of(tmp_path) / "index.sqlite").write_bytes(b"nothing like it")
    (cache,) = list_caches(tmp_path)
    assert cache.block_count is None
    assert "index" in cache.problem
    (instance_of(tmp_path) / "superblock").write_bytes(b"nothing like it")
    (cache,) = list_caches(tmp_path)
    assert cache.superblock is None
    assert "superblock" in cache.problem


def test_rows_are_read_as_they_were_written(tmp_path):
    with opened(tmp_path) as rig:
        rig.write([1, 2], [5, 4], [b"a", b""])
        tier_checksums = [rig.tier._checksums[5], rig.tier._checksums[4]]
        index = index_to_read(instance_of(tmp_path) / "index.sqlite")
        rows = index._connection.execute("SELECT slot, tenant, length, generation FROM blocks ORDER BY slot").fetchall()
        assert index.slots_of(b"a") == [5]
        checksums = index.load(HASH_BYTES).checksums
        index.close()
    assert rows == [(4, b"", 12288, 2), (5, b"a", 12288, 1)]
    assert sorted(checksums) == sorted(tier_checksums)


def test_start_that_is_interrupted_leaves_no_new_cache(tmp_path, monkeypatch):
    def interrupt(*arguments, **keys):
        raise KeyboardInterrupt

    monkeypatch.setattr(instance_module, "write_superblock", interrupt)
    with pytest.raises(KeyboardInterrupt), opened(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
