"""DeviceCopier: whole blocks between G1, the engine's storages, and the slots of this rank's segment.

`offload` and `onboard` are called by copying threads, several at a time for different blocks and slots. They return
when every byte is at its destination, or raise TransferError when it may not be; in both cases nothing of theirs is
still reading or writing. Who owns the blocks and slots is decided elsewhere.

Here are the checks and the CPU's way; `cuda` has the other one. A copying thread that takes the GIL back beside a busy
engine thread may wait 5 ms for it each time, longer than most copies take. So there are few calls that release it,
and these are long. One side of a copy is whole slots: numpy gathers into, or scatters from, each run of consecutive
slots in one call. numpy, because it copies in this thread alone; torch would start threads beside the engine's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvbm.errors import InvariantError, TransferError
from kvbm.host.layout import consecutive

if TYPE_CHECKING:
    import torch

    from kvbm.host.layout import BlockLayout
    from kvbm.host.region import Segment

MIN_ROW_BYTES = 4096
MIN_GATHER_BYTES = 256 << 10
HELD_BYTES = 512 << 10


Moves = Sequence[tuple[int, int]]  # (slot, block) in the order of the slots, which is what makes runs


class DeviceCopier:
    """Copies between `storages`, as `layout` describes them, and `segment`. See the module's text."""

    def __init__(self, layout: BlockLayout, storages: Sequence[torch.Tensor], segment: Segment) -> None:
        _check_storages(layout, storages, segment)
        self._block_count = layout.block_count
        self._slot_count = segment.info.slot_count
        self._path: _Path
        if storages[0].is_cuda:
            from kvbm.device.cuda import CudaPath

            self._path = CudaPath(layout, storages, segment.payload)
        else:
            self._path = _CpuPath(layout, [storage.numpy() for storage in storages], segment.payload)

    def fence(self) -> object | None:
        """Mark what the engine's thread has submitted to the device so far; a copy that gets the fence waits for it."""
        return self._path.fence()

    def offload(self, block_ids: Sequence[int], slots: Sequence[int], fence: object | None) -> None:
        """Copy block `block_ids[i]` to slot `slots[i]`. Raises TransferError."""
        if moves := self._checked(block_ids, slots):
            self._path.offload(moves, fence)

    def onboard(self, slots: Sequence[int], block_ids: Sequence[int], fence: object | None) -> None:
        """Copy slot `slots[i]` to block `block_ids[i]`. Raises TransferError."""
        if moves := self._checked(block_ids, slots):
            self._path.onboard(moves, fence)

    def _checked(self, block_ids: Sequence[int], slots: Sequence[int]) -> Moves:
        """A number that does not exist would hit another block, or memory that is not ours."""
        if len(block_ids) != len(slots):
            raise TransferError(f"copy of {len(block_ids)} blocks and {len(slots)} slots")
        for name, numbers, count in (("block", block_ids, self._block_count), ("slot", slots, self._slot_count)):
            if numbers and not 0 <= min(numbers) <= max(numbers) < count:
                raise TransferError(f"{name} ids {min(numbers)}..{max(numbers)}, but there are {count}")
        return sorted(zip(slots, block_ids, strict=True))


class _Path(Protocol):
    """How one kind of device is reached."""

    def fence(self) -> object | None: ...
    def offload(self, moves: Moves, fence: object | None) -> None: ...
    def onboard(self, moves: Moves, fence: object | None) -> None: ...


class _CpuPath:
    """Whole runs of slots where these are long enough, and else piece by piece."""

    def __init__(self, layout: BlockLayout, storages: Sequence[NDArray[np.uint8]], payload: NDArray[np.uint8]) -> None:
        self._pieces = _Pieces(layout, storages, payload)
        self._rows = _Rows.of(layout, storages, payload)

    def fence(self) -> None:
        """The forward pass ran in the engine's thread; whoever got this order came after it."""

    def offload(self, moves: Moves, fence: object | None) -> None:
        if self._rows is None or (runs := self._rows.runs(moves)) is None:
            self._pieces.copy(moves, is_offload=True)
            return
        for rows, slots in self._rows.spans(moves, runs):
            np.take(self._rows.g1, rows, axis=0, out=slots, mode="clip")

    def onboard(self, moves: Moves, fence: object | None) -> None:
        if self._rows is None or (runs := self._rows.runs(moves)) is None:
            self._pieces.copy(moves, is_offload=False)
            return
        for rows, slots in self._rows.spans(moves, runs):
            self._rows.g1[rows] = slots


