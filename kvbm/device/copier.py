"""DeviceCopier: copies whole blocks between G1, the engine's storages, and the slots of this rank's segment.

Copying threads call `offload` and `onboard`, several at a time for different blocks and slots. The calls return when
every byte is at its destination, and raise TransferError if that is uncertain. In both cases the copy has stopped
reading and writing. The leader decides who owns the blocks and slots.

This module has the checks and the copies on the CPU; `cuda` has those on CUDA devices. A copying thread that reacquires
the GIL while the engine thread is busy may wait 5 ms each time, longer than most copies take. So few calls release the
GIL, and these are long. One side of a copy is whole slots: numpy gathers into, or scatters from, each run of
consecutive slots in one call. numpy copies in the calling thread; torch would start threads that compete with the
engine's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvbm.errors import InvariantError, TransferError
from kvbm.host.layout import Numbers, consecutive

if TYPE_CHECKING:
    import torch

    from kvbm.device.cuda import CudaPath
    from kvbm.device.cuda_runtime import CudaRuntime
    from kvbm.host.layout import BlockLayout
    from kvbm.host.segment import Segment

MIN_ROW_BYTES = 4096
MIN_GATHER_BYTES = 256 << 10
HELD_BYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class Moves:
    """Slot `slots[i]` belongs to block `blocks[i]`, in the order of the slots, which is what makes runs."""

    slots: NDArray[np.int64]
    blocks: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, part: slice) -> Moves:
        return Moves(self.slots[part], self.blocks[part])


class DeviceCopier:
    """Copies between `storages`, which have this `layout`, and `segment`, through `runtime` or, without one, the
    runtime of the storages' device. See the module's text."""

    def __init__(
        self,
        layout: BlockLayout,
        storages: Sequence[torch.Tensor],
        segment: Segment,
        *,
        runtime: CudaRuntime | None = None,
    ) -> None:
        _check_storages(layout, storages, segment)
        self._block_count = layout.block_count
        self._slot_count = len(segment.payload)
        self._path: CudaPath | _CpuPath
        if storages[0].is_cuda or runtime is not None:
            from kvbm.device.cuda import CudaPath
            from kvbm.device.cuda_runtime import CudaRuntime

            runtime = runtime or CudaRuntime(storages[0].device, segment.payload)
            self._path = CudaPath(layout, storages, segment.payload, segment.slots_per_pin, runtime)
        else:
            self._path = _CpuPath(layout, [storage.numpy() for storage in storages], segment.payload)

    def fence(self) -> object | None:
        """Mark the work submitted to the device by the engine's thread so far. A copy with this fence waits for it."""
        return self._path.fence()

    def offload(self, block_ids: Numbers, slots: Numbers, fence: object | None) -> None:
        """Copy block `block_ids[i]` to slot `slots[i]`. Raises TransferError."""
        if moves := self._checked(block_ids, slots):
            self._path.copy(moves, fence, to_host=True)

    def onboard(self, slots: Numbers, block_ids: Numbers, fence: object | None) -> None:
        """Copy slot `slots[i]` to block `block_ids[i]`. Raises TransferError."""
        if moves := self._checked(block_ids, slots):
            self._path.copy(moves, fence, to_host=False)

    def _checked(self, block_ids: Numbers, slots: Numbers) -> Moves:
        """Return the moves in slot order. A number out of range would overwrite other blocks or memory."""
        if len(block_ids) != len(slots):
            raise TransferError(f"copy of {len(block_ids)} blocks and {len(slots)} slots")
        by_slot = np.asarray(slots, np.int64)
        order = by_slot.argsort(kind="stable")
        moves = Moves(by_slot[order], np.asarray(block_ids, np.int64)[order])
        if not moves:
            return moves
        if moves.slots[0] < 0 or moves.slots[-1] >= self._slot_count:
            raise TransferError(f"slots {moves.slots[0]}..{moves.slots[-1]}, but there are {self._slot_count}")
        if np.maximum.reduce(moves.blocks.view(np.uint64)) >= self._block_count:  # a negative number is a large one
            ids = moves.blocks
            raise TransferError(f"blocks {ids.min()}..{ids.max()}, but there are {self._block_count}")
        return moves


class _CpuPath:
    """Copies on the CPU: whole runs of slots if they are long enough, else piece by piece."""

    def __init__(self, layout: BlockLayout, storages: Sequence[NDArray[np.uint8]], payload: NDArray[np.uint8]) -> None:
        self._pieces = _Pieces(layout, storages, payload)
        self._rows = _Rows.of(layout, storages, payload)

    def fence(self) -> None:
        """No fence: the forward pass ran in the engine's thread before it passed this order."""

    def copy(self, moves: Moves, fence: object | None, *, to_host: bool) -> None:
        slot_runs = consecutive(moves.slots)
        if self._rows is None or (runs := self._rows.runs(moves, slot_runs)) is None:
            self._pieces.copy(moves, slot_runs, to_host=to_host)
            return
        for rows, slots in self._rows.spans(moves, runs):
            if to_host:
                np.take(self._rows.g1, rows, axis=0, out=slots, mode="clip")
            else:
                self._rows.g1[rows] = slots


