"""Policy: which blocks a store evicts, and what it learns from requests to know that.

A policy is a module here and a row of POLICIES (`policies/table.py`); for profiles, its name is in the schema of
`eviction`, too (`config/schema.py`). What a policy does not override learns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvbm.core.index import HashIndex
from kvbm.core.policies.chain_use import ChainHint, ChainUse
from kvbm.core.slot_lists import Order


class Policy:
    """`order` has the inactive slots. A policy that `knows_uses` keeps marks of blocks, and what `arrive` returns has
    those of the chain of a request. `follows_hints`: of clients."""

    knows_uses: ClassVar[bool] = False
    follows_hints = True
    order: Order

    def __init__(self, capacity_blocks: int) -> None:
        raise NotImplementedError

    @property
    def marks(self) -> bytearray:
        """What is known of the block in each slot; empty if nothing ever is."""
        return bytearray()

    def arrive(
        self, hashes: Sequence[bytes], index: HashIndex, now_s: float, hint: ChainHint | None = None, above: int = 0
    ) -> ChainUse | None:
        """Note the arrival of a request for the chain `hashes`; `index` has those in the cache. The first `above` ones
        are in a tier above, and count as if they were here."""
        return None

    def see(self) -> None:
        """Do a part of the work that arrivals have left."""

    def let_go(self, hashes: Sequence[bytes], listed: list[int], others: list[int], *, demotes: bool) -> None:
        """Note that the session that owns these blocks of the chain `hashes` needs them no more: slots that are
        inactive, and others. With `demotes`, they are evicted first."""

    def unretain(self, hashes: Sequence[bytes], kept: int, listed: list[int], slots: list[int]) -> None:
        """Note that the blocks of the chain `hashes` from `kept` on, in these slots, are retained no longer."""

    def clear(self) -> None:
        """Forget what is known of blocks."""

    def choice(self) -> tuple[int, int]:
        """Return the number of the order in use, for `kvbm_eviction_order`, and its hits above those of LRU, in
        percent."""
        return 0, 0
