"""HashIndex: maps sequence hashes to slots and slots to hashes.

One dict from hash to slot would be too large: Python rebuilds a dict when its table is full, and with four million
entries that takes 0.25 s and twice the memory. So the entries are distributed by hash over many dicts of about ten
thousand entries, and a rebuild takes about 1 ms. Slots map to hashes through one flat bytearray, which the garbage
collector does not walk.

Finding a prefix is faster than one lookup per block. Blocks that were registered together are mostly in consecutive
slots. So after one lookup the next hashes are compared as bytes with the next slots, and another lookup is made only
where they differ. The result is exact: if a registered slot holds the bytes of a hash, the hash is in that slot.

Only the store calls this. `states` is the store's; it is read here, never written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, compress, pairwise, repeat
from operator import eq, itemgetter, mod, mul
from struct import Struct, iter_unpack

from kvbm.errors import InvariantError

# The table of a dict whose entries change has at least three times as many places, rounded up to a power of two. Up to
# 10 922 entries that is 2**15, with two-byte indices, or 54 bytes per entry. 5 % are left for an uneven distribution.
ENTRIES_PER_DICT = 10_400
# Comparing bytes is faster while runs of consecutive slots have this many blocks on average.
_WORTHWHILE_RUN = 8
_WORTHWHILE_LENGTH = 64  # of the hashes in one call
LONG_RUN = 64  # slots that are a range in the answers: a shorter range costs more than its slots one by one


class HashIndex:
    """A bijection between the registered sequence hashes and the slots whose state is in `registered_states`."""

    def __init__(self, states: bytearray, registered_states: bytes, hash_bytes: int) -> None:
        self._states = states
        self._registered_states = registered_states
        self._hash_bytes = hash_bytes
        self._hashes = bytearray(len(states) * hash_bytes)
        self._dict_count = max(1, -(-len(states) // ENTRIES_PER_DICT))
        self._retired: list[dict[bytes, int]] = []
        self._make_dicts()
        item = Struct(f"{hash_bytes}s")
        self._read, self._write = item.unpack_from, item.pack_into

    def __len__(self) -> int:
        return sum(map(len, self._dicts))

    def __contains__(self, sequence_hash: bytes) -> bool:
        return sequence_hash in self._dict_of(sequence_hash)

    def slot_of(self, sequence_hash: bytes) -> int | None:
        return self._dict_of(sequence_hash).get(sequence_hash)

    def among(self, hashes: set[bytes]) -> set[bytes]:
        """Return those of `hashes` that are registered. Python walks the smaller one of the set and each dict."""
        return set().union(*(entries.keys() & hashes for entries in self._dicts))

    def find_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the slots of `hashes` up to the first that is not registered."""
        return list(chain.from_iterable(self.find_runs(hashes)))

    def find_runs(self, hashes: Sequence[bytes]) -> list[Sequence[int]]:
        """Like `find_prefix`, in pieces: a range for each long run of consecutive slots, lists of the others."""
        end, position = len(hashes), 0
        runs: list[Sequence[int]] = []
        joined, allowed = b"", 0
        if end >= _WORTHWHILE_LENGTH:
            if hashes[0] not in self:
                self.require_length(hashes[:1])
                return runs
            joined, allowed = b"".join(hashes), 4 * _WORTHWHILE_RUN
        if (len(joined) if joined else sum(map(len, hashes))) != end * self._hash_bytes:
            self.require_length(hashes)
        while position < end and allowed > 0:
            slot = self._dict_of(hashes[position]).get(hashes[position])
            if slot is None:
                return runs
            run = self._run_length(joined, position, slot, end - position)
            _add_run(runs, range(slot, slot + run))
            position += run
            allowed += run - _WORTHWHILE_RUN
        rest = hashes[position:]
        slots: list[int] = []
        for found in map(dict.get, self._dicts_of(rest), rest):
            if found is None:
                break
            slots.append(found)
        _add_run(runs, slots)
        return runs

    def _run_length(self, joined: bytes, position: int, slot: int, limit: int) -> int:
        """Return how many hashes from `position` on are in consecutive registered slots, the first one in `slot`."""
        size = self._hash_bytes
        length, window = 1, 16
        limit = min(limit, len(self._states) - slot)
        while length < limit:
            window = min(window, limit - length)
            wanted = joined[(position + length) * size : (position + length + window) * size]
            present = self._hashes[(slot + length) * size : (slot + length + window) * size]
            if wanted != present:
                difference = int.from_bytes(wanted, "big") ^ int.from_bytes(present, "big")
                length += (8 * len(wanted) - difference.bit_length()) // (8 * size)
                break
            length += window
            window *= 2
        return length - len(self._states[slot : slot + length].lstrip(self._registered_states))

    def find(self, hashes: Sequence[bytes]) -> list[int | None]:
        """Return for each hash its slot, or None."""
        if len(hashes) < _WORTHWHILE_LENGTH:
            return list(map(dict.get, self._dicts_of(hashes), hashes))
        found: list[int | None] = [*self.find_prefix(hashes)]
        rest = hashes[len(found) :]
        found += map(dict.get, self._dicts_of(rest), rest)
        return found

    def add(self, hashes: Sequence[bytes], slots: list[int]) -> list[int]:
        """Register each hash at its slot unless it already has a slot; return the slot of each hash."""
        if self._retired:
            self._retired.pop()
        holders = list(map(dict.setdefault, self._dicts_of(hashes), hashes, slots))
        if holders != slots:
            is_new = list(map(eq, slots, holders))
            self._note(list(compress(slots, is_new)), list(compress(hashes, is_new)))
        elif is_consecutive(slots):
            self._hashes[slots[0] * self._hash_bytes : (slots[-1] + 1) * self._hash_bytes] = b"".join(hashes)
        else:
            self._note(slots, hashes)
        return holders

    def _note(self, slots: list[int], hashes: Sequence[bytes]) -> None:
        offsets = map(mul, slots, repeat(self._hash_bytes))
        deque(map(self._write, repeat(self._hashes), offsets, hashes), maxlen=0)

    def remove(self, slots: list[int]) -> tuple[bytes, ...]:
        """Forget the hashes of `slots`, all of which are registered, and return them."""
        hashes = self.hashes_of(slots)
        if list(map(dict.pop, self._dicts_of(hashes), hashes, repeat(None))) != slots:
            raise InvariantError(f"index and slots disagree about some of the slots {slots}")
        return hashes

    def hashes_of(self, slots: Sequence[int]) -> tuple[bytes, ...]:
        """Return the hash that each slot was last registered with."""
        size = self._hash_bytes
        if len(slots) >= _WORTHWHILE_RUN and is_consecutive(slots):
            run = self._hashes[slots[0] * size : (slots[-1] + 1) * size]
            return tuple([item[0] for item in iter_unpack(f"{size}s", run)])
        offsets = map(mul, slots, repeat(size))
        return tuple([item[0] for item in map(self._read, repeat(self._hashes), offsets)])

    def clear(self) -> None:
        """Forget everything at once. Millions of entries take long to free, so `add` frees one dict per call."""
        self._retired += self._dicts
        self._make_dicts()

    def require_length(self, hashes: Sequence[bytes]) -> None:
        """Raise InvariantError unless each hash has the length that this index requires."""
        if hashes and set(map(len, hashes)) != {self._hash_bytes}:
            raise InvariantError(f"sequence hashes of this store have {self._hash_bytes} bytes, got {hashes!r:.200}")

    def _make_dicts(self) -> None:
        self._dicts: list[dict[bytes, int]] = [{} for _ in range(self._dict_count)]

    def _dict_of(self, sequence_hash: bytes) -> dict[bytes, int]:
        # Python's own hash, which the dict needs anyway, distributes evenly for any bytes, even counters or equal ends.
        return self._dicts[hash(sequence_hash) % self._dict_count]

    def _dicts_of(self, hashes: Sequence[bytes]) -> Iterator[dict[bytes, int]]:
        """Return for each hash the dict that holds it or would."""
        return map(self._dicts.__getitem__, map(mod, map(hash, hashes), repeat(self._dict_count)))


