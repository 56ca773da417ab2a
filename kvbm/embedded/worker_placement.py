"""Worker placement: runs the worker of an embedded engine in a separate process.

The driver uses it like a Worker in the engine's process. It maps the engine's G1 memory by its file descriptor and
receives the plans through a pipe; it returns only control words. It ends with the engine, also if that is killed.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import multiprocessing
import os
import pickle
import signal
import struct
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, cast

from kvbm.device.worker import HostCapacity, Worker
from kvbm.errors import EngineError, EnvironmentProblem
from kvbm.host.layout import BlockLayout
from kvbm.host.log_queue import use_queued_stderr
from kvbm.host.shared_memory import is_sealed
from kvbm.plan import StepPlan
from kvbm.types import SegmentInfo

if TYPE_CHECKING:
    from kvbm.embedded.engine.kv_pool import KVPool

WORKER_POLL_S = 0.0005
HEARTBEAT_S = 0.25  # between two heartbeats of an idle worker process
EXIT_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class _ProcessArguments:
    """Arguments of a worker process. The engine's G1 memory is `length` bytes at `path`."""

    path: str
    length: int
    layout: BlockLayout
    capacity: HostCapacity
    thread_count: int
    parent_pid: int


class ProcessWorker:
    def __init__(self, pool: KVPool, capacity: HostCapacity, thread_count: int, init_timeout_s: float) -> None:
        if pool.fd is None:
            raise EnvironmentProblem("a worker process requires G1 in shared memory, which only the CPU supports")
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
        self._process = context.Process(target=_serve_worker, args=(theirs, arguments), name="kvbm-worker", daemon=True)
        self._process.start()
        atexit.register(self._process.kill)  # before multiprocessing sends SIGTERM and waits
        theirs.close()
        self.info = self._first_answer(init_timeout_s)
        self._backlog = bytearray()
        os.set_blocking(self._pipe.fileno(), False)

    def _first_answer(self, timeout_s: float) -> SegmentInfo:
        try:
            answer = self._pipe.recv() if self._pipe.poll(timeout_s) else TimeoutError(f"no answer in {timeout_s:g} s")
        except EOFError:
            self._process.join(EXIT_WAIT_S)
            answer = EngineError(f"the process ended with exit code {self._process.exitcode}")
        if isinstance(answer, SegmentInfo):
            return answer
        self.close()
        if isinstance(answer, EnvironmentProblem):
            raise answer
        raise EngineError(f"the worker process did not start: {answer}")

    def start(self, plan: StepPlan) -> None:
        self._send(("start", plan))

    def finish(self, plan: StepPlan) -> None:
        self._send(("finish", plan))

    def poll(self) -> None:
        """Send the backlog. The worker process writes its control words without a request."""
        self._flush()

    def close(self) -> None:
        atexit.unregister(self._process.kill)
        self._pipe.close()
        self._process.join(EXIT_WAIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _send(self, message: tuple[str, StepPlan]) -> None:
        """Queue a message and send what the pipe accepts. Ignores a dead worker, which the leader detects."""
        plan = message[1]
        if self._backlog and not (plan.offloads or plan.onboards):
            return  # the plan only queries overdue transfers, and the worker does not read
        payload = pickle.dumps(message)
        self._backlog += struct.pack("!i", len(payload)) + payload  # as Connection.recv reads it
        self._flush()

    def _flush(self) -> None:
        """Write what the pipe accepts now. A worker that does not read must not block the engine."""
        try:
            while self._backlog:
                del self._backlog[: os.write(self._pipe.fileno(), self._backlog)]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self._backlog.clear()


def _serve_worker(pipe: Connection, arguments: _ProcessArguments) -> None:
    """Execute plans in a worker process until the engine closes the pipe."""
    _die_with_parent(arguments.parent_pid)
    use_queued_stderr()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the engine still answers its open requests, and then closes the pipe
    import torch

    torch.set_num_threads(1)
    try:
        with open(arguments.path, "r+b") as memory:
            if not is_sealed(memory.fileno(), arguments.length):
                raise EnvironmentProblem(f"{arguments.path} is not the engine's KV pool of {arguments.length} bytes")
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
        if pipe.poll(WORKER_POLL_S if worker.is_busy() else HEARTBEAT_S):
            kind, plan = cast("tuple[str, StepPlan]", pipe.recv())
            (worker.start if kind == "start" else worker.finish)(plan)
    except (EOFError, ConnectionResetError):
        return False
    return True


def _die_with_parent(parent_pid: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    if os.getppid() != parent_pid:
        os._exit(1)
