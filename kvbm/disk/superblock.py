"""Superblock: what one cache on disk is, in a small text file beside its arena.

    kvbm disk cache format 1 3f0c9a1d5be2a877        what it is, and the checksum of that
    9ab1c2d3e4f50617                                 the checksum of the rest
    {"namespace": ..., "facts": ..., ...}

The first line is what every format has in common. A cache of another format is told from a damaged one by it.
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
    """A cache that another version of kvbm wrote."""


@dataclass(frozen=True, slots=True)
class Superblock:
    """`payload_bytes` of a block over all ranks, in slots of `slot_bytes`. `facts` are for people."""

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
        """None if it is damaged. Raises OtherFormat."""
        lines = content.decode("utf-8", "replace").split("\n")
        first = FIRST_LINE.fullmatch(lines[0])
        if first is None or first[3] != _check(first[1]):
            return None
        if int(first[2]) != FORMAT:
            raise OtherFormat(
                f"{path.parent} holds a cache of format {first[2]}, and this version of kvbm knows format {FORMAT}",
                hint="set another `tiers.disk.directory`, or remove that cache",
            )
        if len(lines) != 4 or lines[1] != _check(lines[2]):
            return None
        return cls(**json.loads(lines[2]))


def read_superblock(path: Path) -> Superblock | None:
    """None if there is none or it is damaged. Raises OtherFormat or EnvironmentProblem."""
    try:
        fd = open_private(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise problem(f"{path} cannot be opened", error) from error
    with os.fdopen(fd, "rb") as file:
        try:
            return Superblock.decode(file.read(MAX_BYTES), path)
        except OSError as error:
            raise problem(f"{path} cannot be read", error) from error


def write_superblock(path: Path, superblock: Superblock) -> None:
    """In one step: there is the former one or this one. Raises OSError."""
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
