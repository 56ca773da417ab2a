"""Superblock: the description of one cache on disk, in a small text file next to its arena.

    kvbm disk cache format 1 3f0c9a1d5be2a877        file type and format version, and their checksum
    9ab1c2d3e4f50617                                 checksum of the next line
    {"namespace": ..., "facts": ..., ...}

All formats share the first line, which distinguishes a cache of another format from a damaged one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from kvbm.disk.files import open_private, problem, sync_directory
from kvbm.errors import EnvironmentProblem

FORMAT = 1
MAX_BYTES = 1 << 20
FIRST_LINE = re.compile(r"(kvbm disk cache format (\d{1,9})) ([0-9a-f]{16})")


class OtherFormat(EnvironmentProblem):
    """The cache has the format of another version of kvbm."""


@dataclass(frozen=True, slots=True)
class Superblock:
    """`payload_bytes` of a block over all ranks, in slots of `slot_bytes`. `facts` describe the namespace to people."""

    namespace: str
    facts: Mapping[str, object]
    hash_bytes: int
    payload_bytes: int
    slot_bytes: int
    slot_count: int
    created: float

    def encode(self) -> bytes:
        title = f"kvbm disk cache format {FORMAT}"
        rest = json.dumps(asdict(self), sort_keys=True)
        return f"{title} {_check(title)}\n{_check(rest)}\n{rest}\n".encode()

    @classmethod
    def decode(cls, content: bytes, path: Path) -> Superblock | None:
        """Return None if it is damaged. Raises OtherFormat."""
        lines = content.decode("utf-8", "replace").split("\n")
        first = FIRST_LINE.fullmatch(lines[0])
        if first is None or first[3] != _check(first[1]):
            return None
        if int(first[2]) != FORMAT:
            raise OtherFormat(
                f"{path.parent} has cache format {first[2]}; this version of kvbm supports format {FORMAT}",
                hint=f"set another `tiers.disk.directory`, or remove {path.parent}",
            )
        if len(lines) != 4 or lines[1] != _check(lines[2]):
            return None
        return cls(**json.loads(lines[2]))


def read_superblock(path: Path) -> Superblock | None:
    """Return None if it is missing or damaged. Raises OtherFormat or EnvironmentProblem."""
    try:
        fd = open_private(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise problem(f"cannot open {path}", error) from error
    with os.fdopen(fd, "rb") as file:
        try:
            return Superblock.decode(file.read(MAX_BYTES), path)
        except OSError as error:
            raise problem(f"cannot read {path}", error) from error


def write_superblock(path: Path, superblock: Superblock) -> None:
    """Replace the superblock atomically. Raises OSError."""
    temporary = path.with_name(path.name + ".new")
    with suppress(FileNotFoundError):
        os.unlink(temporary)
    with os.fdopen(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(superblock.encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def _check(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())
