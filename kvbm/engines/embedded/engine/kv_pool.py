"""KVPool: the memory of G1, one storage for all layers and blocks, in one of two byte orders.

    block_first    | b0: L0.K L0.V L1.K L1.V ... | b1: ... |       a block is one run
    layer_first    | L0.K: b0 b1 b2 ... | L0.V: b0 b1 ... | ...    a block is two runs per layer

A run contains `block_size` tokens, each with `kv_heads` times `key_dim` (or `value_dim`) elements. On the CPU the
storage is a memfd, so that a worker in another process can map it; on a GPU it is one tensor. Block ids are indexes;
BlockPool manages which blocks are in use.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import torch

from kvbm.errors import EnvironmentProblem
from kvbm.host.layout import BlockLayout, Piece
from kvbm.host.machine_memory import THIS_MACHINE
from kvbm.host.shared_memory import create_sealed

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of a token's KV, the same in every layer."""

    layer_count: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        return self.layer_count * self.kv_heads * (self.key_dim + self.value_dim) * ELEMENT_BYTES[self.dtype]


class KVPool:
    """The G1 memory of one engine. `keys[l]` and `values[l]` are views [block_count, block_size, kv_heads, dim]."""

    def __init__(self, geometry: KVGeometry, *, block_count: int, block_size: int, kv_layout: str, device: str) -> None:
        self.geometry = geometry
        self.block_count = block_count
        self.block_size = block_size
        self.block_bytes = geometry.token_bytes * block_size
        self.kv_layout = kv_layout
        self.fd: int | None = None
        total_bytes = self.block_bytes * block_count
        storage = self._allocate_shared(total_bytes) if device == "cpu" else _allocate_on(device, total_bytes)
        self.storages: list[torch.Tensor] = [storage]
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        pieces = self._layer_pieces()
        for key_piece, value_piece in zip(pieces[::2], pieces[1::2], strict=True):
            self.keys.append(self._view(key_piece, geometry.key_dim))
            self.values.append(self._view(value_piece, geometry.value_dim))
        self._fetched_keys = self.keys[0].new_empty(0, *self.keys[0].shape[1:])
        self._fetched_values = self.values[0].new_empty(0, *self.values[0].shape[1:])

    def layout(self) -> BlockLayout:
        """Return the location of the bytes of each block."""
        if self.kv_layout == "block_first":
            return BlockLayout((Piece(0, 0, self.block_bytes, self.block_bytes),), self.block_count)
        return BlockLayout(tuple(self._layer_pieces()), self.block_count)

    def fetch(self, layer: int, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather K and V of whole blocks: [blocks * block_size, kv_heads, dim].

        The next call overwrites them. All layers share one buffer, because the page faults of new memory would cost
        more than the copy.
        """
        count = len(block_ids)
        if count > self._fetched_keys.shape[0]:
            self._fetched_keys = self.keys[0].new_empty(2 * count, *self.keys[0].shape[1:])
            self._fetched_values = self.values[0].new_empty(2 * count, *self.values[0].shape[1:])
        keys, values = self._fetched_keys[:count], self._fetched_values[:count]
        torch.index_select(self.keys[layer], 0, block_ids, out=keys)
        torch.index_select(self.values[layer], 0, block_ids, out=values)
        return keys.flatten(0, 1), values.flatten(0, 1)

    def close(self) -> None:
        """Free the memory as soon as the last view is gone. The pool must not be used afterwards."""
        self.keys.clear()
        self.values.clear()
        self.storages.clear()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def _allocate_shared(self, total_bytes: int) -> torch.Tensor:
        room = THIS_MACHINE.room()
        if total_bytes > room.available_bytes:
            raise EnvironmentProblem(
                f"G1 requires {total_bytes} bytes, but {room.available_bytes} are available: {room.limit}",
                hint="lower `engine.arguments.num_blocks`",
            )
        try:
            self.fd = create_sealed("kvbm-g1", total_bytes)
            mapping = mmap.mmap(self.fd, total_bytes)
        except OSError as error:
            raise EnvironmentProblem(
                f"G1 of {total_bytes} bytes cannot be mapped: {error}", hint="lower `engine.arguments.num_blocks`"
            ) from error
        storage = torch.frombuffer(mapping, dtype=torch.uint8)
        storage.zero_()  # prefault every page, so that requests do not
        return storage

    def _layer_pieces(self) -> list[Piece]:
        """K and V of layer 0, K and V of layer 1, ..."""
        geometry = self.geometry
        element_bytes = ELEMENT_BYTES[geometry.dtype]
        pieces: list[Piece] = []
        offset_in_block = 0
        for _ in range(geometry.layer_count):
            for dim in (geometry.key_dim, geometry.value_dim):
                length = self.block_size * geometry.kv_heads * dim * element_bytes
                if self.kv_layout == "block_first":
                    pieces.append(Piece(0, offset_in_block, self.block_bytes, length))
                else:
                    pieces.append(Piece(0, offset_in_block * self.block_count, length, length))
                offset_in_block += length
        return pieces

    def _view(self, piece: Piece, dim: int) -> torch.Tensor:
        element_bytes, heads = ELEMENT_BYTES[self.geometry.dtype], self.geometry.kv_heads
        elements = self.storages[0].view(TORCH_DTYPES[self.geometry.dtype])
        return elements.as_strided(
            (self.block_count, self.block_size, heads, dim),
            (piece.block_stride // element_bytes, heads * dim, dim, 1),
            piece.offset // element_bytes,
        )


def _allocate_on(device: str, total_bytes: int) -> torch.Tensor:
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if total_bytes > free_bytes:
        raise EnvironmentProblem(
            f"G1 requires {total_bytes} bytes, but `{device}` has {free_bytes} free",
            hint="lower `engine.arguments.num_blocks`",
        )
    return torch.zeros(total_bytes, dtype=torch.uint8, device=device)
