"""Program of a worker process (worker_placement.py): executes plans until the engine closes the channel."""

from __future__ import annotations

import mmap
from typing import cast

from kvbm.child.channel import Channel, ChannelClosed
from kvbm.child.child import Problem, end_of_channel, outlive_signals, send_all
from kvbm.device.worker import Worker
from kvbm.engines.embedded.worker_placement import OpenWorker
from kvbm.errors import EnvironmentProblem
from kvbm.host.shared_memory import is_sealed
from kvbm.plan import StepPlan

POLL_S = 0.0005
HEARTBEAT_S = 0.25  # between two heartbeats of an idle worker process


def serve(channel: Channel) -> None:
    """Serve until the engine closes the channel. Raises ChannelClosed if that is before it has a worker."""
    order = channel.receive_one(OpenWorker)
    try:
        worker = _worker(order)
    except EnvironmentProblem as problem:
        channel.send(Problem(problem.message, problem.hint))
        send_all(channel)
        return
    channel.send(worker.info)
    try:
        while True:
            channel.wait(POLL_S if worker.is_busy() else HEARTBEAT_S)
            for message in channel.receive():
                kind, plan = cast("tuple[str, StepPlan]", message)
                (worker.start if kind == "start" else worker.finish)(plan)
                worker.poll()
            worker.poll()
    except ChannelClosed:
        worker.close()


def _worker(order: OpenWorker) -> Worker:
    """May raise EnvironmentProblem."""
    import torch

    torch.set_num_threads(1)
    with open(order.path, "r+b") as memory:
        if not is_sealed(memory.fileno(), order.length):
            raise EnvironmentProblem(f"{order.path} is not the engine's KV pool of {order.length} bytes")
        mapping = mmap.mmap(memory.fileno(), order.length)
    storage = torch.frombuffer(mapping, dtype=torch.uint8)
    return Worker.create(order.layout, [storage], order.capacity, thread_count=order.thread_count)


if __name__ == "__main__":
    outlive_signals()
    serve(end_of_channel())
