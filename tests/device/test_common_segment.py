"""The segment of ranks with equal KV: who allocates it, who proves what, and what happens if one of them fails."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

import kvbm.host.shared_memory
from kvbm.config.schema import Profile
from kvbm.device.replicas import ALONE, Replicas
from kvbm.device.worker import HostCapacity, Worker
from kvbm.engines.make_model import MODELS
from kvbm.engines.table import size
from kvbm.errors import EnvironmentProblem
from kvbm.host.control_words import LANES, REPORTS
from kvbm.host.layout import BlockLayout, Piece
from kvbm.host.region import Region
from kvbm.host.segment import MEMFD_NAME, Segment
from kvbm.types import SlotState

LAYOUT = BlockLayout((Piece(0, 0, 5000, 5000),), 4)
SLOTS = 8
COUNT = 3
EMPTY, READY, FAILED = SlotState


class Meeting:
    """What the ranks of an engine have in common: each `gather` returns when all of them have called it."""

    def __init__(self, count):
        self._barrier = threading.Barrier(count)
        self._values = [None] * count

    def place(self, index):
        return Replicas(index, len(self._values), lambda value: self._gather(index, value))

    def _gather(self, index, value):
        self._values[index] = value
        self._barrier.wait(60)
        values = list(self._values)
        self._barrier.wait(60)
        return values


def together(count, run):
    """Results or exceptions of `run(replicas)` on each rank."""
    meeting = Meeting(count)
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, meeting.place(index)) for index in range(count)]
        return [future.exception() or future.result() for future in futures]


def create(nodes=(), **options):
    return Segment.create(rank=0, layout=LAYOUT, slot_count=SLOTS, replica_count=COUNT, nodes=nodes, **options)


def attach(owner, replica, layout=LAYOUT):
    return Segment.attach(owner, rank=replica, replica=replica, layout=layout)


@pytest.fixture
def segments():
    owner = create()
    segments = [owner, *(attach(owner.info, replica) for replica in range(1, COUNT))]
    yield segments
    for segment in segments:
        segment.close()


@pytest.fixture
def region(segments):
    region = Region.map([segment.info for segment in segments])
    yield region
    region.close()


def report(segments, generation, states, checksums=(5, 5, 5)):
    for segment, state, checksum in zip(segments, states, checksums, strict=True):
        if state is not None:
            segment.write_report(generation, state, checksum)


# -- words -------------------------------------------------------------------------------------------------------------


def test_every_rank_sees_what_another_one_has_written(segments, region):
    segments[1].payload[3] = 7
    segments[1].write_slots([3], 9, READY)
    assert all((segment.payload[3] == 7).all() and segment.slots_carry([3], [9]) for segment in segments)
    assert (region.shards[0][3] == 7).all()
    assert region.slots_carry([3], [9])


def test_sample_slots_are_no_slots(segments, region):
    for segment in segments:
        segment.payload[segment.sample_slot] = 1 + segment.info.replica
    assert len(region.shards[0]) == SLOTS
    assert not region.shards[0].any()
    assert [int(segments[0].payload[SLOTS + replica, 0]) for replica in range(COUNT)] == [1, 2, 3]


def test_lanes_and_heartbeats_are_those_of_each_rank(segments, region):
    for segment in segments[:-1]:
        segment.write_lane(LANES - 1, 4, READY)
        segment.beat()
    assert region.lane_result(LANES - 1, 4) is EMPTY
    assert region.heartbeats() == [1, 1, 0]
    segments[-1].write_lane(LANES - 1, 4, READY)
    assert region.lane_result(LANES - 1, 4) is READY
    assert [segment.lane_carries(LANES - 1, 4) for segment in segments] == [True] * COUNT


@pytest.mark.parametrize(
    ("states", "checksums", "expected"),
    [
        ((READY, READY, None), (5, 5, 5), EMPTY),
        ((FAILED, None, FAILED), (5, 5, 5), EMPTY),
        ((READY, READY, READY), (5, 5, 5), READY),
        ((READY, FAILED, READY), (5, 0, 5), FAILED),
        ((READY, READY, READY), (5, 5, 6), FAILED),
    ],
)
def test_slots_are_proven_when_all_replicas_have_ended_with_equal_samples(
    segments, region, states, checksums, expected
):
    segments[0].write_slots([1, 2], 9, READY)
    report(segments, 9, states, checksums)
    assert region.slot_results([1, 2], 9) == [expected] * 2
    assert region.are_reported([1], [9]) == [expected is not EMPTY]
    assert region.has_different_copies == (len(set(checksums)) > 1 and FAILED not in states)


def test_a_slot_without_a_word_is_not_proven_by_reports(segments, region):
    segments[0].write_slots([1], 9, READY)
    segments[1].write_slots([2], 8, READY)
    report(segments, 9, [READY] * COUNT)
    assert READY not in region.slot_results([2], 9)


@pytest.mark.parametrize("later", [READY, EMPTY])
def test_a_report_that_a_later_one_has_replaced_is_a_failure(segments, region, later):
    segments[0].write_slots([1], 9, READY)
    report(segments, 9, [READY] * COUNT)
    segments[2].write_report(9 + REPORTS, later, 5)
    assert region.slot_results([1], 9) == [FAILED]
    assert not region.has_different_copies
    segments[2].write_report(9, READY, 5)
    assert region.slot_results([1], 9) == [FAILED], "an older report has replaced a later one"


# -- one memory --------------------------------------------------------------------------------------------------------


def test_all_ranks_have_the_segment_or_all_raise_the_same_error():
    segments = together(COUNT, lambda replicas: replicas.share(None, create, lambda i: attach(i, replicas.index)))
    assert [segment.info.replica for segment in segments] == [0, 1, 2]
    assert len({os.fstat(segment.info.fd).st_ino for segment in segments}) == 1
    for segment in segments:
        segment.close()


def open_segments():
    """How many descriptors of segments this process has."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the directory itself
            count += MEMFD_NAME in os.readlink(f"/proc/self/fd/{fd}")
    return count