@dataclass(frozen=True, slots=True)
class _Rows:
    """G1, if it is one storage, as equal rows of which a block takes some; and slots as runs of such rows.

    Rows are int64: numpy holds the GIL while it scatters opaque ones.
    """

    g1: NDArray[np.int64]
    payload: NDArray[np.uint8]
    rows_of_block_0: NDArray[np.int64]
    rows_per_stride: int
    block_bytes: int

    @classmethod
    def of(cls, layout: BlockLayout, storages: Sequence[NDArray[np.uint8]], payload: NDArray[np.uint8]) -> _Rows | None:
        """None where the pieces have no common measure."""
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

    def runs(self, moves: Moves) -> list[tuple[int, int]] | None:
        """The runs of slots, one call each; None where calls would be too short to be worth it."""
        if self.block_bytes == self.payload.shape[1]:
            runs = consecutive([slot for slot, _ in moves])
        else:  # padding parts the slots
            runs = [(index, index + 1) for index in range(len(moves))]
        return runs if len(moves) * self.block_bytes >= MIN_GATHER_BYTES * len(runs) else None

    def spans(self, moves: Moves, runs: list[tuple[int, int]]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """(row numbers in G1, the rows of the slots that they belong to), per run of slots."""
        for begin, end in runs:
            blocks = np.array([block for _, block in moves[begin:end]])
            rows = blocks[:, None] * self.rows_per_stride + self.rows_of_block_0
            first = moves[begin][0]
            data = self.payload[first : first + end - begin, : self.block_bytes].reshape(-1)
            yield rows.reshape(-1), data.view(np.int64).reshape(-1, self.g1.shape[1])


class _Pieces:
    """Pieces at addresses, moved one by one: any layout.

    A short move would spend its time waiting for the GIL, so up to HELD_BYTES are moved before it is released once.
    """

    def __init__(self, layout: BlockLayout, storages: Sequence[NDArray[np.uint8]], payload: NDArray[np.uint8]) -> None:
        self._kept = (storages, payload)  # we hold their addresses
        self._slots, self._slot_stride = payload.ctypes.data, layout.slot_stride
        self._pieces = [
            (storages[p.storage].ctypes.data + p.offset, p.block_stride, p.length, at)
            for p, at in zip(layout.pieces, layout.slot_offsets, strict=True)
        ]
        self._is_dense = len(self._pieces) == 1 and layout.pieces[0].block_stride == layout.slot_stride
        self._move = _memmove(ctypes.CDLL(None))
        self._move_holding = _memmove(ctypes.PyDLL(None))

    def copy(self, moves: Moves, *, is_offload: bool) -> None:
        """Every piece of each block, to or from its slot."""
        held = 0
        for g1, g2, length in self._runs(moves) if self._is_dense else self._each(moves):
            held += length
            target, source = (g2, g1) if is_offload else (g1, g2)
            if held < HELD_BYTES:
                self._move_holding(target, source, length)
            else:
                self._move(target, source, length)
                held = 0

    def _each(self, moves: Moves) -> Iterator[tuple[int, int, int]]:
        """(address in G1, address in the segment, length) of every piece."""
        for slot, block in moves:
            at = self._slots + slot * self._slot_stride
            for start, stride, length, slot_offset in self._pieces:
                yield start + block * stride, at + slot_offset, length

    def _runs(self, moves: Moves) -> Iterator[tuple[int, int, int]]:
        """The same where blocks and slots lie without gaps, so that neighbours on both sides move together."""
        start, stride, length, _ = self._pieces[0]
        for begin, end in consecutive([slot for slot, _ in moves], [block for _, block in moves]):
            slot, block = moves[begin]
            yield start + block * stride, self._slots + slot * stride, (end - begin) * length


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
            raise InvariantError(f"storage {index}: {storage.dtype} of shape {tuple(storage.shape)}, not plain bytes")
        if storage.device != storages[0].device or storage.numel() < layout.storage_bytes(index):
            raise InvariantError(
                f"storage {index}: {storage.numel()} bytes on {storage.device}, the layout needs "
                f"{layout.storage_bytes(index)} on {storages[0].device}"
            )
    if segment.payload.shape[1] != layout.slot_stride:
        raise InvariantError(f"slots of {segment.payload.shape[1]} bytes for a layout of {layout.slot_stride}")
