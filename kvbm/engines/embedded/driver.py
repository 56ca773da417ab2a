"""Integration of the embedded engine: translates its connector hooks into calls of the leader and the worker.

It contains no policy. KvbmScheduler owns the leader, KvbmWorker the worker; they share no object. As in any engine,
only a handshake at start-up and a pickled StepPlan per step pass between them. With `worker_process=True` the
worker runs in a separate process, which maps the engine's G1 memory by its file descriptor, so that the two cannot
share an object by accident.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from kvbm.boundary import Boundary, contained, hook
from kvbm.device.worker import HostCapacity, Worker
from kvbm.engines.embedded.engine.connector import ConnectorOutput, Step
from kvbm.engines.embedded.worker_placement import ProcessWorker
from kvbm.engines.launch_plan import CONTROL_VARIABLE
from kvbm.engines.opening import EngineAtStart, known, open_leader
from kvbm.hashing import HASH_BYTES, extend, namespace, root
from kvbm.metrics import KvbmCollector
from kvbm.observe.series import EngineReport, SeriesCollector
from kvbm.observe.telemetry import Telemetry
from kvbm.plan import StepPlan
from kvbm.tiers.settings import EngineTraits, LeaderCallbacks
from kvbm.types import SegmentInfo

if TYPE_CHECKING:
    from kvbm.config.schema import Profile
    from kvbm.engines.embedded.engine.block_pool import BlockPool
    from kvbm.engines.embedded.engine.kv_pool import KVPool
    from kvbm.engines.embedded.engine.request import Request
    from kvbm.leader.guarded import GuardedLeader
    from kvbm.leader.leader import Leader
    from kvbm.tiers.disk.settings import Progress


def create_connector(
    profile_json: str,
    *,
    worker_process: bool = False,
    memory_progress: Progress | None = None,
    disk_progress: Progress | None = None,
) -> tuple[KvbmScheduler, KvbmWorker]:
    """Create the connector of one embedded engine from a resolved profile in JSON.

    Memory and disk space are allocated later, when the engine registers its KV pool. Raises EnvironmentProblem if the
    metrics port of the profile is in use, or if the recording cannot be written.
    """
    from kvbm.config.schema import Profile

    profile = Profile.model_validate_json(profile_json)
    scheduler = KvbmScheduler(profile, disk_progress)
    worker = KvbmWorker(
        profile, handshake=scheduler.accept_handshake, worker_process=worker_process, progress=memory_progress
    )
    return scheduler, worker


class KvbmScheduler:
    """Scheduler part of the connector: translates hooks into `Leader` calls. No hook raises, see `kvbm.boundary`."""

    def __init__(self, profile: Profile, progress: Progress | None = None) -> None:
        self._profile = profile
        self._telemetry = Telemetry(
            profile.connector_config().metrics, control_directory=os.environ.get(CONTROL_VARIABLE)
        )
        self._progress = progress
        self._namespace = b""
        self._step = (0, 0.0)  # tokens of the current step, and its start time
        self._segment: SegmentInfo | None = None
        self._block_tokens = 0
        self._guarded: GuardedLeader | None = None
        self._wake_engine: Callable[[], None] | None = None
        self.boundary = Boundary()
        self._requests: dict[str, Request] = {}
        self._starts: dict[str, int] = {}

    def accept_handshake(self, segment: SegmentInfo, block_tokens: int) -> None:
        """Note the memory of the worker, which has registered the KV pool."""
        self._segment, self._block_tokens = segment, block_tokens

    def bind_wake(self, wake: Callable[[], None]) -> None:
        self._wake_engine = wake

    def bind_block_pool(self, pool: BlockPool, identity: Mapping[str, object], doubt: str) -> None:
        """Create the leader. `identity` is everything in the engine that determines the bytes and the hashes of blocks.
        `doubt` says why it may not be, empty if it is."""
        assert self._segment is not None, "the engine has not yet registered its KV pool"
        self._namespace = namespace(identity)
        described = known({"model": self._profile.engine.model, **identity}, doubt)
        traits = EngineTraits(self._block_tokens, hash_bytes=HASH_BYTES, gives_up_blocks=True)
        model = PurePath(str(self._profile.engine.model)).name
        info = {"engine_name": "embedded", "model": model, "dtype": str(self._profile.engine.arguments.dtype)}
        self._guarded = open_leader(
            self.boundary,
            self._profile.connector_config(),
            EngineAtStart([self._segment], traits, pool.block_count, lambda: described, self._progress, info),
            LeaderCallbacks(
                pool.hold,
                pool.release,
                self._tenant_of,
                self._telemetry.trace,
                spans=self._telemetry.spans(lambda request_id: None),
                ended=self._telemetry.ended,
                hint_of=self._hint_of,
                chain_of=self._chain_of,
            ),
        )
        self._telemetry.watch(self._guarded, self._wake_engine)

    @property
    def leader(self) -> Leader:
        """The leader, for reports and tests. Hooks use `_cache`."""
        return self._cache.leader

    @property
    def _cache(self) -> GuardedLeader:
        assert self._guarded is not None, "the engine has not yet bound its block pool"
        return self._guarded

    def _tenant_of(self, request_id: str) -> bytes:
        request = self._requests.get(request_id)
        return b"" if request is None else request.tenant

    def _chain_of(self, token_ids: Sequence[int], salt: str | None) -> list[bytes]:
        hashes: list[bytes] = []
        extend(hashes, token_ids, block_size=self._block_tokens, root=root(self._namespace, salt=salt))
        return hashes

    def _hint_of(self, request_id: str) -> tuple[object, object]:
        request = self._requests.get(request_id)
        return (None, None) if request is None else ((request.params.kv_transfer_params or {}).get("kvbm"), None)

    @hook()
    def on_new_request(self, request: Request) -> None:
        self._requests[request.request_id] = request

    @hook(0)
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        start = num_computed_tokens // self._block_tokens
        end = (request.num_tokens - 1) // self._block_tokens  # the engine computes the last token
        matched = self._cache.match(request.request_id, request.block_hashes, start, end)
        if matched is None:
            return None
        self._starts[request.request_id] = start
        return matched * self._block_tokens

    @hook(when_off=True)
    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        if not self._onboard(request, block_ids, num_external_tokens):
            self._cache.fail_load(request.request_id, block_ids)

    @hook(False)
    def _onboard(self, request: Request, block_ids: list[int], num_external_tokens: int) -> bool:
        start = self._starts[request.request_id]
        end = start + num_external_tokens // self._block_tokens
        self._cache.onboard(request.request_id, request.block_hashes, start, block_ids[start:end])
        return True

    @contained((0, 0))
    def lower_tier_tokens(self, request: Request) -> tuple[int, int]:
        return self._cache.lower_tier_tokens(request.request_id)

    @hook(when_off=True)
    def request_finished(self, request: Request) -> None:
        self._count_prompt(request)
        self._requests.pop(request.request_id, None)
        self._starts.pop(request.request_id, None)
        self._cache.finish(request.request_id, request.block_hashes)

    @contained()
    def _count_prompt(self, request: Request) -> None:
        if request.finish_reason is None:
            self._cache.counters.prompt_aborted_tokens += request.num_prompt_tokens
            return
        self._cache.counters.count_prompt(
            request.num_prompt_tokens,
            device=request.num_cached_tokens,
            external=request.num_external_tokens,
            disk=request.num_disk_tokens,
            shared=request.num_shared_tokens,
        )

    @hook(StepPlan(step=0), when_off=True)
    def build_connector_meta(self, step: Step) -> StepPlan:
        self._finish_and_offload(step)
        return self._cache.step()

    @hook()
    def _finish_and_offload(self, step: Step) -> None:
        for request in step.preempted:
            if request.request_id in self._requests:
                self._cache.finish(request.request_id, request.block_hashes, is_preempted=True)
        for request, num_scheduled_tokens in step.scheduled.items():
            self._offload(self._requests[request.request_id], num_scheduled_tokens)
        self._step = sum(step.scheduled.values()), time.monotonic()

    @hook(ConnectorOutput, when_off=True)
    def update_connector_output(self, output: ConnectorOutput) -> ConnectorOutput:
        tokens, began_s = self._step
        self._cache.note_step(tokens, time.monotonic() - began_s)
        for result in self._cache.settle():
            if result.is_live:
                output.finished_recving.add(result.request_id)
                output.failed_block_ids.update(result.failed_block_ids)
        return output

    @hook(False, when_off=True)
    def has_pending_work(self) -> bool:
        return self._cache.has_pending()

    @hook(False, when_off=True)
    def reset_cache(self) -> bool:
        return self._cache.reset()

    def metrics(self) -> tuple[KvbmCollector, SeriesCollector]:
        return (
            KvbmCollector(self._cache.counters, self._cache.blocks, self._cache.wear),
            SeriesCollector(lambda: {0: EngineReport.of(self._cache)}),
        )

    def shutdown(self) -> None:
        """Write blocks that are only in host memory to disk. Call it before the worker's `shutdown`."""
        if self._guarded is not None:
            self._guarded.close()
        self.boundary.attempt("close", self._telemetry.close)

    def _offload(self, request: Request, num_scheduled_tokens: int) -> None:
        self._cache.offload(
            request.request_id,
            request.block_hashes,
            request.block_ids,
            computed_blocks=(request.num_computed_tokens + num_scheduled_tokens) // self._block_tokens,
            prompt_blocks=len(request.prompt_token_ids) // self._block_tokens,
        )