@pytest.mark.parametrize("failing", range(COUNT))
@pytest.mark.parametrize("error", [EnvironmentProblem("planted", hint="`help`"), ValueError("planted")])
def test_a_rank_that_fails_stops_all(failing, error):
    gc.collect()  # segments of earlier tests
    before = open_segments()

    def fail_or(make, index):
        if index == failing:
            raise error
        return make()

    def share(replicas):
        index = replicas.index
        return replicas.share(
            None, lambda nodes: fail_or(create, index), lambda info: fail_or(lambda: attach(info, index), index)
        )

    found = together(COUNT, share)
    assert {type(one) for one in found} == {EnvironmentProblem}
    assert len({one.message for one in found}) == 1
    assert "planted" in found[0].message
    assert len({one.hint for one in found}) == 1
    del found
    gc.collect()  # the errors keep the mappings alive
    assert open_segments() == before


@pytest.mark.parametrize(("nodes", "expected"), [([1, 0, 1], (0, 1)), ([1, 1, 1], (1,)), ([1, None, 0], ())])
def test_memory_is_spread_over_the_numa_nodes_of_all_ranks(nodes, expected):
    seen = []

    def share(replicas):
        return replicas.share(
            nodes[replicas.index],
            lambda found: seen.append(found) or create(),
            lambda info: attach(info, replicas.index),
        )

    for segment in together(COUNT, share):
        segment.close()
    assert seen == [expected]
    assert ALONE.share(1, lambda found: found, attach) == (1,)


def test_several_nodes_are_interleaved(monkeypatch):
    calls = []
    kernel = kvbm.host.shared_memory.KERNEL
    monkeypatch.setattr(kernel, "_system_call", lambda numbers, *arguments: calls.append(arguments[2:]))
    kernel.bind(4096, 4096, [0, 3])
    kernel.bind(4096, 4096, [3])
    assert [policy for policy, *_ in calls] == [
        kvbm.host.shared_memory.MPOL_INTERLEAVE,
        kvbm.host.shared_memory.MPOL_BIND,
    ]


def test_close_of_a_rank_leaves_the_memory_to_the_others_and_that_of_the_owner_frees_it(segments):
    segments[0].payload[1] = 7
    segments[1].close()
    assert (segments[2].payload[1] == 7).all()
    used = os.fstat(segments[0].info.fd).st_blocks
    fd = os.dup(segments[0].info.fd)
    segments[0].close()
    assert not segments[2].payload[1].any(), "a load that runs must not find its words"
    assert os.fstat(fd).st_blocks < used
    os.close(fd)


def test_ranks_that_disagree_about_their_common_memory_are_refused(segments):
    infos = [segment.info for segment in segments]
    stranger = create()
    for wrong in (
        infos[:2],
        [infos[0], infos[1], replace(infos[2], replica=1)],
        [infos[0], infos[1], replace(infos[2], fd=stranger.info.fd)],
        [replace(info, replica=0, replica_count=1) for info in infos],
    ):
        with pytest.raises(EnvironmentProblem, match="shares its memory"):
            Region.map(wrong)
    stranger.close()


def test_a_rank_with_other_blocks_does_not_attach(segments):
    with pytest.raises(EnvironmentProblem, match="rank 1 has blocks of 4000 bytes") as caught:
        attach(segments[0].info, 1, BlockLayout((Piece(0, 0, 5000, 4000),), 4))
    assert "share_equal_kv" in (caught.value.hint or "")


@pytest.mark.parametrize("is_shared", [True, False])
def test_eight_ranks_with_latent_attention_take_as_much_memory_as_kvbm_size_says(is_shared):
    arguments = {"tensor_parallel_size": 8, "dtype": "float32"}
    profile = Profile.model_validate(
        {
            "engine": {"kind": "vllm", "model": "m", "arguments": arguments},
            "tiers": {"host": {"capacity": "16MiB"}},
            "transfer": {"share_equal_kv": is_shared},
        }
    )
    sizes = size(profile, MODELS["vllm-mla"] | {"num_attention_heads": 8}, on_cpu=True)
    layout = BlockLayout((Piece(0, 0, sizes.block_bytes, sizes.block_bytes),), 2)

    def create_worker(place):
        return Worker.create(
            layout,
            [torch.zeros(2 * sizes.block_bytes, dtype=torch.uint8)],
            HostCapacity(capacity_bytes=16 << 20),
            rank=place.index,
            segment_count=1 if is_shared else 8,
            replicas=place if is_shared else ALONE,
            thread_count=1,
        )

    workers = together(8, create_worker)
    assert {worker.info.slot_count for worker in workers} == {sizes.host.block_count}
    segments = {os.fstat(worker.info.fd).st_ino: worker.info for worker in workers}.values()
    assert len(segments) == (1 if is_shared else 8)
    assert sum(info.slot_count * info.slot_stride for info in segments) == sizes.host.total_bytes
    sample_slots = 8 * sizes.stored_bytes if is_shared else 0
    assert sum(info.length for info in segments) < sizes.host.total_bytes + sample_slots + (1 << 20)
    assert sizes.stored_bytes // sizes.block_tokens == 4 * (512 + 64) * 4 * (1 if is_shared else 8), "bytes per token"
    for worker in workers:
        worker.close()
