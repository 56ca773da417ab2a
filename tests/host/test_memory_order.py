"""A machine that does not order stores, such as Arm: every process that uses a segment orders its words itself."""

import errno
import itertools
import json
import re
import subprocess
import sys
from dataclasses import asdict, fields

import numpy as np
import pytest

from kvbm.errors import EnvironmentProblem
from kvbm.host import control_words
from kvbm.host.control_words import ControlWords, SegmentGeometry
from kvbm.host.layout import BlockLayout, Piece
from kvbm.host.region import Region
from kvbm.host.segment import Segment
from kvbm.host.shared_memory import KERNEL
from kvbm.types import SlotState

READY = SlotState.READY
LAYOUT = BlockLayout((Piece(0, 0, 5000, 5000),), 4)
MAPPING_PROCESS = """
import json, sys
from kvbm.host import control_words
control_words.STORES_ARE_ORDERED = False
from kvbm.host.region import Region
from kvbm.types import SegmentInfo, SlotState
region = Region.map([SegmentInfo(**json.loads(sys.argv[1]))])
region.write_slots([6], 8, SlotState.READY)
print(region.slots_carry([5, 6], [7, 8]), region.lane_result(3, 7).name)
"""


class Watched(np.ndarray):
    """Words that note each access. A copy of them is an ordinary array."""

    events: list[str]

    def __getitem__(self, key):
        self.events.append("read")
        found = super().__getitem__(key)
        return found if np.may_share_memory(found, self) else np.array(found)[()]

    def __setitem__(self, key, value):
        self.events.append("write")
        super().__setitem__(key, value)

    def copy(self):
        return np.array(self)

    @property
    def data(self):
        return self


@pytest.fixture
def events(monkeypatch):
    """Reads and writes of words, and the barriers between them."""
    log = []
    monkeypatch.setattr(Watched, "events", log, raising=False)
    monkeypatch.setattr(control_words, "STORES_ARE_ORDERED", False)
    monkeypatch.setattr(KERNEL, "barrier", lambda: log.append("barrier"))
    plain = SegmentGeometry.words

    def watched(self, mapping):
        words = plain(self, mapping)
        return ControlWords(*(getattr(words, field.name).view(Watched) for field in fields(words)))

    monkeypatch.setattr(SegmentGeometry, "words", watched)
    return log


def replicas(count):
    first = Segment.create(rank=0, layout=LAYOUT, slot_count=8, replica_count=count)
    others = [Segment.attach(first.info, rank=rank, replica=rank, layout=LAYOUT) for rank in range(1, count)]
    return [first, *others]


# What reads or writes words: a barrier precedes a write that proves bytes, and follows a read that proves them.
OF_SEGMENT = {
    "write_slots": (([1], 7, READY), "barrier write"),
    "write_lane": ((1, 7, READY), "barrier write"),
    "write_report": ((7, READY), "read write barrier write barrier write"),
    "slots_carry": (([1], [7]), "read barrier"),
    "unproven": (([1], 7), "read barrier"),
    "lane_carries": ((1, 7), "read barrier"),
    "has_reported": ((7,), "read barrier"),
    "beat": ((), "read write"),  # proves no bytes
}
OF_REGION = {
    "write_slots": (([1], 7, READY), "barrier write"),
    "slots_carry": (([1], [7]), "read barrier"),
    "slot_results": (([1], 7), "read barrier"),
    "lane_result": ((1, 7), "read barrier"),
    "lane_results": (([1], [7]), "read barrier"),
    "are_reported": (([1], [7]), "read barrier"),
    "heartbeats": ((), "read"),  # proves no bytes
}
WITHOUT_WORDS = {"create", "attach", "map", "close", "checksum", "sample_slot", "has_lost_rank"}


def test_the_tables_name_all_methods():
    named = {*OF_SEGMENT, *OF_REGION, *WITHOUT_WORDS}
    assert named == {name for kind in (Segment, Region) for name in vars(kind) if not name.startswith("_")}


def happened(events, owner, name, arguments):
    events.clear()
    getattr(owner, name)(*arguments)
    found = " ".join(event for event, _ in itertools.groupby(events))
    return re.sub(r"^(read barrier)( read barrier)+$", r"\1", found)  # words are read in steps


@pytest.mark.parametrize("name", OF_SEGMENT)
def test_a_rank_orders_its_words(name, events):
    (segment, _) = segments = replicas(2)
    arguments, expected = OF_SEGMENT[name]
    assert happened(events, segment, name, arguments) == expected
    for each in reversed(segments):
        each.close()


@pytest.mark.parametrize("count", [1, 100])  # few words are read otherwise than many
@pytest.mark.parametrize("name", OF_REGION)
def test_a_region_orders_words(name, count, events):
    [segment] = replicas(1)
    region = Region.map([segment.info])
    segment.write_slots([1], 7, READY)
    segment.write_lane(1, 7, READY)
    arguments, expected = OF_REGION[name]
    arguments = [argument * count if isinstance(argument, list) else argument for argument in arguments]
    assert happened(events, region, name, arguments) == expected
    region.close()
    segment.close()


def test_a_region_orders_reports_of_replicas(events):
    segments = replicas(2)
    region = Region.map([segment.info for segment in segments])
    segments[0].write_slots([1], 7, READY)
    for segment in segments:
        segment.write_report(7, READY)
    assert happened(events, region, "slot_results", ([1], 7)) == "read barrier"
    assert region.slot_results([1], 7) == [READY]
    assert happened(events, region, "are_reported", ([1], [7])) == "read barrier"
    region.close()
    for segment in reversed(segments):
        segment.close()


def test_a_process_that_only_maps_a_segment_orders_words():
    """Linux refuses some barriers in a process that has not registered itself."""
    [segment] = replicas(1)
    segment.write_slots([5], 7, READY)
    segment.write_lane(3, 7, READY)
    command = [sys.executable, "-c", MAPPING_PROCESS, json.dumps(asdict(segment.info))]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout == "True READY\n"
    assert segment.slots_carry([6], [8])
    segment.close()


def test_without_a_barrier_no_process_creates_or_maps_a_segment(monkeypatch):
    [segment] = replicas(1)

    def refuse():
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(control_words, "STORES_ARE_ORDERED", False)
    monkeypatch.setattr(KERNEL, "barrier", refuse)
    for start in (lambda: replicas(1), lambda: Region.map([segment.info])):
        with pytest.raises(EnvironmentProblem, match=r"no memory barrier on \w+: .*Function not implemented$"):
            start()
    segment.close()
