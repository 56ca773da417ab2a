"""Sizes of the tiers: how many blocks and bytes G1, G2 and G3 hold, from the blocks of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm.config.schema import DiskTierSection, HostTierSection, Tiers
from kvbm.config.sizes import exact_size
from kvbm.errors import ProfileError
from kvbm.types import Tier

PAGE_BYTES = 4096
ESTIMATE = "estimate"  # `set_by` of a number of blocks that is estimated from the memory of a GPU


@dataclass(frozen=True, slots=True)
class SnapshotSize:
    """The states of a sequence at one block boundary: one block of each group of states.

    `state_bytes` are the states alone, on all ranks, without the padding of their blocks. `token_count` is the number
    of tokens whose keys and values have as many bytes.
    """

    block_count: int
    state_bytes: int
    token_count: int


@dataclass(frozen=True, slots=True)
class Device:
    """The blocks of an engine. `rank_block_bytes` has one entry per rank, because the parts may differ.

    `replica_count` consecutive ranks have equal KV, of which G2 and G3 keep one copy.

    `block_count` is None if the engine determines it at start-up. `group_count` is the number of KV cache groups; the
    same tokens take one block in each. `token_count` is the number of tokens in G1, None if it follows from the blocks.
    `set_by` is the key or variable that sets `block_count`. `token_bytes` are the bytes, on all ranks, of a token that
    every layer with full attention keeps. `sequence_blocks` is what a sequence of `sequence_tokens` takes in G1.
    `notes` name what was assumed about the engine. `attention_backend` is the one that decides the block of latent
    attention on a CPU, None for other models.

    Of a model with states, `snapshot` is the snapshot that a sequence needs in G2 and G3, and `stored_sequence_blocks`
    the blocks of a sequence there, snapshot included. `stored_longest` is the same for the maximum length: its tokens
    and its blocks.
    """

    block_tokens: int
    rank_block_bytes: tuple[int, ...]
    block_count: int | None
    set_by: str | None
    group_count: int = 1
    token_count: int | None = None
    token_bytes: int = 0
    sequence_tokens: int = 0
    sequence_blocks: int = 0
    notes: tuple[str, ...] = ()
    replica_count: int = 1
    attention_backend: str | None = None
    snapshot: SnapshotSize | None = None
    stored_sequence_blocks: int = 0
    stored_longest: tuple[int, int] | None = None

    def stored_tokens(self, blocks: int) -> int:
        """Tokens in this number of blocks of G2 or G3. With states, in sequences of the maximum length."""
        if self.stored_longest is None:
            return blocks // self.group_count * self.block_tokens
        longest, longest_blocks = self.stored_longest
        return blocks * longest // longest_blocks


@dataclass(frozen=True, slots=True)
class TierSize:
    """Size of one tier. `total_bytes` is the sum over all ranks, padding included. `sequence_count` is the number of
    sequences of `Sizing.sequence_tokens` that fit, None if that length is unknown."""

    tier: Tier
    block_count: int
    token_count: int
    total_bytes: int
    set_by: str
    sequence_count: int | None = None


@dataclass(frozen=True, slots=True)
class Sizing:
    """`block_bytes` is the largest part of a block on one rank, `stored_bytes` the whole block in G2 and G3, padding
    included; `device` is None if the engine determines it. `sequence_blocks` are the blocks of a sequence in G2 and G3,
    including those of its `snapshot` if the model has states. `buffer_bytes`: of kvbm, below host memory of an engine
    that is G2."""

    block_bytes: int
    block_tokens: int
    rank_count: int
    device: TierSize | None
    host: TierSize
    disk: TierSize | None
    stored_bytes: int
    token_bytes: int
    sequence_tokens: int
    sequence_blocks: int
    notes: tuple[str, ...] = ()
    group_count: int = 1
    snapshot: SnapshotSize | None = None
    attention_backend: str | None = None
    buffer_bytes: int = 0

    def rank_bytes(self, tier: TierSize) -> int:
        """Bytes of a tier on the rank with the largest part."""
        part = self.block_bytes if tier.tier is Tier.DEVICE else self.stored_bytes // self.rank_count
        return tier.block_count * part

    def host_bytes(self, blocks: int) -> int:
        """Host memory, all ranks, for this number of blocks."""
        return blocks * self.stored_bytes


def sizing_of(device: Device, tiers: Tiers, *, keeps_host_memory: bool = False) -> Sizing:
    """Compute the sizes of all tiers. ProfileError if host memory or disk holds no block. `keeps_host_memory`: the
    engine has its own besides G2.

    Every part of a block has an equal share of the host capacity, so the largest part limits the number of blocks. Each
    rank has a part, or several ranks with equal KV have one together. On disk, the parts are stored together.
    """
    parts = device.rank_block_bytes[:: device.replica_count]
    slots = [-(-block_bytes // PAGE_BYTES) * PAGE_BYTES for block_bytes in parts]
    stored_bytes = max(slots) * len(slots)
    host = tiers.memory_below_engine(stored_bytes) if keeps_host_memory else tiers.host_memory()
    buffer_blocks = tiers.buffer_blocks(stored_bytes) if tiers.are_below_engine else 0
    return Sizing(
        block_bytes=max(device.rank_block_bytes),
        block_tokens=device.block_tokens,
        rank_count=len(device.rank_block_bytes),
        device=_device_tier(device),
        host=_tier(Tier.HOST, device, host, sum(slots), required_bytes=stored_bytes),
        disk=None if tiers.disk is None else _tier(Tier.DISK, device, tiers.disk, sum(slots)),
        stored_bytes=stored_bytes,
        token_bytes=device.token_bytes,
        sequence_tokens=device.sequence_tokens,
        sequence_blocks=device.stored_sequence_blocks or device.sequence_blocks,
        notes=device.notes,
        group_count=device.group_count,
        snapshot=device.snapshot,
        attention_backend=device.attention_backend,
        buffer_bytes=buffer_blocks * stored_bytes,
    )


_NAMES = {Tier.HOST: ("host memory", "tiers.host"), Tier.DISK: ("a disk tier", "tiers.disk")}


def _tier(
    tier: Tier,
    device: Device,
    section: HostTierSection | DiskTierSection,
    slot_bytes: int,
    *,
    required_bytes: int | None = None,
) -> TierSize:
    """Return the size of a tier whose blocks have `slot_bytes` and, by default, take as much of its capacity."""
    name, key = _NAMES[tier]
    required_bytes = required_bytes or slot_bytes
    blocks = section.blocks or (section.capacity_bytes or 0) // required_bytes
    if blocks == 0:
        size, required = exact_size(section.capacity_bytes or 0), exact_size(required_bytes)
        message = f"{name} of {size} is too small: one block requires {required}"
        raise ProfileError(message, hint=f"raise `{key}.capacity`")
    set_by = f"{key}.{'blocks' if section.blocks else 'capacity'}"
    sequences = _sequences(blocks, device.stored_sequence_blocks or device.sequence_blocks)
    return TierSize(tier, blocks, device.stored_tokens(blocks), blocks * slot_bytes, set_by, sequences)


def _sequences(blocks: int, sequence_blocks: int) -> int | None:
    return blocks // sequence_blocks if sequence_blocks else None


def _device_tier(device: Device) -> TierSize | None:
    if device.block_count is None or device.set_by is None:
        return None
    tokens = device.token_count
    if tokens is None:
        tokens = device.block_count // device.group_count * device.block_tokens
    total_bytes = device.block_count * sum(device.rank_block_bytes)
    sequences = _sequences(device.block_count, device.sequence_blocks)
    return TierSize(Tier.DEVICE, device.block_count, tokens, total_bytes, device.set_by, sequences)
