"""ObjectStore: what reads and writes objects for SharedStorage. One implementation per kind of store, in `stores`:
`stores/open.py` chooses it by the scheme of the location, and `config/values.py` has the schemes.

The storage calls a store from `threads` threads, each with up to `batch_objects` objects at a time. No call may last
longer than `limit_s`, whatever the store does; one that cannot keep to that has its buffers quarantined by its caller.
A store that does not answer, or answers with less than it should, is an answer FAILED: it says nothing about an object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvbm.tiers.shared.orders import Outcome
from kvbm.tiers.shared.protection import Buffer


@dataclass(frozen=True, slots=True)
class Incoming:
    """An object to be read. Its bytes go to `buffers` one after the other; a number skips as many bytes. An object of
    another length is BAD. `is_fresh`: it must come from the store, because a copy of it was bad. A store may call
    `filled` with each part of a buffer that it has filled, in order, while the part is in the processor's cache."""

    key: str
    buffers: Sequence[memoryview | int]
    length: int
    is_fresh: bool = False
    filled: Callable[[memoryview], None] | None = None


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An object to be written: `buffers` one after the other. Without `replaces`, an existing one is EXISTS if the
    store can tell."""

    key: str
    buffers: Sequence[Buffer]
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """`age_s`: how long ago the object was written, 0 if unknown. `is_copy`: another engine of this machine has read
    it, and the store was not asked."""

    outcome: Outcome
    error: str | None = None
    age_s: float = 0.0
    is_copy: bool = False


def most_writing(threads: int) -> int:
    """Return how many of a store's threads may write: some are left for reads, which requests wait for."""
    return max(1, threads * 3 // 4)


def wrong_length(size: int, one: Incoming) -> StoreAnswer | None:
    """Return the answer for an object of another length than expected, None for one of `one.length`."""
    return None if size == one.length else StoreAnswer(Outcome.BAD, f"{size} bytes, not {one.length}")


def scatter(chunks: Iterable[Buffer], one: Incoming) -> int:
    """Copy what arrives into the buffers of an object. Return its length, which the caller compares."""
    received = 0
    left = deque(one.buffers)
    for chunk in chunks:
        content = memoryview(chunk)
        received += len(content)
        while content and left:
            first = left.popleft()
            size = min(len(content), first if isinstance(first, int) else len(first))
            if isinstance(first, int):
                rest: memoryview | int = first - size
            else:
                # numpy lets other threads run meanwhile
                np.copyto(np.frombuffer(first[:size], np.uint8), np.frombuffer(content[:size], np.uint8))
                if one.filled is not None:
                    one.filled(first[:size])
                rest = first[size:]
            if rest:
                left.appendleft(rest)
            content = content[size:]
    return received


class ObjectStore(Protocol):
    """Without `can_list`, engines know only the objects that they have written or asked for."""

    name: str
    threads: int
    write_threads: int  # of these, that write at most
    batch_objects: int
    can_list: bool

    @property
    def limit_s(self) -> float:
        """The longest time that a call should take now."""
        ...

    def use_memory(self, memory: Sequence[NDArray[np.uint8]]) -> None:
        """Note the host memory that most buffers are in, as arrays of slots. Called once, before the first order.
        Raises OSError."""
        ...

    def get(self, objects: Sequence[Incoming]) -> list[StoreAnswer]: ...
    def put(self, objects: Sequence[Outgoing]) -> list[StoreAnswer]: ...

    def are_present(self, keys: Sequence[str]) -> list[bool | None]:
        """Return whether each object exists; None if that is unknown."""
        ...

    def keys(self, prefix: str) -> Iterator[list[str]]:
        """Yield the keys of all objects below a prefix. Raises OSError."""
        ...

    def check(self, key: str | None) -> str | None:
        """Try whether the store answers, and reads the object `key` if one is known; return why it does not. For the
        breaker."""
        ...

    def close(self) -> None: ...
