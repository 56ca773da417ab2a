#!/usr/bin/env python3
"""Stands for an interpreter that runs an engine: takes its command line, answers /health, and misbehaves on request.

FAKE says how: `crash` ends before it is healthy, `hang` never is, `stubborn` ignores SIGTERM, `dies` ends by itself
once it was healthy, `children` starts a process of its own, `stranger` answers as
another process would. Without it, a well-behaved engine.
"""

import http.server
import os
import signal
import subprocess
import sys
import threading
import time

MODE = os.environ.get("FAKE", "")


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        pid = 1 if MODE == "stranger" else os.getpid()
        self.wfile.write(b'{"pid": %d}' % pid)
        if MODE == "dies":
            threading.Timer(0.2, os._exit, (9,)).start()

    def log_message(self, *arguments: object) -> None:
        pass


def main() -> None:
    print("loading the weights", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if MODE == "stubborn" else lambda *ignored: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN if MODE == "stubborn" else lambda *ignored: sys.exit(0))
    if MODE == "crash":
        sys.exit("Traceback (most recent call last):\nMemoryError: not enough of it")
    if MODE == "children":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", flush=True)
    if MODE == "hang":
        time.sleep(600)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Health).serve_forever()


if __name__ == "__main__":
    main()
