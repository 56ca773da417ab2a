"""A directory as a store: a file is whole or absent, and written once."""

import errno
import os
import shutil
import subprocess
import threading

import pytest
from storage_rig import make_run, opened

from kvbm.errors import EnvironmentProblem
from kvbm.tiers.shared.geometry import ExtentGeometry
from kvbm.tiers.shared.object_store import Outgoing
from kvbm.tiers.shared.orders import Outcome
from kvbm.tiers.shared.stores import directory
from kvbm.tiers.shared.stores.request_limit import FIRST_LIMIT_S

RUN = make_run(0)


def files(root):
    return sorted(path.name for path in root.rglob("*") if path.is_file() and path.suffix != ".json")


def test_a_write_that_fails_in_the_middle_leaves_nothing(rig, root, monkeypatch):
    writev, calls = os.writev, []

    def full(descriptor, buffers):
        calls.append(1)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writev(descriptor, [buffers[0][:100]])

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        result = rig.put(RUN)
    assert result.outcome is Outcome.FAILED
    assert "No space left on device" in result.error
    assert files(root) == []
    assert rig.get(RUN).outcome is Outcome.ABSENT
    assert rig.put(RUN).outcome is Outcome.GOOD


def test_a_file_system_that_takes_few_bytes_at_a_time_gets_all_of_them(rig, monkeypatch):
    writev = os.writev
    monkeypatch.setattr(os, "writev", lambda descriptor, buffers: writev(descriptor, [buffers[0][:1000]]))
    assert rig.put(RUN).outcome is Outcome.GOOD
    assert rig.get(RUN, first_slot=40).outcome is Outcome.GOOD
    assert all(rig.holds(40 + position, name) for position, name in enumerate(RUN))


def test_an_object_of_more_parts_than_one_call_takes_is_whole(rig, monkeypatch):
    monkeypatch.setattr(directory, "MOST_PARTS", 2)
    assert rig.put(RUN).outcome is Outcome.GOOD
    assert rig.get(RUN).outcome is Outcome.GOOD


def test_a_file_system_without_hard_links_is_written(root, monkeypatch):
    def no_links(source, target, *, dst_dir_fd, **_):
        if target in os.listdir(f"/proc/self/fd/{dst_dir_fd}"):  # the kernel looks before it asks the file system
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    with opened(f"file://{root}") as rig:
        assert rig.put(RUN).outcome is Outcome.GOOD
        assert rig.get(RUN).outcome is Outcome.GOOD
        (content,) = [(root / rig.key(RUN)).read_bytes()]
        again = rig.store.put([Outgoing(rig.key(RUN), [content])])
    assert [answer.outcome for answer in again] == [Outcome.EXISTS]
    assert files(root) == [RUN[-1].hex()]