class KvbmWorker:
    """Worker part of the connector: translates hooks into `Worker` calls, in this or in a separate process."""

    def __init__(
        self,
        profile: Profile,
        *,
        handshake: Callable[[SegmentInfo, int], None],
        worker_process: bool,
        progress: Progress | None,
    ) -> None:
        host = profile.tiers.host_memory()
        self._capacity = HostCapacity(capacity_bytes=host.capacity_bytes, block_count=host.blocks)
        self._transfer = profile.transfer
        self._send_handshake = handshake
        self._worker_process = worker_process
        self._progress = progress
        self._home: Worker | ProcessWorker | None = None
        self.boundary = Boundary()

    def register_kv_pool(self, pool: KVPool) -> None:
        threads = self._transfer.max_concurrent
        if self._worker_process:
            self._home = ProcessWorker(pool, self._capacity, threads, self._transfer.init_timeout_s)
        else:
            self._home = Worker.create(
                pool.layout(),
                pool.storages,
                self._capacity,
                thread_count=threads,
                binds_memory=self._transfer.numa,
                progress=self._progress,
            )
        self._send_handshake(self._home.info, pool.block_size)

    @contained()
    def start_load_kv(self, meta: object) -> None:
        """Start the loads of a StepPlan. They are asynchronous: the forward pass does not wait for them."""
        assert isinstance(meta, StepPlan), type(meta)
        if not meta.is_empty():
            self._worker.start(meta)

    @contained()
    def wait_for_save(self, meta: object) -> None:
        """Start the offloads of a StepPlan: the forward pass has computed their blocks."""
        assert isinstance(meta, StepPlan), type(meta)
        if meta.offloads:
            self._worker.finish(meta)

    @contained(ConnectorOutput)
    def take_results(self) -> ConnectorOutput:
        """Poll the worker. Results travel in control words, which the scheduler connector reads next."""
        self._worker.poll()
        return ConnectorOutput()

    @contained()
    def shutdown(self) -> None:
        if self._home is not None:
            self._home.close()

    @property
    def _worker(self) -> Worker | ProcessWorker:
        assert self._home is not None, "the engine has not yet registered its KV pool"
        return self._home
