"""KvbmHiCacheStorage: the class that SGLang loads, with `--hicache-storage-backend dynamic`.

SGLang's hierarchical cache has its own host memory (its G2) and moves pages between it and the device. Below it, this
backend keeps them on disk (G3) and in the shared tier (G4). A page of SGLang is a block of kvbm. SGLang calls from
threads of its own, which wait for the answer:

    batch_exists       how many pages of a prompt are stored, from the first one on
    batch_get_v1       copies pages into SGLang's host memory. False: not there, damaged, or too late
    batch_set_v1       takes pages over. True: in kvbm's memory, and on their way to disk
    batch_*_v2         the same for models with more than one host pool: KV, and states or indexes
    clear              forgets every page

None of these raises: any doubt is False, and SGLang computes the page. Methods of the start raise, so that SGLang does
not start with a storage that cannot work. So do those of SGLang's older interface, which it does not call with
`interface_v1`. One thread of kvbm owns all metadata (leader_thread.py).
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvbm.boundary import Boundary, contained
from kvbm.config.connector import KEY, resolve_connector
from kvbm.engines.engine_code import module_if_installed
from kvbm.engines.launch_plan import CONTROL_VARIABLE
from kvbm.engines.opening import open_storage
from kvbm.engines.sglang import flushes, weight_updates
from kvbm.engines.sglang.host_pool import Addresses, HostPool, copy_in, copy_out
from kvbm.engines.sglang.identity import identity, is_attached
from kvbm.engines.sglang.leader_thread import LeaderThread
from kvbm.engines.sglang.ranks import for_rank, replica
from kvbm.errors import EnvironmentProblem
from kvbm.host.layout import BlockLayout, Piece
from kvbm.identity.description import Description, describe
from kvbm.identity.machine import version_of
from kvbm.observe.telemetry import Telemetry
from kvbm.tiers.settings import EngineTraits

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

    from kvbm.host.segment import Segment
    from kvbm.leader.storage_leader import Lend, Loan, Question, StorageLeader

INTERFACE = "sglang.srt.mem_cache.hicache_storage"
KEY_BYTES = 32  # SHA-256
KV_POOL = "kv"
ALL_PAGES, TRAILING_PAGES = "all_pages", "trailing_pages"  # which pages of a pool a prefix requires
# Keys of `--hicache-storage-backend-extra-config` that SGLang reads; it removes some of them before we see it.
SGLANG_KEYS = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size", "allocator"})

log = logging.getLogger(__name__)


_Storage: Any = getattr(module_if_installed(INTERFACE), "HiCacheStorage", object)


class KvbmHiCacheStorage(_Storage):  # type: ignore[misc]  # sglang is not there for the type checker
    """See the module's text. SGLang creates one in each process of a rank."""

    def __init__(self, storage_config: Any, arguments: Mapping[str, Any] | None = None) -> None:
        """Read the configuration. Raises ProfileError or EnvironmentProblem."""
        self.boundary = Boundary()
        self._storage = storage_config
        extra = dict(storage_config.extra_config or {})
        ours = {name: value for name, value in extra.items() if name not in SGLANG_KEYS}
        if not extra.get("interface_v1"):
            raise EnvironmentProblem(
                "kvbm does not work with SGLang's older interface for storages, which copies each page twice",
                hint='add `"interface_v1": 1` to `--hicache-storage-backend-extra-config`',
            )
        place = f"hicache-storage-backend-extra-config.{KEY}"
        group = (replica() or storage_config.dp_rank) * storage_config.pp_size + storage_config.pp_rank
        rank = self._rank = group * storage_config.tp_size + storage_config.tp_rank
        config = resolve_connector(ours, os.environ, engine="sglang", warns=rank == 0, place=place)
        self._config = for_rank(config, storage_config)
        self._telemetry = self._new_telemetry()
        self._pools: dict[str, HostPool] = {}  # by SGLang's name, the one of KV included
        self._segment: Segment | None = None
        self._thread: LeaderThread | None = None
        self._is_complete = False  # SGLang has registered all pools
        self._doubt = ""  # why the files of the model may not describe the weights
        self._cause = ""  # why nothing is read or written any more

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the tiers. Raises EnvironmentProblem."""
        flushes.build_hashes()
        flushes.watch(self)
        self._doubt = weight_updates.watch(self, is_attached=is_attached())
        self.mem_pool_host = mem_pool_host
        pool = HostPool(mem_pool_host)
        self._pools = {KV_POOL: pool}
        self._open(pool.layout(), pool.facts())

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Note a pool of another kind than KV. Raises EnvironmentProblem if kvbm cannot store its pages."""
        name = _text(host_pool_name)
        if name == KV_POOL:
            return
        try:
            if name.startswith("draft"):
                raise EnvironmentProblem("kvbm does not know the weights of the model that makes a draft")
            if self._is_complete:
                raise EnvironmentProblem("it was added while SGLang runs")
            self._pools[name] = HostPool(host_pool)
        except EnvironmentProblem as problem:
            self.close()
            raise EnvironmentProblem(
                f"kvbm cannot store pages of SGLang's host pool `{name}`: {problem.message}",
                hint="start SGLang without `--hicache-storage-backend`",
            ) from None

    def on_host_pools_registered(self) -> None:
        """Open the tiers again if there are more pools than KV: a slot holds a page of any.

        SGLang calls it right after the pools, before the disk process has opened a file. Raises EnvironmentProblem.
        """
        self._is_complete = True
        if len(self._pools) == 1:
            return
        self.close()
        page_bytes = max(pool.page_bytes for pool in self._pools.values())
        self._telemetry = self._new_telemetry()
        layout = BlockLayout((Piece(0, 0, page_bytes, page_bytes),), 1)
        pools = sorted(self._pools.items())
        self._open(layout, {name: {**pool.facts(), "page_bytes": pool.page_bytes} for name, pool in pools})

    def _new_telemetry(self) -> Telemetry:
        directory = os.environ.get(CONTROL_VARIABLE)
        return Telemetry(self._config.metrics, engine=self._rank, control_directory=directory)

    def _open(self, layout: BlockLayout, facts: dict[str, object]) -> None:
        """Open the tiers for blocks of this layout. Raises EnvironmentProblem."""
        traits = EngineTraits(self._pools[KV_POOL].page_tokens, hash_bytes=KEY_BYTES, names_whole_chains=False)
        ranks = self._storage.tp_size * self._storage.pp_size
        self._segment, leader = open_storage(
            self.boundary,
            self._config,
            layout,
            traits,
            partial(self._described, facts),
            info=self._info(),
            rank_count=ranks,
        )
        total_s, drain_s = self._config.onboard.disk_timeout_s, self._config.tiers.drain_s
        self._thread = LeaderThread(leader, self.boundary, total_s=total_s, drain_s=drain_s)
        self._telemetry.watch(leader, self._thread.wake)
        info = self._segment.info
        log.info(
            "kvbm: rank %d allocated %d blocks of %d bytes in host memory (%.2f GB)",  # `kvbm serve` reads it
            self._rank,
            info.slot_count,
            info.block_bytes,
            info.length / 1e9,
        )

    @contained(0)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Return how many of the keys are stored, up to the first that is not."""
        hashes, prefix = _hashes(keys), _hashes(getattr(extra_info, "prefix_keys", None) or ())
        return self._ask(lambda leader, _: leader.find(hashes, prefix)) or 0

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Copy pages to these token positions of SGLang's host pool. Return which are there."""
        return self._moved("batch_get_v1", self._get, keys, host_indices)

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Take over the pages at these token positions of SGLang's host pool. Return which are stored."""
        return self._moved("batch_set_v1", self._set, keys, host_indices)

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return how long a prefix can be loaded with all pools, and which shorter ones."""
        count = self.batch_exists(keys, extra_info)
        found, _ = self.boundary.attempt(
            "batch_exists_v2", lambda: self._restorable(keys[:count], pool_transfers or ())
        )
        hits, lengths = found or ({}, [])
        result = module_if_installed(INTERFACE).PoolTransferResult  # type: ignore[union-attr]  # SGLang calls this
        return result(lengths[-1] if lengths else 0, hits, lengths)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Copy pages of several pools. Return for each pool which are there."""
        return {
            one.name: self._moved("batch_get_v2", self._get, one.keys or (), one.host_indices, _text(one.name))
            for one in transfers
        }

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Take over pages of several pools. Return for each pool which are stored."""
        return {
            one.name: self._moved("batch_set_v2", self._set, one.keys or (), one.host_indices, _text(one.name))
            for one in transfers
        }

    def _of_older_interface(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("kvbm works with `interface_v1` only")

    get = batch_get = set = batch_set = exists = _of_older_interface  # SGLang's abstract class requires them

    @contained()
    def clear(self) -> None:
        """Forget every page, in every tier."""

        def reset(leader: StorageLeader, _: Lend) -> Question[bool]:
            yield
            return leader.reset()

        if self._thread is None or self.boundary.is_off or not self._thread.ask(reset):
            log.error("kvbm: the storage was not cleared")

    @contained()
    def close(self) -> None:
        """Write what is due, as far as the time allows, and free everything. SGLang calls it when it detaches."""
        thread, self._thread = self._thread, None
        if thread is not None and thread.close() and self._segment is not None:
            self._segment.close()
        self._telemetry.close()

    def refuse_questions(self) -> None:
        if self._thread is not None:
            self._thread.refuse()

    def accept_questions(self) -> None:
        if self._thread is not None:
            self._thread.accept()

    def weights_may_change(self, cause: str) -> None:
        """Read and write nothing any more: pages that are computed from now on may have other weights."""
        if not self._cause:
            self._cause = cause
            log.warning("kvbm: no page is read or stored until SGLang is restarted: %s", cause)

    def _described(self, pool: dict[str, object]) -> Future[Description]:
        facts, doubt = identity(self._storage, pool)
        return describe(facts, self._doubt or doubt)

    def _info(self) -> dict[str, str]:
        """Return the labels of the metric `kvbm_info`."""
        return {
            "engine_name": "sglang",
            "engine_version": version_of("sglang"),
            "model": str(self._storage.model_name or ""),
            "dtype": str(self.mem_pool_host.dtype).removeprefix("torch."),
        }

    def _moved(
        self,
        name: str,
        move: Callable[[Sequence[bytes], Sequence[Addresses]], list[bool]],
        keys: Sequence[str],
        indices: torch.Tensor,
        pool: str = KV_POOL,
    ) -> list[bool]:
        """Move the pages of a pool at these positions; return which have been, none after an exception."""
        moved, _ = self.boundary.attempt(
            name, lambda: move(_hashes(keys, pool), self._pools[pool].pages(indices, len(keys)))
        )
        return moved or [False] * len(keys)

    def _restorable(self, keys: Sequence[str], transfers: Sequence[Any]) -> tuple[dict[Any, int], list[int]]:
        """Return the pages of each pool, and the lengths of prefixes that all pools have. A pool that requires only the
        last pages has holes: of 5 pages, 5 may be restorable, and 4 and 3 not."""
        hits, lengths = ({KV_POOL: len(keys)} if keys else {}), list(range(1, len(keys) + 1))
        for transfer in transfers:
            hashes = _hashes(keys, _text(transfer.name))
            found = self._ask(partial(_which, hashes)) or [False] * len(keys)
            window = _window(transfer)
            allowed = {end for end in lengths if all(found[max(0, end - (window or end)) : end])}
            if allowed:
                hits[transfer.name] = max(allowed)
            lengths = [end for end in lengths if end in allowed]
        return hits, lengths

    def _get(self, hashes: Sequence[bytes], pages: Sequence[Addresses]) -> list[bool]:
        are_there = [False] * len(hashes)

        def copy(loan: Loan) -> None:
            for position, slot in zip(loan.positions, self._addresses(loan), strict=True):
                copy_out(slot, pages[position])
                are_there[position] = True

        self._ask(lambda leader, lend: leader.read(hashes, lend), copy)
        return are_there if not self._cause else [False] * len(hashes)

    def _set(self, hashes: Sequence[bytes], pages: Sequence[Addresses]) -> list[bool]:

        def copy(loan: Loan) -> None:
            for position, slot in zip(loan.positions, self._addresses(loan), strict=True):
                copy_in(slot, pages[position])

        return self._ask(lambda leader, lend: leader.write(hashes, lend), copy) or [False] * len(hashes)

    def _ask(
        self, begin: Callable[[StorageLeader, Lend], Question[Any]], copy: Callable[[Loan], None] | None = None
    ) -> Any:
        """Return the leader's answer; None if there is none, or after a change of the weights."""
        if self._thread is None or self.boundary.is_off or self._cause:
            return None
        return self._thread.ask(begin, copy)

    def _addresses(self, loan: Loan) -> list[int]:
        """Return where the slots of a loan are in this process."""
        assert self._segment is not None
        payload = self._segment.payload
        return [payload.ctypes.data + slot * payload.strides[0] for slot in loan.slots]


