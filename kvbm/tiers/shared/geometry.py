"""ExtentGeometry: where the bytes of an extent are in host memory, and how they are verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbm.tiers.shared.extent_format import BadObject, ExtentFormat, tenant_tag
from kvbm.tiers.shared.object_store import Incoming, Outgoing, StoreAnswer
from kvbm.tiers.shared.orders import NOT_WANTED, Get, ObjectResult, Outcome, Put
from kvbm.tiers.shared.protection import Buffer, Protection


class ArrivingChecksums:
    """Checksums of blocks, computed while their bytes arrive in host memory: in order, after the header."""

    def __init__(self, form: ExtentFormat, hashes: Sequence[bytes]) -> None:
        self._block_bytes = form.block_bytes
        self._hashers = [form.hasher(sequence_hash) for sequence_hash in hashes]
        self._position = -form.header_bytes  # in the payload of the blocks

    def take(self, part: memoryview) -> None:
        """Note the next bytes, which belong to the header or to one block."""
        if self._position >= 0:
            self._hashers[self._position // self._block_bytes].update(part)
        self._position += len(part)

    def digests(self) -> list[bytes] | None:
        """Return the checksums; None unless all bytes were noted."""
        if self._position != self._block_bytes * len(self._hashers):
            return None
        return [hasher.digest() for hasher in self._hashers]


@dataclass(frozen=True, slots=True)
class Arrival:
    """An extent that is being read. `read` is its header, or all of it if it is protected. `checksums` are computed
    only by stores that report what they have filled."""

    incoming: Incoming
    read: memoryview
    checksums: ArrivingChecksums | None = None


@dataclass(frozen=True, slots=True)
class ExtentGeometry:
    """`shards[r][s]` is slot s of segment r, of which the first `shard_bytes[r]` bytes are payload."""

    shards: Sequence[NDArray[np.uint8]]
    shard_bytes: Sequence[int]
    form: ExtentFormat
    protection: Protection

    def block(self, slot: int) -> list[memoryview]:
        """Return the shards of a block in host memory."""
        return [shard[slot, :size].data for shard, size in zip(self.shards, self.shard_bytes, strict=True)]

    def arrival(self, order: Get, key: str) -> Arrival:
        """Return what reads an object straight into the host slots.

        A payload that is encrypted or authenticated goes to a buffer first, which follows the header: nothing reaches
        host memory before its origin is proven.
        """
        form = self.form
        if self.protection.seal_bytes:
            whole = memoryview(bytearray(form.object_bytes))
            return Arrival(Incoming(key, [whole], form.object_bytes), whole)
        header = memoryview(bytearray(form.header_bytes))
        buffers: list[memoryview | int] = [header]
        for slot in order.host_slots:
            buffers += [form.block_bytes] if slot == NOT_WANTED else self.block(slot)
        wanted = [name for name, slot in zip(order.hashes, order.host_slots, strict=True) if slot != NOT_WANTED]
        checksums = ArrivingChecksums(form, wanted)
        return Arrival(Incoming(key, buffers, form.object_bytes, filled=checksums.take), header, checksums)

    def received(self, order: Get, answer: StoreAnswer, arrival: Arrival, *, aging_s: float) -> ObjectResult:
        """Return whether all blocks that were wanted are proven, after the object has been read."""
        if answer.outcome is not Outcome.GOOD:
            return ObjectResult(order.ticket, answer.outcome, answer.error)
        try:
            checksums = self._open(order, arrival.read)
        except BadObject as error:
            return ObjectResult(order.ticket, Outcome.BAD, str(error), is_copy=answer.is_copy)
        pairs = zip(checksums, order.host_slots, strict=True)
        expected = [checksum for checksum, slot in pairs if slot != NOT_WANTED]
        found = arrival.checksums.digests() if arrival.checksums is not None else None
        if (found or self._checksums(order)) != expected:
            why = "a block does not match its checksum"
            return ObjectResult(order.ticket, Outcome.BAD, why, is_copy=answer.is_copy)
        is_aging = 0 < aging_s < answer.age_s
        return ObjectResult(order.ticket, Outcome.GOOD, is_aging=is_aging, is_copy=answer.is_copy)

    def outgoing(self, order: Put, key: str) -> Outgoing:
        """Return what writes an object. Its checksums cover the bytes that are in the host slots now."""
        form, tenant = self.form, tenant_tag(order.tenant)
        blocks = [self.block(slot) for slot in order.host_slots]
        checksums = [form.checksum(name, block) for name, block in zip(order.hashes, blocks, strict=True)]
        described = form.describe(order.hashes, checksums, protection=self.protection.code, tenant=order.tenant)
        payload: Sequence[Buffer] = [shard for block in blocks for shard in block]
        seal, payload = self.protection.seal(tenant, described, payload)
        return Outgoing(key, [form.header(described, seal), *payload], order.replaces)

    def _checksums(self, order: Get) -> list[bytes]:
        pairs = zip(order.hashes, order.host_slots, strict=True)
        return [self.form.checksum(name, self.block(slot)) for name, slot in pairs if slot != NOT_WANTED]

    def _open(self, order: Get, read: memoryview) -> Sequence[bytes]:
        """Return the checksums of the blocks. Raises BadObject if the object is not the extent that was ordered.

        A protected payload is copied to the host slots here.
        """
        form, protection = self.form, self.protection
        head = form.read_header(read, order.hashes, protection=protection.code, seal_bytes=protection.seal_bytes)
        if protection.seal_bytes:
            payload = protection.opened(head.tenant, head.described, head.seal, [read[form.header_bytes :]])
            if payload is None:
                raise BadObject("written without the secret of this namespace, or altered")
            self._scatter(order, memoryview(payload[0]))
        return head.checksums

    def _scatter(self, order: Get, payload: memoryview) -> None:
        at = 0
        for slot in order.host_slots:
            if slot == NOT_WANTED:
                at += self.form.block_bytes
                continue
            for shard in self.block(slot):
                shard[:] = payload[at : at + len(shard)]
                at += len(shard)
