"""Sequence hashes: 128 bits that name a block's tokens, all tokens before them, and how their KV was computed.

    namespace(facts) ──▶ root(namespace, salt) ──▶ hash of block 0 ──▶ hash of block 1 ──▶ ...

Each hash covers its parent and the tokens of its own block, so equal hashes mean equal prefixes. The namespace stands
for everything that changes the bytes of a block (model, weights, layout, ...), the salt for a tenant: requests that
differ in either share no blocks. BLAKE2b is used because a collision would give one tenant's KV cache to another. Token
ids are hashed as little-endian 32-bit words, so that all machines get equal hashes.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from kvbm.errors import InvariantError

HASH_BYTES = 16


def namespace(facts: Mapping[str, object]) -> bytes:
    """Return the digest of `facts`, independent of their order. Raises InvariantError for values that JSON cannot
    represent exactly."""
    _require_json(facts, "facts")
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return blake2b(text.encode(), digest_size=HASH_BYTES, person=b"kvbm namespace").digest()


def root(namespace: bytes, *, salt: str | None = None) -> bytes:
    """Return the parent of a request's first block. No salt and an empty salt give different hashes."""
    if salt is None:
        return blake2b(namespace, digest_size=HASH_BYTES, person=b"kvbm root").digest()
    return blake2b(namespace + _salt_bytes(salt), digest_size=HASH_BYTES, person=b"kvbm salted root").digest()


def tenant(salt: str | None) -> bytes:
    """Return the digest by which the disk tier finds a tenant's blocks, empty without a salt. It hides the salt."""
    return b"" if salt is None else blake2b(_salt_bytes(salt), digest_size=HASH_BYTES, person=b"kvbm tenant").digest()


def extend(hashes: list[bytes], token_ids: Sequence[int], *, block_size: int, root: bytes) -> None:
    """Append to `hashes` the sequence hashes of the full blocks of `token_ids` that are not in it yet.

    `hashes` has the hashes of the first `len(hashes)` blocks of the same tokens; `block_size` is in tokens.
    """
    first_block, end_block = len(hashes), len(token_ids) // block_size
    if first_block >= end_block:
        return
    payload = _token_bytes(token_ids[first_block * block_size : end_block * block_size])
    block_bytes = 4 * block_size
    parent = hashes[-1] if hashes else root
    for start in range(0, len(payload), block_bytes):
        parent = blake2b(parent + payload[start : start + block_bytes], digest_size=HASH_BYTES).digest()
        hashes.append(parent)


def _salt_bytes(salt: str) -> bytes:
    """Encode a salt. It comes from a request, where JSON allows a lone surrogate."""
    return salt.encode("utf-8", "surrogatepass")


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _require_json(value: object, path: str) -> None:
    if value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvariantError(f"namespace: {path} has the key {key!r}, which is not a string")
            _require_json(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _require_json(item, f"{path}[{index}]")
    else:
        raise InvariantError(f"namespace: {path} is {value!r}, which JSON cannot represent exactly")
