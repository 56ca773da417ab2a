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
from kvbm.layout import consecutive

if TYPE_CHECKING:
    import torch

    from kvbm.layout import BlockLayout
    from kvbm.region import Segment

MIN_ROW_BYTES = 4096
MIN_GATHER_BYTES = 256 << 10
HELD_BYTES = 512 << 10


class DeviceCopier:
    """Copies between `storages`, as `layout` describes them, and `segment`. See the module's text."""

    def __init__(self, layout: BlockLayout, storages: Sequence[torch.Tensor], segment: Segment) -> None:
        _check_storages(layout, storages, segment)
        self._block_count = layout.block_count
        self._slot_count = segment.info.slot_count
        self._path: _Path
        if storages[0].is_cuda:
            from kvbm.transfer.cuda import CudaPath

            self._path = CudaPath(layout, storages, segment.payload)
        else:
            self._path = _CpuPath(layout, [storage.numpy() for storage in storages], segment.payload)

    def fence(self) -> object | None:
        """Mark what the engine's thread has submitted to the device so far; a copy that gets the fence waits for it."""
        return self._path.fence()

    def offload(self, block_ids: Sequence[int], slots: Sequence[int], fence: object | None) -> None:
        """Copy block `block_ids[i]` to slot `slots[i]`. Raises TransferError."""
        self._path.offload(*self._checked(block_ids, slots), fence)

    def onboard(self, slots: Sequence[int], block_ids: Sequence[int], fence: object | None) -> None:
        """Copy slot `slots[i]` to block `block_ids[i]`. Raises TransferError."""
        self._path.onboard(*self._checked(block_ids, slots), fence)

    def _checked(self, block_ids: Sequence[int], slots: Sequence[int]) -> tuple[_Indexes, _Indexes]:
        """Both as arrays in the order of the slots, which is what makes runs. A bad number would hit a wrong block."""
        blocks, targets = np.array(block_ids, np.int64), np.array(slots, np.int64)
        if blocks.shape != targets.shape:
            raise TransferError(f"copy of {len(block_ids)} blocks and {len(slots)} slots")
        for name, numbers, count in (("block", blocks, self._block_count), ("slot", targets, self._slot_count)):
            if numbers.size and not 0 <= numbers.min() <= numbers.max() < count:
                raise TransferError(f"{name} ids {numbers.min()}..{numbers.max()}, but there are {count}")
        order = np.argsort(targets, kind="stable")
        return blocks[order], targets[order]


_Indexes = NDArray[np.int64]


class _Path(Protocol):
    """How one kind of device is reached; both arrays are in the order of the slots."""

    def fence(self) -> object | None: ...
    def offload(self, blocks: _Indexes, slots: _Indexes, fence: object | None) -> None: ...
    def onboard(self, blocks: _Indexes, slots: _Indexes, fence: object | None) -> None: ...


class _CpuPath:
    def __init__(self, layout: BlockLayout, storages: Sequence[NDArray[np.uint8]], payload: NDArray[np.uint8]) -> None:
        self._runs = _Runs(layout, storages, payload)
        self._rows = _Rows.of(layout, storages, payload)

    def fence(self) -> None:
        """The forward pass ran in the engine's thread; whoever got this order came after it."""

    def offload(self, blocks: _Indexes, slots: _Indexes, fence: object | None) -> None:
        rows = self._rows
        if rows is None or not rows.pays(slots):
            self._runs.copy(blocks, slots, is_offload=True)
            return
        for some, target in rows.spans(blocks, slots):
            np.take(rows.g1, some, axis=0, out=target, mode="clip")

    def onboard(self, blocks: _Indexes, slots: _Indexes, fence: object | None) -> None:
        rows = self._rows
        if rows is None or not rows.pays(slots):
            self._runs.copy(blocks, slots, is_offload=False)
            return
        for some, source in rows.spans(blocks, slots):
            rows.g1[some] = source


