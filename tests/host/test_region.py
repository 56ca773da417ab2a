import errno
import fcntl
import gc
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import kvbm.host.shared_memory
from kvbm.errors import EnvironmentProblem, InvariantError
from kvbm.host.control_words import LANES
from kvbm.host.layout import BlockLayout, Piece
from kvbm.host.machine_memory import HostMemory
from kvbm.host.region import Region
from kvbm.host.segment import Segment
from kvbm.host.shared_memory import KERNEL
from kvbm.types import SegmentInfo, SlotState

LAYOUT = BlockLayout((Piece(0, 0, 5000, 5000),), 4)
SLOTS = 8
SMALL = ~os.MFD_HUGETLB  # mask of memfd flags on a machine without huge pages
EMPTY, READY, FAILED = SlotState


def segment_of(rank=0, slot_count=SLOTS, **options):
    return Segment.create(rank=rank, layout=LAYOUT, slot_count=slot_count, **options)


@pytest.fixture
def ranks():
    segments = [segment_of(rank) for rank in range(2)]
    yield segments
    for segment in segments:
        segment.close()


@pytest.fixture
def region(ranks):
    region = Region.map([segment.info for segment in ranks])
    yield region
    region.close()


def memory_with(root, *, available, **facts):
    (root / "proc/self").mkdir(parents=True)
    lines = {"MemAvailable": f"{available // 1024} kB", **facts}
    (root / "proc/meminfo").write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))
    return HostMemory(proc=root / "proc", sys=root / "sys")


# -- control words -----------------------------------------------------------------------------------------------------


def test_nothing_is_ready_in_a_fresh_segment(region):
    assert region.slot_results(range(SLOTS), 1) == [EMPTY] * SLOTS
    assert region.lane_result(0, 1) is EMPTY


def test_a_slot_is_ready_when_every_rank_has_said_so(ranks, region):
    ranks[0].write_slots([1, 3], 7, READY)
    assert region.slot_results([1, 3, 5], 7) == [EMPTY] * 3
    ranks[1].write_slots([3, 5], 7, READY)
    assert region.slot_results([1, 3, 5], 7) == [EMPTY, READY, EMPTY]


def test_a_slot_has_failed_when_any_rank_says_so(ranks, region):
    ranks[0].write_slots([2, 4], 7, READY)
    ranks[1].write_slots([2], 7, FAILED)
    ranks[1].write_slots([4], 7, READY)
    assert region.slot_results([2, 4], 7) == [FAILED, READY]


@pytest.mark.parametrize("state", [READY, FAILED])
def test_no_result_counts_while_a_rank_may_still_be_copying(ranks, region, state):
    """A failure of one rank gives slots and blocks back, and the other rank's copier may still be at them."""
    ranks[0].write_slots([2], 7, state)
    ranks[0].write_lane(5, 7, state)
    assert region.slot_results([2], 7) == [EMPTY]
    assert region.lane_result(5, 7) is EMPTY


@pytest.mark.parametrize("written", [6, 8, 7 << 8])
@pytest.mark.parametrize("state", [READY, FAILED])
def test_a_word_of_another_generation_says_nothing(ranks, region, written, state):
    for rank in ranks:
        rank.write_slots([2], written, state)
        rank.write_lane(2, written, state)
    assert region.slot_results([2], 7) == [EMPTY]
    assert region.lane_result(2, 7) is EMPTY


def test_a_rank_with_an_older_generation_has_not_finished(ranks, region):
    ranks[0].write_slots([2], 7, READY)
    ranks[1].write_slots([2], 6, FAILED)
    assert region.slot_results([2], 7) == [EMPTY]


def test_results_come_in_the_order_of_the_question(ranks, region):
    for rank in ranks:
        rank.write_slots([0, 1, 2], 7, READY)
        rank.write_slots([1], 7, FAILED)
    assert region.slot_results([2, 1, 0, 3], 7) == [READY, FAILED, READY, EMPTY]


def test_a_lane_is_no_slot(ranks, region):
    for rank in ranks:
        rank.write_lane(LANES - 1, 9, READY)
        rank.write_lane(0, 9, FAILED)
    assert region.lane_result(LANES - 1, 9) is READY
    assert region.lane_result(0, 9) is FAILED
    assert region.slot_results(range(SLOTS), 9) == [EMPTY] * SLOTS


def test_words_are_as_large_as_generations_get(ranks, region):
    last = (1 << 56) - 1
    for rank in ranks:
        rank.write_slots([SLOTS - 1], last, READY)
    assert region.slot_results([SLOTS - 1], last) == [READY]
    assert ranks[0].slots_carry([SLOTS - 1], [last])


