"""A real vLLM server for tests: started with or without the connector, asked for tokens and log-probabilities.

    with VllmServer(materialise("vllm-25m"), connector=CONNECTOR, blocks=40, environment=host_blocks(300)) as server:
        answer = server.ask(prompt_of_token_ids, max_tokens=8)

The server gets a port, a process group and a temporary directory of its own, and nothing of them stays. When pytest
dies, however it dies, the kernel kills the server, and a guard process whatever the server has started. Computation is
in float32 and in one thread, so that equal requests give equal answers and two servers can run side by
side. A block has 128 tokens.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx
import psutil
from model_runner import IS_V2, assert_in_log
from prometheus_client.parser import text_string_to_metric_families

from kvbm.child.start import command_line
from kvbm.identity.content import QUIET_NS, writes_back
from kvbm_cli.engine.process import choose_port

HERE = Path(__file__).parent
BLOCK_TOKENS = 128
START_TIMEOUT_S = 600.0  # 25 s on a quiet machine
STOP_TIMEOUT_S = 20.0
SLACK_S = 3.0  # kvbm allows 2 s for clocks that differ
THIS_TREE = (str(HERE), str(HERE.parent.parent))  # whatever is installed
ANSWER_TIMEOUT_S = 600.0 if IS_V2 else 240.0
MAX_MODEL_LEN = 4096
CONNECTOR = {
    "kv_connector": "DynamoConnector",
    "kv_connector_module_path": "kvbm.vllm_integration.connector",
    "kv_role": "kv_both",
}
FAULTS_FILE = "KVBM_TEST_FAULTS"
FAULTY_CONNECTOR = CONNECTOR | {"kv_connector": "FaultyConnector", "kv_connector_module_path": "faulty_connector"}
GUARD = "import os, sys; os.read(0, 1) or os.killpg(int(sys.argv[1]), 9)"  # end of file: pytest is gone
RUNNING: list[VllmServer] = []  # for the reports of failed tests
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
LOCAL_HITS = "vllm:prefix_cache_hits_total"


def host_blocks(count: int) -> dict[str, str]:
    """A host tier of that many blocks, as somebody sets it who starts vLLM by hand."""
    return {"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(count)}


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request brought.

    `margins`: by how much each token was more likely, in log-probability, than the next best. `cached`: how many tokens
    of the prompt came from a cache, whichever.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]
    cached: int


def answer_of(choice: dict, body: dict) -> Answer:
    """One choice of a completion."""
    return Answer(
        tuple(choice["token_ids"]),
        tuple(choice["logprobs"]["token_logprobs"]),
        tuple(margin(best.values()) for best in choice["logprobs"]["top_logprobs"]),
        (body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


class VllmClient:
    """Asks a server that runs, whoever has started it."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self.http = httpx.Client(base_url=url, timeout=ANSWER_TIMEOUT_S, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def log_tail(self, lines: int = 40) -> str:
        """For reports: of a server that this process has not started it is not at hand."""
        return ""

    def ask(self, prompt: Sequence[int] | str, max_tokens: int = 8, **fields: object) -> Answer:
        """One greedy completion of exactly `max_tokens` tokens."""
        body = self.completion(prompt, max_tokens, **fields)
        answer = answer_of(body["choices"][0], body)
        assert len(answer.tokens) == max_tokens, answer
        return answer

    def completion(self, prompt: Sequence[int] | str, max_tokens: int = 8, **fields: object) -> dict:
        answer = self.http.post("/v1/completions", json=self.request(prompt, max_tokens, **fields))
        assert answer.status_code == 200, f"{answer.status_code} {answer.text}\n{self.log_tail()}"
        return answer.json()

    def request(self, prompt: Sequence[int] | str, max_tokens: int, **fields: object) -> dict:
        request = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        return request | fields

    @contextmanager
    def stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[Iterator[str]]:
        """The events of a streamed completion; whoever leaves the block has hung up."""
        body = self.request(prompt, max_tokens, stream=True)
        with (
            httpx.Client(base_url=self.url, timeout=ANSWER_TIMEOUT_S, trust_env=False) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            yield (line for line in answer.iter_lines() if line)

    def leave(self, prompt: Sequence[int], after_s: float) -> None:
        """Ask, and hang up after so many seconds without an answer."""
        with suppress(httpx.ReadTimeout):
            self.http.post("/v1/completions", json=self.request(prompt, 400), timeout=after_s)
            raise AssertionError("the answer came before the client had left")

    def ask_all(self, prompts: Iterable[Sequence[int]], max_tokens: int = 8, concurrency: int = 8) -> list[Answer]:
        """Answers in the order of the prompts, `concurrency` requests at a time."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, max_tokens), prompts))

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by name, summed over its labels."""
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").raise_for_status().text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    def reset_prefix_cache(self, *, external: bool) -> bool:
        """Forget G1, and what the connector holds if `external`. True if vLLM says that it worked."""
        answer = self.http.post("/reset_prefix_cache", params={"reset_external": str(external).lower()})
        assert answer.status_code == 200, answer.text
        return answer.json()["success"]

    def wait_until(self, what: str, condition, timeout_s: float = 60.0) -> None:
        """Poll the metrics until `condition(metrics)` holds."""
        deadline = time.monotonic() + timeout_s
        while not condition(metrics := self.metrics()):
            relevant = {name: value for name, value in metrics.items() if name.startswith("kvbm_") or "num_req" in name}
            assert time.monotonic() < deadline, f"{what} did not happen: {relevant}\n{self.log_tail()}"
            time.sleep(0.1)

    def hits_by_source(self) -> dict[str, float]:
        """Of vLLM's own counter: tokens that each tier has supplied."""
        text = self.http.get("/metrics").raise_for_status().text
        return {
            sample.labels["source"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "vllm:prompt_tokens_cached_by_source_total" and sample.value
        }


class VllmServer(VllmClient):
    """A started server, ready to be asked. As a context manager it is stopped at the end, whatever happened."""

    def __init__(
        self,
        model: Path,
        *arguments: str,
        blocks: int = 200,
        connector: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        max_model_len: int = MAX_MODEL_LEN,
        wait: bool = True,
    ) -> None:
        wait_until_old(model)
        self.port = choose_port("127.0.0.1", 0)
        super().__init__(f"http://127.0.0.1:{self.port}", model.name)
        self._directory = tempfile.TemporaryDirectory(prefix="kvbm-v")  # short: sockets have paths of at most 107 bytes
        self.log_path = Path(self._directory.name) / "log"
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", self.model),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--enforce-eager", "--enable-prompt-tokens-details"),
            *("--max-model-len", str(max_model_len), "--num-gpu-blocks-override", str(blocks)),
            *(("--kv-transfer-config", json.dumps(connector)) if connector else ()),
            *arguments,
        ]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command_line(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=minimal_environment(self._directory.name) | dict(environment or {}),
                process_group=0,
            )
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD, str(self.process.pid)],
            stdin=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )
        RUNNING.append(self)
        if wait:
            self.wait_healthy()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_healthy(self) -> VllmServer:
        """Returns when the server answers; stops it and raises if it does not come up."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with suppress(httpx.TransportError):
                if self.http.get("/health", timeout=5).status_code == 200:
                    assert_in_log(self.log())
                    return self
            if self._has_ended() or time.monotonic() > deadline:
                story = f"vLLM did not start\n{self.log_tail(80)}"
                self.stop()
                raise AssertionError(story)
            time.sleep(0.2)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    def stop(self) -> None:
        """SIGTERM and some patience, then SIGKILL for the whole group; removes what vLLM leaves in shared memory."""
        if self not in RUNNING:
            return
        RUNNING.remove(self)
        self.http.close()
        os.kill(self.process.pid, signal.SIGTERM)  # not by Popen, which reaps a server that has ended by itself
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(0.05)
        with suppress(ProcessLookupError):  # before the leader is reaped: until then nobody else gets its number
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._guard.communicate(b".")
        for left in Path(self._directory.name).glob("vllm_dist_*"):
            for segment in Path("/dev/shm").glob(f"{left.name}*"):
                segment.unlink(missing_ok=True)
        self._directory.cleanup()

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_until_old(*models: Path, has_code: bool = False) -> None:
    """Files that are newer than the process of an engine are in doubt, and the blocks of their model do not outlive it.
    Waits until the clock's slack has passed, if a test has just written them; for code, and on an overlay, until they
    are quiet."""
    newest_ns = max((path.lstat().st_ctime_ns for one in models for path in (one, *one.rglob("*"))), default=0)
    slack_s = SLACK_S if not has_code and all(map(writes_back, models)) else QUIET_NS / 1e9 + 1
    time.sleep(max(0, newest_ns / 1e9 + slack_s - time.time()))


def minimal_environment(directory: str) -> dict[str, str]:
    """A small environment of its own: no variable of the caller's shell changes the server."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "VIRTUAL_ENV") if name in os.environ}
    return kept | {
        "TMPDIR": directory,
        "PYTHONPATH": os.pathsep.join(filter(None, (*THIS_TREE, os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCH_COMPILE_DISABLE": "1",  # or the first request waits half a minute for a C++ compiler
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines run at the same time, on cores that Linux chooses
        "OMP_NUM_THREADS": "1",
    }


def margin(logprobs: Iterable[float]) -> float:
    best, second = sorted(logprobs, reverse=True)[:2]
    return best - second


def disk_process(engine: int) -> psutil.Process | None:
    """Return the process that does the disk's I/O for an engine, by the engine's process id; None while it has none."""
    children = psutil.Process(engine).children(recursive=True)
    return next((child for child in children if "kvbm.tiers.disk.service.server" in child.cmdline()), None)


@contextmanager
def stopped_disk(engine: int) -> Iterator[None]:
    """The process that does the disk's I/O for an engine does not run."""
    process = disk_process(engine)
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)
