"""KvbmTier: disk (G3) and shared tier (G4) below the host memory of vLLM's own offloading.

vLLM's OffloadingConnector copies blocks between the device and a region of host memory. It hands every block of that
region to the tiers below it, and asks them for blocks that it has not:

    lookup          whether a block can be read: HIT, MISS, or RETRY while a shared store is asked
    submit_load     a job: copy blocks into these rows of the region
    submit_store    a job: take blocks over from these rows
    get_finished_jobs, drain_jobs    report each job once; a load names the blocks that have arrived

All of these run in the thread of vLLM's scheduler, which owns the StorageLeader, and none waits but `drain_jobs`. A row
is copied by a thread of this process, from or into a slot of kvbm's own memory (G2). No other process has the region,
so a late read of a drive, or of a process that was stopped, ends in a slot that stays reserved. A job that takes too
long is given up: it is reported when its thread has stopped copying.

vLLM ends the engine at any exception of a tier. No method raises one: any doubt is a MISS, or a job that has failed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbm.boundary import Boundary, contained, hook
from kvbm.config.connector import KEY, resolve_connector
from kvbm.device.worker import HostCapacity
from kvbm.engines.engine_code import module_if_installed
from kvbm.engines.launch_plan import CONTROL_VARIABLE
from kvbm.engines.vllm import idle_engine, loads
from kvbm.engines.vllm.beginning import log_as_vllm_does, refuse_rival
from kvbm.engines.vllm.engine_facts import VllmFacts
from kvbm.engines.vllm.identity import identity
from kvbm.engines.vllm.offloading import OffloadedRequests
from kvbm.engines.vllm.weight_updates import watch
from kvbm.errors import EnvironmentProblem, InvariantError
from kvbm.host.layout import BlockLayout
from kvbm.host.segment import Segment
from kvbm.identity.description import Description, describe
from kvbm.leader.opening import EngineAtStart, open_storage_leader
from kvbm.observe.telemetry import Telemetry
from kvbm.tiers.settings import EngineTraits, LeaderCallbacks

if TYPE_CHECKING:
    from kvbm.leader.storage_leader import Loan, Question, StorageLeader

INTERFACE = "vllm.v1.kv_offload.tiering.base"
OFFLOADING = "vllm.v1.kv_offload.base"
PLACE = f"secondary_tiers.{KEY}"
GROUP_BYTES = 4  # of a key: the index of the KV cache group, after the block hash
STORE_LIMIT_S = 2.0  # until a block that lower tiers have no room for is given up
COPYING_THREADS = 2
POLL_S = 0.0005

log = logging.getLogger(__name__)

_interface = module_if_installed(INTERFACE)
_offloading = module_if_installed(OFFLOADING)
_HIT, _MISS, _RETRY = (
    getattr(getattr(_offloading, "LookupResult", None), name, None) for name in ("HIT", "MISS", "RETRY")
)
_Tier: Any = getattr(_interface, "SecondaryTierManager", object)


@dataclass(slots=True, eq=False)
class _Job:
    """Blocks that move between rows of vLLM's region and tiers. `copied` are the positions whose bytes have arrived,
    in the order in which they did. The copying threads append to it; the scheduler's thread does all else."""

    job_id: int
    keys: Sequence[bytes]
    rows: Sequence[int]
    is_load: bool
    request_id: str
    end_s: float
    began_s: float
    question: Question[Any] | None = None
    copies: list[Future[None]] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    is_given_up: bool = False

    def is_copied(self) -> bool:
        """Whether no thread copies any more."""
        return all(copy.done() for copy in self.copies)


@dataclass(slots=True, eq=False)
class _Lookup:
    """The keys of a request that a shared store has to answer: those of a step together."""

    unasked: dict[bytes, None] = field(default_factory=dict)
    asked: Sequence[bytes] = ()
    answered: set[bytes] = field(default_factory=set)
    question: Question[int] | None = None

    def advance(self, leader: StorageLeader) -> None:
        if self.question is None and self.unasked:
            self.asked, self.unasked = list(self.unasked), {}
            self.question = leader.find(self.asked)
        if self.question is not None:
            try:
                next(self.question)
            except StopIteration:
                self.answered.update(self.asked)
                self.question = None


