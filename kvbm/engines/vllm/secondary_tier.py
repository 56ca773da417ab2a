"""KvbmTier: disk (G3) and the shared tier (G4) below the host memory of vLLM's own offloading.

vLLM's OffloadingConnector copies blocks between the device and a region of host memory. It hands every block of that
region to the tiers below it, and asks them for blocks that it has not:

    lookup          whether a block can be read: HIT, MISS, or RETRY while the shared store is asked
    submit_load     a job: copy blocks into these rows of the region
    submit_store    a job: take blocks over from these rows
    get_finished_jobs, drain_jobs    report each job once; a load names the blocks that have arrived

vLLM lets a request at RETRY wait, and asks again in each step. The shared tier ends each question after 0.1 s at most
(`WAIT_S` of kvbm/tiers/shared/tier.py); what the store answers later, the next request finds. A request with a chain
of more than SLICE_BLOCKS blocks, or with several groups, asks several times, for FIND_LIMIT_S altogether.

All of these run in the thread of vLLM's scheduler, which owns the StorageLeader. A row is copied by a thread of this
process, from or into a slot of kvbm's own memory (G2). No other process has the region, so a late read of a drive, or
of a process that was stopped, ends in a slot that stays reserved. A job that takes too long is given up: it is reported
when its thread has stopped copying.

vLLM ends the engine at any exception of a tier. No method raises one: any doubt is a MISS, or a job that has failed.
From a change of the weights on, which a reset of vLLM's offloading may mean too, everything is a MISS, and nothing is
stored: vLLM's device and host memory have blocks of the former weights, and later requests find them there and hand
them to this tier. It continues when vLLM resets its offloading while its device memory is empty: no request has blocks
in it, and none is left in its prefix cache. All that comes later was computed later. What a copy under way still
writes into host memory, vLLM has forgotten by then.

vLLM names a request, and says nothing else of it. So `on_new_request` of the connector is wrapped. What is not kept:

    blocks of an adapter                                its name says nothing of its weights
    blocks from the first image, sound or video on      clients choose their names; the text in front is kept
    blocks of requests whose hashes do not name them    see `is_named`
    new blocks of a request with a hint that demotes    its client will not need them again
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbm.boundary import Boundary, contained, hook
from kvbm.config.connector import KEY, resolve_connector
from kvbm.engines.engine_code import call_before, module_if_installed
from kvbm.engines.launch_plan import CONTROL_VARIABLE
from kvbm.engines.opening import open_storage
from kvbm.engines.vllm import idle_engine, loads
from kvbm.engines.vllm.beginning import log_as_vllm_does, refuse_rival
from kvbm.engines.vllm.engine_facts import VllmFacts
from kvbm.engines.vllm.flags import OFFLOADING_CONNECTOR, TIER
from kvbm.engines.vllm.identity import identity
from kvbm.engines.vllm.request import UNLIMITED, hint_of, is_named
from kvbm.engines.vllm.weight_updates import watch
from kvbm.errors import EnvironmentProblem, InvariantError
from kvbm.host import threads
from kvbm.host.layout import BlockLayout
from kvbm.identity.description import Description, describe
from kvbm.leader.storage_leader import has_ended
from kvbm.observe.telemetry import Telemetry
from kvbm.tiers.settings import SLICE_BLOCKS, EngineTraits

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from kvbm.leader.storage_leader import Loan, Question

INTERFACE = "vllm.v1.kv_offload.tiering.base"
OFFLOADING = "vllm.v1.kv_offload.base"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
PLACE = f"secondary_tiers.{KEY}"
GROUP_BYTES = 4  # of a key: the index of the KV cache group, after the block hash
STORE_LIMIT_S = 2.0  # without a block that moves, until a store is given up
FIND_LIMIT_S = 1.0  # from the first question of a request to the shared store
COPYING_THREADS = 2
POLL_S = 0.0005

log = logging.getLogger(__name__)

_interface = module_if_installed(INTERFACE)
_offloading = module_if_installed(OFFLOADING)
_LookupResult = getattr(_offloading, "LookupResult", None)
_HIT, _MISS, _RETRY = (getattr(_LookupResult, name, None) for name in ("HIT", "MISS", "RETRY"))
_Tier: Any = getattr(_interface, "SecondaryTierManager", object)


@dataclass(slots=True, eq=False)
class _Tracked:
    """A request that may use the cache. Of its tokens, only the first `named_tokens` are in blocks that have names, and
    the first `kept_tokens` in blocks that are kept.

    `found`: its blocks that could be read. `failed`: keys whose load has failed. `first`: the first key of the open
    question, for which vLLM waits. `asked`: keys for which the shared store was asked, and those before them; no
    question is open or begins after `end_s`.
    """

    named_tokens: int
    kept_tokens: int
    found: int = 0
    failed: set[bytes] = field(default_factory=set)
    asked: set[bytes] = field(default_factory=set)
    question: Question[int] | None = None
    first: bytes = b""
    end_s: float = 0.0

    def end_question(self, _answer: int = 0) -> None:
        if self.question is not None:
            self.question.close()
        self.question = None


@dataclass(slots=True, eq=False)
class _Job:
    """Blocks that move between rows of vLLM's region and slots. `copied` are the positions whose bytes have arrived.
    The copying threads append to it; the scheduler's thread does all else."""

    job_id: int
    began_s: float
    is_load: bool
    end_s: float
    request_id: str = ""
    keys: Sequence[bytes] = ()
    rows: Sequence[int] = ()
    question: Question[Any] | None = None
    copies: list[Future[None]] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    stored: bool = False
    is_given_up: bool = True  # until it is known to be valid

    def note_stored(self, answer: Sequence[bool] | None) -> None:
        self.stored = answer is not None and all(answer)

    def is_copied(self) -> bool:
        """Whether no thread copies any more."""
        return all(copy.done() for copy in self.copies)


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
        """Open the tier. `primary_kv_view`: bytes [rows, bytes of a row]. Raises ProfileError or EnvironmentProblem."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        log_as_vllm_does()
        refuse_rival()
        self.boundary = Boundary()
        self._vllm_config: Any = _only_cache_of(loads.last_config())
        self._config = resolve_connector(options, os.environ, engine="vllm", place=PLACE)
        if not self._config.tiers.has_lower:
            raise EnvironmentProblem(
                "below vLLM's own offloading, kvbm requires a disk tier or a shared tier",
                hint=f"set `{PLACE}.tiers.disk`, `{PLACE}.tiers.shared` or both",
            )
        self._rows = np.asarray(primary_kv_view)
        if self._rows.itemsize != 1 or not self._rows.flags.c_contiguous:
            raise EnvironmentProblem("this version of vLLM has another layout of host memory than kvbm knows")
        self._requests: dict[str, _Tracked] = {}
        self._asking: list[_Tracked] = []  # whose question is open, or was
        self._jobs: dict[int, _Job] = {}
        self._results: list[Any] = []
        self._readable: set[bytes] = set()  # until the end of this step
        self._cause = ""  # why nothing is found or stored
        self.pools: Collection[BlockPool] = ()  # of vLLM's device memory
        self._threads = _copying_threads()
        facts = VllmFacts.of(self._vllm_config)
        self._telemetry = Telemetry(
            self._config.metrics, engine=facts.index, control_directory=os.environ.get(CONTROL_VARIABLE)
        )
        self._open(facts)
        watch(self)
        idle_engine.watch_cores()
        connector = importlib.import_module(CONNECTOR).OffloadingConnector
        call_before(connector, "on_new_request", _note_request)
        call_before(connector, "bind_kv_cache_manager", _note_pools)

    def _open(self, facts: VllmFacts) -> None:
        """Open the tier. Raises EnvironmentProblem."""
        spec = self._offloading_spec.config
        layout = BlockLayout.block_contiguous(block_count=len(self._rows), block_bytes=self._rows.shape[1])
        tokens = max(group.tokens_per_block for group in spec.groups) * spec.cache.blocks_per_chunk
        self._segment, self._leader = open_storage(
            self.boundary,
            self._config,
            layout,
            EngineTraits(tokens, hash_bytes=facts.hash_bytes + GROUP_BYTES, names_whole_chains=False),
            self._described,
            info=facts.info,
            g1_blocks=len(self._rows),
        )
        self._telemetry.watch(self._leader, idle_engine.wake)
        log.info("kvbm: %d blocks of %d bytes between vLLM's host memory and the tiers", *self._segment.payload.shape)

    def _described(self) -> Future[Description]:
        """Return what decides the bytes and names of a row."""
        spec = self._offloading_spec.config
        facts, doubt = identity(self._vllm_config)
        rows = {
            "groups": [repr(group) for group in spec.groups],
            "blocks": [spec.cache.blocks_per_chunk, spec.cache.tokens_per_hash, spec.worker_kv_bytes_per_block],
            "layout": [spec.kv_cache_layout, spec.replicated_layout, spec.canonical_layout],
        }
        return describe({**facts, "offloading": rows}, doubt)

    @contained()
    def note_request(self, request: Request) -> None:
        """Note a request that arrives, before vLLM asks for its blocks."""
        if is_named(request) and request.lora_request is None:
            named = min((one.mm_position.offset for one in request.mm_features or ()), default=UNLIMITED)
            hint = self._leader.read_hint(*hint_of(request))
            demotes = hint is not None and hint.demotes
            self._requests[request.request_id] = _Tracked(named, 0 if demotes else named)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return whether a block can be read. vLLM asks for one block after the other; the answers for those that
        follow are found together."""
        request = self._requests.get(req_context.req_id)
        if request is None:
            return _MISS
        if key in self._readable and key not in request.failed:
            return _HIT
        if request.question is not None and not self.boundary.is_off:
            # At the first MISS, vLLM ends its scan of a chain. It waits all the same, because of the RETRY before.
            return _MISS if key in request.asked and key != request.first else _RETRY
        try:
            return self._looked_up(request, key, req_context)
        except Exception as error:  # a decorator would take as long as the lookup
            self.boundary.caught("KvbmTier.lookup", error, turns_off=True)
            return _MISS

    def _looked_up(self, request: _Tracked, key: bytes, req_context: Any) -> Any:
        if self.boundary.is_off or self._cause or key in request.failed:
            return _MISS
        positions = _positions(req_context)
        if positions.get(key, UNLIMITED) > request.named_tokens:
            return _MISS
        is_readable, now_s = self._leader.contains(key), time.monotonic()
        may_ask = self._config.tiers.shared is not None and key not in request.asked
        if not is_readable and not (may_ask and now_s < (request.end_s or now_s + FIND_LIMIT_S)):
            return _MISS
        keys = list(positions)
        if request.named_tokens < UNLIMITED:
            keys = [one for one in keys if positions[one] <= request.named_tokens]
        at = keys.index(key) if key in keys else len(keys)
        following = keys[at:] or [key]
        if is_readable:
            found = 1 + self._leader.readable(following[1:])
            self._readable.update(following[:found])
            request.found = max(found, request.found)
            return _HIT
        request.end_s = request.end_s or now_s + FIND_LIMIT_S
        group = key[-GROUP_BYTES:]
        chain = [one for one in following[:SLICE_BLOCKS] if one.endswith(group)]
        request.question, request.first = self._leader.ask(chain), key
        request.asked.update(chain)
        # In a group with a sliding window, vLLM goes from the last block to the first: it waits once, not at each.
        request.asked.update(one for one in keys[:at] if one.endswith(group))
        if not self._is_asking(request):
            return _MISS
        self._asking.append(request)
        return _RETRY

    def _is_asking(self, request: _Tracked) -> bool:
        """Advance the question of a request; return whether it is still open."""
        if time.monotonic() > request.end_s:
            request.end_question()
        elif request.question is not None:
            has_ended(request.question, request.end_question)
        return request.question is not None

    @contained()
    def submit_load(self, job_metadata: Any) -> None:
        self._submit(job_metadata, is_load=True, limit_s=self._config.onboard.disk_timeout_s)

    @contained()
    def submit_store(self, job_metadata: Any) -> None:
        self._submit(job_metadata, is_load=False, limit_s=STORE_LIMIT_S)

    def _submit(self, metadata: Any, *, is_load: bool, limit_s: float) -> None:
        """Note a job, which begins at the end of this step. One that raises here is reported as failed."""
        now_s = time.monotonic()
        job = self._jobs[metadata.job_id] = _Job(metadata.job_id, now_s, is_load, now_s + limit_s)
        job.request_id = metadata.req_context.req_id
        positions = _positions(metadata.req_context)
        moves = [(key, int(row)) for key, row in zip(metadata.keys, metadata.chunk_ids, strict=True)]
        request = self._requests.get(job.request_id)
        if not is_load and request is not None:
            moves = [move for move in moves if positions.get(move[0], UNLIMITED) <= request.kept_tokens]
        moves.sort(key=lambda move: positions.get(move[0], 0))  # vLLM stores a set; the order of a chain counts
        job.keys, job.rows = [key for key, _ in moves], [row for _, row in moves]
        if any(not 0 <= row < len(self._rows) for row in job.rows):
            raise InvariantError(f"job {job.job_id} of vLLM has the rows {job.rows[:8]} of {len(self._rows)}")
        if self.boundary.is_off or self._cause or request is None or not moves:
            return
        ask = self._leader.read if is_load else partial(self._leader.write, waits_for_shared=True)
        job.question = ask(job.keys, partial(self._lend, job))
        job.is_given_up = False

    def _lend(self, job: _Job, loan: Loan) -> None:
        if not job.is_load:
            job.end_s = time.monotonic() + STORE_LIMIT_S
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
        """Let the tier and the jobs continue."""
        self._leader.step()
        self._asking = [request for request in self._asking if self._is_asking(request)]
        for job in list(self._jobs.values()):
            job.is_given_up |= time.monotonic() > job.end_s
            if not job.is_given_up and job.question is not None:
                if has_ended(job.question, job.note_stored):
                    self._end(job)
            elif job.is_copied():
                if job.question is not None:
                    job.question.close()
                self._end(job)

    @contained()
    def _end_jobs(self) -> None:
        """End the jobs of a cache that is off. Asks no metadata."""
        for job in list(self._jobs.values()) if self.boundary.is_off else ():
            job.is_given_up = True
            if job.is_copied():
                self._end(job)

    def _end(self, job: _Job) -> None:
        """Report a job. No thread copies for it any more."""
        good = [job.keys[position] for position in job.copied] if not self._cause else []
        if job.is_load and (request := self._requests.get(job.request_id)) is not None:
            request.failed.update(set(job.keys).difference(good))
        self._results.append(
            _interface.JobResult(  # type: ignore[union-attr]  # vLLM calls this
                job.job_id,
                success=bool(good) and len(good) == len(job.keys) if job.is_load else job.stored,
                successful_keys=good if job.is_load and good else None,
                transfer_time=time.monotonic() - job.began_s,
                transfer_bytes=len(good) * self._rows.shape[1],
            )
        )
        del self._jobs[job.job_id]

    @contained(False)
    def has_pending_work(self) -> bool:
        return bool(self._jobs or self._results) or (not self.boundary.is_off and self._leader.is_busy())

    def on_new_request(self, req_context: Any) -> Any:
        return _offloading.RequestOffloadingContext()  # type: ignore[union-attr]  # vLLM calls this

    @contained()
    def on_request_finished(self, req_context: Any) -> None:
        """Forget a request. Its blocks become recent, unless its client demotes them: vLLM does not say when it uses
        one in its host memory."""
        request = self._requests.pop(req_context.req_id, None)
        if request is not None and not self.boundary.is_off:
            request.end_question()
            keys = list(_positions(req_context))
            self._leader.note_request(keys[:SLICE_BLOCKS] if request.kept_tokens else [], request.found, len(keys))

    @contained()
    def drain_jobs(self) -> None:
        """End every job: vLLM resets its host memory next, possibly because the weights change. Waits for the copy of
        one block at most, and for the disk to forget its blocks, which takes 2 s at most."""
        cause = "a reset of vLLM's offloading"
        is_first = self._forget(cause)
        if self._config.tiers.disk is not None and self.pools and all(map(_is_empty, self.pools)):
            self._cause = ""
            if not self.boundary.is_off:
                log.info(
                    "kvbm: %s while its device memory is empty: all blocks are forgotten, new ones are kept", cause
                )
        elif is_first:
            self._warn(cause)

    def weights_may_change(self, cause: str) -> None:
        """Give up every job, and forget every block. Nothing is found or stored until vLLM has reset its caches."""
        if self._forget(cause):
            self._warn(cause)

    def _warn(self, cause: str) -> None:
        end = "vLLM resets its offloading while its device memory is empty"
        if self._config.tiers.disk is None:
            end = "vLLM is started again"  # a shared tier forgets nothing, so that it is off
        log.warning("kvbm: all blocks are forgotten, and none is kept until %s: %s", end, cause)

    @hook(False, when_off=True)  # not contained: what cannot be forgotten must not be found later
    def _forget(self, cause: str) -> bool:
        """Give up every job, and forget every block. Return whether blocks were kept until now."""
        is_first = not self._cause and not self.boundary.is_off
        self._cause = self._cause or cause
        self._readable.clear()
        self._give_up()
        if is_first:
            self._reset()
        return is_first

    @hook()
    def _reset(self) -> None:
        self._leader.reset(ends_persistence=True)

    def adapter_is_loaded(self, adapter: Any) -> None:
        """Do nothing: no block of an adapter is kept."""

    def _give_up(self) -> None:
        """End every job and question. Waits until no thread copies: for the copy of one block at most."""
        for job in self._jobs.values():
            job.is_given_up = True
        wait([copy for job in self._jobs.values() for copy in job.copies])
        for request in self._asking:
            request.end_question()
        self._advance()
        self._end_jobs()

    @contained()
    def shutdown(self) -> None:
        """Write what is due, as far as the time allows, and free everything. vLLM unmaps its region next."""
        end_s = time.monotonic() + STORE_LIMIT_S
        try:
            while self._jobs and not self.boundary.is_off and time.monotonic() < end_s:
                self._advance()
                time.sleep(POLL_S)
            self._give_up()
            self._threads.shutdown()
            if self.boundary.is_off:
                self._leader.abandon()
            else:
                self._leader.close()
        finally:
            self._rows = np.empty((0, 0), np.uint8)  # vLLM cannot release a region that is in use
            self._segment.close()
            self._telemetry.close()


