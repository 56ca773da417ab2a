"""Worker placement: runs the worker of an embedded engine in a separate process.

The driver uses it like a Worker in the engine's process. It maps the engine's G1 memory by its file descriptor and
receives the plans through a channel; it returns only control words. It ends with the engine, also if that is killed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbm.child.channel import ChannelClosed
from kvbm.child.child import Problem
from kvbm.child.parent import end, has_ended, start_child
from kvbm.device.worker import HostCapacity
from kvbm.errors import EngineError, EnvironmentProblem
from kvbm.host.layout import BlockLayout
from kvbm.plan import StepPlan
from kvbm.types import SegmentInfo

if TYPE_CHECKING:
    from kvbm.engines.embedded.engine.kv_pool import KVPool

MODULE = "kvbm.engines.embedded.worker_process"
EXIT_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class OpenWorker:
    """The first message to a worker process. The engine's G1 memory is `length` bytes at `path`."""

    path: str
    length: int
    layout: BlockLayout
    capacity: HostCapacity
    thread_count: int


class ProcessWorker:
    def __init__(self, pool: KVPool, capacity: HostCapacity, thread_count: int, init_timeout_s: float) -> None:
        if pool.fd is None:
            raise EnvironmentProblem("a worker process requires G1 in shared memory, which only the CPU supports")
        order = OpenWorker(
            path=f"/proc/{os.getpid()}/fd/{pool.fd}",
            length=pool.storages[0].numel(),
            layout=pool.layout(),
            capacity=capacity,
            thread_count=thread_count,
        )
        self._process, self._channel = start_child(MODULE, "the worker process", dies_with_parent=True)
        try:
            self.info = self._open(order, init_timeout_s)
        except BaseException:
            self.close()
            raise

    def _open(self, order: OpenWorker, timeout_s: float) -> SegmentInfo:
        try:
            self._channel.send(order)
            answer = self._channel.receive_one(object, timeout_s)
        except TimeoutError:
            raise EngineError(f"the worker process did not start: no answer in {timeout_s:g} s") from None
        except ChannelClosed:
            has_ended(self._process, EXIT_WAIT_S)
            code = self._process.returncode
            raise EngineError(f"the worker process did not start: the process ended with exit code {code}") from None
        if isinstance(answer, Problem):
            raise EnvironmentProblem(answer.message, hint=answer.hint)
        assert isinstance(answer, SegmentInfo), answer
        return answer

    def start(self, plan: StepPlan) -> None:
        self._send("start", plan)

    def finish(self, plan: StepPlan) -> None:
        self._send("finish", plan)

    def poll(self) -> None:
        """Send the backlog. The worker process writes its control words without a request."""
        with suppress(ChannelClosed):
            self._channel.flush()

    def close(self) -> None:
        self._channel.close()
        end(self._process, EXIT_WAIT_S)

    def _send(self, kind: str, plan: StepPlan) -> None:
        """Send a plan, as far as the channel accepts it now. Ignores a dead worker, which the leader detects."""
        if self._channel.has_more_to_send() and not (plan.offloads or plan.onboards):
            return  # the plan only queries overdue transfers, and the worker does not read
        with suppress(ChannelClosed):
            self._channel.send((kind, plan))
