"""G1 caches of every shape, for tests of copies: real torch storages filled with a pattern of each block's hash."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import torch

from kvbm.device.copier import DeviceCopier
from kvbm.host.layout import BlockLayout, Piece, storages_of
from kvbm.host.segment import Segment

BLOCKS = 12
SLOTS = 9


@lru_cache(maxsize=64)
def pattern(name: str, length: int) -> np.ndarray:
    """`length` bytes that nothing else has."""
    return np.frombuffer(hashlib.shake_128(name.encode()).digest(length), np.uint8)


def layer_separate(*, layer_count: int, block_count: int, piece_bytes: int) -> BlockLayout:
    """Return the layout of one storage in which layer follows layer, and inside a layer block follows block."""
    layer_bytes = block_count * piece_bytes
    pieces = tuple(Piece(0, layer * layer_bytes, piece_bytes, piece_bytes) for layer in range(layer_count))
    return BlockLayout(pieces, block_count)


def whole_pages(device: str) -> tuple[BlockLayout, list[torch.Tensor]]:
    """Block-contiguous, a slot without padding."""
    layout = BlockLayout.block_contiguous(block_count=BLOCKS, block_bytes=64 << 10)
    return layout, [torch.zeros(BLOCKS * (64 << 10), dtype=torch.uint8, device=device)]


def layers(device: str) -> tuple[BlockLayout, list[torch.Tensor]]:
    """Layer-separate in one storage."""
    layout = layer_separate(layer_count=4, block_count=BLOCKS, piece_bytes=16 << 10)
    return layout, [torch.zeros(4 * BLOCKS * (16 << 10), dtype=torch.uint8, device=device)]


def large_layers(device: str) -> tuple[BlockLayout, list[torch.Tensor]]:
    """Layer-separate, large enough for one gather per run of slots."""
    layout = layer_separate(layer_count=4, block_count=BLOCKS, piece_bytes=128 << 10)
    return layout, [torch.zeros(4 * BLOCKS * (128 << 10), dtype=torch.uint8, device=device)]


def large_layers_with_padding(device: str) -> tuple[BlockLayout, list[torch.Tensor]]:
    """The same with pieces that do not fill pages, so that there is padding between slots."""
    layout = layer_separate(layer_count=6, block_count=BLOCKS, piece_bytes=50_000)
    return layout, [torch.zeros(6 * BLOCKS * 50_000, dtype=torch.uint8, device=device)]


def padded_layers(device: str) -> tuple[BlockLayout, list[torch.Tensor]]:
    """Layers behind a header with gaps between the pieces."""
    pieces = tuple(Piece(0, 4096 + layer * (100 << 10), 312 << 10, 99 << 10) for layer in range(3))
    layout = BlockLayout(pieces, BLOCKS)
    return layout, [torch.zeros(layout.storage_bytes(0) + 777, dtype=torch.uint8, device=device)]


def odd_bytes(device: str) -> tuple[BlockLayout, list[torch.Tensor]]:
    """Pieces of odd lengths at odd places, in slot order against the order in G1."""
    pieces = (Piece(0, 20_001, 613, 611), Piece(0, 3, 1027, 1003), Piece(1, 0, 5, 5))
    layout = BlockLayout(pieces, BLOCKS)
    return layout, [torch.zeros(layout.storage_bytes(i) + 1, dtype=torch.uint8, device=device) for i in range(2)]


def storage_per_layer(device: str) -> tuple[BlockLayout, list[torch.Tensor]]:
    """Keys and values of each layer in a tensor of its own: [2, blocks, tokens, heads, size]."""
    tensors = [torch.zeros((2, BLOCKS, 16, 4, 64), dtype=torch.bfloat16, device=device) for _ in range(3)]
    return BlockLayout.from_tensors(tensors, block_count=BLOCKS, block_dim=1), storages_of(tensors)


def block_first(device: str) -> tuple[BlockLayout, list[torch.Tensor]]:
    """One view per layer into a cache whose outermost dimension is the block."""
    cache = torch.zeros((BLOCKS, 5, 2, 16, 4, 64), dtype=torch.float32, device=device)
    tensors = [cache[:, layer] for layer in range(5)]
    return BlockLayout.from_tensors(tensors, block_count=BLOCKS, block_dim=0), storages_of(tensors)


CACHES = (
    whole_pages,
    layers,
    large_layers,
    large_layers_with_padding,
    padded_layers,
    odd_bytes,
    storage_per_layer,
    block_first,
)


class Rig:
    """One rank: a cache on a device, a segment, and the copier between them."""

    def __init__(self, cache, device: str = "cpu", *, pin: bool = False) -> None:
        self.layout, self.storages = cache(device)
        self.segment = Segment.create(rank=0, layout=self.layout, slot_count=SLOTS, pin=pin)
        self.copier = DeviceCopier(self.layout, self.storages, self.segment)

    def content(self, name: str) -> np.ndarray:
        return pattern(name, self.layout.block_bytes)

    def write(self, block: int, name: str) -> None:
        """What a forward pass does."""
        content = torch.from_numpy(self.content(name).copy())
        for view, at in self.views(block):
            view.copy_(content[at : at + view.numel()])

    def read(self, block: int) -> np.ndarray:
        return np.concatenate([view.cpu().numpy() for view, _ in self.views(block)])

    def everything(self) -> list[np.ndarray]:
        return [storage.cpu().numpy().copy() for storage in self.storages]

    def views(self, block: int):
        for piece, at in zip(self.layout.pieces, self.layout.slot_offsets, strict=True):
            start = piece.offset + block * piece.block_stride
            yield self.storages[piece.storage][start : start + piece.length], at


def check_integrity(rig: Rig, blocks: list[int], slots: list[int], others: list[int]) -> None:
    """Fill `blocks`, offload to `slots`, wipe G1, onboard into `others`, compare; nothing else may change."""
    names = [f"block {block} in slot {slot}" for block, slot in zip(blocks, slots, strict=True)]
    for block, name in zip(blocks, names, strict=True):
        rig.write(block, name)
    rig.segment.payload[:] = 0xAB
    rig.copier.offload(blocks, slots, rig.copier.fence())
    size = rig.layout.block_bytes
    for slot, name in zip(slots, names, strict=True):
        assert np.array_equal(rig.segment.payload[slot, :size], rig.content(name)), f"slot {slot} is not {name}"
    for slot in set(range(SLOTS)) - set(slots):
        assert (rig.segment.payload[slot] == 0xAB).all(), f"slot {slot} was written"
    for storage in rig.storages:
        storage.fill_(0xCD)
    rig.copier.onboard(slots, others, rig.copier.fence())
    for block, name in zip(others, names, strict=True):
        assert np.array_equal(rig.read(block), rig.content(name)), f"block {block} is not {name}"
    for block in others:
        for view, _ in rig.views(block):
            view.fill_(0xCD)
    assert all((storage == 0xCD).all() for storage in rig.everything()), "bytes outside of the blocks were written"
