"""ExtentFormat: the bytes of an object, which hold an extent of blocks.

    | header, a multiple of 4096 bytes | block 0 | block 1 | ... | block K-1 |

    header   magic 8, format version 2, protection 2, header length 4, block count 4, hash length 4, bytes per block 8,
             namespace 16, tenant 16; per block its sequence hash and a checksum of 16; a checksum of all that 16;
             the seal of the protection; zeros
    block    the shards of all ranks in their order, without padding

A checksum is xxh3-128 over the namespace, the sequence hash and the bytes. All numbers are little-endian. Namespace,
extent length and block size decide the length of an object, so that one of another length is recognised before a read.
Nothing in an object is trusted before it is compared with what the reader expects.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import xxhash

from kvbm.tiers.shared.protection import Buffer

MAGIC = b"kvbm-run"
FORMAT_VERSION = 1
FIXED = struct.Struct("<8sHHIIIQ16s16s")
CHECKSUM_BYTES = 16
NAMESPACE_BYTES = 16
MAX_SEAL_BYTES = 64
PAGE = 4096


class BadObject(Exception):
    """Why an object is not the extent that was expected."""


@dataclass(frozen=True, slots=True)
class ExtentFormat:
    """The form of all extents of a namespace. `block_bytes` is the payload of a block over all ranks."""

    namespace: bytes
    block_count: int
    block_bytes: int
    hash_bytes: int

    def __post_init__(self) -> None:
        assert len(self.namespace) == NAMESPACE_BYTES, self.namespace

    @property
    def header_bytes(self) -> int:
        used = FIXED.size + self.block_count * (self.hash_bytes + CHECKSUM_BYTES) + CHECKSUM_BYTES + MAX_SEAL_BYTES
        return -(-used // PAGE) * PAGE

    @property
    def object_bytes(self) -> int:
        return self.header_bytes + self.block_count * self.block_bytes

    def hasher(self, sequence_hash: bytes) -> xxhash.xxh3_128:
        """Return what computes the checksum of a block from the shards of its ranks."""
        return xxhash.xxh3_128(self.namespace + sequence_hash)

    def checksum(self, sequence_hash: bytes, shards: Iterable[Buffer]) -> bytes:
        """Return the checksum of a block, given the shards of its ranks."""
        hasher = self.hasher(sequence_hash)
        for shard in shards:
            hasher.update(shard)
        return hasher.digest()

    def describe(
        self, hashes: Sequence[bytes], checksums: Sequence[bytes], *, protection: int = 0, tenant: bytes = b""
    ) -> bytes:
        """Return the part of the header that the seal covers."""
        assert len(hashes) == len(checksums) == self.block_count, (len(hashes), len(checksums), self.block_count)
        assert all(len(name) == self.hash_bytes for name in hashes), "hashes of another length"
        fixed = FIXED.pack(
            MAGIC,
            FORMAT_VERSION,
            protection,
            self.header_bytes,
            self.block_count,
            self.hash_bytes,
            self.block_bytes,
            self.namespace,
            tenant_tag(tenant),
        )
        content = fixed + b"".join(part for pair in zip(hashes, checksums, strict=True) for part in pair)
        return content + _digest(content)

    def header(self, described: bytes, seal: bytes) -> bytes:
        return (described + seal).ljust(self.header_bytes, b"\0")

    def read_header(self, header: Buffer, hashes: Sequence[bytes], *, protection: int, seal_bytes: int) -> ReadHeader:
        """Return what a header says about an extent of these hashes. Raises BadObject if it is not that extent."""
        head = bytes(header[: self.header_bytes])
        end = FIXED.size + self.block_count * (self.hash_bytes + CHECKSUM_BYTES)
        found_protection, *shape, namespace, tenant = fixed_part(head)
        if shape != [self.header_bytes, self.block_count, self.hash_bytes, self.block_bytes]:
            raise BadObject("another extent length, hash length or block size")
        if _digest(head[:end]) != head[end : end + CHECKSUM_BYTES]:
            raise BadObject("damaged header")
        if namespace != self.namespace:
            raise BadObject("its header names another namespace")
        if found_protection != protection:
            raise BadObject("its protection is not that of `tiers.shared.protection`")
        step = self.hash_bytes + CHECKSUM_BYTES
        entries = [head[at : at + step] for at in range(FIXED.size, end, step)]
        if [entry[: self.hash_bytes] for entry in entries] != list(hashes):
            raise BadObject("it holds other blocks than its name says")
        described = head[: end + CHECKSUM_BYTES]
        seal = head[len(described) : len(described) + seal_bytes]
        return ReadHeader(described, seal, tenant, [entry[self.hash_bytes :] for entry in entries])


@dataclass(frozen=True, slots=True)
class ReadHeader:
    """`described` is what the seal covers, `tenant` the tag of the tenant."""

    described: bytes
    seal: bytes
    tenant: bytes
    checksums: Sequence[bytes]


def fixed_part(head: bytes) -> tuple[Any, ...]:
    """Return what follows the version. Raises BadObject for the object of another program or version."""
    if len(head) < FIXED.size or head[: len(MAGIC)] != MAGIC:
        raise BadObject("not an object of kvbm")
    _, version, *rest = FIXED.unpack_from(head)
    if version != FORMAT_VERSION:
        raise BadObject(f"format version {version}, not {FORMAT_VERSION}")
    return tuple(rest)


def tenant_tag(tenant: bytes) -> bytes:
    """Return the tag of a tenant in a header: zeros for none. It does not show the tenant's name."""
    return blake2b(tenant, digest_size=16, person=b"kvbm tenant").digest() if tenant else bytes(16)


def _digest(content: bytes) -> bytes:
    return xxhash.xxh3_128_digest(content)
