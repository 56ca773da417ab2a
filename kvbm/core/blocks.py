"""Handles: batches of slots that a caller holds, and the state changes they allow.

            allocate              stage(hashes)            register
  free ───────────────▶ Mutable ───────────────▶ Complete ───────────▶ Registered: pinned ⇄ inactive (evictable)
   ▲                      │ release                 │ release                              │
   └──────────────────────┴─────────────────────────┴───────────── evict (only in allocate)┘

A handle holds a batch. A state change consumes the handle and returns the next one; if it is refused, the handle stays
as it was. `release()`, or the end of a `with`, gives the blocks back. Use of a consumed or released handle raises
InvariantError. If a handle is dropped while it holds blocks, the store reports a leak and does nothing else, because a
finalizer may run in any thread at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from kvbm.errors import InvariantError

if TYPE_CHECKING:
    from kvbm.core.store import BlockStore


class Handle:
    """A batch of slots of one store. `epoch` is the number of resets of the store before they were allocated."""

    __slots__ = ("_epoch", "_slots", "_store")

    def __init__(self, store: BlockStore, slots: list[int], epoch: int) -> None:
        self._store: BlockStore | None = store
        self._slots = slots
        self._epoch = epoch

    @property
    def slots(self) -> Sequence[int]:
        """The slots, in the order of the batch."""
        self._holder()
        return self._slots

    def release(self) -> None:
        """Give the blocks back; ends the handle."""
        raise NotImplementedError

    def _holder(self) -> BlockStore:
        if self._store is None:
            raise InvariantError(f"{self!r} was used after it was consumed or released")
        return self._store

    def _consume(self) -> BlockStore:
        store = self._holder()
        self._store = None
        return store

    def __enter__(self) -> Self:
        self._holder()
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            self.release()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._slots)} blocks, slots {self._slots!r:.80})"

    def __del__(self) -> None:
        # A constructor that failed leaves no `_store`.
        if getattr(self, "_store", None) is not None and self._slots:
            self._holder()._report_leak(repr(self))


class MutableBlocks(Handle):
    """Slots whose bytes are undefined. Only the holder may write them."""

    __slots__ = ()

    def stage(self, hashes: Sequence[bytes]) -> CompleteBlocks:
        """Consumes. Declare the bytes as written; `hashes[i]` is the sequence hash of `slots[i]`."""
        store = self._holder()
        staged_hashes = tuple(hashes)
        store._stage(self._slots, staged_hashes)
        self._store = None
        return CompleteBlocks(store, self._slots, self._epoch, staged_hashes)

    def split(self, mask: Sequence[bool]) -> tuple[MutableBlocks, MutableBlocks]:
        """Consumes. Return the blocks chosen by a mask and the others."""
        if len(mask) != len(self._slots):
            raise InvariantError(f"{self!r} cannot be split by {mask!r:.80}")
        store = self._consume()
        chosen = [slot for slot, is_chosen in zip(self._slots, mask, strict=True) if is_chosen]
        others = [slot for slot, is_chosen in zip(self._slots, mask, strict=True) if not is_chosen]
        return MutableBlocks(store, chosen, self._epoch), MutableBlocks(store, others, self._epoch)

    def release(self) -> None:
        """Give the slots back; ends the handle."""
        self._consume()._free_mutable(self._slots)


class NamedBlocks(Handle):
    """A batch whose blocks have sequence hashes: `hashes[i]` names `slots[i]`."""

    __slots__ = ("_hashes",)

    def __init__(self, store: BlockStore, slots: list[int], epoch: int, hashes: tuple[bytes, ...]) -> None:
        super().__init__(store, slots, epoch)
        self._hashes = hashes

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """The sequence hash of each slot."""
        self._holder()
        return self._hashes


class CompleteBlocks(NamedBlocks):
    """Slots whose bytes are written and named, but not findable yet."""

    __slots__ = ()

    def register(self, marks: bytes = b"") -> PinnedBlocks:
        """Consumes. Make the blocks findable and return them pinned. `marks[i]` is the mark of `slots[i]`, if known.

        A hash that is already registered keeps its slot: the returned handle holds that slot, and the new one becomes
        free. Slots that were allocated before a reset become pinned without being findable.
        """
        store = self._consume()
        holders = store._register(self._slots, self._hashes, self._epoch, marks)
        return PinnedBlocks(store, holders, self._epoch, self._hashes)

    def release(self) -> None:
        """Give the slots back without registering them; ends the handle."""
        self._consume()._free_complete(self._slots)


class PinnedBlocks(NamedBlocks):
    """Registered blocks that cannot be evicted while this handle holds them. Several handles may hold one block."""

    __slots__ = ()

    def release(self) -> None:
        """Unpin; ends the handle. Blocks without another pin become the most recently used, the first one newest."""
        self._consume()._unpin(self._slots)
