"""Ways in which the files of a model are exchanged: afterwards `models/current` below `home` shows other weights.

    home/models/v1, v2      two models of equal names, sizes and times
    home/models/current     a link to v1; engines load this path

Each way is a function of `home`. The file systems of the machine decide which can be tried: a way that cannot is
skipped. `unmount` undoes the mounts. `save_twin` and `placed` make what they exchange.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from kvbm.host.libc import LIBC

WEIGHTS = "model.safetensors"
LONG_AGO_NS = 10**18
FICLONE = 0x40049409
AT_FDCWD, RENAME_EXCHANGE = -100, 2


def unmount(home: Path) -> None:
    """Remove all mounts below `home`, the last one first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    for point in reversed([line.split()[4] for line in lines]):
        if Path(point).is_relative_to(home):
            subprocess.run(["umount", "-l", point], check=True)


def save_twin(one: Path, rows: Sequence[int]) -> Path:
    """Save v2 next to a model: of equal sizes and times, with other values in these rows of the embedding."""
    two = shutil.copytree(one, one.with_name("v2"))
    weights = load_file(two / WEIGHTS)
    name = next(name for name in weights if "embed_tokens" in name)
    weights[name][rows] = weights[name][rows].flip(1)
    save_file(weights, two / WEIGHTS, metadata={"format": "pt"})
    for path in (*one.iterdir(), *two.iterdir()):
        os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    assert (one / WEIGHTS).stat().st_size == (two / WEIGHTS).stat().st_size
    return two


def placed(saved: Path, tmp_path: Path) -> Iterator[Path]:
    """Copies of v1 and v2 in `home/models`, and `current`, a link to v1. Yields home, and unmounts what is below it."""
    home = tmp_path / "home"
    for name in ("v1", "v2"):
        shutil.copytree(saved / name, home / "models" / name)
    (home / "models" / "current").symlink_to("v1")
    yield home
    unmount(tmp_path)


def swap(one: Path, other: Path) -> None:
    os.rename(one, one.with_name("away"))
    os.rename(other, one)
    os.rename(one.with_name("away"), other)


def _swapped_copy(home: Path, source: Path, target: Path, models: str) -> Path:
    """A copy of a directory in which v1 and v2 have changed places."""
    shutil.copytree(source, target, symlinks=True)
    swap(target / models / "v1", target / models / "v2")
    return target


def parent(home: Path) -> None:
    """Blue-green."""
    swap(home / "models", _swapped_copy(home, home / "models", home / "green", "."))


def grandparent(home: Path) -> None:
    swap(home, _swapped_copy(home, home, home.with_name("green"), "models"))


def parent_becomes_a_link(home: Path) -> None:
    green = _swapped_copy(home, home / "models", home / "green", ".")
    os.rename(home / "models", home / "former")
    (home / "models").symlink_to(green)


def directory(home: Path) -> None:
    swap(home / "models" / "v1", home / "models" / "v2")


def directory_atomically(home: Path) -> None:
    _exchange(home / "models" / "v1", home / "models" / "v2")


def file_atomically(home: Path) -> None:
    _exchange(home / "models" / "v1" / WEIGHTS, home / "models" / "v2" / WEIGHTS)


def _exchange(one: Path, other: Path) -> None:
    if LIBC.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE):
        pytest.skip("no atomic exchange here")


def link(home: Path) -> None:
    (home / "models" / "next").symlink_to("v2")
    os.replace(home / "models" / "next", home / "models" / "current")


def link_becomes_a_directory(home: Path) -> None:
    (home / "models" / "current").unlink()
    shutil.copytree(home / "models" / "v2", home / "models" / "current")


def file_becomes_a_link(home: Path) -> None:
    (home / "models" / "v1" / WEIGHTS).unlink()
    (home / "models" / "v1" / WEIGHTS).symlink_to(home / "models" / "v2" / WEIGHTS)


def hard_link(home: Path) -> None:
    os.link(home / "models" / "v2" / WEIGHTS, home / "linked")
    os.replace(home / "linked", home / "models" / "v1" / WEIGHTS)


def through_a_hard_link(home: Path) -> None:
    os.link(home / "models" / "v1" / WEIGHTS, home / "linked")
    _copy_with_time(home / "models" / "v2" / WEIGHTS, home / "linked")


