"""A real SGLang server for tests, on a CPU with stand-ins for its kernels, started from a profile as `kvbm serve` does.

    with serving(model, directory) as server:
        reply = server.ask(prompt_of_token_ids, 8)

The model computes in float32 and in one thread, so that equal KV gives equal tokens. A page has 64 tokens. The server
gets ports and a process group of its own. Its storage can be detached and attached while it runs, which takes a second
instead of the minute of a start.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_server import Answer, margin

from kvbm.config.schema import Profile
from kvbm.engines.sglang import launch
from kvbm.engines.sglang.options import STORAGE

PAGE = 64
START_S, ANSWER_S, REST_S = 400.0, 240.0, 60.0
ADMIN_KEY = "tests"
ARGUMENTS = {
    "dtype": "float32",
    "page_size": PAGE,
    "max_total_tokens": 3200,
    "device": "cpu",
    "random_seed": 1,
    "attention_backend": "torch_native",
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
    "hicache_ratio": 2,
    "hicache_storage_backend_extra_config": {"prefetch_threshold": PAGE},
    "admin_api_key": ADMIN_KEY,
}


@dataclass(frozen=True, slots=True)
class Reply:
    """`cached`: cached tokens by where they were: `device`, `host`, `storage`."""

    answer: Answer
    cached: Mapping[str, int]


class Server:
    def __init__(self, plan: Any, profile: Profile, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url, self.metrics_url = plan.base_url, plan.metrics_url
        self.profile, self.process, self.log = profile, process, log

    def ask(self, prompt: Sequence[int], count: int = 8, **fields: object) -> Reply:
        """One greedy answer of `count` tokens. `fields`: such as `cache_salt`."""
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
        found = json.loads(self.post("/generate", {**body, **fields}))
        facts = found["meta_info"]
        logprobs = [(value, token) for value, token, *_ in facts["output_token_logprobs"]]
        answer = Answer(
            tuple(token for _, token in logprobs),
            tuple(_number(value) for value, _ in logprobs),
            tuple(margin([_number(value) for value, *_ in best]) for best in facts["output_top_logprobs"]),
            int(facts["cached_tokens"]),
        )
        assert len(answer.tokens) == count, found
        details = facts.get("cached_tokens_details") or {}
        return Reply(answer, {name: details.get(name, 0) for name in ("device", "host", "storage")})

    def abort(self, prompt: Sequence[int], **fields: object) -> None:
        """Ask for a long answer, and leave after its first event."""
        sampling = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True, **fields}
        with self._open("POST", "/generate", body) as answer:
            answer.readline()

    def post(self, path: str, body: object = None) -> bytes:
        with self._open("POST", path, body) as answer:
            return bytes(answer.read())

    def try_call(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        """The status and the text of an answer."""
        try:
            with self._open(method, path, body) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def flush(self) -> None:
        """Empty device and host memory. SGLang refuses that while something runs."""
        self._until_done("POST", "/flush_cache")

    def clear(self) -> None:
        self._until_done("POST", "/hicache/storage-backend/clear")

    def detach(self) -> None:
        self._until_done("DELETE", "/hicache/storage-backend")

    def attach(self) -> None:
        """Attach the storage of the profile again."""
        status, text = self.try_attach()
        assert status == 200, text

    def try_attach(self, **changes: object) -> tuple[int, str]:
        ours = {**self.profile.connector_config().model_dump(mode="json"), **changes}
        extra = {**ARGUMENTS["hicache_storage_backend_extra_config"], **STORAGE, "kvbm": ours}  # type: ignore[dict-item]
        body = {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config_json": json.dumps(extra),
        }
        end_s = time.monotonic() + REST_S
        while "not idle" in (answer := self.try_call("PUT", "/hicache/storage-backend", body))[1]:
            assert time.monotonic() < end_s, answer
            time.sleep(0.1)
        return answer

    def counters(self, *, rank: int = 0) -> dict[str, float]:
        url = self.metrics_url.replace(f":{self.profile.metrics.port}", f":{self.profile.metrics.port + rank}")
        text = urllib.request.urlopen(url, timeout=30).read().decode()
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("kvbm_"))
        return {name: float(value) for name, value in rows}

    def wait_for(self, name: str, least: float, *, rank: int = 0) -> None:
        end_s = time.monotonic() + REST_S
        while self.counters(rank=rank).get(name, 0) < least:
            assert time.monotonic() < end_s, (name, self.counters(rank=rank))
            time.sleep(0.2)

    def wait_until_written(self) -> None:
        """Wait until nothing more is written to disk."""
        found, end_s = self.counters(), time.monotonic() + REST_S
        while (before := found) and time.monotonic() < end_s:
            time.sleep(0.5)
            found = self.counters()
            names = ("kvbm_offload_blocks_d2h", "kvbm_offload_blocks_h2d")
            if all(found[name] == before[name] for name in names):
                return
        raise AssertionError(f"the server still writes: {found}")

    def disk_process(self) -> int:
        """The disk I/O process, which is a descendant of the server."""
        found = subprocess.run(
            ["pgrep", "-f", "kvbm.tiers.disk.service"], capture_output=True, text=True
        ).stdout.split()
        mine = [int(pid) for pid in found if self._is_descendant(int(pid))]
        assert len(mine) == 1, found
        return mine[0]

    def _is_descendant(self, pid: int) -> bool:
        while pid > 1:
            if pid == self.process.pid:
                return True
            try:
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            except FileNotFoundError:
                return False
        return False

    def _open(self, method: str, path: str, body: object) -> Any:
        headers = {"Content-Type": "application/json"}
        if path != "/generate":
            headers["Authorization"] = f"Bearer {ADMIN_KEY}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        return urllib.request.urlopen(request, timeout=ANSWER_S)

    def _until_done(self, method: str, path: str) -> None:
        end_s = time.monotonic() + REST_S
        while (answer := self.try_call(method, path))[0] != 200:
            assert time.monotonic() < end_s, (path, answer)
            time.sleep(0.1)


def make_model(preset: str, directory: Path) -> Path:
    subprocess.run([sys.executable, "-P", "-m", "kvbm_cli.make_model", preset, str(directory / preset)], check=True)
    return directory / preset


def profile_of(
    model: Path,
    tiers: Mapping[str, object],
    *,
    arguments: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    offload: Mapping[str, str] | None = None,
) -> Profile:
    engine = {
        "kind": "sglang",
        "model": str(model),
        "cpu_stand_ins": True,
        "python": sys.executable,
        "arguments": {**ARGUMENTS, **(arguments or {})},
        "environment": {"OMP_NUM_THREADS": "1", **(environment or {})},
    }
    metrics = {"serve": True, "port": free_port()}
    sections = {"engine": engine, "tiers": dict(tiers), "metrics": metrics, "offload": dict(offload or {})}
    return Profile.model_validate(sections)


def disk_at(directory: Path, **keys: object) -> dict[str, object]:
    return {"disk": {"directory": str(directory), "capacity": "1GB", **keys}}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


@contextmanager
def serving(profile: Profile, log: Path, *, has_kvbm: bool = True, more: Sequence[str] = ()) -> Iterator[Server]:
    """Without kvbm, `more` may name another storage."""
    plan = launch.plan(profile, connector=has_kvbm, port=free_port())
    with log.open("ab") as output:
        process = subprocess.Popen(
            (*plan.argv, *more),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **plan.environment},
        )
    try:
        end_s = time.monotonic() + START_S
        while not _is_healthy(plan.health_url):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end_s, log.read_text()[-3000:]
            time.sleep(0.5)
        yield Server(plan, profile, process, log)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def plain(model: Path, log: Path) -> Iterator[Server]:
    """SGLang without its hierarchical cache, and so without kvbm."""
    profile = profile_of(model, disk_at(log.parent / "unused"), arguments={"enable_hierarchical_cache": False})
    with serving(profile, log, has_kvbm=False) as server:
        yield server


def _number(value: float | None) -> float:
    return math.nan if value is None else value  # JSON has no NaN, which wrong KV can give


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
