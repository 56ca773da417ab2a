"""The integration of the embedded engine: its connector hooks, translated into calls of our leader and worker.

It holds no policy. The scheduler side owns the leader, the worker side owns the worker; they share no object. What
crosses from one to the other is what crosses in any engine: a pickled handshake at start-up and a pickled StepPlan
per step. With `worker_process=True` the worker runs in a process of its own, which maps the engine's G1 memory by its
file descriptor, so that sharing anything by accident is impossible.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Protocol, cast

from kvbm.errors import EngineError, EnvironmentProblem
from kvbm.layout import BlockLayout
from kvbm.leader import Leader, LeaderSettings
from kvbm.metrics import KvbmCollector
from kvbm.plan import StepPlan
from kvbm.region import Region
from kvbm.types import SegmentInfo
from kvbm.worker import HostCapacity, Worker

if TYPE_CHECKING:
    from kvbm.config.schema import Profile
    from kvbm.embedded.blocks import BlockPool
    from kvbm.embedded.connector import ConnectorOutput, SchedulerOutput
    from kvbm.embedded.kv import KVPool
    from kvbm.embedded.request import Request

HELD_SHARE_OF_G1 = 4  # offloads hold at most a quarter of the engine's blocks at a time
WORKER_POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class Handshake:
    """What the worker side tells the scheduler side once, at start-up."""

    segments: tuple[SegmentInfo, ...]
    block_tokens: int


def create_connector(
    profile_json: str, *, worker_process: bool = False, progress: Callable[[int, int], None] | None = None
) -> tuple[KvbmScheduler, KvbmWorker]:
    """The two halves for one embedded engine, from the resolved profile's contents.

    Memory is taken when the engine registers its KV pool, not here.
    """
    from kvbm.config.schema import Profile

    profile = Profile.model_validate_json(profile_json)
    scheduler = KvbmScheduler(profile)
    worker = KvbmWorker(profile, handshake=scheduler.accept_handshake, worker_process=worker_process, progress=progress)
    return scheduler, worker


class KvbmScheduler:
    """The decision half: engine hooks to `Leader` calls."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._pool: BlockPool | None = None
        self._handshake: Handshake | None = None
        self._leader: Leader | None = None
        self._region: Region | None = None
        self._requests: dict[str, Request] = {}
        self._starts: dict[str, int] = {}

    # -- start-up ------------------------------------------------------------------------------------------------------

    def accept_handshake(self, message: bytes) -> None:
        self._handshake = pickle.loads(message)
        self._create_leader()

    def bind_block_pool(self, pool: BlockPool) -> None:
        self._pool = pool
        self._create_leader()

    @property
    def leader(self) -> Leader:
        assert self._leader is not None, "the engine has not registered its KV pool, or not bound its block pool"
        return self._leader

    def _create_leader(self) -> None:
        """As soon as both the workers' segments and the engine's block pool are known, whichever comes last."""
        if self._handshake is None or self._pool is None:
            return
        self._region = Region.map(self._handshake.segments)
        settings = LeaderSettings(
            block_tokens=self._handshake.block_tokens,
            block_bytes=sum(segment.block_bytes for segment in self._handshake.segments),
            max_in_flight_blocks=max(1, self._pool.block_count // HELD_SHARE_OF_G1),
            batch_blocks=self._profile.transfer.batch_blocks,
            offload_generated=self._profile.offload.generated,
        )
        self._leader = Leader(self._region, settings, hold=self._pool.hold, release=self._pool.release)

    # -- requests ------------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        start = num_computed_tokens // self._block_tokens
        matched = self.leader.match(request.request_id, self._loadable(request), start)
        if matched is None:
            return None, False
        self._starts[request.request_id] = start
        return matched * self._block_tokens, matched > 0

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        if num_external_tokens:
            start = self._starts[request.request_id]
            end = start + num_external_tokens // self._block_tokens
            self.leader.onboard(request.request_id, self._loadable(request), start, block_ids[start:end])

    def request_finished(self, request: Request, block_ids: list[int]) -> bool:
        self._requests.pop(request.request_id, None)
        self._starts.pop(request.request_id, None)
        self.leader.finish(request.request_id, request.block_hashes)
        return False

    # -- steps ---------------------------------------------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> StepPlan:
        for request_id in output.preempted_ids:
            if (request := self._requests.get(request_id)) is not None:
                self.leader.finish(request_id, request.block_hashes)
        for request_id, num_scheduled_tokens in output.scheduled:
            self._offload(self._requests[request_id], num_scheduled_tokens)
        return self.leader.step()

    def update_connector_output(self, output: ConnectorOutput) -> ConnectorOutput:
        for result in self.leader.settle():
            output.finished_recving.add(result.request_id)
            output.failed_block_ids.update(result.failed_block_ids)
        return output

    def has_pending_work(self) -> bool:
        return self.leader.has_pending()

    def take_events(self) -> list[object]:
        return list(self.leader.take_events())

    def reset_cache(self) -> bool:
        self.leader.reset()
        return True

    def metrics(self) -> KvbmCollector:
        return KvbmCollector(self.leader.counters, self.leader.host_blocks)

    def shutdown(self) -> None:
        if self._region is not None:
            self._region.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _block_tokens(self) -> int:
        assert self._handshake is not None
        return self._handshake.block_tokens

    def _loadable(self, request: Request) -> list[bytes]:
        """The blocks that a load may cover: all full ones before the last token, which the engine must compute."""
        return request.block_hashes[: (request.num_tokens - 1) // self._block_tokens]

    def _offload(self, request: Request, num_scheduled_tokens: int) -> None:
        self.leader.offload(
            request.request_id,
            request.block_hashes,
            request.block_ids,
            computed_blocks=(request.num_computed_tokens + num_scheduled_tokens) // self._block_tokens,
            prompt_blocks=len(request.prompt_token_ids) // self._block_tokens,
        )


class KvbmWorker:
    """The copying half: engine hooks to `Worker` calls, in this process or in one of its own."""

    def __init__(
        self,
        profile: Profile,
        *,
        handshake: Callable[[bytes], None],
        worker_process: bool,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        host = profile.tiers.host
        self._capacity = HostCapacity(capacity_bytes=host.capacity, block_count=host.blocks)
        self._thread_count = profile.transfer.max_concurrent
        self._init_timeout_s = profile.transfer.init_timeout_s
        self._send_handshake = handshake
        self._worker_process = worker_process
        self._progress = progress
        self._home: _WorkerHome | None = None
        self._plan = StepPlan(step=0)

    def register_kv_pool(self, pool: KVPool) -> None:
        home: _WorkerHome
        if self._worker_process:
            home = _ProcessWorker(pool, self._capacity, self._thread_count, self._init_timeout_s)
        else:
            home = _InlineWorker(pool, self._capacity, self._thread_count, self._progress)
        self._home = home
        self._send_handshake(pickle.dumps(Handshake((home.info,), pool.block_size)))

    def handle_preemptions(self, meta: StepPlan) -> None:
        """Nothing to wait for: blocks under a copy are held in the engine's pool."""

    def bind_connector_metadata(self, meta: StepPlan) -> None:
        self._plan = meta

    def start_load_kv(self) -> None:
        if not self._plan.is_empty():
            self._worker.start(self._plan)

    def wait_for_layer_load(self, layer: int) -> None:
        """Loads are asynchronous: a request is scheduled only when its load has ended."""

    def save_kv_layer(self, layer: int) -> None:
        """Blocks are copied whole, after the forward pass."""

    def wait_for_save(self) -> None:
        if self._plan.offloads:
            self._worker.finish(self._plan)

    def get_finished(self, finished_request_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Results travel by control words; the scheduler side reads them right after this."""
        self._worker.poll()
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def clear_connector_metadata(self) -> None:
        self._plan = StepPlan(step=0)

    def shutdown(self) -> None:
        if self._home is not None:
            self._home.close()

    @property
    def _worker(self) -> _WorkerHome:
        assert self._home is not None, "the engine has not registered its KV pool"
        return self._home


class _WorkerHome(Protocol):
    """Where a Worker lives: in the engine's process or beside it."""

    info: SegmentInfo

    def start(self, plan: StepPlan) -> None: ...
    def finish(self, plan: StepPlan) -> None: ...
    def poll(self) -> None: ...
    def close(self) -> None: ...


class _InlineWorker:
    def __init__(
        self, pool: KVPool, capacity: HostCapacity, thread_count: int, progress: Callable[[int, int], None] | None
    ) -> None:
        self._worker = Worker.create(
            pool.layout(), pool.storages, capacity, thread_count=thread_count, progress=progress
        )
        self.info = self._worker.info
        self.start = self._worker.start
        self.finish = self._worker.finish
        self.poll = self._worker.poll
        self.close = self._worker.close


@dataclass(frozen=True, slots=True)
class _ProcessArguments:
    """How a worker process finds the engine's G1 memory: `length` bytes at `path`."""

    path: str
    length: int
    layout: BlockLayout
    capacity: HostCapacity
    thread_count: int
    parent_pid: int


class _ProcessWorker:
    """A Worker in a process of its own. Orders go through a pipe; nothing comes back but control words."""

    def __init__(self, pool: KVPool, capacity: HostCapacity, thread_count: int, init_timeout_s: float) -> None:
        if pool.fd is None:
            raise EnvironmentProblem("a worker process needs G1 in shared memory, which only a CPU pool is")
        arguments = _ProcessArguments(
            path=f"/proc/{os.getpid()}/fd/{pool.fd}",
            length=pool.storages[0].numel(),
            layout=pool.layout(),
            capacity=capacity,
            thread_count=thread_count,
            parent_pid=os.getpid(),
        )
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve_worker, args=(theirs, arguments), name="kvbm-worker")
        self._process.start()
        theirs.close()
        self.info = self._first_answer(init_timeout_s)

    def _first_answer(self, timeout_s: float) -> SegmentInfo:
        try:
            answer = self._pipe.recv() if self._pipe.poll(timeout_s) else TimeoutError(f"no answer in {timeout_s:g} s")
        except EOFError:
            answer = EngineError(f"it ended with exit code {self._process.exitcode}")
        if isinstance(answer, SegmentInfo):
            return answer
        self.close()
        raise EngineError(f"the worker process did not start: {answer}") from answer

    def start(self, plan: StepPlan) -> None:
        self._send(("start", plan))

    def finish(self, plan: StepPlan) -> None:
        self._send(("finish", plan))

    def poll(self) -> None:
        """The worker process writes its words by itself."""

    def close(self) -> None:
        self._pipe.close()
        self._process.join(timeout=5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _send(self, message: tuple[str, StepPlan]) -> None:
        """A dead worker is noticed by the leader, which maps its segment; here there is nobody left to tell."""
        try:
            self._pipe.send(message)
        except (BrokenPipeError, ConnectionResetError):
            return


def _serve_worker(pipe: Connection, arguments: _ProcessArguments) -> None:
    """Main function of a worker process: carry out plans until the engine closes the pipe."""
    import torch

    _die_with_parent(arguments.parent_pid)
    torch.set_num_threads(1)
    try:
        with open(arguments.path, "r+b") as memory:
            mapping = mmap.mmap(memory.fileno(), arguments.length)
        storage = torch.frombuffer(mapping, dtype=torch.uint8)
        worker = Worker.create(arguments.layout, [storage], arguments.capacity, thread_count=arguments.thread_count)
    except EnvironmentProblem as problem:
        pipe.send(problem)
        return
    pipe.send(worker.info)
    while _serve_once(pipe, worker):
        worker.poll()
    worker.close()


def _serve_once(pipe: Connection, worker: Worker) -> bool:
    try:
        if pipe.poll(WORKER_POLL_S if worker.is_busy() else None):
            kind, plan = cast("tuple[str, StepPlan]", pipe.recv())
            (worker.start if kind == "start" else worker.finish)(plan)
    except (EOFError, ConnectionResetError):
        return False
    return True


def _die_with_parent(parent_pid: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    if os.getppid() != parent_pid:
        os._exit(1)