def replaced(home: Path) -> None:
    _copy_with_time(home / "models" / "v2" / WEIGHTS, home / "part")
    os.replace(home / "part", home / "models" / "v1" / WEIGHTS)


def overwritten(home: Path) -> None:
    _copy_with_time(home / "models" / "v2" / WEIGHTS, home / "models" / "v1" / WEIGHTS)


def _copy_with_time(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-p", source, target], check=True)


def mapped(home: Path) -> None:
    source = np.fromfile(home / "models" / "v2" / WEIGHTS, np.uint8)
    np.memmap(home / "models" / "v1" / WEIGHTS, mode="r+", dtype=np.uint8)[:] = source


def direct(home: Path) -> None:
    target = home / "models" / "v1" / WEIGHTS
    command = ["dd", f"if={home / 'models' / 'v2' / WEIGHTS}", f"of={target}", "bs=1M", "oflag=direct", "conv=notrunc"]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no O_DIRECT here")


def in_kernel(home: Path) -> None:
    """By copy_file_range, which clones where it can."""
    with (
        (home / "models" / "v2" / WEIGHTS).open("rb") as source,
        (home / "models" / "v1" / WEIGHTS).open("r+b") as target,
    ):
        left = os.fstat(source.fileno()).st_size
        while left:
            left -= os.copy_file_range(source.fileno(), target.fileno(), left)


def reflink(home: Path) -> None:
    with (home / "models" / "v2" / WEIGHTS).open() as source, (home / "models" / "v1" / WEIGHTS).open("r+") as target:
        try:
            fcntl.ioctl(target.fileno(), FICLONE, source.fileno())
        except OSError:
            pytest.skip("the file system has no reflinks")


def header(home: Path) -> None:
    """Two tensors of one shape change their names; no value does."""
    path = home / "models" / "v1" / WEIGHTS
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        facts = json.loads(file.read(length))
        one, other = sorted(name for name in facts if name.endswith("k_proj.weight"))[:2]
        facts[one], facts[other] = facts[other], facts[one]
        text = json.dumps(facts, separators=(",", ":")).encode()
        assert len(text) <= length
        file.seek(8)
        file.write(text.ljust(length))


def configuration(home: Path) -> None:
    path = home / "models" / "v1" / "config.json"
    facts = json.loads(path.read_text())
    rope = facts.get("rope_parameters") or {"rope_type": "default"}
    path.write_text(json.dumps(facts | {"rope_parameters": rope | {"rope_theta": 500.0}}))


def tokenizer(home: Path) -> None:
    """Two tokens change their numbers."""
    path = home / "models" / "v1" / "tokenizer.json"
    facts = json.loads(path.read_text())
    vocabulary = facts["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    path.write_text(json.dumps(facts))


def bind(home: Path) -> None:
    _mount("--bind", str(home / "models" / "v2"), str(home / "models" / "v1"))


def bind_a_file(home: Path) -> None:
    _mount("--bind", str(home / "models" / "v2" / WEIGHTS), str(home / "models" / "v1" / WEIGHTS))


def overlay(home: Path) -> None:
    for name in ("upper", "work"):
        (home / name).mkdir()
    options = f"lowerdir={home / 'models' / 'v2'},upperdir={home / 'upper'},workdir={home / 'work'}"
    _mount("-t", "overlay", "overlay", "-o", options, str(home / "models" / "v1"))


def tmpfs(home: Path) -> None:
    new = shutil.copytree(home / "models" / "v2", home / "new")
    _mount("-t", "tmpfs", "tmpfs", str(home / "models" / "v1"))
    shutil.copytree(new, home / "models" / "v1", dirs_exist_ok=True)


def _mount(*arguments: str) -> None:
    if subprocess.run(["mount", *arguments], capture_output=True).returncode:
        pytest.skip(f"cannot mount here: {arguments[0]} {arguments[1]}")


WAYS = (
    *(parent, grandparent, parent_becomes_a_link, directory, directory_atomically, file_atomically, link),
    *(link_becomes_a_directory, file_becomes_a_link, hard_link, through_a_hard_link, replaced, overwritten, mapped),
    *(direct, in_kernel, reflink, bind, bind_a_file, overlay, tmpfs),
)
CHANGES = (header, configuration)  # their result is neither v1 nor v2