def _which(hashes: Sequence[bytes], leader: StorageLeader, _: Lend) -> Question[list[bool]]:
    return leader.which(hashes)


def _text(name: Any) -> str:
    """Return the text of one of SGLang's names, which are enumerations."""
    return str(getattr(name, "value", name))


def _window(transfer: Any) -> int | None:
    """Return how many pages at the end of a prefix must be there, None for all. Raises ValueError for other rules."""
    policy = _text(transfer.hit_policy)
    if policy not in (ALL_PAGES, TRAILING_PAGES):
        raise ValueError(f"kvbm does not know the hit policy `{policy}` of SGLang's host pool `{_text(transfer.name)}`")
    return max(1, len(transfer.keys or ())) if policy == TRAILING_PAGES else None


def _hashes(keys: Sequence[str], pool: str = KV_POOL) -> list[bytes]:
    """Return SGLang's keys as hashes of pages of a pool. Raises ValueError for a key that is none of its hashes."""
    hashes = [bytes.fromhex(key) for key in keys]
    if any(len(one) != KEY_BYTES for one in hashes):
        raise ValueError(f"{len(hashes)} keys of SGLang are not all of {KEY_BYTES} bytes")
    if pool == KV_POOL:
        return hashes
    return [hashlib.sha256(f"{pool}/".encode() + one).digest() for one in hashes]