def _copying_threads() -> ThreadPoolExecutor:
    """Return threads that run already. Raises EnvironmentProblem.

    A thread that cannot be started later would leave its copy in the queue, for rows that vLLM has freed.
    """
    copying = ThreadPoolExecutor(COPYING_THREADS, thread_name_prefix="kvbm-copy")
    barrier = threading.Barrier(COPYING_THREADS)
    try:
        for one in [copying.submit(barrier.wait, threads.START_LIMIT_S) for _ in range(COPYING_THREADS)]:
            one.result()
    except RuntimeError as error:  # a barrier that breaks is one too
        barrier.abort()
        copying.shutdown(cancel_futures=True)
        raise EnvironmentProblem(
            f"the {COPYING_THREADS} threads that copy blocks cannot be started: {str(error) or 'they do not run'}",
            hint="raise the limit of processes of this user (`ulimit -u`), or of the container",
        ) from error
    return copying


def _only_cache_of(vllm_config: Any) -> Any:
    """Return the engine's configuration. EnvironmentProblem if anything else loads KV: kvbm would store what it loads,
    and another cache may load KV of other weights."""
    if vllm_config is None:
        raise EnvironmentProblem(
            "kvbm does not know the model of this engine: vLLM has not called its plugin `kvbm`",
            hint="add `kvbm` to VLLM_PLUGINS, or unset it",
        )
    transfer = vllm_config.kv_transfer_config
    tiers = transfer.kv_connector_extra_config.get("secondary_tiers")
    if transfer.kv_connector != OFFLOADING_CONNECTOR or [one.get("type") for one in tiers] != [TIER]:
        raise EnvironmentProblem(
            f"{TIER} requires {OFFLOADING_CONNECTOR} to be the only connector, and no other tier beside itself",
            hint="remove the others from `--kv-transfer-config`",
        )
    return vllm_config


def _note_request(connector: Any, request: Request) -> None:
    """Tell the tiers of this connector of a request. Called before the connector's own method; raises nothing."""
    for tier in _tiers_of(connector):
        tier.note_request(request)


def _note_pools(connector: Any, manager: KVCacheManager) -> None:
    """Tell the tiers of this connector of vLLM's device memory. Called once, when vLLM starts."""
    for tier in _tiers_of(connector):
        tier.pools = {one.block_pool for one in manager.coordinator.single_type_managers}


def _tiers_of(connector: Any) -> Iterator[KvbmTier]:
    scheduler = getattr(connector, "connector_scheduler", None)
    tiers = getattr(getattr(scheduler, "manager", None), "secondary_tiers", ())
    return (tier for tier in tiers if isinstance(tier, KvbmTier))


def _is_empty(pool: BlockPool) -> bool:
    """Return whether no request has a block of this pool, and vLLM's prefix cache has none. One is never used."""
    return pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 and not len(pool.cached_block_hash_to_block)


def _positions(req_context: Any) -> dict[bytes, int]:
    """Return the keys of a request in the order of their chain, each with the number of tokens until its end."""
    return getattr(req_context, "_offload_key_positions", None) or {}
