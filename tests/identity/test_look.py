"""Look and digests: every way to exchange the files of a model changes its content, and nothing else does."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from held_write import held_write
from model_files import LONG_AGO_NS, aged, exchange, model, safetensors

from kvbm.identity import content, digests
from kvbm.identity.digest_cache import DigestCache
from kvbm.identity.digests import Unidentified
from kvbm.identity.look import look


def content_of(directory, state=None):
    """The content of a model directory; `state` is the file with the digests of earlier starts."""
    found = look(directory)
    known = digests.begin(found.paths(), DigestCache(state)).result()
    return found.content(dict(zip(sorted(found.files), known, strict=True)))


@pytest.fixture(params=[None, 1 << 16], ids=["one piece", "pieces"])
def pieces(request, monkeypatch):
    """Files of more than 64 KiB have several pieces in one of the two runs."""
    if request.param is not None:
        monkeypatch.setattr(content, "PIECE_BYTES", request.param)
        monkeypatch.setattr(content, "READ_BYTES", 1 << 14)


def noise(seed, length=300_000):
    return random.Random(seed).randbytes(length)


# -- what counts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", ["first", "middle", "last"])
def test_other_values_in_one_tensor_are_found(tmp_path, pieces, changed):
    names = ("first", "middle", "last")
    tensors = {name: noise(name) for name in names}
    path = safetensors(tmp_path / "model.safetensors", tensors)
    before = content_of(tmp_path)
    facts = path.stat()
    safetensors(path, tensors | {changed: noise("fine-tuned")})
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert path.stat().st_size == facts.st_size
    assert content_of(tmp_path) != before


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "model.gguf", "weights.pt", "adapter_model.safetensors"]
)
def test_one_byte_anywhere_is_found(tmp_path, pieces, name):
    path, old = tmp_path / name, noise("old")
    path.write_bytes(old)
    before = content_of(tmp_path)
    for at in (0, 65_535, 65_536, 65_537, 150_000, len(old) - 1):
        exchange(path, old[:at] + bytes([old[at] ^ 1]) + old[at + 1 :])
        assert content_of(tmp_path) != before, at
    exchange(path, old)
    assert content_of(tmp_path) == before


def test_the_length_of_a_file_and_the_place_of_its_pieces_count(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "PIECE_BYTES", 1 << 10)
    path, seen = tmp_path / "model.safetensors", set()
    for text in (
        b"",
        b"\0",
        bytes(1024),
        bytes(1025),
        bytes(2048),
        b"1" * 1024 + bytes(1024),
        bytes(1024) + b"1" * 1024,
    ):
        path.write_bytes(text)
        seen.add(content_of(tmp_path))
    assert len(seen) == 7


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_digest_does_not_depend_on_the_number_of_threads(tmp_path, monkeypatch, threads):
    monkeypatch.setattr(content, "PIECE_BYTES", 1 << 10)
    files = []
    for number in range(20):
        path = tmp_path / str(number)
        path.write_bytes(noise(number, 511 * number))
        files.append((str(path), content.signature_of(path)))
    assert content.digest_files(files, threads) == content.digest_files(files, 1)
    assert content.digest_files(files[7:8], threads) == content.digest_files(files, 1)[7:8]


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "modeling_own.py", "tokenizer.model", "adapter_model.safetensors"]
)
def test_other_files_of_a_model_count(tmp_path, name):
    model(tmp_path)
    (tmp_path / name).write_bytes(noise(0, 5000))
    before = content_of(tmp_path)
    changed = bytearray(noise(0, 5000))
    changed[2500] ^= 1
    exchange(tmp_path / name, bytes(changed))
    assert content_of(tmp_path) != before


def test_shards_in_subdirectories_count(tmp_path):
    model(tmp_path)
    shard = safetensors(tmp_path / "shards" / "1" / "model.safetensors", {"a": bytes(9)})
    before = content_of(tmp_path)
    exchange(shard, shard.read_bytes()[:-1] + b"\1")
    assert content_of(tmp_path) != before


@pytest.mark.parametrize("name", ["outside.weights", "../elsewhere/shard-1", ".hidden/shard"])
def test_a_file_that_an_index_names_counts_whatever_its_name(tmp_path, name):
    model(tmp_path / "model")
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "model" / name).write_bytes(b"one")
    before = content_of(tmp_path / "model")
    assert os.path.normpath(name) in look(tmp_path / "model").weights
    exchange(tmp_path / "model" / name, b"two")
    assert content_of(tmp_path / "model") != before


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 100_000])
def test_an_index_that_is_damaged_names_nothing(tmp_path, text):
    model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert look(tmp_path).weights == {"model.safetensors"}


@pytest.mark.parametrize("command", [["cp", "-p"], ["rsync", "-a"], ["mv"], ["ln", "-sfn"]])
def test_files_exchanged_by_a_command_are_found_with_size_and_time_kept(tmp_path, command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]}")
    old, new = model(tmp_path / "old"), model(tmp_path / "new", a=b"1" * 64, b=bytes(64), c=bytes(64))
    for directory in (old, new):
        os.utime(directory / "model.safetensors", ns=(LONG_AGO_NS, LONG_AGO_NS))
    before = content_of(old)
    size, mtime_ns = look(old).files["model.safetensors"][2:4]
    subprocess.run([*command, new / "model.safetensors", old / "model.safetensors"], check=True)
    after = look(old)
    assert content_of(old) != before
    assert after.files["model.safetensors"][2] == size
    if command[0] != "rsync":  # which transfers nothing if size and time are equal
        assert after.files["model.safetensors"][3] == mtime_ns


def test_a_link_to_another_model_changes_the_content(tmp_path):
    for name, value in (("one", b"1"), ("two", b"2")):
        model(tmp_path / "blobs" / name, a=value * 8)
    (tmp_path / "current").symlink_to("blobs/one")
    before = content_of(tmp_path / "current")
    assert before == content_of(tmp_path / "blobs" / "one")
    (tmp_path / "next").symlink_to("blobs/two")
    os.replace(tmp_path / "next", tmp_path / "current")
    assert content_of(tmp_path / "current") == content_of(tmp_path / "blobs" / "two") != before


def test_a_snapshot_of_links_has_the_content_of_its_blobs(tmp_path):
    plain = model(tmp_path / "plain")
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(plain.iterdir()):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert content_of(snapshot) == content_of(plain)


def test_a_circle_of_links_ends(tmp_path):
    model(tmp_path)
    before = content_of(tmp_path)
    (tmp_path / "self").symlink_to(".")
    assert content_of(tmp_path) == before
    (tmp_path / "broken.bin").symlink_to("nowhere")
    assert content_of(tmp_path) == before


# -- what does not count -----------------------------------------------------------------------------------------------


def test_a_renamed_copy_with_other_times_has_the_same_content(tmp_path):
    before = content_of(model(tmp_path / "one"))
    shutil.copytree(tmp_path / "one", tmp_path / "other" / "deep")
    for path in (tmp_path / "other" / "deep").iterdir():
        os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    assert content_of(tmp_path / "other" / "deep") == before


def test_files_that_no_engine_reads_do_not_count(tmp_path):
    before = content_of(model(tmp_path))
    for name in ("README.md", ".gitattributes", "figure.png", ".cache/huggingface/x.json", ".git/config.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("anything")
    assert content_of(tmp_path) == before


def test_a_directory_without_weights_says_so(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.msgpack").write_bytes(b"weights of another library")
    assert look(tmp_path).weights == frozenset()


# -- files that change meanwhile ---------------------------------------------------------------------------------------


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    path = model(tmp_path) / "model.safetensors"
    read = os.preadv

    def preadv(fd, buffers, offset):
        with path.open("ab") as file:
            file.write(b"more")
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(Unidentified, match="changed"):
        content_of(tmp_path)


def test_a_digest_is_never_that_of_a_file_in_the_middle_of_a_write(tmp_path):
    """Its times do not move when the write ends."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(1 << 20))
    with ThreadPoolExecutor(1) as pool, held_write(path, b"2" * (1 << 20)) as write:
        found = pool.submit(lambda: content.digest_files([(str(path), content.signature_of(path))], 1))
        wait({found}, timeout=0.5)
        write.end()
        assert found.result() == content.digest_files([(str(path), content.signature_of(path))], 1)


