"""CudaRuntime: the calls of torch and of the CUDA driver that the copies of one device need, and nothing else.

`cuda` decides what is copied, in which order, and what waits for what. This module only executes it, so that tests can
replace it with a runtime over CPU memory that executes everything as late as CUDA allows. No call waits for the device
except `synchronize` and `synchronize_stream`. Errors of the device are RuntimeErrors, as in torch.

A thread calls `use_device` before any other call on a stream. In a thread that has never selected a device, CUDA
selects GPU 0 and opens a context there, which takes several hundred MiB of its memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvbm.host.machine_memory import node_of_pci_device

if TYPE_CHECKING:
    import torch

LIBRARY = "libcuda.so.1"
BATCH_COPY_VERSION = 12080  # CUDA 12.8; its signature has `failIdx`, which CUDA 13 removed from `_v2`
SOURCE_ACCESS_IN_STREAM_ORDER = 1


@dataclass(frozen=True, slots=True)
class Spans:
    """Ranges of `memory`, contiguous bytes on the device, and the ranges of host memory that they are copied to or
    from. Starts are offsets in bytes."""

    memory: torch.Tensor
    starts: NDArray[np.int64]
    host_starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


class CudaRuntime:
    """The CUDA device `device`, and `payload`, the host memory of the copies. See the module's text."""

    def __init__(self, device: torch.device, payload: NDArray[np.uint8]) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._payload = payload
        self._host = torch.from_numpy(payload).view(-1)
        self._driver = _Driver(device.index)

    @property
    def has_batch_copy(self) -> bool:
        """Whether the driver copies many ranges in one call (CUDA 12.8 and later)."""
        return self._driver.batch_copy is not None

    def use_device(self) -> None:
        """Select the device in the calling thread."""
        self._torch.cuda.set_device(self._device)
        self._driver.use_context()

    def priority_range(self) -> tuple[int, int]:
        """Return the (least, greatest) priority of streams. In CUDA a smaller number is a greater priority."""
        least, greatest = self._torch.cuda.Stream.priority_range()
        return int(least), int(greatest)

    def make_stream(self, priority: int) -> Any:
        return self._torch.cuda.Stream(self._device, priority=priority)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate device memory."""
        return self._torch.empty(count, dtype=dtype, device=self._device)

    def empty_on_host(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate page-locked host memory. A copy from other memory would wait for the whole stream."""
        with self._torch.cuda.device(self._device):
            return self._torch.empty(count, dtype=dtype, pin_memory=True)

    def record_engine(self) -> object:
        """Record an event in the current stream of the calling thread, which is the engine's."""
        event = self._torch.cuda.Event()
        event.record(self._torch.cuda.current_stream(self._device))
        return event

    def record(self, stream: Any) -> object:
        """Record an event behind the work of `stream` so far."""
        event = self._torch.cuda.Event(blocking=True)  # the thread that waits for it sleeps
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Make later work of `stream` wait for the event."""
        stream.wait_event(event)

    def synchronize(self, event: Any) -> None:
        """Wait until the device has reached the event. Releases the GIL."""
        event.synchronize()

    def synchronize_stream(self, stream: Any) -> None:
        stream.synchronize()

    def upload(self, stream: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy from page-locked host memory of `empty_on_host`."""
        with self._torch.cuda.stream(stream), self._torch.inference_mode():
            target.copy_(source, non_blocking=True)

    def gather(self, stream: Any, source: torch.Tensor, rows: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `source[rows[i]]` to `target[i]`, on the device."""
        with self._torch.cuda.stream(stream), self._torch.inference_mode():
            self._torch.index_select(source, 0, rows, out=target)

    def scatter(self, stream: Any, source: torch.Tensor, rows: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `source[i]` to `target[rows[i]]`, on the device."""
        with self._torch.cuda.stream(stream), self._torch.inference_mode():
            target.index_copy_(0, rows, source)

    def copy_batch(self, stream: Any, parts: Sequence[Spans], *, to_host: bool) -> object:
        """Copy all ranges in one call of the driver. The caller keeps the result until the copies have ended, because
        the driver may read it until then. Raises RuntimeError if the driver refuses."""
        assert self._driver.batch_copy is not None
        device = np.concatenate([spans.memory.data_ptr() + spans.starts for spans in parts])
        host = np.concatenate([self._payload.ctypes.data + spans.host_starts for spans in parts])
        lengths = np.concatenate([spans.lengths for spans in parts])
        targets, sources = (host, device) if to_host else (device, host)
        self._driver.batch_copy.enqueue(targets, sources, lengths, stream.cuda_stream)
        return targets, sources, lengths

    def copy_each(self, stream: Any, parts: Sequence[Spans], *, to_host: bool) -> None:
        """Copy one range after the other, in one call of torch, which releases the GIL once."""
        device, host = [], []
        for spans in parts:
            for start, host_start, length in zip(
                spans.starts.tolist(), spans.host_starts.tolist(), spans.lengths.tolist(), strict=True
            ):
                device.append(spans.memory[start : start + length])
                host.append(self._host[host_start : host_start + length])
        targets, sources = (host, device) if to_host else (device, host)
        with self._torch.cuda.stream(stream), self._torch.inference_mode():
            self._torch._foreach_copy_(targets, sources, non_blocking=True)


class _Driver:
    """libcuda, which torch has loaded, for what torch has no call for."""

    def __init__(self, ordinal: int) -> None:
        self._cuda = ctypes.CDLL(LIBRARY)
        self._set_context = ctypes.PyDLL(LIBRARY).cuCtxSetCurrent  # too short to release the GIL for
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._require(self._cuda.cuInit(0), "cuInit")
        self._require(self._cuda.cuDeviceGet(ctypes.byref(device), ordinal), "cuDeviceGet")
        retained = self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device)
        self._require(retained, "cuDevicePrimaryCtxRetain")
        self.batch_copy = _BatchCopy.find(self._cuda)

    def use_context(self) -> None:
        """Bind the context of the device, which torch uses too, to the calling thread. `set_device` does not if the
        device is the default one, and then calls of the driver fail."""
        self._require(self._set_context(self._context), "cuCtxSetCurrent")

    def _require(self, result: int, call: str) -> None:
        if result != 0:
            raise RuntimeError(f"{call} failed: CUDA error {result}")


