"""A stand-in for CUDA on CPU memory: copies run late, in any order that streams and events allow.

    machine = LateMachine("random", seed=3)              # or "late", or "early"
    copier = DeviceCopier(layout, storages, segment, runtime=machine.runtime(0, storages, segment))
    machine.engine(0).run(lambda: ...)                   # a kernel of the engine, in a stream of its own

A call on a stream only queues an operation. Operations of one stream run in order; one that waits for an event runs
after everything that the event marks. Otherwise the order is free:

    random   after each call some operations run, chosen at random; a synchronisation runs random ones until it may end
    late     an operation runs only when a thread waits for it
    early    an operation runs as soon as its stream and its events allow it

Operations move real bytes, so that a missing fence, a report before the event or a buffer that is reused too early
gives wrong bytes. What the device refuses, or what opens a context on another device, raises an AssertionError, which
also remains in `machine.violations`: a call in a thread that has not selected the device, memory of another device, a
range outside of its memory, a host range that crosses the border of two page-locked ranges.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

LIMIT_S = 30.0
PRIORITIES = (0, -5)  # (least, greatest), as in CUDA


@dataclass(eq=False)
class Stream:
    device: int
    priority: int
    queued: deque[Operation] = field(default_factory=deque)
    accepted: int = 0
    executed: int = 0


@dataclass(frozen=True)
class Event:
    """Everything that `stream` had accepted when the event was recorded."""

    stream: Stream
    position: int

    def is_reached(self) -> bool:
        return self.stream.executed >= self.position


@dataclass(frozen=True)
class Operation:
    run: Callable[[], None]
    after: Event | None = None  # runs only then

    def may_run(self) -> bool:
        return self.after is None or self.after.is_reached()


class LateMachine:
    """Streams of all devices of one process. Any thread may call it."""

    def __init__(self, mode: str = "random", seed: int = 0) -> None:
        assert mode in ("random", "late", "early"), mode
        self.violations: list[str] = []
        self._mode = mode
        self._random = random.Random(seed)
        self._changed = threading.Condition(threading.RLock())
        self._streams: list[Stream] = []
        self._thread = threading.local()
        self._memories: list[tuple[torch.Tensor, int]] = []  # kept, so that no address gets a second meaning
        self._engines: dict[int, Engine] = {}
        self._failures: dict[str, tuple[int, BaseException]] = {}
        self._wanted_waiters = self._waiters = 0
        self.operations: list[str] = []  # names of all calls, in their order

    def runtime(self, device: int, storages: Sequence[torch.Tensor], segment, **facts) -> LateRuntime:
        for storage in storages:
            self.place(device, storage)
        return LateRuntime(self, device, segment.payload, segment.slots_per_pin, **facts)

    def engine(self, device: int) -> Engine:
        return self._engines.setdefault(device, Engine(self, self.make_stream(device, PRIORITIES[0])))

    def fail(self, call: str, error: BaseException, *, after: int = 0) -> None:
        """Make a call of this name raise, the next one or that `after` so many. What is queued remains queued."""
        self._failures[call] = (after, error)

    def run_together(self, count: int) -> None:
        """Run nothing until so many threads wait for the device, once."""
        with self._changed:
            self._wanted_waiters, self._waiters = count, 0
            self._changed.notify_all()

    def until_waiting(self, count: int, *, timeout_s: float) -> None:
        """Return when so many threads wait for the device, or after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiters >= count, timeout_s)

    def pending(self) -> int:
        return sum(len(stream.queued) for stream in self._streams)

    def run_all(self) -> None:
        """Let the device run everything that is queued."""
        with self._changed:
            while runnable := self._runnable():
                self._execute(self._random.choice(runnable))
            assert not self.pending(), "streams wait for each other"

    # -- for the runtimes ----------------------------------------------------------------------------------------------

    @property
    def current_device(self) -> int:
        """Of the calling thread; CUDA begins with GPU 0."""
        return getattr(self._thread, "device", 0)

    def use_device(self, device: int) -> None:
        self._thread.device = device

    def place(self, device: int, memory: torch.Tensor) -> torch.Tensor:
        self._memories.append((memory, device))
        return memory

    def device_of(self, memory: torch.Tensor) -> int | None:
        """Return the device whose memory contains the tensor; None for host memory."""
        first, end = _bounds(memory)
        for owner, device in self._memories:
            begin, stop = _bounds(owner)
            if begin <= first and end <= stop:
                return device
        return None

    def require(self, is_right: bool, violation: str) -> None:
        if not is_right:
            self.violations.append(violation)
            raise AssertionError(violation)

    def make_stream(self, device: int, priority: int) -> Stream:
        with self._changed:
            stream = Stream(device, priority)
            self._streams.append(stream)
            return stream

    def called(self, name: str) -> None:
        with self._changed:
            self.operations.append(name)
            if (failure := self._failures.pop(name, None)) is not None:
                after, error = failure
                if not after:
                    raise error
                self._failures[name] = (after - 1, error)

    def enqueue(self, stream: Stream, run: Callable[[], None], after: Event | None = None) -> None:
        with self._changed:
            stream.queued.append(Operation(run, after))
            stream.accepted += 1
            if self._wanted_waiters == 0:
                self._progress()

    def synchronize(self, event: Event) -> None:
        with self._changed:
            self._waiters += 1
            self._changed.notify_all()
            if self._waiters >= self._wanted_waiters:
                self._wanted_waiters = 0
            assert self._changed.wait_for(lambda: self._wanted_waiters == 0, LIMIT_S), "other threads never waited"
            while not event.is_reached():
                runnable = self._needed(event) if self._mode == "late" else self._runnable()
                assert runnable, "the event is never reached"
                self._execute(self._random.choice(runnable))

    # -- with the lock -------------------------------------------------------------------------------------------------

    def _progress(self) -> None:
        count = {"late": 0, "early": 1 << 30, "random": self._random.choice((0, 0, 1, 3))}[self._mode]
        while count and (runnable := self._runnable()):
            self._execute(self._random.choice(runnable))
            count -= 1

    def _runnable(self) -> list[Stream]:
        return [stream for stream in self._streams if stream.queued and stream.queued[0].may_run()]

    def _needed(self, event: Event) -> list[Stream]:
        """Return the stream whose next operation brings this event nearer."""
        stream = event.stream
        while stream.queued and not stream.queued[0].may_run():
            stream = stream.queued[0].after.stream
        return [stream] if stream.queued else []

    def _execute(self, stream: Stream) -> None:
        operation = stream.queued.popleft()
        operation.run()
        stream.executed += 1


