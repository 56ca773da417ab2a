#!/usr/bin/env python3
"""Stands for an interpreter that runs an engine: takes its command line, answers /health, and misbehaves on request.

FAKE says how: `crash` ends before it is healthy, `long_farewell` too and says much more, `hang` never is, `stubborn`
ignores SIGTERM, `dies` ends by itself once it was healthy, `ends` too and as if all were well, `children` starts a
process of its own, `litters` also one that leaves the group, and makes files in shared memory and in TMPDIR that it
never deletes, `mute` is healthy but gives no token, `refuses` answers 404 to a completion, `broken` answers 500, `busy`
answers 503 twice before it gives one, `unhealthy` answers 503 with a phase, `full_disk` and others of LAST_WORDS end
with such words, `noisy` prints control characters and then a line per millisecond, `held_stop` ends once there is a
file `may_end`. Without it, a well-behaved engine. FAKE_SAYS is printed at the start.
"""

import http.server
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

MODE = os.environ.get("FAKE", "")
NOISE = b"\x1b[31mred\x1b[0m \x1b]0;title\x07 \xff end\n 10%|#\r100%|##########\n"
REFUSALS = {"refuses": (404, 99), "broken": (500, 99), "busy": (503, 2)}  # status, and how often
LAST_WORDS = {
    "full_disk": "OSError: [Errno 28] No space left on device",
    "no_library": "ModuleNotFoundError: No module named 'flash'",
    "no_gpu_memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "own_words": "error: the model cannot be read: config.json is missing\n\nhint: `engine.model`",
}
asked = [0]


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if MODE == "unhealthy":
            self.answer(503, b'{"status": "loading", "phase": "compiling kernels"}')
            return
        self.answer(200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked[0] += 1
        if MODE == "mute":
            time.sleep(600)
        if MODE == "keyed" and self.headers.get("Authorization") != "Bearer secret":
            self.answer(401, b'{"error": {"message": "no key"}}')
        elif MODE in REFUSALS and asked[0] <= REFUSALS[MODE][1]:
            self.answer(REFUSALS[MODE][0], b'{"error": {"message": "asked for"}}')
        else:
            self.answer(200, b'{"choices": [{"text": "a"}], "kv_transfer_params": {"remote_block_ids": [1]}}')
        if MODE in ("dies", "ends"):
            threading.Timer(0.2, os._exit, (9 if MODE == "dies" else 0,)).start()

    def answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


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
    os._exit(0)


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
    if MODE in LAST_WORDS:
        sys.exit(LAST_WORDS[MODE])
    if MODE == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if MODE == "long_farewell":
        print("(Worker pid=7) ERROR 11-21 18:03:38 [worker.py:3] the device is gone", flush=True)
        sys.exit("\n".join(f"farewell {number}" for number in range(20)))
    if MODE == "children":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", flush=True)
    if MODE == "litters":
        held = litter()
        print(f"made {len(held)} things", flush=True)
    if MODE == "noisy":
        threading.Thread(target=make_noise, daemon=True).start()
    if MODE == "hang":
        time.sleep(600)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Health).serve_forever()


if __name__ == "__main__":
    main()
