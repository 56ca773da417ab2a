"""Presence: which runs the shared tier holds, as far as this engine knows. A request per block would not scale.

    listed     a listing of the namespace: 8 bytes per run, sorted
    added      runs that this engine has written, read, or found by a probe since that listing began
    erased     runs that a read did not find since then: a listing may still contain them
    absent     runs that a probe did not find, for ABSENT_S

A name is known by a digest of 64 bits. Two names with one digest cost a read that finds other blocks, which is a miss.
One thread owns it; `clock` returns seconds.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvbm.shared.orders import Listing

ABSENT_S = 5.0
MAX_ABSENT = 10_000
MAX_ADDED = 1_000_000
MAX_LISTED = 1 << 26
DIGEST = np.dtype("<u8")


def digest_of(name: bytes) -> int:
    return xxhash.xxh3_64_intdigest(name)


class Presence:
    """See the module's text."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._listed: NDArray[np.uint64] = np.empty(0, DIGEST)
        self._parts: list[NDArray[np.uint64]] = []
        self._added: OrderedDict[int, float] = OrderedDict()  # digest -> when; the oldest is first
        self._erased: dict[int, float] = {}
        self._absent: OrderedDict[int, float] = OrderedDict()  # digest -> until when

    def __len__(self) -> int:
        return len(self._listed) + len(self._added)

    def contains(self, name: bytes) -> bool:
        digest = digest_of(name)
        if digest in self._added:
            return True
        if not len(self._listed) or digest in self._erased:
            return False
        index = int(self._listed.searchsorted(np.uint64(digest)))
        return index < len(self._listed) and int(self._listed[index]) == digest

    def count(self, names: Sequence[bytes]) -> int:
        """Return how many of the names are known, up to the first that is not."""
        for index, name in enumerate(names):
            if not self.contains(name):
                return index
        return len(names)

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
        """Forget a run that could not be read."""
        digest = digest_of(name)
        self._added.pop(digest, None)
        self._erased[digest] = self._clock()
        self.note_absent(name)

    def note_absent(self, name: bytes) -> None:
        """Note that a probe did not find a run."""
        digest = digest_of(name)
        self._absent[digest] = self._clock() + ABSENT_S
        self._absent.move_to_end(digest)
        while len(self._absent) > MAX_ABSENT:
            self._absent.popitem(last=False)

    def take(self, listing: Listing) -> None:
        """Take a part of a listing. The last part replaces what was known before the listing began."""
        if listing.is_first:
            self._parts = []
        self._parts.append(np.frombuffer(listing.names, DIGEST))
        if not listing.is_last:
            return
        self._listed = np.concatenate(self._parts)
        self._parts = []
        began_s = listing.began_s
        self._erased = {digest: since for digest, since in self._erased.items() if since >= began_s}
        while self._added and next(iter(self._added.values())) < began_s:
            self._added.popitem(last=False)

    def clear(self) -> None:
        self._listed, self._parts = np.empty(0, DIGEST), []
        self._added.clear()
        self._erased.clear()
        self._absent.clear()