@dataclass(frozen=True, slots=True)
class _Rows:
    """One storage as equal rows of 64-bit words, of which a block takes some; and slots as runs of such rows.

    Rows must be int64: numpy holds the GIL while it scatters opaque rows.
    """

    g1: NDArray[np.int64]
    payload: NDArray[np.uint8]
    block_row: NDArray[np.int64]
    row_stride: int
    block_bytes: int

    @classmethod
    def of(cls, layout: BlockLayout, storages: Sequence[NDArray[np.uint8]], payload: NDArray[np.uint8]) -> _Rows | None:
        """None where pieces have no common measure, or lie in several storages."""
        strides = {piece.block_stride for piece in layout.pieces}
        row_bytes = gcd(*(number for p in layout.pieces for number in (p.offset, p.block_stride, p.length)))
        if len(storages) != 1 or len(strides) != 1 or row_bytes < MIN_ROW_BYTES or row_bytes % 8:
            return None
        row_count = layout.storage_bytes(0) // row_bytes
        starts = [range(p.offset // row_bytes, (p.offset + p.length) // row_bytes) for p in layout.pieces]
        return cls(
            g1=storages[0][: row_count * row_bytes].view(np.int64).reshape(row_count, row_bytes // 8),
            payload=payload,
            block_row=np.concatenate([np.array(run, np.int64) for run in starts]),
            row_stride=strides.pop() // row_bytes,
            block_bytes=layout.block_bytes,
        )

    def pays(self, slots: _Indexes) -> bool:
        """Whether the calls are long enough; one call serves one run of slots."""
        return len(slots) * self.block_bytes >= MIN_GATHER_BYTES * len(list(self._slot_runs(slots)))

    def spans(self, blocks: _Indexes, slots: _Indexes) -> Iterator[tuple[_Indexes, NDArray[np.int64]]]:
        """(row numbers in G1, the rows of the slots that they belong to), per run of slots."""
        for begin, end in self._slot_runs(slots):
            rows = blocks[begin:end, None] * self.row_stride + self.block_row
            first, count = int(slots[begin]), end - begin
            data = self.payload[first : first + count, : self.block_bytes].reshape(-1)
            yield rows.reshape(-1), data.view(np.int64).reshape(-1, self.g1.shape[1])

    def _slot_runs(self, slots: _Indexes) -> Iterator[tuple[int, int]]:
        if self.payload.shape[1] != self.block_bytes:  # padding parts the slots
            return ((index, index + 1) for index in range(len(slots)))
        return consecutive(slots)


class _Runs:
    """Runs of bytes at addresses, moved one by one: any layout.

    A short run would spend its time waiting for the GIL, so up to HELD_BYTES are moved before it is released once.
    """

    def __init__(self, layout: BlockLayout, storages: Sequence[NDArray[np.uint8]], payload: NDArray[np.uint8]) -> None:
        self._storages, self._payload = storages, payload  # kept, for we hold their addresses
        addresses = [storage.ctypes.data for storage in storages]
        self._starts = np.array([addresses[p.storage] + p.offset for p in layout.pieces], np.int64)
        self._strides = np.array([p.block_stride for p in layout.pieces], np.int64)
        self._lengths = np.array([p.length for p in layout.pieces], np.int64)
        self._slot_starts = payload.ctypes.data + np.array(layout.slot_offsets, np.int64)
        self._slot_stride = layout.slot_stride
        self._move = _memmove(ctypes.CDLL(None))
        self._move_holding = _memmove(ctypes.PyDLL(None))

    def copy(self, blocks: _Indexes, slots: _Indexes, *, is_offload: bool) -> None:
        """Every piece of each block, to or from its slot."""
        g1 = (self._starts + blocks[:, None] * self._strides).reshape(-1)
        g2 = (self._slot_starts + slots[:, None] * self._slot_stride).reshape(-1)
        lengths = np.tile(self._lengths, len(blocks))
        source, target = (g1, g2) if is_offload else (g2, g1)
        held = 0
        for to, at, length in zip(*_joined(target, source, lengths), strict=True):
            held += length
            if held < HELD_BYTES:
                self._move_holding(to, at, length)
            else:
                self._move(to, at, length)
                held = 0


def _memmove(libc: ctypes.CDLL) -> Any:
    function = libc.memmove
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_void_p
    return function


def _joined(target: _Indexes, source: _Indexes, lengths: _Indexes) -> tuple[list[int], list[int], list[int]]:
    """The runs, with those that continue their neighbour on both sides made one."""
    if not len(lengths):
        return [], [], []
    parts = (np.diff(target) != lengths[:-1]) | (np.diff(source) != lengths[:-1])
    firsts = np.concatenate([[0], np.flatnonzero(parts) + 1])
    return target[firsts].tolist(), source[firsts].tolist(), np.add.reduceat(lengths, firsts).tolist()


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
