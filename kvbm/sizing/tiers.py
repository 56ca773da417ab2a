"""From the blocks of an engine to its tiers: how many blocks and bytes G1, G2 and G3 hold."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm.config.schema import DiskTierSection, HostTierSection, Tiers
from kvbm.config.sizes import exact_size
from kvbm.errors import ProfileError
from kvbm.types import Tier

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Device:
    """The blocks of an engine. `rank_block_bytes` has one entry per rank, because ranks may hold unequal parts.

    `block_count` is None where only the engine can tell, at its start. `group_count` is how many blocks the same tokens
    take, one in each KV cache group; `token_count`, unless it follows from that, is how many tokens G1 holds.
    `set_by` is the key or the variable that makes `block_count`.
    """

    block_tokens: int
    rank_block_bytes: tuple[int, ...]
    block_count: int | None
    set_by: str | None
    group_count: int = 1
    token_count: int | None = None


@dataclass(frozen=True, slots=True)
class TierSize:
    """What one tier holds. `total_bytes` is what it takes from its memory over all ranks, padding included."""

    tier: Tier
    block_count: int
    token_count: int
    total_bytes: int
    set_by: str


@dataclass(frozen=True, slots=True)
class Sizing:
    """`block_bytes` is a block's part on the rank that holds most; `device` is None where only the engine can tell."""

    block_bytes: int
    block_tokens: int
    rank_count: int
    device: TierSize | None
    host: TierSize
    disk: TierSize | None


def sizing_of(device: Device, tiers: Tiers) -> Sizing:
    """ProfileError if host memory or disk holds no block.

    Every rank makes slots of its own size in an equal share of the host capacity, so the one with the largest has
    fewest. On disk a block's parts of all ranks lie together.
    """
    host = tiers.host_memory()
    slots = [-(-block_bytes // PAGE_BYTES) * PAGE_BYTES for block_bytes in device.rank_block_bytes]
    host_blocks = host.blocks or (host.capacity or 0) // (max(slots) * len(slots))
    if host_blocks == 0:
        taken = exact_size(max(slots) * len(slots))
        raise ProfileError(
            f"host memory of {exact_size(host.capacity or 0)} holds no block: one takes {taken}",
            hint="raise `tiers.host.capacity`",
        )
    return Sizing(
        block_bytes=max(device.rank_block_bytes),
        block_tokens=device.block_tokens,
        rank_count=len(device.rank_block_bytes),
        device=_device_tier(device),
        host=_tier(Tier.HOST, host_blocks, host_blocks * sum(slots), device, host),
        disk=None if tiers.disk is None else _disk_tier(device, sum(slots), tiers.disk),
    )


def _disk_tier(device: Device, slot_bytes: int, disk: DiskTierSection) -> TierSize:
    blocks = disk.blocks or (disk.capacity or 0) // slot_bytes
    if blocks == 0:
        raise ProfileError(
            f"a disk of {exact_size(disk.capacity or 0)} holds no block: one takes {exact_size(slot_bytes)}",
            hint="raise `tiers.disk.capacity`",
        )
    return _tier(Tier.DISK, blocks, blocks * slot_bytes, device, disk)


_NAMES = {Tier.HOST: "tiers.host", Tier.DISK: "tiers.disk"}


def _tier(
    tier: Tier, blocks: int, total_bytes: int, device: Device, section: HostTierSection | DiskTierSection
) -> TierSize:
    tokens = blocks // device.group_count * device.block_tokens
    set_by = f"{_NAMES[tier]}.{'blocks' if section.blocks else 'capacity'}"
    return TierSize(tier, blocks, tokens, total_bytes, set_by)


def _device_tier(device: Device) -> TierSize | None:
    if device.block_count is None or device.set_by is None:
        return None
    tokens = device.token_count
    if tokens is None:
        tokens = device.block_count // device.group_count * device.block_tokens
    total_bytes = device.block_count * sum(device.rank_block_bytes)
    return TierSize(Tier.DEVICE, device.block_count, tokens, total_bytes, device.set_by)
