#!/usr/bin/env python3
"""Stands for an interpreter that runs an engine: takes its command line, answers /health, and misbehaves on request.

FAKE says how: `crash` ends before it is healthy, `long_farewell` too and says much more, `hang` never is, `stubborn`
ignores SIGTERM, `dies` ends by itself once it was healthy, `ends` too and as if all were well, `children` starts a
process of its own, `litters` also one that leaves the group, and makes files in shared memory and in TMPDIR that it
never deletes. Without it, a well-behaved engine.
"""

import http.server
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


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        if MODE in ("dies", "ends"):
            threading.Timer(0.2, os._exit, (9 if MODE == "dies" else 0,)).start()

    def log_message(self, *arguments: object) -> None:
        pass


def litter() -> list[object]:
    """As a real engine does that is killed: a daemon, a segment, a semaphore and a file."""
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    segment = shared_memory.SharedMemory(create=True, size=4096)
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    _, path = tempfile.mkstemp()
    return [daemon, segment, semaphore, path]


def main() -> None:
    print("loading the weights", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if MODE == "stubborn" else lambda *ignored: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN if MODE == "stubborn" else lambda *ignored: sys.exit(0))
    if MODE == "crash":
        sys.exit("Traceback (most recent call last):\nMemoryError: not enough of it")
    if MODE == "long_farewell":
        print("(Worker pid=7) ERROR 11-21 18:03:38 [worker.py:3] the device is gone", flush=True)
        sys.exit("\n".join(f"farewell {number}" for number in range(20)))
    if MODE == "children":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", flush=True)
    if MODE == "litters":
        held = litter()
        print(f"made {len(held)} things", flush=True)
    if MODE == "hang":
        time.sleep(600)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Health).serve_forever()


if __name__ == "__main__":
    main()
