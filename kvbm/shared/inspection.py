"""Inspection: verifies an object without the engine that wrote it, by its own header and checksums.

Nothing in a header is believed before it is within bounds and agrees with the object's key and length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbm.shared.keys import MAX_RUN_TOKENS
from kvbm.shared.protection import AesProtection, Buffer, HmacProtection, Protection
from kvbm.shared.run_format import CHECKSUM_BYTES, FIXED, FORMAT_VERSION, MAGIC, PAGE, BadObject, RunFormat

MAX_OBJECT_BYTES = 4 << 30  # a run of 256 tokens of a model with 16 MiB per token
HEAD_BYTES = PAGE  # has at least the fixed part of a header
HASH_BYTES = range(8, 65)
SEAL_BYTES = {0: 0, HmacProtection.code: HmacProtection.seal_bytes, AesProtection.code: AesProtection.seal_bytes}
MAX_BLOCKS = MAX_RUN_TOKENS


@dataclass(frozen=True, slots=True)
class FoundRun:
    """What the header of an object says. `tenant` is a tag (`run_format.tenant_tag`)."""

    form: RunFormat
    protection: int
    tenant: bytes


def found_run(head: Buffer, *, namespace: bytes, byte_count: int) -> FoundRun:
    """Return what the beginning of an object says. Raises BadObject if it is not a run of this namespace and length."""
    head = bytes(head[: FIXED.size])
    if len(head) < FIXED.size or head[: len(MAGIC)] != MAGIC:
        raise BadObject("not an object of kvbm")
    _, version, protection, header_bytes, block_count, hash_bytes, block_bytes, found, tenant = FIXED.unpack(head)
    if version != FORMAT_VERSION:
        raise BadObject(f"format version {version}, not {FORMAT_VERSION}")
    if found != namespace:
        raise BadObject("its header names another namespace")
    if protection not in SEAL_BYTES or not 1 <= block_count <= MAX_BLOCKS or hash_bytes not in HASH_BYTES:
        raise BadObject("damaged header")
    form = RunFormat(namespace, block_count, block_bytes, hash_bytes)
    if header_bytes != form.header_bytes:
        raise BadObject("damaged header")
    if byte_count > MAX_OBJECT_BYTES:
        raise BadObject(f"{byte_count} bytes, but an object has at most {MAX_OBJECT_BYTES}")
    if byte_count != form.object_bytes:
        raise BadObject(f"{byte_count} bytes, not {form.object_bytes}")
    return FoundRun(form, protection, tenant)


def verify(content: Buffer, run: FoundRun, name: bytes, protection: Protection | None) -> bool:
    """Verify all bytes of a whole object with this name, and return whether its origin is proven.

    Without `protection`, an authenticated object proves its bytes but not its origin, and of an encrypted one only the
    header is verified. Raises BadObject.
    """
    form, view = run.form, memoryview(content)
    seal_bytes = SEAL_BYTES[run.protection]
    hashes = _hashes(view, form)
    if hashes[-1] != name:
        raise BadObject("it holds other blocks than its name says")
    head = form.read_header(view, hashes, protection=run.protection, seal_bytes=seal_bytes)
    payload: Buffer = view[form.header_bytes :]
    is_proven = False
    if protection is not None:
        opened = protection.opened(head.tenant, head.described, head.seal, [payload])
        if opened is None:
            raise BadObject("written with another secret, or altered")
        payload, is_proven = opened[0], True
    elif run.protection == AesProtection.code:
        return False
    _verify_blocks(memoryview(payload), form, hashes, head.checksums)
    return is_proven


def _hashes(view: memoryview, form: RunFormat) -> list[bytes]:
    step = form.hash_bytes + CHECKSUM_BYTES
    starts = range(FIXED.size, FIXED.size + form.block_count * step, step)
    return [bytes(view[start : start + form.hash_bytes]) for start in starts]


def _verify_blocks(payload: memoryview, form: RunFormat, hashes: Sequence[bytes], checksums: Sequence[bytes]) -> None:
    for position, (name, checksum) in enumerate(zip(hashes, checksums, strict=True)):
        start = position * form.block_bytes
        if form.checksum(name, [payload[start : start + form.block_bytes]]) != checksum:
            raise BadObject(f"block {position} does not match its checksum")