def test_of_engines_that_write_an_object_at_the_same_time_one_creates_it(root):
    with opened(f"file://{root}") as first, opened(f"file://{root}") as second:
        start, answers = threading.Barrier(2), []

        def write(rig, value):
            start.wait()
            answers.extend(rig.store.put([Outgoing(rig.key(RUN), [bytes([value]) * (1 << 20)])]))

        threads = [threading.Thread(target=write, args=one) for one in ((first, 1), (second, 2))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(answer.outcome.name for answer in answers) == ["EXISTS", "GOOD"]
    assert files(root) == [RUN[-1].hex()]
    assert len(set((root / first.key(RUN)).read_bytes())) == 1, "the bytes of one of them"


def test_a_write_of_an_object_that_exists_is_measured_since_its_bytes_are_written_first(root):
    with opened(f"file://{root}") as first, opened(f"file://{root}") as second:
        one = Outgoing(first.key(RUN), [bytes(4096)])
        assert [answer.outcome for rig in (first, second) for answer in rig.store.put([one])] == [
            Outcome.GOOD,
            Outcome.EXISTS,
        ]
        assert second.store.limit_s == first.store.limit_s < FIRST_LIMIT_S


@pytest.mark.parametrize("replaces", [False, True])
def test_a_directory_that_cannot_be_created_is_a_failed_write_and_no_object_that_exists(rig, root, replaces):
    key = rig.key(RUN)
    (root / key).parent.symlink_to("/nonexistent")
    (answer,) = rig.store.put([Outgoing(key, [b"x"], replaces=replaces)])
    assert answer.outcome is Outcome.FAILED


def test_an_object_that_is_a_loop_leaves_the_tier_on(rig, root):
    """Of a directory that belongs to another user, the same holds; a test that runs as root has access to it."""
    rig.put(make_run(1))
    (root / rig.key(RUN)).parent.mkdir(exist_ok=True)
    (root / rig.key(RUN)).symlink_to(root / rig.key(RUN))
    assert [rig.probe([RUN[-1]]).present for _ in range(4)] == [0] * 4
    assert rig.storage.off_because is None
    assert rig.get(make_run(1)).outcome is Outcome.GOOD


def test_what_is_written_to_a_store_is_not_written_to_its_bare_mount_point(rig, root, monkeypatch):
    assert rig.put(RUN).outcome is Outcome.GOOD
    shutil.rmtree(root)
    root.mkdir()
    monkeypatch.setattr(rig.store, "_device", -1)  # the file system below the mount point has another number
    assert rig.put(RUN).outcome is Outcome.FAILED
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("damage", ["gone", "a file", "a loop"])
def test_a_directory_that_is_gone_turns_the_tier_off(rig, root, damage):
    rig.put(RUN)
    shutil.rmtree(root)
    if damage == "a file":
        root.write_bytes(b"")
    elif damage == "a loop":
        root.symlink_to(root)
    outcomes = [rig.get(RUN).outcome for _ in range(4)]
    assert set(outcomes) == {Outcome.FAILED}
    assert rig.probe([RUN[-1]]).present is None
    assert rig.storage.off_because is not None


def test_a_file_system_that_takes_no_bytes_is_a_failed_write(rig, monkeypatch):
    monkeypatch.setattr(os, "writev", lambda descriptor, buffers: 0)
    assert rig.put(RUN).outcome is Outcome.FAILED


def test_a_mount_point_that_is_gone_does_not_become_a_directory(rig, root):
    shutil.rmtree(root)
    assert rig.put(RUN).outcome is Outcome.FAILED
    assert not root.exists()


def test_a_file_in_place_of_the_directory_is_an_error_that_names_it(tmp_path):
    (tmp_path / "objects").write_bytes(b"")
    with (
        pytest.raises(EnvironmentProblem, match=r"objects of `tiers\.shared\.url` is not a directory"),
        opened(f"file://{tmp_path}/objects"),
    ):
        pass


def test_a_directory_that_is_read_only_now_is_an_error_unless_the_engine_only_reads(root):
    with opened(f"file://{root}") as rig:
        rig.put(RUN)
    if subprocess.run(["mount", "--bind", root, root], capture_output=True).returncode != 0:
        pytest.skip("requires the right to mount")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", root], check=True)
        with pytest.raises(EnvironmentProblem, match="Read-only file system"), opened(f"file://{root}"):
            pass
        with opened(f"file://{root}", writes=False) as rig:
            assert rig.get(RUN).outcome is Outcome.GOOD
    finally:
        subprocess.run(["umount", root], check=True)


def test_checksums_are_computed_while_the_bytes_of_a_server_arrive(monkeypatch):
    """So that no second pass reads the blocks from memory; tests of damaged objects show that they are compared."""
    with opened("memory:///") as rig:
        rig.put(RUN)
        monkeypatch.setattr(ExtentGeometry, "_checksums", lambda *_: pytest.fail("a second pass"))
        assert rig.get(RUN, wanted=(1, 3)).outcome is Outcome.GOOD
        assert rig.holds(33, RUN[1])
