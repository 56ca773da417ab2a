"""What an engine knows of a store: listings in parts, and what has happened since."""

import numpy as np
import pytest

from kvbm.tiers.shared import presence as module
from kvbm.tiers.shared.orders import Listing
from kvbm.tiers.shared.presence import ABSENT_S, DIGEST, Presence, digest_of

NAMES = [b"%d" % number for number in range(1000)]


def parts_of(names, size, began_s=0.0):
    digests = np.sort(np.array([digest_of(name) for name in names], DIGEST))
    starts = range(0, max(1, len(digests)), size)
    for start in starts:
        content = digests[start : start + size].tobytes()
        yield Listing(content, began_s, is_first=start == 0, is_last=start + size >= len(digests))


def listed(names, size=64, **options):
    known = Presence(**options)
    for part in parts_of(names, size):
        known.take(part)
    return known


@pytest.mark.parametrize("size", [1, 7, 64, 500, 1000])
def test_every_name_of_a_listing_in_parts_is_known_and_no_other(size):
    known = listed(NAMES[::2], size)
    assert len(known) == 500
    assert [known.contains(name) for name in NAMES] == [number % 2 == 0 for number in range(1000)]


def test_a_listing_counts_when_it_is_whole():
    known = listed(NAMES[:10])
    *first, last = parts_of(NAMES[500:], 100)
    for part in first:
        known.take(part)
    assert known.contains(NAMES[0])
    assert not known.contains(NAMES[500])
    known.take(last)
    assert not known.contains(NAMES[0])
    assert known.contains(NAMES[500])


def test_a_listing_that_begins_again_is_not_mixed_with_the_one_before():
    known = Presence()
    known.take(next(parts_of(NAMES, 100)))  # its process has ended
    for part in parts_of(NAMES[:3], 100):
        known.take(part)
    assert [known.contains(name) for name in NAMES] == [True] * 3 + [False] * 997


def test_an_empty_store_is_known_to_be_empty():
    known = listed(NAMES[:5])
    for part in parts_of([], 100):
        known.take(part)
    assert len(known) == 0
    assert not known.contains(NAMES[0])


def test_what_happens_while_the_store_is_listed_counts_more_than_the_listing():
    now = [10.0]
    known = Presence(clock=lambda: now[0])
    known.add([NAMES[0]])
    known.erase(NAMES[1])
    assert known.is_absent(NAMES[1])
    for part in parts_of(NAMES[1:3], 100, began_s=9.0):
        known.take(part)
    assert [known.contains(name) for name in NAMES[:3]] == [True, False, True]
    now[0] += ABSENT_S + 20
    for part in parts_of(NAMES[1:3], 100, began_s=29.0):
        known.take(part)
    assert [known.contains(name) for name in NAMES[:3]] == [False, True, True]
    assert not known.is_absent(NAMES[1])


def test_memory_is_limited_without_a_listing(monkeypatch):
    for limit in ("MAX_ADDED", "MAX_ERASED", "MAX_ABSENT"):
        monkeypatch.setattr(module, limit, 10)
    known = Presence()
    known.add(NAMES[:500])
    assert len(known) == 10
    assert known.contains(NAMES[499])
    for name in NAMES:
        known.erase(name)
    assert len(known._erased) == len(known._absent) == 10
