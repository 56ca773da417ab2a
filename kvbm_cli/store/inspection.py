"""Inspection: verifies an object without the engine that wrote it, by its own header and checksums.

Nothing in a header is believed before it is within bounds and agrees with the object's key and length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbm.tiers.shared.extent_format import CHECKSUM_BYTES, FIXED, PAGE, BadObject, ExtentFormat, fixed_part
from kvbm.tiers.shared.keys import MAX_EXTENT_TOKENS
from kvbm.tiers.shared.protection import AesProtection, Buffer, HmacProtection, Protection

MAX_OBJECT_BYTES = 4 << 30  # an extent of 256 tokens of a model with 16 MiB per token
HEAD_BYTES = PAGE  # has at least the fixed part of a header
HASH_BYTES = range(8, 65)
SEAL_BYTES = {0: 0, HmacProtection.code: HmacProtection.seal_bytes, AesProtection.code: AesProtection.seal_bytes}
MAX_BLOCKS = MAX_EXTENT_TOKENS


@dataclass(frozen=True, slots=True)
class FoundExtent:
    """What the header of an object says. `tenant` is a tag (`extent_format.tenant_tag`)."""

    form: ExtentFormat
    protection: int
    tenant: bytes


def found_extent(head: Buffer, *, namespace: bytes, byte_count: int) -> FoundExtent:
    """Return what the beginning of an object says. Raises BadObject for another namespace or length."""
    fixed = fixed_part(bytes(head[: FIXED.size]))
    protection, header_bytes, block_count, hash_bytes, block_bytes, found, tenant = fixed
    if found != namespace:
        raise BadObject("its header names another namespace")
    if protection not in SEAL_BYTES or not 1 <= block_count <= MAX_BLOCKS or hash_bytes not in HASH_BYTES:
        raise BadObject("damaged header")
    form = ExtentFormat(namespace, block_count, block_bytes, hash_bytes)
    if header_bytes != form.header_bytes:
        raise BadObject("damaged header")
    if byte_count > MAX_OBJECT_BYTES:
        raise BadObject(f"{byte_count} bytes, but an object has at most {MAX_OBJECT_BYTES}")
    if byte_count != form.object_bytes:
        raise BadObject(f"{byte_count} bytes, not {form.object_bytes}")
    return FoundExtent(form, protection, tenant)


def verify(content: Buffer, extent: FoundExtent, name: bytes, protection: Protection | None) -> bool:
    """Verify all bytes of a whole object with this name, and return whether its origin is proven.

    Without `protection`, an authenticated object proves its bytes but not its origin, and of an encrypted one only the
    header is verified. Raises BadObject.
    """
    form, view = extent.form, memoryview(content)
    seal_bytes = SEAL_BYTES[extent.protection]
    hashes = _hashes(view, form)
    if hashes[-1] != name:
        raise BadObject("it holds other blocks than its name says")
    head = form.read_header(view, hashes, protection=extent.protection, seal_bytes=seal_bytes)
    payload: Buffer = view[form.header_bytes :]
    is_proven = False
    if protection is not None:
        opened = protection.opened(head.tenant, head.described, head.seal, [payload])
        if opened is None:
            raise BadObject("written with another secret, or altered")
        payload, is_proven = opened[0], True
    elif extent.protection == AesProtection.code:
        return False
    _verify_blocks(memoryview(payload), form, hashes, head.checksums)
    return is_proven


def _hashes(view: memoryview, form: ExtentFormat) -> list[bytes]:
    step = form.hash_bytes + CHECKSUM_BYTES
    starts = range(FIXED.size, FIXED.size + form.block_count * step, step)
    return [bytes(view[start : start + form.hash_bytes]) for start in starts]


def _verify_blocks(
    payload: memoryview, form: ExtentFormat, hashes: Sequence[bytes], checksums: Sequence[bytes]
) -> None:
    for position, (name, checksum) in enumerate(zip(hashes, checksums, strict=True)):
        start = position * form.block_bytes
        if form.checksum(name, [payload[start : start + form.block_bytes]]) != checksum:
            raise BadObject(f"block {position} does not match its checksum")
