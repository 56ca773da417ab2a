"""Names of objects in the store, and how many blocks an object holds.

    <prefix of the URL>/v1/<namespace, 32 hex>/<2 hex>/<sequence hash of the last block, hex>      an extent of blocks
    <prefix of the URL>/v1/<namespace, 32 hex>/namespace.json                                      what it belongs to

Keys begin with the hash, so that a store that splits its keys into ranges spreads the load.
"""

from __future__ import annotations

from dataclasses import dataclass

VERSION = "v1"
FACTS = "namespace.json"
MIN_EXTENT_BYTES = 4 << 20  # reaches most of a store's throughput; of Mooncake's, see bench/micro/shared_mooncake.py
MAX_EXTENT_TOKENS = 256  # a hit ends at an extent, so that long extents lose reuse where prompts part


@dataclass(frozen=True, slots=True)
class KeySpace:
    """The keys of one namespace, given as 16 bytes."""

    namespace: bytes

    @property
    def prefix(self) -> str:
        """Without a slash at its end."""
        return f"{VERSION}/{self.namespace.hex()}"

    @property
    def facts(self) -> str:
        return f"{self.prefix}/{FACTS}"

    def key(self, name: bytes) -> str:
        text = name.hex()
        return f"{self.prefix}/{text[:2]}/{text}"

    def name_of(self, key: str) -> bytes | None:
        """Return the name of the extent with this key; None if it is another object."""
        try:
            name = bytes.fromhex(key.rpartition("/")[2])
        except ValueError:
            return None
        return name if name and self.key(name) == key else None


def extent_blocks(block_bytes: int, block_tokens: int) -> int:
    """Return the number of blocks in an object: the smallest power of two with MIN_EXTENT_BYTES, within
    MAX_EXTENT_TOKENS.

    `block_bytes` is the payload of one block over all ranks.
    """
    most = max(1, MAX_EXTENT_TOKENS // block_tokens)
    count = 1
    while count * block_bytes < MIN_EXTENT_BYTES and 2 * count <= most:
        count *= 2
    return count