class Engine:
    """The engine's stream on one device, and its thread's view of it."""

    def __init__(self, machine: LateMachine, stream: Stream) -> None:
        self._machine, self.stream = machine, stream

    def run(self, kernel: Callable[[], None]) -> None:
        """Queue a part of a forward pass."""
        self._machine.enqueue(self.stream, kernel)


class LateRuntime:
    """`CudaRuntime` of one device of a LateMachine, for a segment that is page-locked in ranges of whole slots."""

    def __init__(
        self, machine: LateMachine, device: int, payload: np.ndarray, slots_per_pin: int, has_batch_copy: bool = True
    ) -> None:
        self.machine, self.device, self.has_batch_copy = machine, device, has_batch_copy
        self.streams: list[Stream] = []
        self._kept_by_torch: list[np.ndarray] = []
        self._host = payload.reshape(-1)
        self._pin_bytes = slots_per_pin * payload.shape[1]

    def use_device(self) -> None:
        self.machine.use_device(self.device)

    def priority_range(self) -> tuple[int, int]:
        return PRIORITIES

    def make_stream(self, priority: int) -> Stream:
        self.streams.append(self.machine.make_stream(self.device, priority))
        return self.streams[-1]

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Device memory that holds what an earlier user left there."""
        memory = torch.full((max(1, count * dtype.itemsize),), 0x5A, dtype=torch.uint8)
        return self.machine.place(self.device, memory)[: count * dtype.itemsize].view(dtype)

    def empty_on_host(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def record_engine(self) -> Event:
        """The engine's thread passes its fence; CUDA reads the current stream of the right device in any case."""
        self.machine.called("record_engine")
        stream = self.machine.engine(self.device).stream
        return Event(stream, stream.accepted)

    def record(self, stream: Stream) -> Event:
        self._called("record", stream)
        return Event(stream, stream.accepted)

    def wait(self, stream: Stream, event: Event) -> None:
        self._called("wait", stream)
        self.machine.enqueue(stream, lambda: None, after=event)

    def synchronize(self, event: Event) -> None:
        self._called("synchronize", event.stream)
        self.machine.synchronize(event)

    def synchronize_stream(self, stream: Stream) -> None:
        self._called("synchronize_stream", stream)
        self.machine.synchronize(Event(stream, stream.accepted))

    def upload(self, stream: Stream, source: torch.Tensor, target: torch.Tensor) -> None:
        self._called("upload", stream)
        self._require_here(target)
        self._require(self.machine.device_of(source) is None, "upload of memory that is on a device")
        self.machine.enqueue(stream, lambda: target.copy_(source))

    def gather(self, stream: Stream, source: torch.Tensor, rows: torch.Tensor, target: torch.Tensor) -> None:
        self._called("gather", stream)
        self._require_here(source, rows, target)
        self._require(target.shape == (len(rows), *source.shape[1:]), f"gather into {target.shape}")
        self.machine.enqueue(stream, lambda: torch.index_select(source, 0, rows, out=target))

    def scatter(self, stream: Stream, source: torch.Tensor, rows: torch.Tensor, target: torch.Tensor) -> None:
        self._called("scatter", stream)
        self._require_here(source, rows, target)
        self.machine.enqueue(stream, lambda: target.index_copy_(0, rows, source))

    def copy_batch(self, stream: Stream, parts, *, to_host: bool) -> object:
        self._require(self.has_batch_copy, "the driver has no such call")
        return self._copy("copy_batch", stream, parts, to_host)

    def copy_each(self, stream: Stream, parts, *, to_host: bool) -> None:
        self._kept_by_torch.append(self._copy("copy_each", stream, parts, to_host))

    def _copy(self, name: str, stream: Stream, parts, to_host: bool) -> np.ndarray:
        """Queue the copies in any order: those of a batch have none."""
        ranges = [
            (spans.memory, *numbers)
            for spans in parts
            for numbers in zip(spans.starts.tolist(), spans.host_starts.tolist(), spans.lengths.tolist(), strict=True)
        ]
        for spans in parts:
            self._require_here(spans.memory)
        for memory, start, host_start, length in ranges:
            self._require(0 <= start < start + length <= memory.nbytes, f"bytes {start}+{length} of {memory.nbytes}")
            self._require(0 <= host_start < host_start + length <= len(self._host), f"host bytes {host_start}+{length}")
            pins = host_start // self._pin_bytes, (host_start + length - 1) // self._pin_bytes
            self._require(pins[0] == pins[1], f"host bytes {host_start}+{length} cross a border of pins: {pins}")
        self._called(name, stream)
        self.machine.operations[-1] += f" {len(ranges)}"
        kept = np.array([numbers[1:] for numbers in ranges]).reshape(-1, 3)
        read_late = weakref.ref(kept)
        for index in random.Random(len(ranges)).sample(range(len(ranges)), len(ranges)):
            self.machine.enqueue(stream, partial(self._move, ranges[index][0], read_late, index, to_host))
        return kept

    def _move(self, memory: torch.Tensor, kept: weakref.ref, index: int, to_host: bool) -> None:
        numbers = kept()
        self._require(numbers is not None, "the numbers of a batch were freed before its copies had ended")
        start, host_start, length = numbers[index].tolist()
        device, host = memory.numpy()[start : start + length], self._host[host_start : host_start + length]
        target, source = (host, device) if to_host else (device, host)
        ctypes.memmove(target.ctypes.data, source.ctypes.data, length)

    def _called(self, name: str, stream: Stream) -> None:
        self._require(
            self.machine.current_device == self.device == stream.device,
            f"{name} on device {stream.device} in a thread that uses device {self.machine.current_device}",
        )
        self.machine.called(name)

    def _require_here(self, *memories: torch.Tensor) -> None:
        for memory in memories:
            where = self.machine.device_of(memory)
            self._require(where == self.device, f"memory of device {where} in a copy of device {self.device}")

    def _require(self, is_right: bool, violation: str) -> None:
        self.machine.require(is_right, violation)


def _bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses (first, end) of a strided tensor."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