@pytest.mark.parametrize("generation", [-1, 1 << 56])
def test_a_generation_that_does_not_fit_is_a_bug_of_ours(ranks, region, generation):
    with pytest.raises(InvariantError):
        ranks[0].write_slots([0], generation, READY)
    with pytest.raises(InvariantError):
        region.slot_results([0], generation)


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_that_does_not_exist_is_a_bug_of_ours(ranks, region, slot):
    for call in (
        lambda: ranks[0].write_slots([slot], 1, READY),
        lambda: ranks[0].slots_carry([slot], [1]),
        lambda: region.slot_results([slot], 1),
    ):
        with pytest.raises(InvariantError):
            call()


@pytest.mark.parametrize("lane", [-1, LANES])
def test_a_lane_that_does_not_exist_is_a_bug_of_ours(ranks, region, lane):
    with pytest.raises(InvariantError):
        ranks[0].write_lane(lane, 1, READY)
    with pytest.raises(InvariantError):
        region.lane_result(lane, 1)


def test_slots_carry_their_own_generations_or_do_not(ranks):
    segment = ranks[0]
    segment.write_slots([1], 5, READY)
    segment.write_slots([2], 6, READY)
    segment.write_slots([3], 6, FAILED)
    assert segment.slots_carry([1, 2], [5, 6])
    assert segment.slots_carry([2, 1], [6, 5])
    assert segment.slots_carry([], [])
    assert not segment.slots_carry([1, 2], [6, 5])
    assert not segment.slots_carry([1, 2], [5, 7])
    assert not segment.slots_carry([3], [6])
    assert not segment.slots_carry([0], [0])


def test_payload_and_words_do_not_touch_each_other(ranks, region):
    for rank in ranks:
        rank.payload[:] = 0xFF
    assert region.slot_results(range(SLOTS), 1) == [EMPTY] * SLOTS
    for rank in ranks:
        rank.write_slots(range(SLOTS), 1, READY)
        rank.write_lane(0, 1, READY)
        assert (rank.payload == 0xFF).all()
    assert ranks[0].payload.shape == (SLOTS, 8192)


# -- mapping -----------------------------------------------------------------------------------------------------------


def test_the_smallest_segment_decides_how_many_slots_there_are(ranks):
    larger = segment_of(2, SLOTS + 1)
    region = Region.map([ranks[0].info, larger.info])
    assert region.slot_count == SLOTS
    for rank in (ranks[0], larger):
        rank.write_slots([SLOTS - 1], 1, READY)
        rank.write_lane(3, 1, READY)
    assert region.slot_results([SLOTS - 1], 1) == [READY]
    assert region.lane_result(3, 1) is READY
    region.close()
    larger.close()


def test_no_rank_and_a_rank_twice_are_refused(ranks):
    for infos in ([], [ranks[0].info, ranks[0].info]):
        with pytest.raises(InvariantError):
            Region.map(infos)


def changed(info, **facts):
    return SegmentInfo(**{name: getattr(info, name) for name in info.__slots__} | facts)


def test_a_segment_that_is_gone_is_an_error_that_names_its_rank(ranks):
    with pytest.raises(EnvironmentProblem, match="rank 1"):
        Region.map([changed(ranks[1].info, fd=999_999)])


def test_a_file_that_is_no_segment_is_refused(ranks, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(ranks[0].info.length))
    with path.open("r+b") as file, pytest.raises(EnvironmentProblem, match="is not its sealed segment"):
        Region.map([changed(ranks[0].info, fd=file.fileno())])
    with pytest.raises(EnvironmentProblem, match="is not its sealed segment"):
        Region.map([changed(ranks[0].info, length=ranks[0].info.length + 4096)])


# -- memory ------------------------------------------------------------------------------------------------------------


