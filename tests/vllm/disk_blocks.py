"""Blocks in a disk directory: which hashes are in it, and damage to one of them."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from vllm_server import BLOCK_TOKENS


def block_hashes(prompt: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> list[bytes]:
    """Return the hashes of its full blocks, as vLLM computes them."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

    init_none_hash(sha256)
    hashes: list[bytes] = []
    for end in range(block_tokens, len(prompt) + 1, block_tokens):
        hashes.append(hash_block_tokens(sha256, hashes[-1] if hashes else None, prompt[end - block_tokens : end], None))
    return hashes


def slots_by_hash(directory: Path, copy: Path) -> dict[bytes, int]:
    """Return the slot of each block. A running engine has locked the index, so that a copy is read."""
    (index,) = directory.glob("**/index.sqlite")
    for path in index.parent.glob("index.sqlite*"):
        shutil.copy(path, copy)
    with closing(sqlite3.connect(copy / index.name)) as connection:
        return dict(connection.execute("SELECT hash, slot FROM blocks"))


def damage(directory: Path, copy: Path, block_hash: bytes, slots: int) -> None:
    """Flip a bit of this block in the arena, which has so many slots."""
    slot = slots_by_hash(directory, copy)[block_hash]
    (path,) = directory.glob("**/arena")
    with path.open("r+b") as arena:
        at = slot * os.path.getsize(arena.name) // slots + 1000
        arena.seek(at)
        (byte,) = arena.read(1)
        arena.seek(at)
        arena.write(bytes((byte ^ 4,)))
