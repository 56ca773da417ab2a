"""A directory that cannot be used: the cause is named, whatever the errno, and what removes it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvbm.errors import PATH_HINTS, EnvironmentProblem, path_hint
from kvbm.host.directories import make_private_directories
from kvbm.tiers.disk.files import MAX_DIRECTORY_BYTES, require_usable_parent
from kvbm.tiers.disk.index import BlockIndex

EVERY_ERRNO = ("ENOSPC", "EROFS", "ELOOP", "ENAMETOOLONG", "EACCES", "EPERM", "ENOTDIR", "EDQUOT", "ESTALE", "EIO")


@pytest.mark.parametrize("name", EVERY_ERRNO)
def test_every_error_of_a_path_has_a_hint_with_the_path_quoted(name: str) -> None:
    hint = path_hint(OSError(getattr(errno, name), "no"), Path("/my cache"))
    assert hint is not None
    assert "{path}" not in hint
    assert ("'/my cache'" in hint) == ("{path}" in PATH_HINTS[getattr(errno, name)])


@pytest.mark.parametrize(
    ("target", "below", "number"),
    [
        ("loop", "", errno.ELOOP),
        ("loop", "a", errno.ELOOP),
        ("nowhere", "", errno.ENOENT),
        ("file", "a", errno.ENOTDIR),
    ],
)
def test_a_link_that_leads_to_no_directory_is_not_said_to_exist(
    target: str, below: str, number: int, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(target)
    with pytest.raises(OSError) as caught:
        make_private_directories(tmp_path / "loop" / below)
    assert caught.value.errno == number


def test_the_longest_path_that_is_accepted_has_room_for_the_index(tmp_path: Path) -> None:
    directory = _of_length(tmp_path, MAX_DIRECTORY_BYTES)
    require_usable_parent(directory)
    instance = directory / ("0" * 32) / ("1" * 16)
    instance.mkdir(parents=True, mode=0o700)
    (instance / "index.sqlite").touch(0o600)
    BlockIndex.open(instance / "index.sqlite").close()
    longer = _of_length(tmp_path, MAX_DIRECTORY_BYTES + 1)
    with pytest.raises(EnvironmentProblem, match="441 bytes; the index of the disk tier allows 440"):
        require_usable_parent(longer)
    assert not longer.exists()


def _of_length(directory: Path, length: int) -> Path:
    while (missing := length - len(os.fsencode(directory)) - 1) > 200:
        directory /= "d" * 100
    return directory / ("e" * missing)