class KvbmTier(_Tier):  # type: ignore[misc]  # vllm is not there for the type checker
    """See the module's text. vLLM creates one in the process of the scheduler."""

    medium = getattr(getattr(_offloading, "Medium", None), "STORAGE", None)

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        """Open the tiers. `primary_kv_view`: uint8 [rows, bytes of a row]. Raises ProfileError or
        EnvironmentProblem."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        log_as_vllm_does()
        refuse_rival()
        self.boundary = Boundary()
        self._vllm_config: Any = loads.last_config()
        if self._vllm_config is None:
            raise EnvironmentProblem(
                "kvbm does not know the model of this engine: vLLM has not called its plugin `kvbm`",
                hint="add `kvbm` to VLLM_PLUGINS, or unset it",
            )
        self._config = resolve_connector(options, os.environ, engine="vllm", place=PLACE)
        if not self._config.tiers.has_lower:
            raise EnvironmentProblem(
                "kvbm has no tier below vLLM's host memory", hint=f"set `{PLACE}.tiers.disk` or `{PLACE}.tiers.shared`"
            )
        facts = VllmFacts.of(self._vllm_config)
        self._requests = OffloadedRequests(self.boundary, self.weights_may_change)
        self._jobs: dict[int, _Job] = {}
        self._results: list[Any] = []
        self._failed: dict[str, set[bytes]] = {}  # by request: keys whose load has failed
        self._readable: set[bytes] = set()  # until the end of this step
        self._lookups: dict[str, _Lookup] = {}  # by request: what a shared store has to answer
        self._has_former = False  # vLLM's host memory may have blocks of former weights
        self._threads = ThreadPoolExecutor(COPYING_THREADS, thread_name_prefix="kvbm-copy")
        self._rows = np.asarray(primary_kv_view)
        self._telemetry = Telemetry(
            self._config.metrics, engine=facts.index, control_directory=os.environ.get(CONTROL_VARIABLE)
        )
        self._open(facts)
        watch(self)
        idle_engine.watch_cores()

    def _open(self, facts: VllmFacts) -> None:
        """Open the tiers. Raises EnvironmentProblem."""
        spec = self._offloading_spec.config
        layout = BlockLayout.block_contiguous(block_count=len(self._rows), block_bytes=self._rows.shape[1])
        host = self._config.tiers.host_memory()
        capacity = HostCapacity(capacity_bytes=host.capacity_bytes, block_count=host.blocks)
        self._segment = Segment.create(rank=0, layout=layout, slot_count=capacity.slot_count(layout.slot_stride, 1))
        tokens = max(group.tokens_per_block for group in spec.groups) * spec.cache.blocks_per_chunk
        traits = EngineTraits(tokens, hash_bytes=facts.hash_bytes + GROUP_BYTES, names_whole_chains=False)
        try:
            self._leader = open_storage_leader(
                self._config,
                EngineAtStart([self._segment.info], traits, len(self._rows), self._described, info=facts.info),
                LeaderCallbacks(_no_device_blocks, _no_device_blocks),
            )
        except BaseException:
            self._segment.close()
            raise
        self.boundary.counters = self._leader.counters
        self._telemetry.watch(self._leader, idle_engine.wake)
        log.info("kvbm: %d blocks of %d bytes between vLLM's host memory and the tiers", *self._segment.payload.shape)

    def _described(self) -> Future[Description]:
        """Return what decides the bytes and names of a row."""
        spec = self._offloading_spec.config
        facts, doubt = identity(self._vllm_config)
        if not doubt and getattr(self._vllm_config.model_config, "is_multimodal_model", False):
            doubt = "vLLM does not say which images a block has, and clients may choose their names"
        rows = {
            "groups": [repr(group) for group in spec.groups],
            "blocks": [spec.cache.blocks_per_chunk, spec.cache.tokens_per_hash, spec.worker_kv_bytes_per_block],
            "layout": [spec.kv_cache_layout, spec.replicated_layout, spec.canonical_layout],
        }
        return describe({**facts, "offloading": rows}, doubt)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return HIT if a block can be read, RETRY while a shared store is asked, else MISS. vLLM asks for one block
        after the other; the answers for those that follow are found together."""
        if key in self._readable and req_context.req_id not in self._failed:
            return _HIT
        try:
            return self._looked_up(key, req_context)
        except Exception as error:  # a decorator would take as long as the lookup
            self.boundary.caught("KvbmTier.lookup", error, turns_off=True)
            return _MISS

    def _looked_up(self, key: bytes, req_context: Any) -> Any:
        request_id = req_context.req_id
        if self.boundary.is_off or self._has_former or key in self._failed.get(request_id, ()):
            return _MISS
        if self._leader.readable([key]):
            keys = list(getattr(req_context, "_offload_key_positions", ()))  # of the request, by group, in order
            following = keys[keys.index(key) :] if key in keys else [key]
            self._readable.update(following[: self._leader.readable(following)])
            return _HIT
        if not self._leader.asks_others:
            return _MISS
        lookup = self._lookups.setdefault(request_id, _Lookup())
        if key in lookup.answered:
            return _MISS
        lookup.unasked.setdefault(key)
        return _RETRY

    @contained()
    def submit_load(self, job_metadata: Any) -> None:
        self._submit(job_metadata, self._config.onboard.disk_timeout_s)

    @contained()
    def submit_store(self, job_metadata: Any) -> None:
        self._submit(job_metadata, STORE_LIMIT_S)

    def _submit(self, metadata: Any, limit_s: float) -> None:
        """Note a job. It begins at the end of this step."""
        now_s, keys = time.monotonic(), list(metadata.keys)
        job = _Job(
            metadata.job_id,
            keys,
            [int(row) for row in metadata.chunk_ids],
            metadata.is_promotion,
            metadata.req_context.req_id,
            now_s + limit_s,
            now_s,
        )
        self._jobs[job.job_id] = job
        is_stale = not job.is_load and self._requests.is_stale(job.request_id)
        if len(job.rows) != len(keys) or any(not 0 <= row < len(self._rows) for row in job.rows):
            raise InvariantError(f"job {job.job_id} of vLLM has {len(keys)} keys and the rows {job.rows[:8]}")
        if self.boundary.is_off or self._has_former or is_stale:
            job.is_given_up = True
            return
        ask = self._leader.read if job.is_load else self._leader.write
        job.question = ask(keys, partial(self._lend, job))

    def _lend(self, job: _Job, loan: Loan) -> None:
        job.copies.append(self._threads.submit(self._copy, job, loan))

    def _copy(self, job: _Job, loan: Loan) -> None:
        """Copy the blocks of a loan, until the job is given up. Runs in a thread of its own."""
        row_bytes, payload = self._rows.shape[1], self._segment.payload
        for position, slot in zip(loan.positions, loan.slots, strict=True):
            if job.is_given_up:
                return
            row = self._rows.ctypes.data + job.rows[position] * row_bytes
            slot_address = payload.ctypes.data + slot * payload.strides[0]
            target, source = (row, slot_address) if job.is_load else (slot_address, row)
            ctypes.memmove(target, source, row_bytes)  # lets other threads run
            job.copied.append(position)
        loan.is_over = True

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the results of the jobs that have ended since the last call."""
        self._advance()
        self._end_jobs()
        results, self._results = self._results, []
        return results

    @contained()
    def on_schedule_end(self, context: Any) -> None:
        """Begin what vLLM has asked for in this step."""
        self._readable.clear()
        self._advance()

    @hook()
    def _advance(self) -> None:
        """Let the tiers and the jobs continue."""
        self._leader.step()
        for lookup in self._lookups.values():
            lookup.advance(self._leader)
        for job in list(self._jobs.values()):
            self._continue(job)

    def _continue(self, job: _Job) -> None:
        job.is_given_up |= time.monotonic() > job.end_s
        if not job.is_given_up and job.question is not None:
            try:
                next(job.question)
            except StopIteration:
                self._end(job)
        elif job.is_copied():
            if job.question is not None:
                job.question.close()
            self._end(job)

    @contained()
    def _end_jobs(self) -> None:
        """End the jobs of a cache that is off, and those that no question answers. Asks no metadata."""
        if not self.boundary.is_off:
            return
        for job in list(self._jobs.values()):
            job.is_given_up = True
            if job.is_copied():
                self._end(job)

    def _end(self, job: _Job) -> None:
        """Report a job. No thread copies for it any more."""
        del self._jobs[job.job_id]
        good = [job.keys[position] for position in job.copied]
        is_whole = len(good) == len(job.keys)
        if job.is_load and not is_whole:
            self._failed.setdefault(job.request_id, set()).update(set(job.keys).difference(good))
        self._results.append(
            _interface.JobResult(  # type: ignore[union-attr]  # vLLM calls this
                job.job_id,
                success=is_whole if job.is_load else not job.is_given_up,
                successful_keys=good if job.is_load and good else None,
                transfer_time=time.monotonic() - job.began_s,
                transfer_bytes=len(good) * self._rows.shape[1],
            )
        )

    @contained(False)
    def has_pending_work(self) -> bool:
        return bool(self._jobs or self._results) or self._leader.is_busy()

    @contained()
    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        self._leader.touch(list(keys))

    def on_new_request(self, req_context: Any) -> Any:
        return _offloading.RequestOffloadingContext()  # type: ignore[union-attr]  # vLLM calls this

    @contained()
    def on_request_finished(self, req_context: Any) -> None:
        self._failed.pop(req_context.req_id, None)
        lookup = self._lookups.pop(req_context.req_id, None)
        if lookup is not None and lookup.question is not None:
            lookup.question.close()
        self._requests.end(req_context.req_id)

    @contained()
    def drain_jobs(self) -> None:
        """End every job, and forget every block: vLLM resets its host memory next, possibly because the weights change.
        Waits at most STORE_LIMIT_S."""
        end_s = time.monotonic() + STORE_LIMIT_S
        while self._jobs and not self.boundary.is_off and time.monotonic() < end_s:
            self._advance()
            time.sleep(POLL_S)
        self._give_up()
        self._forget("vLLM's offloading was reset, possibly because the weights change")
        self._has_former = False

    def _give_up(self) -> None:
        """End every job. Waits until no thread copies: for the copy of one block at most."""
        for job in self._jobs.values():
            job.is_given_up = True
        wait([copy for job in self._jobs.values() for copy in job.copies])
        self._advance()
        self._end_jobs()

    @contained()
    def weights_may_change(self, cause: str) -> None:
        """Forget every block, here and in vLLM's host memory: vLLM itself keeps blocks of former weights there."""
        self._give_up()
        self._has_former = True
        self._forget(f"{cause} can change the weights")
        self._requests.reset_host_memory()

    def adapter_is_loaded(self, adapter: Any) -> None:
        self._requests.adapter_is_loaded(adapter)

    @hook()
    def _forget(self, why: str) -> None:
        log.warning("kvbm: %s: every block is deleted, and no later one will outlive this engine", why)
        self._readable.clear()
        self._requests.change()
        self._leader.reset(ends_persistence=True)

    @contained()
    def shutdown(self) -> None:
        """Write what is due, as far as the time allows, and free everything. vLLM unmaps its region next."""
        self._give_up()
        self._threads.shutdown()
        if self.boundary.is_off:
            self._leader.abandon()
        else:
            self._leader.close()
        self._rows = np.empty((0, 0), np.uint8)  # vLLM cannot release a region that is in use
        self._segment.close()
        self._telemetry.close()


def _no_device_blocks(block_ids: Sequence[int]) -> None:
    assert not block_ids, "kvbm holds no device memory of vLLM"
