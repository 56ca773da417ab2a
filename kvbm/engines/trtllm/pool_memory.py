"""Pool memory: the KV cache of one rank as TensorRT-LLM passes it, as layouts and storages for the workers.

Versions up to 1.3 pass one tensor of shape (blocks, layers, 2, elements), so that a block is one run of bytes. Newer
versions pass a layout of layer groups: block i of a group is `size` bytes at `base + stride * i` in each region.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbm.engines.trtllm.engine_facts import cuts
from kvbm.engines.trtllm.rank_side import GroupMemory
from kvbm.errors import EnvironmentProblem
from kvbm.host.layout import BlockLayout, Piece, storages_of

if TYPE_CHECKING:
    import torch


def of_tensor(pool: torch.Tensor) -> list[GroupMemory]:
    """Return the memory of the only layer group. Raises EnvironmentProblem for a tensor without whole blocks."""
    layout = BlockLayout.from_tensors([pool], block_count=int(pool.shape[0]), block_dim=0)
    return [GroupMemory(layout, storages_of([pool]))]


def of_layout(layout: Any) -> list[GroupMemory]:
    """Return the memory of each layer group, in the order of their ids."""
    groups = sorted(layout.groups, key=lambda group: int(group.layer_group_id))
    return [_of_group(group) for group in groups]


def declined_window(layout: Any, max_tokens: int | None) -> str | None:
    """Return why a layout cannot be cached, or None."""
    for group in layout.groups:
        if cuts(group.window_size, max_tokens):
            return (
                f"layer group {group.layer_group_id} has a sliding window of {group.window_size} tokens: "
                "the engine reuses its blocks during a copy"
            )
    return None


def _of_group(group: Any) -> GroupMemory:
    regions = [*group.regions, *(getattr(group, "replicated_regions", None) or ())]
    if not regions:
        raise EnvironmentProblem(f"layer group {group.layer_group_id} has no memory")
    block_count = min(int(region.num_slots) for region in regions)
    pieces = tuple(
        Piece(index, 0, block_stride=int(region.stride), length=int(region.size))
        for index, region in enumerate(regions)
    )
    storages = [
        _bytes_at(int(region.base), (block_count - 1) * int(region.stride) + int(region.size)) for region in regions
    ]
    return GroupMemory(BlockLayout(pieces, block_count), storages)


def _bytes_at(address: int, length: int) -> torch.Tensor:
    """Return the memory at an address of the current CUDA device, or of this process without one."""
    import torch

    if torch.cuda.is_available():
        return torch.as_tensor(_DeviceBytes(address, length), device="cuda")
    return torch.frombuffer((ctypes.c_uint8 * length).from_address(address), dtype=torch.uint8)


@dataclass(frozen=True)
class _DeviceBytes:
    """Device memory that torch maps without a copy."""

    address: int
    length: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.length,), "typestr": "|u1", "data": (self.address, False), "version": 3}
