"""CudaPath: copies between G1 on a CUDA device and page-locked slots. `copier` checks the numbers and calls it.

There is one stream per direction. It waits for the fence, all copies are enqueued, then the copying thread waits for
the device. Pieces of layer-separate caches pass through a staging buffer on the device (`index_select` out of G1,
`index_copy_` into it), so that whole blocks cross the link, consecutive slots in one copy. A block of one piece is
copied directly.

torch releases the GIL in each call, and a copying thread may wait long to reacquire it. So the copies of a batch are
one call. No thread waits for the device while it holds the stream's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvbm.errors import TransferError
from kvbm.host.layout import consecutive
from kvbm.host.machine_memory import node_of_pci_device

if TYPE_CHECKING:
    import torch

    from kvbm.device.copier import Moves
    from kvbm.host.layout import BlockLayout, Sheet

STAGING_BYTES = 64 << 20


class CudaPath:
    """Copies on one CUDA device. The segment should be page-locked: copies from pageable memory are slow. No copy
    crosses a multiple of `slots_per_pin`."""

    def __init__(
        self,
        layout: BlockLayout,
        storages: Sequence[torch.Tensor],
        payload: NDArray[np.uint8],
        slots_per_pin: int | None = None,
    ) -> None:
        import torch

        numbers = [number for p in layout.pieces for number in (p.offset, p.block_stride, p.length)]
        element = torch.int64 if gcd(*numbers) % 8 == 0 else torch.uint8
        self._device = storages[0].device
        self._slots_per_pin = slots_per_pin
        self._slots = torch.from_numpy(payload).view(element)
        self._block_size = layout.block_bytes // element.itemsize
        self._sheets = [_DeviceSheet.of(sheet, layout.block_count, storages, element) for sheet in layout.sheets()]
        self._is_direct = len(layout.pieces) == 1
        staging = 0 if self._is_direct else min(layout.block_count, max(1, STAGING_BYTES // layout.slot_stride))
        self._out = _Direction(self._device, self._slots, staging)
        self._back = _Direction(self._device, self._slots, staging)

    def fence(self) -> object:
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def offload(self, moves: Moves, fence: object | None) -> None:
        slots, blocks = zip(*moves, strict=True)
        self._out.run(fence, lambda: self._enqueue_offload(blocks, slots))

    def onboard(self, moves: Moves, fence: object | None) -> None:
        slots, blocks = zip(*moves, strict=True)
        self._back.run(fence, lambda: self._enqueue_onboard(blocks, slots))

    def _enqueue_offload(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        if self._is_direct:
            g1, g2 = self._direct_runs(blocks, slots)
            _copy_all(g2, g1)
            return
        import torch

        for begin, end in self._out.batches(len(blocks)):
            rows, count = self._on_device(blocks[begin:end]), end - begin
            for sheet in self._sheets:
                torch.index_select(sheet.g1, 0, rows, out=sheet.inside(self._out.staging[:count]))
            g2, staged = self._staged_runs(self._out, slots[begin:end])
            _copy_all(g2, staged)

    def _enqueue_onboard(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        if self._is_direct:
            g1, g2 = self._direct_runs(blocks, slots)
            _copy_all(g1, g2)
            return
        for begin, end in self._back.batches(len(blocks)):
            rows, count = self._on_device(blocks[begin:end]), end - begin
            g2, staged = self._staged_runs(self._back, slots[begin:end])
            _copy_all(staged, g2)
            for sheet in self._sheets:
                sheet.g1.index_copy_(0, rows, sheet.inside(self._back.staging[:count]))

    def _direct_runs(
        self, blocks: Sequence[int], slots: Sequence[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return (pieces of G1, pieces of slots), each contiguous; neighbours on both sides are one piece."""
        g1, size = self._sheets[0].g1[:, 0], self._block_size
        is_dense = g1.is_contiguous() and self._slots.shape[1] == size
        runs = (
            consecutive(slots, blocks, border=self._slots_per_pin)
            if is_dense
            else [(i, i + 1) for i in range(len(blocks))]
        )
        return (
            [g1[blocks[begin] : blocks[begin] + end - begin].view(-1) for begin, end in runs],
            [self._slots[slots[begin] : slots[begin] + end - begin, :size].view(-1) for begin, end in runs],
        )

    def _staged_runs(
        self, direction: _Direction, slots: Sequence[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return (runs of whole slots with padding, their parts of the staging buffer)."""
        runs = consecutive(slots, border=self._slots_per_pin)
        return (
            [self._slots[slots[begin] : slots[begin] + end - begin] for begin, end in runs],
            [direction.staging[begin:end] for begin, end in runs],
        )

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        """Copy numbers through page-locked memory: a copy from pageable memory would wait for the whole stream."""
        import torch

        return torch.tensor(numbers).pin_memory().to(self._device, non_blocking=True)


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


class _Direction:
    """A stream and its staging buffer. Copies of one direction share the link, so they are enqueued one by one."""

    def __init__(self, device: torch.device, slots: torch.Tensor, staging_blocks: int) -> None:
        import torch

        self._stream = torch.cuda.Stream(device)
        self._enqueuing = threading.Lock()
        self.staging = torch.empty((staging_blocks, slots.shape[1]), dtype=slots.dtype, device=device)

    def batches(self, block_count: int) -> Iterator[tuple[int, int]]:
        """Return index ranges that fit into the staging buffer. The stream runs them in order."""
        size = len(self.staging)
        return ((begin, min(begin + size, block_count)) for begin in range(0, block_count, size))

    def run(self, fence: Any, enqueue: Callable[[], None]) -> None:
        """Enqueue after the fence and wait for the device. Raises TransferError, also only when the device is done."""
        import torch

        done = torch.cuda.Event(blocking=True)
        try:
            with self._enqueuing, torch.cuda.stream(self._stream), torch.inference_mode():
                if fence is not None:
                    self._stream.wait_event(fence)
                enqueue()
                done.record(self._stream)
            done.synchronize()
        except BaseException as error:  # whatever it is, copies that were enqueued before it may still run
            self._drain()
            if not isinstance(error, RuntimeError):
                raise
            raise TransferError(f"copy on {self._stream.device} failed: {error}") from error

    def _drain(self) -> None:
        """Wait for copies that were enqueued before the failure. A lost context copies nothing any more."""
        with suppress(RuntimeError):
            self._stream.synchronize()


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Enqueue the copies in one call, which releases the GIL once."""
    import torch

    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)


def numa_node_of(storage: torch.Tensor) -> int | None:
    """Return the NUMA node of the device of `storage`; None for CPU memory, or if it is unknown."""
    if not storage.is_cuda:
        return None
    import torch

    facts = torch.cuda.get_device_properties(storage.device)
    try:
        address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    except AttributeError:  # torch before 2.8 lacks these properties
        return None
    return node_of_pci_device(address)
