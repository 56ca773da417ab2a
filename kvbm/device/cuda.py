"""CudaPath: copies between G1 on a CUDA device and page-locked slots. `copier` checks the numbers and calls it.

Each direction has two streams of the least priority. A copying thread takes a free one, and everything on it in order:

    offload   wait for the fence | rows to the device | gather G1 -> staging | staging -> slots | event
    onboard   wait for the fence | rows to the device | slots -> staging | scatter staging -> G1 | event
    direct    wait for the fence | G1 <-> slots | event

It returns the stream only when the device has reached the event, or after an error has ended all work of the stream.
So the buffers of a stream have one user at a time, and while one stream copies over the link, the other one gathers.
Whole blocks cross the link, consecutive slots in one copy. No copy crosses the border of two page-locked ranges.

Copies are direct if a block is one piece, or if the driver takes all pieces in one call and they are long enough.

torch releases the GIL in each call, and a copying thread may wait long to reacquire it. So the copies of a batch are
one call. `cuda_runtime` has the calls of torch and of the driver.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvbm.device.cuda_runtime import Spans
from kvbm.errors import TransferError
from kvbm.host.layout import consecutive

if TYPE_CHECKING:
    import torch

    from kvbm.device.copier import Moves
    from kvbm.device.cuda_runtime import CudaRuntime
    from kvbm.host.layout import BlockLayout, Piece, Sheet

STREAMS_PER_DIRECTION = 2
STAGING_BYTES = 32 << 20  # per stream
# On an H100, vLLM 0.32 found a kernel faster than the driver's copies up to 28 KiB and slower above
# (vllm/v1/kv_offload/cpu/swap_blocks_triton.py). bench/gpu/check_and_measure.py measures both ways of this module.
MIN_DIRECT_BYTES = 32 << 10

log = logging.getLogger(__name__)


class CudaPath:
    """Copies on one CUDA device, in any number of threads. The segment should be page-locked: copies from pageable
    memory are slow. No copy crosses a multiple of `slots_per_pin`."""

    def __init__(
        self,
        layout: BlockLayout,
        storages: Sequence[torch.Tensor],
        payload: NDArray[np.uint8],
        slots_per_pin: int | None,
        runtime: CudaRuntime,
    ) -> None:
        import torch

        self._runtime = runtime
        self._uses_batch_copy = runtime.has_batch_copy
        self._slots_per_pin = slots_per_pin
        self._slot_stride = payload.shape[1]
        numbers = [number for p in layout.pieces for number in (p.offset, p.block_stride, p.length)]
        element = torch.int64 if gcd(*numbers) % 8 == 0 else torch.uint8
        self._sheets = [_DeviceSheet.of(sheet, layout.block_count, storages, element) for sheet in layout.sheets()]
        self._pieces = [
            _DevicePieces.of(layout, index, storage) for index, storage in enumerate(storages[: layout.storage_count])
        ]
        self._is_dense = len(layout.pieces) == 1 and layout.pieces[0].block_stride == layout.slot_stride
        self._is_direct = _is_direct(layout, self._uses_batch_copy)
        staged = 0 if self._is_direct else min(layout.block_count, max(1, STAGING_BYTES // layout.slot_stride))
        self._batch_blocks = staged or layout.block_count
        self._out, self._back = self._make_streams(staged, element), self._make_streams(staged, element)

    def fence(self) -> object:
        return self._runtime.record_engine()

    def copy(self, moves: Moves, fence: object | None, *, to_host: bool) -> None:
        """Run one batch after the other. Raises TransferError, also only when the device is done."""
        self._runtime.use_device()
        streams = self._out if to_host else self._back
        for begin in range(0, len(moves), self._batch_blocks):
            stream = streams.get()
            try:
                self._run_batch(stream, moves[begin : begin + self._batch_blocks], fence, to_host=to_host)
            finally:
                streams.put(stream)

    def _make_streams(self, staged: int, element: torch.dtype) -> queue.SimpleQueue[_CopyStream]:
        least, _ = self._runtime.priority_range()
        streams: queue.SimpleQueue[_CopyStream] = queue.SimpleQueue()
        for _ in range(STREAMS_PER_DIRECTION):
            streams.put(_CopyStream.make(self._runtime, least, staged, self._slot_stride, element))
        return streams

    def _run_batch(self, stream: _CopyStream, moves: Moves, fence: object | None, *, to_host: bool) -> None:
        runtime, handle = self._runtime, stream.handle
        try:
            if fence is not None:
                runtime.wait(handle, fence)
            kept = self._enqueue(stream, moves, to_host=to_host)
            runtime.synchronize(runtime.record(handle))
            del kept  # the driver may read it until here
        except BaseException as error:  # whatever it is, copies that were enqueued before it may still run
            self._drain(stream)
            if not isinstance(error, RuntimeError):
                raise
            raise TransferError(f"copy on a CUDA device failed: {error}") from error

    def _drain(self, stream: _CopyStream) -> None:
        """Wait for copies that were enqueued before the failure. A lost context copies nothing any more."""
        with suppress(RuntimeError):
            self._runtime.synchronize_stream(stream.handle)

    def _enqueue(self, stream: _CopyStream, moves: Moves, *, to_host: bool) -> object:
        if self._is_direct:
            return self._copy(stream, self._direct(moves), to_host=to_host)
        rows, staging = stream.upload_rows(self._runtime, moves.blocks), stream.staging[: len(moves)]
        for sheet in self._sheets if to_host else ():
            self._runtime.gather(stream.handle, sheet.g1, rows, sheet.inside(staging))
        kept = self._copy(stream, [self._staged(stream, moves)], to_host=to_host)
        for sheet in () if to_host else self._sheets:
            self._runtime.scatter(stream.handle, sheet.inside(staging), rows, sheet.g1)
        return kept

    def _copy(self, stream: _CopyStream, parts: Sequence[Spans], *, to_host: bool) -> object:
        """Enqueue all copies; the driver's call that fails once is not used again. Copies that it may have enqueued
        before it failed are enqueued again, with the same bytes."""
        if self._uses_batch_copy:
            try:
                return self._runtime.copy_batch(stream.handle, parts, to_host=to_host)
            except RuntimeError as error:
                self._uses_batch_copy = False
                log.warning("kvbm: %s; kvbm copies the ranges one by one from now on", error)
        self._runtime.copy_each(stream.handle, parts, to_host=to_host)
        return None

    def _staged(self, stream: _CopyStream, moves: Moves) -> Spans:
        """Return runs of whole slots, with padding, and their parts of the staging buffer."""
        begin, end = np.array(consecutive(moves.slots, border=self._slots_per_pin)).T
        stride = self._slot_stride
        return Spans(stream.staged_bytes, begin * stride, moves.slots[begin] * stride, (end - begin) * stride)

    def _direct(self, moves: Moves) -> list[Spans]:
        """Return every piece of every block; blocks that are neighbours on both sides are one range."""
        if not self._is_dense:
            return [pieces.spans(moves, self._slot_stride) for pieces in self._pieces]
        begin, end = np.array(consecutive(moves.slots, moves.blocks, border=self._slots_per_pin)).T
        (pieces,), stride = self._pieces, self._slot_stride
        starts = pieces.offsets[0] + moves.blocks[begin] * stride
        return [Spans(pieces.memory, starts, moves.slots[begin] * stride, (end - begin) * stride)]


def _is_direct(layout: BlockLayout, has_batch_copy: bool) -> bool:
    shortest = min(piece.length for piece in layout.pieces)
    return len(layout.pieces) == 1 or (has_batch_copy and shortest >= MIN_DIRECT_BYTES)


@dataclass(frozen=True, slots=True)
class _CopyStream:
    """A stream with buffers of its own: staged blocks, and block numbers on the host and on the device."""

    handle: Any
    staging: torch.Tensor  # [blocks, elements of a slot]
    staged_bytes: torch.Tensor
    host_rows: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def make(
        cls, runtime: CudaRuntime, priority: int, staged: int, slot_stride: int, element: torch.dtype
    ) -> _CopyStream:
        import torch

        memory = runtime.empty(staged * slot_stride, torch.uint8)
        staging = memory.view(element).view(staged, slot_stride // element.itemsize)
        host_rows, rows = runtime.empty_on_host(staged, torch.int64), runtime.empty(staged, torch.int64)
        return cls(runtime.make_stream(priority), staging, memory, host_rows, rows)

    def upload_rows(self, runtime: CudaRuntime, blocks: NDArray[np.int64]) -> torch.Tensor:
        """Enqueue the block numbers, and return them on the device."""
        count = len(blocks)
        self.host_rows[:count].numpy()[:] = blocks
        runtime.upload(self.handle, self.host_rows[:count], self.rows[:count])
        return self.rows[:count]


@dataclass(frozen=True, slots=True)
class _DeviceSheet:
    """A sheet as a view [blocks, pieces, elements] of G1, and its columns in a slot."""

    g1: torch.Tensor
    begin: int
    end: int

    @classmethod
    def of(cls, sheet: Sheet, block_count: int, storages: Sequence[torch.Tensor], element: torch.dtype) -> _DeviceSheet:
        size, first = element.itemsize, sheet.first
        storage = storages[first.storage]
        words = storage[: storage.numel() // size * size].view(element)
        shape = (block_count, sheet.count, first.length // size)
        strides = (first.block_stride // size, sheet.piece_stride // size, 1)
        begin = sheet.slot_offset // size
        return cls(words.as_strided(shape, strides, first.offset // size), begin, begin + sheet.slot_bytes // size)

    def inside(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the columns of this sheet in staged blocks, in the shape of the sheet."""
        return rows[:, self.begin : self.end].unflatten(1, tuple(self.g1.shape[1:]))


@dataclass(frozen=True, slots=True)
class _DevicePieces:
    """The pieces of a block in one storage: their offsets and strides in G1, and their places in a slot."""

    memory: torch.Tensor
    offsets: NDArray[np.int64]
    strides: NDArray[np.int64]
    lengths: NDArray[np.int64]
    slot_offsets: NDArray[np.int64]

    @classmethod
    def of(cls, layout: BlockLayout, index: int, storage: torch.Tensor) -> _DevicePieces:
        own: list[tuple[Piece, int]] = [
            (piece, at) for piece, at in zip(layout.pieces, layout.slot_offsets, strict=True) if piece.storage == index
        ]
        numbers = np.array([(p.offset, p.block_stride, p.length, at) for p, at in own], np.int64).reshape(-1, 4)
        return cls(storage, *numbers.T)

    def spans(self, moves: Moves, slot_stride: int) -> Spans:
        starts = self.offsets + moves.blocks[:, None] * self.strides
        host_starts = self.slot_offsets + moves.slots[:, None] * slot_stride
        lengths = np.broadcast_to(self.lengths, starts.shape)
        return Spans(self.memory, starts.reshape(-1), host_starts.reshape(-1), lengths.reshape(-1))