def test_a_file_that_is_exchanged_after_the_look_is_an_error(tmp_path):
    path = model(tmp_path) / "model.safetensors"
    found = look(tmp_path)
    exchange(path, path.read_bytes())
    with pytest.raises(Unidentified, match="changed"):
        digests.begin(found.paths(), DigestCache(None)).result()


def test_the_start_of_this_process_is_known():
    child = "import time; from kvbm.identity.look import process_start_ns as p; print(p(), time.time_ns())"
    before = time.time_ns()
    printed = subprocess.run([sys.executable, "-c", child], capture_output=True, check=True).stdout
    started, ended = map(int, printed.split())
    assert before - 50_000_000 <= started <= ended


# -- the cache of digests ----------------------------------------------------------------------------------------------


def test_unchanged_files_are_not_read_again(tmp_path, monkeypatch):
    directory, state = aged(model(tmp_path / "model"), monkeypatch), tmp_path / "state" / "digests.json"
    before = content_of(directory, state)
    assert state.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(digests, "digest_files", lambda files, threads: ["read again"] * len(files))
    assert content_of(directory, state) == before


def test_a_changed_file_is_read_again_with_size_and_time_kept(tmp_path, monkeypatch):
    directory, state = aged(model(tmp_path / "model"), monkeypatch), tmp_path / "digests.json"
    before = content_of(directory, state)
    exchange(directory / "model.safetensors", (directory / "model.safetensors").read_bytes()[:-1] + b"\1")
    assert content_of(directory, state) != before


