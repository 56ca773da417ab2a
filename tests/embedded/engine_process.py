"""The embedded engine as a process of its own, with a synthetic model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server_rig import ADMIN_TOKEN
from waiting import eventually

from kvbm.engines.launch_plan import ADMIN_VARIABLE

WAIT_S = 240.0  # for a busy machine


@contextmanager
def engine(log_path: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A serving engine process and its address; ended by SIGTERM, which must end in exit code 0."""
    command = [
        sys.executable,
        "-m",
        "kvbm.engines.embedded",
        "--model",
        "synthetic:tiny",
        "--port",
        "0",
        "--no-verify",
        *flags,
    ]
    environment = {**os.environ, ADMIN_VARIABLE: ADMIN_TOKEN}
    with log_path.open("wb") as log, subprocess.Popen(command, stderr=log, env=environment) as child:
        try:
            eventually(lambda: child.poll() is not None or "serving" in log_path.read_text())
            assert child.poll() is None, log_path.read_text()
            match = re.search(r"listening on (\S+)", log_path.read_text())
            assert match is not None
            yield child, match[1]
            child.send_signal(signal.SIGTERM)
            assert child.wait(WAIT_S) == 0
            assert "Traceback" not in log_path.read_text()
        finally:
            child.kill()
