"""A connector for tests: keeps real bytes in host memory, loads over steps, fails on request.

Its two sides share nothing but pickled metadata. `memory` is how the worker side reaches the bytes of a block, so
that the same connector serves the torch engine and the simulated one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvbm.engines.embedded.engine.connector import ConnectorOutput, Step


class Memory(Protocol):
    """The blocks of G1 as opaque contents."""

    def read(self, block_id: int) -> object: ...
    def write(self, block_id: int, content: object) -> None: ...
    def spoil(self, block_id: int) -> None: ...


class TorchMemory:
    """The blocks of a KVPool, by its own layout."""

    def __init__(self, pool) -> None:
        self._pieces = pool.layout().pieces
        self._storages = pool.storages

    def _views(self, block_id: int) -> list[torch.Tensor]:
        return [
            self._storages[piece.storage][piece.offset + block_id * piece.block_stride :][: piece.length]
            for piece in self._pieces
        ]

    def read(self, block_id: int) -> object:
        return [view.clone() for view in self._views(block_id)]

    def write(self, block_id: int, content) -> None:
        for view, source in zip(self._views(block_id), content, strict=True):
            view.copy_(source)

    def spoil(self, block_id: int) -> None:
        for view in self._views(block_id):
            view.fill_(0x4E)  # as float32 about 8.6e8


@dataclass(frozen=True)
class Load:
    request_id: str
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class Meta:
    loads: tuple[Load, ...]
    saves: tuple[tuple[bytes, int], ...]


@dataclass
class Lookup:
    """What happened at one lookup, for tests to look at."""

    request_id: str
    num_computed_tokens: int
    preemptions: int


class HostScheduler:
    """Saves every computed full block; offers what is saved. Attributes are for tests to set and read."""

    def __init__(self, *, block_size: int) -> None:
        self.block_size = block_size
        self.known: set[bytes] = set()
        self.not_yet: set[str] = set()  # request ids that are answered None
        self.may_load = True
        self.leaves_last_block = True  # what a decent connector does: the last token's block is not offered
        self.lookups: list[Lookup] = []
        self.allocations: list[tuple[str, tuple[int, ...], int]] = []
        self.finished: Counter[str] = Counter()
        self.steps: list[Step] = []
        self.bad: set[str] = set()
        self.resets = 0
        self._requests: dict[str, object] = {}
        self._starts: dict[str, int] = {}
        self._loading: dict[str, list[int]] = {}  # the blocks that each load holds
        self._loads: list[Load] = []
        self._saving: list[bytes] = []

    def bind_wake(self, wake) -> None:
        """It has work in steps only."""

    def bind_block_pool(self, pool, identity, doubt) -> None:
        self.pool = pool

    def on_new_request(self, request) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> int | None:
        preemptions = sum(request in step.preempted for step in self.steps)
        self.lookups.append(Lookup(request.request_id, num_computed_tokens, preemptions))
        if request.request_id in self.not_yet:
            return None
        start = num_computed_tokens // self.block_size
        self._starts[request.request_id] = start
        last = (request.num_tokens - self.leaves_last_block) // self.block_size
        usable = request.block_hashes[start:last]
        count = 0
        while count < len(usable) and usable[count] in self.known:
            count += 1
        if not self.may_load or request.request_id in self.bad:
            count = 0
        return count * self.block_size

    def update_state_after_alloc(self, request, block_ids: list[int], num_external_tokens: int) -> None:
        self.allocations.append((request.request_id, tuple(block_ids), num_external_tokens))
        start = self._starts[request.request_id]
        end = start + num_external_tokens // self.block_size
        loaded = block_ids[start:end]
        self._loads.append(Load(request.request_id, tuple(request.block_hashes[start:end]), tuple(loaded)))
        self.pool.hold(loaded)
        self._loading[request.request_id] = loaded

    def build_connector_meta(self, step) -> Meta:
        self.steps.append(step)
        saves = {}
        for request, count in step.scheduled.items():
            for index in range((request.num_computed_tokens + count) // self.block_size):
                block_hash = request.block_hashes[index]
                if block_hash not in self.known:
                    saves[block_hash] = request.block_ids[index]
        loads, self._loads = tuple(self._loads), []
        self._saving = list(saves)
        return Meta(loads, tuple(saves.items()))

    def update_connector_output(self, output):
        if not output.failed_block_ids:
            self.known.update(self._saving)
        for load_id in output.finished_recving:
            self.pool.release(reversed(self._loading.pop(load_id, [])))
        if output.failed_block_ids:
            self.bad.update(self._requests)  # what failed once is not offered again to those who are here
        return output

    def request_finished(self, request) -> None:
        self.finished[request.request_id] += 1
        self._requests.pop(request.request_id, None)

    def has_pending_work(self) -> bool:
        return bool(self._loading)

    def lower_tier_tokens(self, request) -> tuple[int, int]:
        return 0, 0

    def reset_cache(self) -> bool:
        self.resets += 1
        self.known.clear()
        return True

    def shutdown(self) -> None:
        pass


@dataclass
class HostWorker:
    """Moves the bytes. A load takes `latency_steps` steps, or until `finish_loads` where that is None."""

    latency_steps: int | None = 1
    fail_next: int = 0  # so many of the next blocks to load come out wrong
    store: dict[bytes, object] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pending: list[list] = []
        self._failed: set[int] = set()
        self.finished: set[str] = set()

    def register_kv_pool(self, pool) -> None:
        self.memory: Memory = pool if hasattr(pool, "read") else TorchMemory(pool)

    def start_load_kv(self, meta) -> None:
        self.calls.append("start_load")
        for load in meta.loads:
            for block_id in load.block_ids:
                self.memory.spoil(block_id)
            self.pending.append([load, self.latency_steps])

    def wait_for_save(self, meta) -> None:
        self.calls.append("wait_for_save")
        for block_hash, block_id in meta.saves:
            self.store.setdefault(block_hash, self.memory.read(block_id))

    def take_results(self) -> ConnectorOutput:
        self.calls.append("take_results")
        for entry in list(self.pending):
            load, left = entry
            if left is None:
                continue
            if left <= 0:
                self.pending.remove(entry)
                self._copy(load)
                self.finished.add(load.request_id)
            entry[1] = left - 1
        results = ConnectorOutput(self.finished, self._failed)
        self.finished, self._failed = set(), set()
        return results

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    @property
    def loading_ids(self) -> list[str]:
        return [load.request_id for load, _ in self.pending]

    def finish_loads(self, request_id: str | None = None) -> None:
        """The loads of this request (of all) end in the coming step."""
        for entry in self.pending:
            if request_id in (None, entry[0].request_id):
                entry[1] = 0

    def report_failure(self, block_id: int) -> None:
        """A block of a load under way is known to be bad, before the load ends."""
        self._failed.add(block_id)

    def _copy(self, load: Load) -> None:
        for block_hash, block_id in zip(load.hashes, load.block_ids, strict=True):
            if self.fail_next:
                self.fail_next -= 1
                self.memory.spoil(block_id)
                self._failed.add(block_id)
            else:
                self.memory.write(block_id, self.store[block_hash])


def create(*, block_size: int, latency_steps: int | None = 1) -> tuple[HostScheduler, HostWorker]:
    return HostScheduler(block_size=block_size), HostWorker(latency_steps)
