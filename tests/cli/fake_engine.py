#!/usr/bin/env python3
"""Stands for an interpreter that runs an engine: takes its command line, answers /health, and misbehaves on request.

FAKE says how: `crash` ends before it is healthy, `long_farewell` too and says much more, `hang` never is, `stubborn`
ignores SIGTERM, `dies` ends by itself once it was healthy, `ends` too and as if all were well, `children` starts a
process of its own, `litters` also one that leaves the group, and makes files in shared memory and in TMPDIR that it
never deletes, `mute` is healthy but gives no token, `refuses` answers 404 to a completion, `broken` answers 500, `busy`
answers 503 twice before it gives one, `unhealthy` answers 503 with a phase, `own_words` ends with an error and a hint,
`noisy` prints control characters and then a line per millisecond, `held_stop` ends once there is a file `may_end`,
`obstructs` makes a directory where the launcher writes the file for Prometheus.
Without it, a well-behaved engine. FAKE_SAYS is printed at the start.
"""

import asyncio
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import shared_memory
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from fake_server import Connection, FakeServer, Request

MODE = os.environ.get("FAKE", "")
NOISE = b"\x1b[31mred\x1b[0m \x1b]0;title\x07 \xff end\n 10%|#\r100%|##########\n"
REFUSALS = {"refuses": (404, 99), "broken": (500, 99), "busy": (503, 2)}  # status, and how often
OWN_WORDS = "error: the model cannot be read: config.json is missing\n\nhint: `engine.model`"


class FakeEngine(FakeServer):
    asked = 0

    async def answer(self, request: Request, connection: Connection) -> None:
        if request.method == "POST":
            await self._complete(request, connection)
        elif MODE == "unhealthy":
            connection.reply(503, {"status": "loading", "phase": "compiling kernels"})
        else:
            connection.reply(200)

    async def _complete(self, request: Request, connection: Connection) -> None:
        self.asked += 1
        if MODE == "mute":
            await asyncio.sleep(600)
        if MODE == "keyed" and request.headers.get("authorization") != "Bearer secret":
            connection.reply(401, {"error": {"message": "no key"}})
        elif MODE in REFUSALS and self.asked <= REFUSALS[MODE][1]:
            connection.reply(REFUSALS[MODE][0], {"error": {"message": "asked for"}})
        else:
            connection.reply(200, {"choices": [{"text": "a"}], "kv_transfer_params": {"remote_block_ids": [1]}})
        if MODE in ("dies", "ends"):
            asyncio.get_running_loop().call_later(0.2, os._exit, 9 if MODE == "dies" else 0)  # with its requests open


def litter() -> list[object]:
    """As a real engine does that is killed: a daemon, a segment, a semaphore and a file."""
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    segment = shared_memory.SharedMemory(create=True, size=4096)
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    _, path = tempfile.mkstemp()
    return [daemon, segment, semaphore, path]


def end_when_allowed() -> None:
    while not os.path.exists("may_end"):
        time.sleep(0.01)
    os._exit(0)  # at once


def make_noise() -> None:
    os.write(1, NOISE)
    for number in itertools.count():
        os.write(1, b"line %d\n" % number)
        time.sleep(0.001)


def main() -> None:
    print("loading the weights", *filter(None, [os.environ.get("FAKE_SAYS")]), sep="\n", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if MODE == "stubborn" else lambda *ignored: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN if MODE == "stubborn" else lambda *ignored: sys.exit(0))
    if MODE == "held_stop":
        signal.signal(signal.SIGTERM, lambda *ignored: end_when_allowed())
    if MODE == "crash":
        sys.exit("Traceback (most recent call last):\nMemoryError: not enough of it")
    if MODE == "own_words":
        sys.exit(OWN_WORDS)
    if MODE == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if MODE == "long_farewell":
        print("(Worker pid=7) ERROR 11-21 18:03:38 [worker.py:3] the device is gone", flush=True)
        sys.exit("\n".join(f"farewell {number}" for number in range(20)))
    if MODE in ("children", "litters"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", flush=True)
    if MODE == "litters":
        held = litter()
        print(f"made {len(held)} things", flush=True)
    if MODE == "obstructs":
        Path(os.environ["KVBM_CONTROL_DIRECTORY"], "prometheus-targets.json").mkdir()
    if MODE == "noisy":
        threading.Thread(target=make_noise, daemon=True).start()
    if MODE == "hang":
        time.sleep(600)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    FakeEngine(port=port).serve_forever()


if __name__ == "__main__":
    main()
