"""Which slot holds a sequence hash, and which hash a slot holds.

One dict from hash to slot would do, but for its size: Python rebuilds a dict when its table is used up, and at four
million entries that is a pause of a fifth of a second and twice the memory. So the entries are spread over many dicts
of about ten thousand, by two bytes of the hash; a rebuild then costs less than a millisecond. The way back, from slot
to hash, is one flat bytearray, which the garbage collector has no need to walk.

Only the store calls this. All operations take batches; the loops over them run inside C functions.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import contains, getitem, indexOf, mul
from struct import Struct

from kvbm.errors import InvariantError

# A dict in which entries come and go settles at a table of at least three times its entries, rounded up to a power of
# two: up to 10 922 entries that is 2**15, with two-byte indices, or 54 bytes an entry. 5 % are left for uneven spread.
ENTRIES_PER_DICT = 10_400
_WORDS = 1 << 16


class HashIndex:
    """A bijection between the registered sequence hashes and their slots."""

    def __init__(self, slot_count: int, hash_bytes: int) -> None:
        if hash_bytes < 4 or hash_bytes % 2:
            raise InvariantError(f"a sequence hash must have an even number of bytes, 4 or more, not {hash_bytes}")
        self._hash_bytes = hash_bytes
        self._dict_count = max(1, -(-slot_count // ENTRIES_PER_DICT))
        self._hashes = bytearray(slot_count * hash_bytes)
        self._read = Struct(f"{hash_bytes}s").unpack_from
        self._write = Struct(f"{hash_bytes}s").pack_into
        self._retired: list[dict[bytes, int]] = []
        self._make_dicts()

    def __len__(self) -> int:
        return sum(map(len, self._dicts))

    def first_missing(self, hashes: Sequence[bytes]) -> int:
        """Return the position of the first hash that is not registered, or their number."""
        try:
            return indexOf(map(contains, self._dicts_of(hashes), hashes), False)
        except ValueError:
            return len(hashes)

    def find_all(self, hashes: Sequence[bytes]) -> list[int] | None:
        """Return the slot of each hash, or None when one of them is not registered."""
        try:
            return list(map(getitem, self._dicts_of(hashes), hashes))
        except KeyError:
            return None

    def find(self, hashes: Sequence[bytes]) -> list[int | None]:
        """Return for each hash its slot, or None."""
        return list(map(dict.get, self._dicts_of(hashes), hashes))

    def add(self, hashes: Sequence[bytes], slots: list[int]) -> list[int]:
        """Register each hash at its slot unless it has one already; return the slot that each hash has afterwards."""
        if self._retired:
            self._retired.pop()
        holders = list(map(dict.setdefault, self._dicts_of(hashes), hashes, slots))
        for slot, holder, sequence_hash in zip(slots, holders, hashes, strict=True):
            if slot == holder:
                self._write(self._hashes, slot * self._hash_bytes, sequence_hash)
        return holders

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
        self._dict_of_word = (self._dicts * (-(-_WORDS // self._dict_count)))[:_WORDS]

    def _dicts_of(self, hashes: Sequence[bytes]) -> Iterator[dict[bytes, int]]:
        """Return for each hash the dict that holds it or would.

        A dict is chosen by the first two bytes of the hash, exclusive or its last two: some hashes start with zeros and
        some end with a constant. The words of the whole batch are cut and combined as two large integers.
        """
        joined = b"".join(hashes)
        if len(joined) != len(hashes) * self._hash_bytes:
            raise InvariantError(f"sequence hashes of this store have {self._hash_bytes} bytes, got {hashes!r:.200}")
        words, stride = array("H", joined), self._hash_bytes // 2
        first, last = words[::stride].tobytes(), words[stride - 1 :: stride].tobytes()
        mixed = int.from_bytes(first, "little") ^ int.from_bytes(last, "little")
        return map(self._dict_of_word.__getitem__, array("H", mixed.to_bytes(len(first), "little")))
