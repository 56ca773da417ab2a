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
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import xxhash

from kvbm.errors import EnvironmentProblem
from kvbm.text.reading import parse_json
from kvbm.tiers.disk.files import open_private, problem, sync_directory

FORMAT = 1
MAX_BYTES = 1 << 20
MAX_COUNT = 1 << 62
NAMESPACE = re.compile(r"([0-9a-f]{2}){1,64}")
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
        """Return None if it is damaged, or has other fields than a superblock. Raises OtherFormat."""
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
        try:
            found = parse_json(lines[2])
        except ValueError:
            return None
        return cls(**found) if _has_its_fields(found) else None


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


def _has_its_fields(found: object) -> bool:
    """Return whether `found` has exactly the fields of a superblock, of the right types and in their ranges."""
    if not isinstance(found, dict) or found.keys() != {field.name for field in fields(Superblock)}:
        return False
    counts = [found[name] for name in ("hash_bytes", "payload_bytes", "slot_bytes", "slot_count")]
    return (
        isinstance(found["namespace"], str)
        and NAMESPACE.fullmatch(found["namespace"]) is not None
        and isinstance(found["facts"], dict)
        and all(type(count) is int and 0 < count <= MAX_COUNT for count in counts)
        and isinstance(found["created"], float)
        and 0 <= found["created"] <= MAX_COUNT  # also False for NaN
    )


def _check(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())
