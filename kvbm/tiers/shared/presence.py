"""Presence: which extents the shared tier holds, as far as this engine knows. A request per block would not scale.

    listed     a listing of the namespace: 8 bytes per extent, sorted
    added      extents that this engine has written, read, or found by a probe since that listing began
    erased     extents that a read did not find since then: a listing may still contain them
    absent     extents that a probe did not find, for ABSENT_S

A name is known by a digest of 64 bits. If two names have the same digest, a read may find no object, which is a miss.
One thread owns it; `clock` returns seconds.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvbm.tiers.shared.orders import Listing

ABSENT_S = 5.0
MAX_ABSENT = 10_000
MAX_ADDED = 1_000_000
MAX_ERASED = 100_000
DIGEST = np.dtype("<u8")


def digest_of(name: bytes) -> int:
    return xxhash.xxh3_64_intdigest(name)


class Presence:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._listed: list[NDArray[np.uint64]] = []  # parts as they came: joining them would delay an engine's step
        self._starts: list[int] = []  # the first digest of each part
        self._parts: list[NDArray[np.uint64]] = []  # of a listing that is still coming
        self._added: OrderedDict[int, float] = OrderedDict()  # digest -> when; the oldest is first
        self._erased: dict[int, float] = {}
        self._absent: OrderedDict[int, float] = OrderedDict()  # digest -> until when

    def __len__(self) -> int:
        return sum(map(len, self._listed)) + len(self._added)

    def contains(self, name: bytes) -> bool:
        digest = digest_of(name)
        if digest in self._added:
            return True
        position = bisect_right(self._starts, digest) - 1
        if position < 0 or digest in self._erased:
            return False
        part = self._listed[position]
        index = int(part.searchsorted(np.uint64(digest)))
        return index < len(part) and int(part[index]) == digest

    def is_absent(self, name: bytes) -> bool:
        """Whether a probe has just not found it."""
        return self._absent.get(digest_of(name), 0.0) > self._clock()

    def add(self, names: Sequence[bytes]) -> None:
        now = self._clock()
        for name in names:
            digest = digest_of(name)
            self._added[digest] = now
            self._added.move_to_end(digest)
            self._erased.pop(digest, None)
            self._absent.pop(digest, None)
        while len(self._added) > MAX_ADDED:
            self._added.popitem(last=False)

    def erase(self, name: bytes) -> None:
        """Forget an extent that could not be read."""
        digest = digest_of(name)
        self._added.pop(digest, None)
        self._erased[digest] = self._clock()
        while len(self._erased) > MAX_ERASED:  # in a store that is not listed; another read finds it absent
            self._erased.pop(next(iter(self._erased)))
        self.note_absent(name)

    def note_absent(self, name: bytes) -> None:
        """Note that a probe did not find an extent."""
        digest = digest_of(name)
        self._absent[digest] = self._clock() + ABSENT_S
        self._absent.move_to_end(digest)
        while len(self._absent) > MAX_ABSENT:
            self._absent.popitem(last=False)

    def take(self, listing: Listing) -> None:
        """Take a part of a listing. The last part replaces what was known before the listing began."""
        if listing.is_first:
            self._parts = []
        if listing.names:
            self._parts.append(np.frombuffer(listing.names, DIGEST))
        if not listing.is_last:
            return
        self._listed, self._parts = self._parts, []
        self._starts = [int(part[0]) for part in self._listed]
        began_s = listing.began_s
        self._erased = {digest: since for digest, since in self._erased.items() if since >= began_s}
        while self._added and next(iter(self._added.values())) < began_s:
            self._added.popitem(last=False)

    def clear(self) -> None:
        self._listed, self._starts, self._parts = [], [], []
        self._added.clear()
        self._erased.clear()
        self._absent.clear()
