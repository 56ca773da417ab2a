"""One vLLM server as a child process, with its metrics and CPU time.

Every server of a comparison is started here, with the same environment and flags; an arm adds only its connector. The
forward pass runs on one core (`VLLM_CPU_OMP_THREADS_BIND`, by default 0), because vLLM by itself uses a different
number of cores with a connector than without. torch.compile is off, because it would compile for tens of seconds in the
first request.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 20
MODEL_NAME = "m"
BLOCK_TOKENS = 128
SCHEDULER_CLOCK = 2  # with a process id above it: the clock that clock_getcpuclockid(3) names
SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^}]*\})? (\S+)", re.MULTILINE)

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "0"),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags that all servers of a comparison share."""

    model: Path
    max_model_len: int = 8192
    block_count: int = 66
    dtype: str = "bfloat16"
    block_tokens: int = BLOCK_TOKENS
    extra: Sequence[str] = ()

    def argv(self) -> list[str]:
        return [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--served-model-name", MODEL_NAME),
            *("--dtype", self.dtype, "--max-model-len", str(self.max_model_len)),
            *("--num-gpu-blocks-override", str(self.block_count), "--block-size", str(self.block_tokens)),
            "--enforce-eager",
            *("--host", "127.0.0.1"),
            *self.extra,
        ]


@dataclass(slots=True)
class Server:
    """Owns the process group; `stop` ends all of it."""

    name: str
    argv: list[str]
    environment: Mapping[str, str]
    port: int
    directory: Path
    process: subprocess.Popen[bytes]
    stopped: bool = field(default=False)

    @classmethod
    def start(
        cls,
        name: str,
        flags: Flags,
        *,
        transfer_config: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Server:
        port = free_port()
        argv = [*flags.argv(), "--port", str(port)]
        if transfer_config is not None:
            argv += ["--kv-transfer-config", json.dumps(transfer_config)]
        directory = Path(tempfile.mkdtemp(prefix="b-", dir="/tmp"))
        added = {**ENVIRONMENT, **(environment or {}), "TMPDIR": str(directory)}
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                argv, env={**os.environ, **added}, stdout=log, stderr=log, cwd=directory, start_new_session=True
            )
        return cls(name, argv, added, port, directory, process)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_until_healthy(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.process.returncode}:\n{self.log()[-4000:]}")
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"{self.name} is not healthy after {START_TIMEOUT_S} s:\n{self.log()[-4000:]}")

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def counters(self) -> dict[str, float]:
        """Every sample of /metrics by name and labels, without the labels that identify the engine."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return {name + short_labels(labels): float(value) for name, labels, value in SAMPLE.findall(text)}

    def pids(self) -> list[int]:
        """Every process of the group: API server, engine core, worker, and helpers."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if group_of(pid) == self.process.pid]

    def cpu_seconds(self) -> float:
        """CPU time of all living processes of the group."""
        return sum(cpu_seconds_of(pid) for pid in self.pids())

    def stop(self) -> None:
        if self.stopped:
            return
        self.stopped = True
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def short_labels(labels: str) -> str:
    kept = [pair for pair in labels.strip("{}").split(",") if pair and not pair.startswith(("engine=", "model_name="))]
    return "{" + ",".join(kept) + "}" if kept else ""


def group_of(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[2])


def cpu_seconds_of(pid: int) -> float:
    """CPU time of all threads of a process, ended ones included, to the nanosecond; 0 if it has ended."""
    try:
        return time.clock_gettime(~pid << 3 | SCHEDULER_CLOCK)
    except OSError:
        return 0.0


@contextlib.contextmanager
def running(servers: Sequence[Server]) -> Iterator[None]:
    """Wait until all servers are healthy, and always stop them at the end, also after SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for server in servers:
            server.wait_until_healthy()
        yield
    finally:
        for server in servers:
            server.stop()