def test_progress_rises_to_the_whole_and_every_page_is_there(monkeypatch):
    monkeypatch.setattr(kvbm.host.shared_memory, "PREFAULT_BYTES", 1 << 16)
    seen = []
    segment = segment_of(slot_count=64, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {total for _, total in seen} == {segment.info.length}
    assert seen[-1][0] == segment.info.length
    assert os.fstat(segment.info.fd).st_blocks * 512 >= segment.info.length
    segment.close()


def test_too_little_memory_is_an_error_before_any_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "memfd_create", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(EnvironmentProblem) as caught:
        segment_of(rank=3, slot_count=1000, memory=memory_with(tmp_path, available=4_096_000))
    assert "rank 3" in caught.value.message
    assert "requests 7.83 MiB" in caught.value.message
    assert "3.91 MiB are available" in caught.value.message
    assert "`tiers.host.capacity`" in (caught.value.hint or "")


def test_too_little_room_in_the_control_group_is_an_error_that_names_it(tmp_path):
    memory = memory_with(tmp_path, available=1 << 40)
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n")
    group = tmp_path / "sys/fs/cgroup/box"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("400000\n")
    (group / "memory.stat").write_text("inactive_file 0\n")
    with pytest.raises(EnvironmentProblem, match=r"0\.57 MiB are available \(.* control group .*box\)"):
        segment_of(slot_count=1000, memory=memory)


def test_memory_that_somebody_else_takes_meanwhile_ends_the_allocation_and_gives_all_back(tmp_path, monkeypatch):
    monkeypatch.setattr(kvbm.host.shared_memory, "PREFAULT_BYTES", 1 << 16)
    memory = memory_with(tmp_path, available=1 << 40)
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))

    def others_take_everything(done, total):
        (tmp_path / "proc/meminfo").write_text("MemAvailable: 1 kB\n")

    with pytest.raises(EnvironmentProblem, match="rank 0 requests"):
        segment_of(slot_count=1000, memory=memory, progress=others_take_everything)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_failure_while_pages_are_taken_says_how_far_it_came(monkeypatch):
    monkeypatch.setattr(kvbm.host.shared_memory, "PREFAULT_BYTES", 1 << 16)

    class Exhausted:
        def advise_huge_pages(self, address, length):
            pass

        def populate(self, address, fd, start, length):  # in several threads, in any order
            if start >= 2 << 16:
                raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(kvbm.host.shared_memory, "KERNEL", Exhausted())
    with pytest.raises(EnvironmentProblem, match=r"ran out after 0\.12 MiB of"):
        segment_of(slot_count=64)


def test_huge_pages_are_used_where_enough_are_reserved_and_not_otherwise(tmp_path, monkeypatch):
    flags = []
    real = os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda name, flag: (flags.append(flag), real(name, flag & SMALL))[1])
    pages = {"HugePages_Rsvd": 0, "Hugepagesize": "2048 kB"}
    for free in (1, 0):
        memory = memory_with(tmp_path / str(free), available=1 << 40, HugePages_Free=free, **pages)
        segment = segment_of(memory=memory)
        assert segment.info.length % ((2 << 20) if free else 4096) == 0
        segment.close()
    assert [bool(flag & os.MFD_HUGETLB) for flag in flags] == [True, False]


RESERVED = {"HugePages_Rsvd": 0, "Hugepagesize": "2048 kB", "HugePages_Free": 1}


def test_a_rank_that_requires_more_huge_pages_than_are_free_says_so_and_uses_small_ones(tmp_path, caplog):
    memory = memory_with(tmp_path, available=1 << 40, **RESERVED)
    segment = segment_of(slot_count=1000, memory=memory)
    segment.payload[:] = 3
    assert "rank 0 uses small pages: 2.00 MiB of huge pages are free, it requires 8.00 MiB" in caplog.text
    segment.close()


@pytest.mark.parametrize("lost", ["when they are mapped", "when they are touched"])
def test_a_rank_that_loses_the_race_for_huge_pages_uses_small_ones(lost, tmp_path, monkeypatch, caplog):
    """Another rank takes them after the check. This machine has none, so that mmap fails as after a lost race."""
    memory = memory_with(tmp_path, available=1 << 40, **RESERVED)
    if lost == "when they are touched":
        real, populate = os.memfd_create, KERNEL.populate
        failures = iter([OSError(errno.EFAULT, "Bad address")])
        monkeypatch.setattr(os, "memfd_create", lambda name, flag: real(name, flag & SMALL))

        def touched(*arguments):
            if (error := next(failures, None)) is not None:
                raise error
            populate(*arguments)

        monkeypatch.setattr(KERNEL, "populate", touched)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    segment = segment_of(memory=memory)
    segment.payload[:] = 3
    assert "rank 0 uses small pages" in caplog.text
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before + 2, "descriptors of the huge pages are still open"
    segment.close()


