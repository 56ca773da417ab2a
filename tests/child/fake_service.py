"""A child process that does what its orders say."""

import os
import signal
import sys

from fake_messages import Answer, Ask, FakeCounters, FakeOpened, OpenFake

from kvbm.child.child import StorageServer, serve_leader
from kvbm.errors import EnvironmentProblem

EXIT_CODE = 7


class FakeStorage:
    def __init__(self):
        self.off_because = None
        self.counters = FakeCounters()
        self.ended = []

    def submit(self, order):
        match order.what:
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "die":
                os._exit(EXIT_CODE)
            case "garbage":
                os.write(int(sys.argv[1]), b"\xff" * 64)
        self.counters.answers += 1
        self.ended.append(Answer(order.ticket, True))
        self.on_result()

    def poll(self):
        ended, self.ended = self.ended, []
        return ended

    def close(self, timeout_s):
        pass


class FakeServer(StorageServer):
    def _handle(self, message):
        assert isinstance(message, Ask)
        self._submit(message)


def opened(order, send, log):
    if order.problem is not None:
        raise EnvironmentProblem(order.problem)
    return FakeStorage(), FakeOpened()


if __name__ == "__main__":
    sys.exit(serve_leader(OpenFake, opened, FakeServer))