@dataclass(frozen=True, slots=True)
class _Rows:
    """G1, if it is one storage, as rows of equal length; a block and a slot are several rows each.

    The elements are int64, because numpy holds the GIL while it scatters elements of opaque types.
    """

    g1: NDArray[np.int64]
    payload: NDArray[np.uint8]
    rows_of_block_0: NDArray[np.int64]
    rows_per_stride: int
    block_bytes: int

    @classmethod
    def of(cls, layout: BlockLayout, storages: Sequence[NDArray[np.uint8]], payload: NDArray[np.uint8]) -> _Rows | None:
        """Return None if the pieces have no common row length."""
        strides = {piece.block_stride for piece in layout.pieces}
        row_bytes = gcd(*(number for p in layout.pieces for number in (p.offset, p.block_stride, p.length)))
        if len(storages) != 1 or len(strides) != 1 or row_bytes < MIN_ROW_BYTES or row_bytes % 8:
            return None
        row_count = layout.storage_bytes(0) // row_bytes
        starts = [np.arange(p.offset // row_bytes, (p.offset + p.length) // row_bytes) for p in layout.pieces]
        return cls(
            g1=storages[0][: row_count * row_bytes].view(np.int64).reshape(row_count, row_bytes // 8),
            payload=payload,
            rows_of_block_0=np.concatenate(starts),
            rows_per_stride=strides.pop() // row_bytes,
            block_bytes=layout.block_bytes,
        )

    def runs(self, moves: Moves, runs: list[tuple[int, int]]) -> list[tuple[int, int]] | None:
        """Return the runs of slots, one call each; None if the calls would be too short."""
        if self.block_bytes != self.payload.shape[1]:  # padding separates the slots
            runs = [(index, index + 1) for index in range(len(moves))]
        return runs if len(moves) * self.block_bytes >= MIN_GATHER_BYTES * len(runs) else None

    def spans(self, moves: Moves, runs: list[tuple[int, int]]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield (row numbers in G1, rows of the slots), per run of slots."""
        for begin, end in runs:
            rows = moves.blocks[begin:end, None] * self.rows_per_stride + self.rows_of_block_0
            first = int(moves.slots[begin])
            data = self.payload[first : first + end - begin, : self.block_bytes].reshape(-1)
            yield rows.reshape(-1), data.view(np.int64).reshape(-1, self.g1.shape[1])


class _Pieces:
    """Copies piece by piece with memmove, for any layout.

    After a short move a thread would mostly wait for the GIL, so it is released only once per HELD_BYTES.
    """

    def __init__(self, layout: BlockLayout, storages: Sequence[NDArray[np.uint8]], payload: NDArray[np.uint8]) -> None:
        self._kept = (storages, payload)  # keeps the memory behind the addresses alive
        self._slots, self._slot_stride = payload.ctypes.data, layout.slot_stride
        self._pieces = [
            (storages[p.storage].ctypes.data + p.offset, p.block_stride, p.length, at)
            for p, at in zip(layout.pieces, layout.slot_offsets, strict=True)
        ]
        self._is_dense = len(self._pieces) == 1 and layout.pieces[0].block_stride == layout.slot_stride
        self._move = _memmove(ctypes.CDLL(None))
        self._move_holding = _memmove(ctypes.PyDLL(None))

    def copy(self, moves: Moves, slot_runs: list[tuple[int, int]], *, to_host: bool) -> None:
        """Copy every piece of each block to or from its slot."""
        held = 0
        for g1, g2, length in self._runs(moves, slot_runs) if self._is_dense else self._each(moves):
            held += length
            target, source = (g2, g1) if to_host else (g1, g2)
            if held < HELD_BYTES:
                self._move_holding(target, source, length)
            else:
                self._move(target, source, length)
                held = 0

    def _each(self, moves: Moves) -> Iterator[tuple[int, int, int]]:
        """Yield (address in G1, address in the segment, length) of every piece."""
        for slot, block in zip(moves.slots.tolist(), moves.blocks.tolist(), strict=True):
            at = self._slots + slot * self._slot_stride
            for start, stride, length, slot_offset in self._pieces:
                yield start + block * stride, at + slot_offset, length

    def _runs(self, moves: Moves, slot_runs: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """Like `_each`, for blocks and slots without gaps: neighbours on both sides are one move."""
        start, stride, length, _ = self._pieces[0]
        slots, blocks = moves.slots.tolist(), moves.blocks.tolist()
        runs = slot_runs if len(slot_runs) == len(moves) else consecutive(moves.slots, moves.blocks)
        for begin, end in runs:
            yield start + blocks[begin] * stride, self._slots + slots[begin] * stride, (end - begin) * length


def _memmove(libc: ctypes.CDLL) -> Any:
    function = libc.memmove
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_void_p
    return function


def _check_storages(layout: BlockLayout, storages: Sequence[torch.Tensor], segment: Segment) -> None:
    if len(storages) < layout.storage_count:
        raise InvariantError(f"{len(storages)} storages for a layout of {layout.storage_count}")
    for index, storage in enumerate(storages):
        if storage.dim() != 1 or storage.element_size() != 1 or not storage.is_contiguous():
            shape = tuple(storage.shape)
            raise InvariantError(f"storage {index} is not contiguous bytes: {storage.dtype} of shape {shape}")
        if storage.device != storages[0].device or storage.numel() < layout.storage_bytes(index):
            raise InvariantError(
                f"storage {index}: {storage.numel()} bytes on {storage.device}, the layout needs "
                f"{layout.storage_bytes(index)} on {storages[0].device}"
            )
    if segment.payload.shape[1] != layout.slot_stride:
        raise InvariantError(f"slots of {segment.payload.shape[1]} bytes for a layout of {layout.slot_stride}")
