"""Loading: whatever is exchanged while an engine loads a model, before the files are digested or after, is noticed."""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import exchanges
import numpy as np
import pytest
from held_write import held_write
from model_files import exchange, model

from kvbm.identity import content, digests, loading, look
from kvbm.identity.digest_cache import DigestCache
from kvbm.identity.digests import Unidentified
from kvbm.identity.loading import Loading, loaded
from kvbm.identity.watch import ChangeWatch

WEIGHTS = "model.safetensors"
BIG = 1 << 20


@pytest.fixture(autouse=True)
def state(monkeypatch, tmp_path):
    """The file system of the tests, which may be an overlay, counts as one whose dirty pages are written back."""
    monkeypatch.setattr(content, "LIVE_FILE_SYSTEMS", content.LIVE_FILE_SYSTEMS | {content.file_system_type(tmp_path)})
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(look, "CLOCK_SLACK_NS", 50_000_000)


@pytest.fixture
def home(tmp_path):
    """Two models, v1 and v2, three directories below `home`; `current` is a link to v1."""
    for name, value in (("v1", b"1"), ("v2", b"2")):
        model(tmp_path / "home" / "models" / name, a=value * BIG)
    (tmp_path / "home" / "models" / "current").symlink_to("v1")
    time.sleep(0.1)
    return tmp_path / "home"


def retarget(home: Path, target: str) -> None:
    (home / "models" / "next").symlink_to(target)
    os.replace(home / "models" / "next", home / "models" / "current")


def rename_the_parent(home: Path) -> None:
    shutil.copytree(home / "models", home / "other", symlinks=True)
    exchanges.swap(home / "models", home / "other")


def rename_the_parent_and_back(home: Path) -> None:
    rename_the_parent(home)
    exchanges.swap(home / "models", home / "other")


def rename_the_grandparent(home: Path) -> None:
    shutil.copytree(home, home.with_name("other"), symlinks=True)
    exchanges.swap(home, home.with_name("other"))


def rename_the_directory_and_back(home: Path) -> None:
    exchanges.directory(home)
    exchanges.directory(home)


def link_to_another_and_back(home: Path) -> None:
    former = home / "models" / "former"
    os.rename(home / "models" / "current", former)
    retarget(home, "v2")
    os.replace(former, home / "models" / "current")


def through_a_hard_link(home: Path) -> None:
    os.link(home / "models" / "v1" / WEIGHTS, home / "linked")
    with (home / "linked").open("r+b") as file:
        file.seek(5000)
        file.write(b"x")