def test_without_madv_populate_a_shortage_is_an_error_and_no_signal(monkeypatch):
    """On a kernel before 5.14 the file allocates its pages before they are touched."""
    monkeypatch.setattr(kvbm.host.shared_memory, "MADV_POPULATE_WRITE", 9999)
    segment = segment_of(slot_count=64)
    assert os.fstat(segment.info.fd).st_blocks * 512 >= segment.info.length
    segment.close()

    def refuse(fd, start, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(EnvironmentProblem, match="ran out after"):
        segment_of(slot_count=64)


def test_a_heartbeat_changes_its_own_number_and_no_word(ranks, region):
    ranks[0].write_lane(LANES - 1, 7, READY)
    before = region.heartbeats()
    ranks[0].beat()
    after = region.heartbeats()
    assert [now != then for now, then in zip(after, before, strict=True)] == [True, False]
    ranks[1].write_lane(LANES - 1, 7, READY)
    assert region.lane_result(LANES - 1, 7) is READY
    assert region.heartbeats() == after


# -- seals -------------------------------------------------------------------------------------------------------------


def test_no_process_can_change_the_length_of_a_segment(ranks):
    """A shorter file would end every process that touches its mapping by SIGBUS."""
    info = ranks[0].info
    with open(f"/proc/{info.pid}/fd/{info.fd}", "r+b") as same:
        for length in (0, info.length - 4096, info.length + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(same.fileno(), length)
        with pytest.raises(PermissionError):  # and no process can add a seal that forbids writes
            fcntl.fcntl(same, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL])
def test_a_segment_that_can_be_shortened_is_not_mapped(ranks, seals):
    info = ranks[0].info
    fd = os.memfd_create("kvbm-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, info.length)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(EnvironmentProblem, match="is not its sealed segment"):
            Region.map([changed(info, fd=fd)])
    finally:
        os.close(fd)


# -- page-locked memory ------------------------------------------------------------------------------------------------


class Runtime:
    """cudart that only remembers which ranges are page-locked, and on which device that was."""

    def __init__(self, monkeypatch):
        self.ranges, self.device, self.devices = {}, 1, set()
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.device)
        monkeypatch.setattr(torch.cuda, "device", self.use)

    @contextmanager
    def use(self, device):
        before, self.device = self.device, device
        yield
        self.device = before

    def cudaHostRegister(self, address, size, flags):
        self.ranges[address] = size
        self.devices.add(self.device)
        return 0

    def cudaHostUnregister(self, address):
        del self.ranges[address]
        self.devices.add(self.device)

    def cudaGetErrorString(self, error):
        return "an error"


@pytest.mark.parametrize("page_bytes", [4096, 65536])
@pytest.mark.parametrize("pin_bytes", [100, 4096, 10_000, 20_480, 70_000, 1 << 40])
def test_no_slot_and_no_page_lies_in_two_page_locked_ranges(pin_bytes, page_bytes, monkeypatch):
    """The device refuses a copy that does."""
    runtime = Runtime(monkeypatch)
    monkeypatch.setattr(mmap, "PAGESIZE", page_bytes)
    monkeypatch.setattr(kvbm.host.shared_memory, "PIN_BYTES", pin_bytes)
    segment = segment_of(slot_count=23, pin=True)
    start, stride = segment.payload.ctypes.data, segment.info.slot_stride
    assert sum(runtime.ranges.values()) == segment.info.length
    assert not any((at - start) % page_bytes or size % page_bytes for at, size in runtime.ranges.items())
    for slot in range(23):
        begin, end = start + slot * stride, start + (slot + 1) * stride
        (inside,) = [at for at, size in runtime.ranges.items() if at <= begin and end <= at + size]
        if slot and slot % segment.slots_per_pin:
            assert inside <= begin - stride, "a border between slots that may be copied together"
    runtime.device = 0  # of the thread that closes it
    segment.close()
    assert not runtime.ranges
    assert runtime.devices == {1}, "a context on another device"


def test_a_segment_on_a_numa_node_keeps_its_bytes(tmp_path):
    (tmp_path / "sys/devices/system/node/node0").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/node1").mkdir()
    (tmp_path / "sys/devices/system/node/node0/meminfo").write_text("Node 0 MemFree: 1000000 kB\n")
    segment = segment_of(nodes=[0], memory=memory_with(tmp_path, available=1 << 40))
    segment.payload[3] = 5
    assert (segment.payload[3] == 5).all()
    segment.close()


def test_a_numa_node_that_cannot_be_bound_to_is_an_error(tmp_path):
    for node in (0, 900):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/node900/meminfo").write_text("Node 900 MemFree: 1000000 kB\n")
    with pytest.raises(EnvironmentProblem, match="NUMA node 900"):
        segment_of(nodes=[900], memory=memory_with(tmp_path, available=1 << 40))


def test_a_segment_without_slots_is_refused():
    with pytest.raises(InvariantError):
        segment_of(slot_count=0)


def test_a_segment_has_whole_pages_of_the_machine_and_slots_of_any_machine(monkeypatch):
    """Slots are as far apart on every machine: caches on disk and objects of the shared tier are read by all."""
    monkeypatch.setattr(mmap, "PAGESIZE", 65536)
    segment = segment_of()
    region = Region.map([segment.info])
    assert (segment.info.length, segment.info.slot_stride) == (131072, 8192)
    segment.write_slots(range(SLOTS), 7, READY)
    assert region.slot_results(range(SLOTS), 7) == [READY] * SLOTS
    segment.close()
    assert region.slot_results(range(SLOTS), 7) == [EMPTY] * SLOTS


def test_close_gives_the_memory_back_although_views_live_on():
    segment = segment_of(slot_count=64)
    fd = os.dup(segment.info.fd)
    view = segment.payload
    view[:] = 1
    segment.close()
    segment.close()
    assert os.fstat(fd).st_blocks == 0
    assert not view[:8].any()
    os.close(fd)


def test_a_closed_region_keeps_no_mapping_and_no_descriptor(ranks):
    gc.collect()  # of other tests
    before = set(os.listdir("/proc/self/fd"))
    region = Region.map([segment.info for segment in ranks])
    region.close()
    region.close()
    del region
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


# -- processes ---------------------------------------------------------------------------------------------------------

RANK = """
    import json, sys, time
    from dataclasses import asdict
    from kvbm.host.layout import BlockLayout
    from kvbm.host.segment import Segment
    from kvbm.types import SlotState
    layout = BlockLayout.block_contiguous(block_count=1, block_bytes=1 << 20)
    segment = Segment.create(rank=0, layout=layout, slot_count=64)
    segment.payload[5] = 42
    segment.write_slots([5], 7, SlotState.READY)
    print(json.dumps(asdict(segment.info)), flush=True)
    time.sleep(600)
"""
LEADER = """
    import json, sys, time
    from kvbm.host.region import Region
    from kvbm.types import SegmentInfo
    region = Region.map([SegmentInfo(**json.loads(sys.argv[1]))])
    print(region.slot_results([5], 7)[0].name, flush=True)
    time.sleep(600)
"""


class Child:
    def __init__(self, script, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


def pids_that_hold(info):
    """A function that lists the processes with this segment open or mapped. Memory that no process holds is freed."""
    segment = os.stat(f"/proc/{info.pid}/fd/{info.fd}")
    mapped = re.compile(rf" {segment.st_ino}\s+/memfd:")

    def pids():
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile
                if mapped.search((process / "maps").read_text()):
                    found.add(int(process.name))
            with suppress(OSError):
                if any(os.path.samestat(fd.stat(), segment) for fd in (process / "fd").iterdir()):
                    found.add(int(process.name))
        return found

    return pids


def test_a_leader_reads_the_words_of_a_rank_in_another_process_and_notices_its_death():
    rank = Child(RANK)
    info = SegmentInfo(**json.loads(rank.line))
    region = Region.map([info])
    assert region.slot_results([5], 7) == [READY]
    with open(f"/proc/{info.pid}/fd/{info.fd}", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        assert np.frombuffer(view[5 << 20 : 6 << 20], np.uint8).tolist() == [42] * (1 << 20)
    assert not region.has_lost_rank()
    rank.kill()
    assert region.has_lost_rank()
    region.close()
    with pytest.raises(EnvironmentProblem, match="cannot map the segment of rank 0"):
        Region.map([info])


@pytest.mark.parametrize("first", ["rank", "leader"])
def test_nothing_is_left_when_both_processes_are_killed(first):
    rank = Child(RANK)
    leader = Child(LEADER, rank.line)
    assert leader.line == "READY\n"
    pids = pids_that_hold(SegmentInfo(**json.loads(rank.line)))
    assert pids() == {rank.process.pid, leader.process.pid}
    assert not any("/dev/shm" in Path(f"/proc/{pid}/maps").read_text() for pid in pids()), "a name would stay behind"
    for child in (rank, leader) if first == "rank" else (leader, rank):
        child.kill()
    assert pids() == set()


def test_a_child_of_a_rank_does_not_keep_its_segment(ranks):
    script = """
        import os
        for fd in range(3, 256):
            try:
                print(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:
                pass
        print("end")
    """
    kept = os.memfd_create("a file that is handed on", 0)
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, close_fds=False
    ).stdout
    os.close(kept)
    assert "a file that is handed on" in output
    assert "kvbm" not in output