def test_a_changed_file_is_read_again_where_stat_lags_behind(tmp_path, monkeypatch):
    """As on NFS: only opening a file brings its new metadata from the server."""
    directory, state = aged(model(tmp_path / "model"), monkeypatch), tmp_path / "digests.json"
    before, former = content_of(directory, state), os.stat
    late = {path: os.stat(path) for path in map(str, directory.rglob("*"))}
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    monkeypatch.setattr(os, "stat", lambda path, **keys: late.get(str(path)) or former(path, **keys))
    assert os.stat(path).st_ctime_ns < former(path).st_ctime_ns
    assert content_of(directory, state) != before


@pytest.mark.parametrize("stamp", [None, LONG_AGO_NS, 4_000_000_000_000_000_000])
def test_a_file_that_was_just_written_is_not_remembered_whatever_time_was_set(tmp_path, stamp):
    directory, state = model(tmp_path / "model"), tmp_path / "digests.json"
    for path in directory.iterdir() if stamp else ():
        os.utime(path, ns=(stamp, stamp))
    content_of(directory, state)
    assert not state.exists()


def image_of(directory, path):
    """A squashfs image, as reproducible builds make it: all times are equal."""
    if os.geteuid() != 0 or shutil.which("mksquashfs") is None:
        pytest.skip("needs root and mksquashfs")
    subprocess.run(["mksquashfs", directory, path, "-all-time", "0", "-no-progress", "-quiet"], check=True)
    return path


@contextlib.contextmanager
def mounted_image(image, point, options="loop,ro"):
    if subprocess.run(["mount", "-o", options, image, point], capture_output=True).returncode != 0:
        pytest.skip("cannot mount images here")
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", point], check=True)


def disk_image_of(directory, path):
    """A writable image of ext4. `mke2fs` copies times, in whole seconds."""
    if os.geteuid() != 0 or shutil.which("mke2fs") is None:
        pytest.skip("needs root and mke2fs")
    with path.open("wb") as image:
        image.truncate(8 << 20)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", directory, path], check=True)
    return path


def test_another_disk_image_at_the_same_place_is_read_again(tmp_path, monkeypatch):
    """Its files have equal metadata, and the file system is one that is otherwise trusted."""
    former, new = model(tmp_path / "former"), model(tmp_path / "new")
    exchange(new / "model.safetensors", (new / "model.safetensors").read_bytes()[:-1] + b"\1")
    point, state = tmp_path / "mounted", tmp_path / "digests.json"
    point.mkdir()
    time.sleep(1 - time.time() % 1)
    for path in (*former.iterdir(), *new.iterdir()):  # so that all get the same time
        os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    images = [disk_image_of(directory, tmp_path / f"{directory.name}.img") for directory in (former, new)]
    aged(tmp_path, monkeypatch)
    contents, signatures = [], []
    for image in images:
        with mounted_image(image, point, "loop"):
            signatures.append(content.signature_of(point / "model.safetensors"))
            contents.append(content_of(point, state))
    assert signatures[0] == signatures[1]
    assert contents[0] != contents[1]