def replace_with_the_old_time(home: Path) -> None:
    facts = (home / "models" / "v1" / WEIGHTS).stat()
    shutil.copy(home / "models" / "v2" / WEIGHTS, home / "part")
    os.utime(home / "part", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    os.replace(home / "part", home / "models" / "v1" / WEIGHTS)


def edit_with_the_old_time(home: Path) -> None:
    path = home / "models" / "v1" / WEIGHTS
    exchange(path, path.read_bytes()[:-1] + b"x")


def edit_a_mapping(home: Path) -> None:
    np.memmap(home / "models" / "v1" / WEIGHTS, mode="r+", dtype=np.uint8)[5000] = 7


def write_directly(home: Path) -> None:
    buffer = mmap.mmap(-1, 4096)
    try:
        fd = os.open(home / "models" / "v1" / WEIGHTS, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("no O_DIRECT here")
    os.pwrite(fd, buffer, 4096)
    os.close(fd)


def edit_the_tokenizer(home: Path) -> None:
    (home / "models" / "v1" / "tokenizer.json").write_text("{}")


def add_an_adapter(home: Path) -> None:
    (home / "models" / "v1" / "adapter_model.safetensors").write_text("{}")


EXCHANGES = [
    *(rename_the_parent, rename_the_parent_and_back, rename_the_grandparent, exchanges.directory),
    *(rename_the_directory_and_back, exchanges.link, link_to_another_and_back, exchanges.hard_link),
    *(through_a_hard_link, exchanges.reflink, exchanges.bind, exchanges.overlay, add_an_adapter),
    *(replace_with_the_old_time, edit_with_the_old_time, edit_a_mapping, write_directly, edit_the_tokenizer),
]
LATER = [each for each in EXCHANGES if not each.__name__.endswith("_back") and each is not add_an_adapter]


@pytest.fixture
def unmounting(home):
    yield
    exchanges.unmount(home)


@pytest.mark.usefixtures("unmounting")
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", ["v1", "current"])
def test_what_is_exchanged_while_an_engine_loads_is_noticed(home, exchange, name):
    if exchange in (exchanges.link, link_to_another_and_back) and name == "v1":
        pytest.skip("not on the way")
    started = Loading(home / "models" / name)
    exchange(home)
    with pytest.raises(Unidentified, match="changed while"):
        started.end()


@pytest.mark.usefixtures("unmounting")
@pytest.mark.parametrize("exchange", LATER)
def test_what_is_exchanged_between_the_load_and_the_digest_is_not_digested(home, exchange, monkeypatch):
    """Either the loaded bytes are digested, or none: a file that was added meanwhile was not loaded."""
    former = Loading(home / "models" / "current").end().text()
    monkeypatch.setattr(digests, "INLINE_BYTES", 0)
    may_read = threading.Event()
    monkeypatch.setattr(digests, "_by_process", lambda files: content.digest_files(files, 2) if may_read.wait() else [])
    found = Loading(home / "models" / "current").end()
    try:
        exchange(home)
    finally:
        may_read.set()
    try:
        text = found.text()
    except Unidentified as error:
        if "changed" not in str(error) and "became shorter" not in str(error):
            raise
        return
    assert exchange is edit_the_tokenizer, "it does not show"
    assert text == former


def test_entries_that_others_make_on_the_way_change_nothing(home):
    started = Loading(home / "models" / "current")
    for directory in (home, home / "models", home.parent):
        (directory / "busy").write_text("")
        (directory / "busy").rename(directory / "more")
    assert started.end().text()


@pytest.mark.parametrize("is_renamed", [False, True])
def test_without_a_watch_the_times_of_directories_tell_a_rename(home, monkeypatch, is_renamed):
    monkeypatch.setattr(ChangeWatch, "watch", lambda directories, files: None)
    started = Loading(home / "models" / "current")
    if is_renamed:
        rename_the_parent_and_back(home)
        with pytest.raises(Unidentified, match="changed while"):
            started.end()
    else:
        (home / "busy").write_text("")
        assert started.end().text()


def test_a_page_that_is_dirty_before_the_load_does_not_hide_a_later_store(home):
    if content.file_system_type(home) == content.OVERLAY:
        pytest.skip("such a file is in doubt on an overlay")
    mapped = np.memmap(home / "models" / "v1" / WEIGHTS, mode="r+", dtype=np.uint8)
    mapped[5000] = 1
    time.sleep(0.1)
    started = Loading(home / "models" / "v1")
    mapped[5001] = 2
    with pytest.raises(Unidentified, match="changed while"):
        started.end()


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_write_that_is_under_way_when_the_load_begins_does_not_hide_its_end(home, is_direct):
    """It sets the times when it begins."""
    weights = home / "models" / "v1" / WEIGHTS
    weights.write_bytes(bytes(2 * BIG))
    time.sleep(0.1)
    with ThreadPoolExecutor(1) as pool, held_write(weights, b"2" * (2 * BIG), is_direct=is_direct) as write:
        time.sleep(0.1)
        begun = pool.submit(Loading, home / "models" / "v1")
        wait({begun}, timeout=0.5)  # until the write has ended, where the file system allows that
        if not begun.done():
            write.end()
        started = begun.result()
        loaded_bytes = weights.read_bytes()
        write.end()
    if loaded_bytes == weights.read_bytes():
        assert started.end().text()
    else:
        with pytest.raises(Unidentified, match="changed while"):
            started.end()


def test_a_file_that_was_written_just_before_is_in_doubt(home):
    """A change within the same tick of the clock does not show."""
    (home / "models" / "v1" / "config.json").write_text("{ }")
    with pytest.raises(Unidentified, match=r"config\.json"):
        Loading(home / "models" / "v1").end()


def test_a_file_where_changes_leave_no_trace_is_in_doubt(home, monkeypatch):
    monkeypatch.setattr(content, "SILENT_FILE_SYSTEMS", {content.file_system_type(home)})
    with pytest.raises(Unidentified, match="copy the model to a disk"):
        Loading(home / "models" / "v1").end()


def test_a_real_tmpfs_is_silent():
    if content.file_system_type(Path("/dev/shm")) != 0x01021994:
        pytest.skip("no tmpfs")
    assert content.hides_changes(Path("/dev/shm"))
    assert not content.shows_changes(Path("/dev/shm"), 1)


# -- overlays: what hides below them -----------------------------------------------------------------------------------


@pytest.fixture
def overlay(home):
    """Mounts overlays over v2, with a lower layer somewhere and an upper one next to it."""
    point = home / "models" / "v2"

    def mount(layers):
        for name in ("lower", "upper", "work"):
            (layers / name).mkdir()
        shutil.copytree(home / "models" / "v1", layers / "lower", dirs_exist_ok=True)
        options = f"lowerdir={layers / 'lower'},upperdir={layers / 'upper'},workdir={layers / 'work'}"
        if subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, point], capture_output=True).returncode:
            pytest.skip("cannot mount an overlay here")
        return point

    yield mount
    if os.path.ismount(point):
        subprocess.run(["umount", "-l", point], check=True)


