"""What the CUDA way asks torch to do, on CPU tensors: views, gathers, batches and errors.

Streams and events are replaced by ones that do nothing, since without a device everything is done at once. That the
device keeps their promises is for tests/gpu.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from copies import CACHES, Rig, check_integrity, layers

from kvbm.device import cuda
from kvbm.errors import TransferError


class Stream:
    device = "cuda:0"

    def __init__(self, *_, **__):
        self.waited_for = []
        self.synchronized = 0

    def wait_event(self, event):
        self.waited_for.append(event)

    def synchronize(self):
        self.synchronized += 1


class Event:
    def __init__(self, **_):
        self.recorded_on = []

    def record(self, stream):
        self.recorded_on.append(stream)

    def synchronize(self):
        assert self.recorded_on


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the engine's stream")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


def rig_of(cache, slots_per_pin=None):
    rig = Rig(cache)
    rig.copier._path = cuda.CudaPath(rig.layout, rig.storages, rig.segment.payload, slots_per_pin)
    return rig


@pytest.mark.parametrize("staging_blocks", [1, 3, 100])
@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.__name__)
def test_a_block_survives_the_way_out_and_back_into_another_place(cache, staging_blocks, monkeypatch):
    rig = Rig(cache)
    monkeypatch.setattr(cuda, "STAGING_BYTES", staging_blocks * rig.layout.slot_stride)
    for case in (
        ([2, 3, 4, 5], [1, 2, 3, 4], [6, 7, 8, 9]),
        ([11, 0, 6, 2], [8, 0, 4, 2], [1, 7, 3, 10]),
        ([], [], []),
    ):
        check_integrity(rig_of(cache), *case)


@pytest.mark.parametrize("slots_per_pin", [1, 2, 5])
@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.__name__)
def test_no_copy_crosses_from_one_page_locked_range_into_the_next(cache, slots_per_pin, monkeypatch):
    """The device refuses such a copy."""
    rig = rig_of(cache, slots_per_pin)
    start, size = rig.segment.payload.ctypes.data, slots_per_pin * rig.layout.slot_stride
    copy_all, copied = cuda._copy_all, []

    def refuse_border(targets, sources):
        for tensor in (*targets, *sources):
            first = tensor.data_ptr() - start
            if 0 <= first < rig.segment.payload.nbytes:
                assert first // size == (first + tensor.nbytes - 1) // size, "invalid argument"
                copied.append(tensor)
        copy_all(targets, sources)

    monkeypatch.setattr(cuda, "_copy_all", refuse_border)
    check_integrity(rig, [2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6], [3, 4, 5, 6, 7, 8])
    assert copied


@pytest.mark.parametrize("way", ["offload", "onboard"])
def test_a_copy_waits_for_its_fence_in_the_stream_of_its_direction(way):
    rig = rig_of(layers)
    fence = rig.copier.fence()
    assert fence.recorded_on == ["the engine's stream"]
    getattr(rig.copier, way)([0], [0], fence)
    path = rig.copier._path
    own, other = (path._out, path._back) if way == "offload" else (path._back, path._out)
    assert own._stream.waited_for == [fence]
    assert other._stream.waited_for == []


def test_an_exception_of_any_kind_is_raised_only_when_the_stream_has_ended(monkeypatch):
    """What was enqueued before it may still write to blocks that are released after the report."""
    rig = rig_of(layers)

    def broken(*_, **__):
        raise IndexError("a bug")

    monkeypatch.setattr(torch, "_foreach_copy_", broken)
    with pytest.raises(IndexError):
        rig.copier.offload([0], [0], None)
    assert rig.copier._path._out._stream.synchronized == 1


def test_a_failure_is_reported_when_the_stream_has_ended(monkeypatch):
    rig = rig_of(layers)

    def broken(*_, **__):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch, "_foreach_copy_", broken)
    with pytest.raises(TransferError, match="cuda:0 failed: CUDA error"):
        rig.copier.offload([0], [0], None)
    assert rig.copier._path._out._stream.synchronized == 1


def test_consecutive_slots_cross_the_link_together(monkeypatch):
    rig = rig_of(layers)
    crossings = []
    real = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, at, **how: (crossings.append(len(to)), real(to, at, **how)))
    rig.copier.offload([5, 3, 8, 1], [0, 1, 2, 6], None)
    rig.copier.onboard([0, 1, 2, 6], [5, 3, 8, 1], None)
    assert crossings == [2, 2]


def test_the_node_of_cpu_memory_is_not_asked_for():
    assert cuda.numa_node_of(torch.zeros(1)) is None


def test_a_device_that_says_where_it_hangs_is_looked_up(monkeypatch):
    asked = []

    class Facts:
        pci_domain_id, pci_bus_id, pci_device_id = 0, 0x1B, 0

    class Storage:
        is_cuda, device = True, "cuda:0"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Facts)
    monkeypatch.setattr(cuda, "node_of_pci_device", lambda address: asked.append(address) or np.int64(1))
    assert cuda.numa_node_of(Storage()) == 1
    assert asked == ["0000:1b:00.0"]