def test_another_image_at_the_same_place_is_read_again(tmp_path):
    former, new = model(tmp_path / "former"), model(tmp_path / "new")
    exchange(new / "model.safetensors", (new / "model.safetensors").read_bytes()[:-1] + b"\1")
    point, state = tmp_path / "mounted", tmp_path / "digests.json"
    point.mkdir()
    contents = []
    for directory in (former, new):
        with mounted_image(image_of(directory, tmp_path / f"{directory.name}.sqfs"), point):
            contents.append(content_of(point, state))
    assert contents[0] != contents[1]


@pytest.mark.parametrize("what", ["type", "read-only"])
def test_files_of_a_file_system_without_change_times_are_not_remembered(tmp_path, monkeypatch, what):
    directory, state = aged(model(tmp_path / "model"), monkeypatch), tmp_path / "digests.json"
    if what == "type":
        monkeypatch.setattr(content, "LIVE_FILE_SYSTEMS", frozenset())
    else:
        monkeypatch.setattr(os, "statvfs", lambda _: types.SimpleNamespace(f_flag=os.ST_RDONLY))
    content_of(directory, state)
    assert not state.exists()


def test_a_digest_of_a_mount_that_became_read_only_is_computed_again(tmp_path, monkeypatch):
    """Another image may be mounted there, with equal metadata."""
    directory, state = aged(model(tmp_path / "model"), monkeypatch), tmp_path / "digests.json"
    content_of(directory, state)
    files = look(directory).paths()
    known = DigestCache(state)
    assert all(known.get(content.Path(path), signature) for path, signature in files)
    monkeypatch.setattr(os, "statvfs", lambda _: types.SimpleNamespace(f_flag=os.ST_RDONLY))
    assert not any(known.get(content.Path(path), signature) for path, signature in files)


def entries(state):
    return DigestCache(state)._entries  # one file of another model is worth no public name


def remembered(tmp_path, monkeypatch):
    directory, state = aged(model(tmp_path / "model"), monkeypatch), tmp_path / "digests.json"
    before = content_of(directory, state)
    return directory, state, before


def damage(document, how):
    files = document["files"]
    path = next(iter(files))
    if how == "digest":
        files[path][1] = "../../../etc/passwd"
    elif how == "number":
        files[path][0][2] = "1"
    elif how == "boolean":
        files[path][0][2] = True
    elif how == "short":
        files[path][0].pop()
    elif how == "method":
        document["method"] = "another"
    elif how == "list":
        document["files"] = [1]
    return document


@pytest.mark.parametrize("how", ["digest", "number", "boolean", "short", "method", "list"])
def test_a_damaged_state_file_is_ignored_and_replaced(tmp_path, monkeypatch, how):
    directory, state, before = remembered(tmp_path, monkeypatch)
    state.write_text(json.dumps(damage(json.loads(state.read_text()), how)))
    assert entries(state) == {}
    assert content_of(directory, state) == before
    assert len(entries(state)) == 2


@pytest.mark.parametrize("text", ["", "{", "null", "[" * 100_000, '{"a": NaN}', "\xff"])
def test_a_state_file_of_anything_is_ignored(tmp_path, monkeypatch, text):
    directory, state, before = remembered(tmp_path, monkeypatch)
    state.write_bytes(text.encode("latin-1"))
    assert content_of(directory, state) == before


def test_a_state_file_behind_a_link_or_too_large_or_that_others_can_write_is_ignored(tmp_path, monkeypatch):
    _, state, _ = remembered(tmp_path, monkeypatch)
    assert entries(state)
    (tmp_path / "link").symlink_to(state)
    assert entries(tmp_path / "link") == {}
    with monkeypatch.context() as patch:
        patch.setattr("kvbm.identity.digest_cache.MAX_BYTES", 10)
        assert entries(state) == {}
    state.chmod(0o620)
    assert entries(state) == {}


def test_a_state_file_that_cannot_be_written_costs_nothing_but_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    directory = aged(model(tmp_path / "model"), monkeypatch)
    assert content_of(directory, tmp_path / "file" / "digests.json")


def test_entries_of_other_models_stay_up_to_a_limit(tmp_path, monkeypatch):
    state = tmp_path / "digests.json"
    for name in ("one", "two", "three"):
        content_of(aged(model(tmp_path / name), monkeypatch), state)
    assert len(entries(state)) == 6
    monkeypatch.setattr("kvbm.identity.digest_cache.MAX_ENTRIES", 4)
    state.unlink()
    for name in ("one", "two", "three"):
        content_of(tmp_path / name, state)
    assert {path.split("/")[-2] for path in entries(state)} == {"three", "two"}
