"""The tier on real file systems, mounted for a test: what works, what is refused, and what goes wrong in service."""

import os
import re
import subprocess

import pytest
from disk_rig import assembled, instance_of, opened
from filesystems import Unavailable, mounted

from kvbm.errors import EnvironmentProblem
from kvbm.tiers.disk.files import NoRoom
from kvbm.tiers.disk.settings import Namespace
from kvbm_cli.store.caches import list_caches

OTHER = Namespace(bytes(16), {"model": "another model"})
SMALL = {"block_count": 64, "host_slots": 64, "shard_bytes": (64 << 10,)}
DIRECT = ["ext4", "ext4-1k", "ext4-4096-sectors", "xfs", "xfs-4096-sectors", "btrfs", "tmpfs", "overlay"]


@pytest.fixture
def mount(tmp_path, request):
    """A function that mounts a kind and returns a directory in it that is not there yet."""
    stack = []

    def mount(kind):
        home = tmp_path / "file-system"
        home.mkdir()
        context = mounted(kind, home)
        try:
            point = context.__enter__()
        except Unavailable as error:
            pytest.skip(str(error))
        stack.append(context)
        return point / "cache"

    yield mount
    for context in stack:
        context.__exit__(None, None, None)


def fill_disk(directory, *, leaving):
    """All but so many bytes of the file system. Returns the file to remove."""
    path = directory.parent / "everything"
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 20, leaving):
            try:
                while True:
                    file.write(bytes(size))
                    os.fdatasync(file.fileno())
            except OSError:
                pass
    return path


def serves_and_survives(directory, **keys):
    with opened(directory, **SMALL, **keys) as rig:
        assert all(rig.write(range(16), range(0, 64, 4)).is_good)
        assert all(rig.read(range(16), range(0, 64, 4)).is_good)
    with opened(directory, **SMALL, **keys) as rig:
        found = rig.recovered()
        assert set(found) == set(range(16))
        assert all(rig.read(found, found.values()).is_good)


@pytest.mark.parametrize("kind", DIRECT)
@pytest.mark.parametrize("allocator", ["default", "open-direct"])
def test_blocks_survive_on(mount, kind, allocator):
    serves_and_survives(mount(kind), allocator=allocator)


@pytest.mark.parametrize("kind", ["ext2", "ramfs"])
def test_what_the_file_system_lacks_is_named_and_replaced(mount, kind):
    directory = mount(kind)
    keys = {}
    for _ in range(3):
        try:
            serves_and_survives(directory, **keys)
            break
        except EnvironmentProblem as error:
            (setting, value) = re.search(r"`tiers\.disk\.(\w+): (\w+)`", error.hint).groups()
            keys[setting] = value == "true"
            assert list(directory.glob("*")) == []
    assert keys == ({"zerofill": True} if kind == "ext2" else {"zerofill": True, "o_direct": False})


@pytest.mark.parametrize(("kind", "error"), [("nearly-full", "ENOSPC"), ("tmpfs", "ENOSPC"), ("btrfs-quota", "EDQUOT")])
def test_too_little_room_is_told_and_nothing_is_left(mount, kind, error):
    directory = mount(kind)
    with pytest.raises(NoRoom, match=error), opened(directory, block_count=3000, shard_bytes=(64 << 10,)):
        pass
    assert list(directory.glob("*")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "leaving"), [("ext4", 512), ("xfs", 512), ("btrfs", 65536), ("btrfs-quota", 65536)])
def test_disk_that_fills_up_in_service_is_off_until_there_is_room(mount, kind, leaving):
    """The arena has its space; the index needs more, and on btrfs whatever is written again."""
    directory = mount(kind)
    with assembled(directory, **SMALL) as rig:
        assert all(rig.write(range(16), range(16)).is_good)
        filler = fill_disk(directory, leaving=leaving)
        number = 100
        for _ in range(400):
            rig.write([number], [16 + number % 40])
            number += 1
            if not rig.tier.health.is_on:
                break
        assert not rig.tier.health.is_on, rig.tier.counters
        filler.unlink()
        os.sync()
        rig.wait_until(lambda: rig.tier.health.is_on)
        assert all(rig.read(range(16), range(16)).is_good)
        assert rig.write([7000], [60]).is_good == (True,)
    with opened(directory, **SMALL) as rig:
        found = rig.recovered()
        assert {*range(16), 7000} <= set(found)
        assert all(rig.read(found, found.values()).is_good)


def test_file_system_that_turns_read_only_turns_the_tier_off(mount):
    directory = mount("ext4")
    with assembled(directory, **SMALL) as rig:
        assert all(rig.write(range(8), range(8)).is_good)
        subprocess.run(["mount", "-o", "remount,abort", str(directory.parent)], check=True)
        for number in range(20):
            rig.write([100 + number], [20])
            rig.read([1], [1])
        assert rig.write([1], [30]).is_good == (False,)
        rig.wait_until(lambda: (rig.write([1], [30]), not rig.tier.health.is_on)[1])
        with pytest.raises(EnvironmentProblem, match="not cleared durably"):
            rig.clear()


def test_removed_and_full_directory_do_not_hold_up_the_end(mount):
    directory = mount("ext4")
    with assembled(directory, **SMALL) as rig:
        rig.write(range(8), range(8))
        instance = instance_of(directory)
        for path in instance.iterdir():
            path.unlink()
        instance.rmdir()
        rig.wait_until(lambda: not rig.tier.health.is_on)


@pytest.mark.parametrize("persist", [True, False])
@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_a_full_volume_has_room_for_another_identity_if_unused_caches_may_go(mount, kind, persist):
    directory = mount(kind)
    serves_and_survives(directory)
    fill_disk(directory, leaving=512)
    wanted = {**SMALL, "block_count": 48, "namespace": OTHER, "persist": persist}
    with opened(directory, **SMALL) as living:
        for reclaim in (False, True):
            with pytest.raises(NoRoom, match=r"ENOSPC|disk is full"), opened(directory, **wanted, reclaim=reclaim):
                pass
        assert set(living.recovered()) == set(range(16)), "that of a living engine stays"
    with pytest.raises(NoRoom), opened(directory, **wanted):
        pass
    assert len(list_caches(directory)) == 1
    with opened(directory, **wanted, reclaim=True) as rig:
        assert all(rig.write(range(16), range(16)).is_good)
        assert all(rig.read(range(16), range(16)).is_good)
    assert [cache.namespace for cache in list_caches(directory)] == [OTHER.digest.hex()] * persist