def picked(values: bytes | bytearray, slots: Sequence[int]) -> tuple[int, ...]:
    """Return the values of these slots; a quarter of the time of a loop in Python."""
    return itemgetter(*slots)(values) if len(slots) > 1 else tuple(values[slot] for slot in slots)


def is_consecutive(slots: Sequence[int]) -> bool:
    """Whether each slot is the next one after the slot before. False for none."""
    count = len(slots)
    return count > 0 and slots[-1] - slots[0] == count - 1 and list(slots) == list(range(slots[0], slots[0] + count))


def ascending_runs(slots: list[int]) -> list[Sequence[int]]:
    """Return `slots`, which are different, in pieces: a range for each long run of consecutive ones, if they ascend and
    most runs are long; else as they are."""
    sample = slots[::LONG_RUN]
    long_runs = sum(after - before == LONG_RUN for before, after in pairwise(sample))
    if 2 * long_runs < len(sample) or slots != sorted(slots):  # sorting what ascends takes little time
        return [slots]
    count, begin = len(slots), 0
    runs: list[Sequence[int]] = []
    while begin < count:
        end, upto, first = begin + 1, count, slots[begin] - begin
        step = LONG_RUN
        while end < upto:  # slots[i] - i never falls, so a run ends where it is not `first` any more
            middle = min(end + step, upto) - 1
            if slots[middle] - middle == first:
                end, step = middle + 1, 2 * step
            else:
                upto, step = middle, max(1, (middle - end) // 2)
        _add_run(runs, range(slots[begin], slots[begin] + end - begin))
        begin = end
    return runs


def _add_run(runs: list[Sequence[int]], run: Sequence[int]) -> None:
    if isinstance(run, range) and len(run) >= LONG_RUN:
        runs.append(run)
    elif runs and isinstance(runs[-1], list):
        runs[-1].extend(run)
    elif run:
        runs.append([*run])
