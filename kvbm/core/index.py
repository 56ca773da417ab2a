"""Which slot holds a sequence hash, and which hash a slot holds.

One dict from hash to slot would do, but for its size: Python rebuilds a dict when its table is used up, and at four
million entries that is a pause of a quarter of a second with twice the memory. So the entries are spread by hash over
many dicts of about ten thousand, and a rebuild costs about a millisecond. The way back, from slot to hash, is one flat
bytearray, which the garbage collector has no need to walk.

A prefix is found faster than by a lookup per block. Blocks that were registered together mostly lie in consecutive
slots, so after one lookup the hashes that follow are compared with those slots as bytes, and only where they differ is
the next lookup made. That is exact: a slot that is registered and holds the bytes of a hash is where that hash is.

Only the store calls this. `states` is the store's; it is read here, never written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import compress, repeat
from operator import eq, mod, mul
from struct import Struct

from kvbm.errors import InvariantError

# A dict in which entries come and go settles at a table of at least three times its entries, rounded up to a power of
# two: up to 10 922 entries that is 2**15, with two-byte indices, or 54 bytes an entry. 5 % are left for uneven spread.
ENTRIES_PER_DICT = 10_400
# Comparing bytes pays while the runs of consecutive slots have this many blocks on average.
_WORTHWHILE_RUN = 8


class HashIndex:
    """A bijection between the registered sequence hashes and those slots whose state is in `registered_states`."""

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

    def find_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the slots of `hashes` up to the first that is not registered."""
        joined, end = b"".join(hashes), len(hashes)
        if len(joined) != end * self._hash_bytes:
            self.require_length(hashes)
        slots: list[int] = []
        allowed = 4 * _WORTHWHILE_RUN
        while len(slots) < end and allowed > 0:
            position = len(slots)
            slot = self._dict_of(hashes[position]).get(hashes[position])
            if slot is None:
                return slots
            run = self._run_length(joined, position, slot, end - position)
            slots += range(slot, slot + run)
            allowed += run - _WORTHWHILE_RUN
        rest = hashes[len(slots) :]
        for slot in map(dict.get, self._dicts_of(rest), rest):
            if slot is None:
                break
            slots.append(slot)
        return slots

    def _run_length(self, joined: bytes, position: int, slot: int, limit: int) -> int:
        """Return how many hashes from `position` on lie in consecutive registered slots, the first one in `slot`."""
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
        return list(map(dict.get, self._dicts_of(hashes), hashes))

    def add(self, hashes: Sequence[bytes], slots: list[int]) -> list[int]:
        """Register each hash at its slot unless it has one already; return the slot that each hash has afterwards."""
        if self._retired:
            self._retired.pop()
        holders = list(map(dict.setdefault, self._dicts_of(hashes), hashes, slots))
        if holders != slots:
            is_new = list(map(eq, slots, holders))
            self._note(list(compress(slots, is_new)), list(compress(hashes, is_new)))
        elif _is_consecutive(slots):
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
        offsets = map(mul, slots, repeat(self._hash_bytes))
        return tuple([item[0] for item in map(self._read, repeat(self._hashes), offsets)])

    def clear(self) -> None:
        """Forget everything at once. Freeing the entries takes long when there are millions: `add` does it in turns."""
        self._retired += self._dicts
        self._make_dicts()

    def require_length(self, hashes: Sequence[bytes]) -> None:
        """Raise InvariantError unless each hash has the length that this index was made for."""
        if hashes and set(map(len, hashes)) != {self._hash_bytes}:
            raise InvariantError(f"sequence hashes of this store have {self._hash_bytes} bytes, got {hashes!r:.200}")

    def _make_dicts(self) -> None:
        self._dicts: list[dict[bytes, int]] = [{} for _ in range(self._dict_count)]

    def _dict_of(self, sequence_hash: bytes) -> dict[bytes, int]:
        # Python's own hash, which the dict needs anyway, spreads evenly whatever the bytes are: counters, equal ends.
        return self._dicts[hash(sequence_hash) % self._dict_count]

    def _dicts_of(self, hashes: Sequence[bytes]) -> Iterator[dict[bytes, int]]:
        """Return for each hash the dict that holds it or would."""
        return map(self._dicts.__getitem__, map(mod, map(hash, hashes), repeat(self._dict_count)))


def _is_consecutive(slots: list[int]) -> bool:
    return bool(slots) and slots == list(range(slots[0], slots[0] + len(slots)))