def test_an_overlay_on_tmpfs_is_silent(overlay):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        if content.file_system_type(Path(place)) != 0x01021994:
            pytest.skip("no tmpfs")
        point = overlay(Path(place))
        weights = np.memmap(point / WEIGHTS, mode="r+", dtype=np.uint8)
        weights[5000] = 6  # the first store into a page moves the times
        before = (point / WEIGHTS).stat()
        weights[5000] = 7
        assert (point / WEIGHTS).stat() == before
        with pytest.raises(Unidentified, match="copy the model to a disk"):
            Loading(point).end()


def test_a_file_on_an_overlay_is_in_doubt_until_it_has_been_quiet_for_a_minute(overlay, tmp_path, monkeypatch):
    """Its dirty pages cannot be written back, and a store to one leaves no trace."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    point = overlay(tmp_path)
    weights = np.memmap(point / WEIGHTS, mode="r+", dtype=np.uint8)
    weights[5000] = 7
    time.sleep(2.1)
    started = Loading(point)
    before = (point / WEIGHTS).stat()
    weights[5001] = 7
    assert (point / WEIGHTS).stat() == before
    with pytest.raises(Unidentified, match="just before"):
        started.end()


@pytest.mark.parametrize("age_s", [50, 61])
def test_where_pages_cannot_be_written_back_files_must_have_been_quiet_for_a_minute(home, monkeypatch, age_s):
    monkeypatch.setattr(content, "LIVE_FILE_SYSTEMS", set())
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + age_s * 10**9)
    started = Loading(home / "models" / "v1")
    if age_s > 60:
        assert started.end().text()
    else:
        with pytest.raises(Unidentified, match="just before"):
            started.end()


# -- without a look before ---------------------------------------------------------------------------------------------


def since(monkeypatch, start_ns):
    monkeypatch.setattr(loading, "process_start_ns", lambda: start_ns)


@pytest.mark.parametrize("exchange", [each for each in EXCHANGES if each not in (exchanges.bind, exchanges.overlay)])
def test_what_changed_after_the_process_started_is_in_doubt(home, monkeypatch, exchange):
    monkeypatch.setattr(look, "QUIET_NS", 50_000_000)
    since(monkeypatch, time.time_ns())
    assert loaded(home / "models" / "current").text()
    exchange(home)
    with pytest.raises(Unidentified, match="after the engine was started"):
        loaded(home / "models" / "current")


def test_files_must_have_been_quiet_for_a_minute_before_the_process_started(home, monkeypatch):
    since(monkeypatch, time.time_ns() + 50_000_000_000)
    with pytest.raises(Unidentified, match="just before"):
        loaded(home / "models" / "v1")
    since(monkeypatch, time.time_ns() + 61_000_000_000)
    assert loaded(home / "models" / "v1").text()


# -- the process that digests ------------------------------------------------------------------------------------------


def test_a_process_digests_large_files_and_nobody_waits(home, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    inline = Loading(home / "models" / "v1").end()
    assert inline.is_known
    monkeypatch.setattr(digests, "INLINE_BYTES", 0)
    by_process = Loading(home / "models" / "v1").end()
    assert by_process.text() == inline.text()
    assert "identified 0.0 GB of model files" in caplog.text
    (home / "models" / "v1" / WEIGHTS).write_bytes(b"other")
    time.sleep(0.1)
    assert Loading(home / "models" / "v1").end().text() != inline.text()


def test_a_process_that_finds_another_file_says_so(home, monkeypatch):
    monkeypatch.setattr(digests, "INLINE_BYTES", 0)
    files = look.look(home / "models" / "v1").paths()
    edit_with_the_old_time(home)
    with pytest.raises(Unidentified, match="changed"):
        digests.begin(files, DigestCache(None)).result()


@pytest.mark.parametrize("how", ["no process", "no thread", "killed"])
def test_without_the_process_the_content_is_in_doubt(home, monkeypatch, how):
    monkeypatch.setattr(digests, "INLINE_BYTES", 0)
    if how == "no process":
        monkeypatch.setattr("sys.executable", "/no/such/python")
    elif how == "no thread":
        monkeypatch.setattr(digests.threading.Thread, "start", fails)
    else:
        start = digests.start_child

        def killed(*arguments):
            child, channel = start(*arguments)
            child.kill()
            return child, channel

        monkeypatch.setattr(digests, "start_child", killed)
    found = Loading(home / "models" / "v1").end()
    with pytest.raises(Unidentified, match=r"process|thread"):
        found.text()


def fails(self):
    raise RuntimeError("can't start new thread")


def test_directories_are_open_only_until_the_digest_is_there(home, monkeypatch):
    before = len(os.listdir("/proc/self/fd"))
    started = Loading(home / "models" / "current")
    assert len(os.listdir("/proc/self/fd")) > before
    started.end().text()
    assert len(os.listdir("/proc/self/fd")) == before
    started = Loading(home / "models" / "current")
    edit_with_the_old_time(home)
    with pytest.raises(Unidentified):
        started.end()
    assert len(os.listdir("/proc/self/fd")) == before