class _MemoryLocation(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes of cuda.h. Location hints are for managed memory only; zero means that there is none."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _MemoryLocation),
        ("target_hint", _MemoryLocation),
        ("flags", ctypes.c_uint),
    )


class _BatchCopy:
    """cuMemcpyBatchAsync with the signature of CUDA 12.8, which later drivers keep."""

    def __init__(self, address: int) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        # (targets, sources, lengths, count, attributes, first copies of attributes, attribute count, failIdx, stream)
        signature = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
        self._call = ctypes.CFUNCTYPE(ctypes.c_int, *signature)(address)

    @classmethod
    def find(cls, cuda: ctypes.CDLL) -> _BatchCopy | None:
        """Return None if the driver is older than CUDA 12.8."""
        address, status = ctypes.c_void_p(), ctypes.c_int()
        try:
            lookup = cuda.cuGetProcAddress_v2
        except AttributeError:  # before CUDA 12
            return None
        lookup.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)
        result = lookup(b"cuMemcpyBatchAsync", ctypes.byref(address), BATCH_COPY_VERSION, 0, ctypes.byref(status))
        return cls(address.value) if result == 0 and address.value else None

    def enqueue(
        self, targets: NDArray[np.int64], sources: NDArray[np.int64], lengths: NDArray[np.int64], stream: int
    ) -> None:
        """Enqueue the copies, which have no order among each other. The source is read in stream order: any other order
        could read G1 before the fence."""
        attributes = _CopyAttributes(source_access_order=SOURCE_ACCESS_IN_STREAM_ORDER)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        result = self._call(
            targets.ctypes.data,
            sources.ctypes.data,
            lengths.ctypes.data,
            len(targets),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        if result != 0:
            raise RuntimeError(f"cuMemcpyBatchAsync of {len(targets)} copies: CUDA error {result}")


def on_device(storage: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context in which the calling thread uses the device of `storage`; nothing for CPU memory."""
    if not storage.is_cuda:
        return nullcontext()
    import torch

    guard: AbstractContextManager[object] = torch.cuda.device(storage.device)
    return guard


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
