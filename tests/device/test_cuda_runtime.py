"""What the runtime passes to torch and to the driver: over CPU tensors, with streams that do nothing."""

import ctypes
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from copies import SLOTS, Rig, check_integrity, layers, odd_bytes, storage_per_layer, whole_pages

from kvbm.device import cuda, cuda_runtime, worker
from kvbm.device.copier import DeviceCopier
from kvbm.device.cuda_runtime import CudaRuntime
from kvbm.device.worker import HostCapacity, Worker


class Stream:
    cuda_stream = 77

    def __init__(self, device, priority):
        self.priority = priority

    @staticmethod
    def priority_range():
        return 0, -5

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass


class Event:
    def __init__(self, **_):
        self.streams = []

    def record(self, stream):
        self.streams.append(stream)

    def synchronize(self):
        assert self.streams


SIGNATURE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.POINTER(ctypes.c_int64),) * 3,
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_int),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.c_void_p,
)


class Driver:
    """libcuda, whose batch call copies at once and remembers its other arguments."""

    def __init__(self, version=13000, result=0):
        self.calls, self.version, self.result = [], version, result
        self.selected = []
        self._call = SIGNATURE(self._copy)
        self.cuGetProcAddress_v2 = Lookup(self)

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, device, ordinal):
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = ordinal
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        ctypes.cast(context, ctypes.POINTER(ctypes.c_void_p))[0] = 1000 + device.value
        return 0

    def cuCtxSetCurrent(self, context):
        self.selected.append(context.value)
        return 0

    def _copy(self, targets, sources, lengths, count, attributes, first, attribute_count, failed, stream):
        self.calls.append((count, attributes[:6], first[0], attribute_count, stream))
        if self.result == 0:
            for i in range(count):
                ctypes.memmove(targets[i], sources[i], lengths[i])
        return self.result


class Lookup:
    """cuGetProcAddress: a driver before 12.8 does not find the call."""

    def __init__(self, driver):
        self._driver = driver

    def __call__(self, symbol, address, version, flags, status):
        assert (symbol, version, flags) == (b"cuMemcpyBatchAsync", 12080, 0)
        if self._driver.version >= version:
            found = ctypes.cast(self._driver._call, ctypes.c_void_p).value
            ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))[0] = found
        return 0


@pytest.fixture
def make_rig(monkeypatch):
    """Return a rig whose copier uses the real runtime and this driver."""
    selected = []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the engine's stream on {device}")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=None, device=None, **how: empty(*a, **how))

    def make(cache, driver):
        load = ctypes.CDLL
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver if name == "libcuda.so.1" else load(name))
        rig = Rig(cache)
        runtime = CudaRuntime(torch.device("cuda", 1), rig.segment.payload)
        rig.copier = DeviceCopier(rig.layout, rig.storages, rig.segment, runtime=runtime)
        rig.selected = selected
        return rig

    return make


@pytest.mark.parametrize("version", [12070, 12080, 13000])
@pytest.mark.parametrize("cache", [whole_pages, layers, odd_bytes, storage_per_layer], ids=lambda cache: cache.__name__)
@pytest.mark.parametrize("shortest", [1, 1 << 40])
def test_a_block_survives_the_way_out_and_back_into_another_place(make_rig, cache, version, shortest, monkeypatch):
    monkeypatch.setattr(cuda, "MIN_DIRECT_BYTES", shortest)
    driver = Driver(version)
    check_integrity(make_rig(cache, driver), [11, 0, 6, 2], [8, 0, 4, 5], [1, 7, 3, 10])
    assert len(driver.calls) == (2 if version >= 12080 else 0)


def test_the_driver_reads_sources_in_stream_order_and_gets_one_attribute_for_all_copies(make_rig):
    driver = Driver()
    make_rig(layers, driver).copier.offload([5, 3], [0, 2], None)
    assert ctypes.sizeof(cuda_runtime._CopyAttributes) == 24
    assert driver.calls == [(2, [1, 0, 0, 0, 0, 0], 0, 1, Stream.cuda_stream)]


def test_an_error_of_the_driver_falls_back_to_copies_one_by_one(make_rig, caplog):
    driver = Driver(result=801)
    rig = make_rig(layers, driver)
    check_integrity(rig, [5, 3], [0, 2], [1, 2])
    assert len(driver.calls) == 1
    assert "CUDA error 801" in caplog.text


def test_a_thread_selects_the_device_and_its_context(make_rig):
    driver = Driver()
    rig = make_rig(layers, driver)
    rig.copier.offload([0], [0], rig.copier.fence())
    assert (rig.selected, driver.selected) == ([torch.device("cuda", 1)], [1001])


def test_a_fence_is_recorded_in_the_current_stream_of_the_device(make_rig):
    assert make_rig(layers, Driver()).copier.fence().streams == ["the engine's stream on cuda:1"]


def test_a_driver_that_does_not_start_is_an_error(make_rig):
    driver = Driver()
    driver.cuInit = lambda flags: 100
    with pytest.raises(RuntimeError, match="cuInit failed: CUDA error 100"):
        make_rig(layers, driver)


# -- where the device is -----------------------------------------------------------------------------------------------


class Storage:
    is_cuda, device = True, "cuda:1"


def test_host_memory_is_page_locked_on_the_device_of_the_rank(monkeypatch):
    current, used = ["cuda:0"], []

    @contextmanager
    def use(device):
        current.append(device)
        yield
        current.pop()

    def create(**facts):
        assert facts["pin"]
        used.append(current[-1])
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "device", use)
    monkeypatch.setattr(worker.Segment, "create", create)
    with pytest.raises(InterruptedError):
        Worker.create(layers("cpu")[0], [Storage()], HostCapacity(block_count=SLOTS), binds_memory=False)
    assert used == ["cuda:1"]


def test_cpu_memory_has_no_device_to_use_and_no_node():
    with cuda_runtime.on_device(torch.zeros(1)):
        assert cuda_runtime.numa_node_of(torch.zeros(1)) is None


def test_the_node_of_a_device_is_that_of_its_address(monkeypatch):
    asked = []

    class Facts:
        pci_domain_id, pci_bus_id, pci_device_id = 0, 0x1B, 0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Facts)
    monkeypatch.setattr(cuda_runtime, "node_of_pci_device", lambda address: asked.append(address) or np.int64(1))
    assert cuda_runtime.numa_node_of(Storage()) == 1
    assert asked == ["0000:1b:00.0"]
