"""`kvbm bench` of vLLM on a CPU: kvbm against no cache, vLLM's own KV offloading and LMCache, at two pressures.

    pip install --no-deps --target .nox/lmcache lmcache==0.5.6 aiofile caio aiofiles awscrt nvtx redis \\
        sortedcontainers opentelemetry-exporter-prometheus
    python bench/peers/compare.py --output kvbm-runs/peers

Run it on an idle machine, with an interpreter that has vLLM 0.32 for CPUs and this repository. Without the first
command the arm `lmcache` is left out. The program changes to the root of the repository and calls `kvbm bench` with two
pressures and two pairs. It passes its options on, so `--dry-run` shows the plan, and `--resume DIR` continues. On two
cores it starts vLLM 19 times and takes about 30 minutes. The same workload takes about nine minutes on the embedded
engine:

    kvbm bench --profile demo --workload bench/peers/workload.yaml --pressure 0.8,2 --pairs 2 --output kvbm-runs/demo

bench/keep_result.py copies a result to bench/results/.

    baseline  no connector: a prompt that was evicted from G1 is computed again
    kvbm      DynamoConnector with 2 GiB of host memory
    native    vLLM's OffloadingConnector with 2 GiB of host memory; `native_on_cpu.py` replaces its copier
    lmcache   LMCacheMPConnector, and a server with 2 GiB of host memory, in the mode that supports CPUs
    floor     no connector, and a G1 that holds everything

Every run starts a new vLLM. LMCache's server starts once: before every run, `kvbm bench` empties it through vLLM's
`/reset_prefix_cache?reset_external=true`. At the end this program requires that no run found more tokens of its cold
requests in a cache than the baseline, which finds only the shared system prompt. The memory of LMCache's server is not
part of the memory of its arm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvbm.child.start import command_line
from kvbm_cli.app import run as kvbm

ROOT = Path(__file__).resolve().parents[2]
LMCACHE = Path(".nox/lmcache")  # as lmcache.yaml has it
LOG = Path("kvbm-runs/lmcache-server.log")
PORT, HTTP_PORT = 15557, 15558  # lmcache.yaml names the first
HOST_GB = "2"
START_TIMEOUT_S = 120
DEFAULTS = {"--workload": "bench/peers/workload.yaml", "--pressure": "0.8,2", "--pairs": "2"}


def options_of(given: Sequence[str], *, has_lmcache: bool) -> list[str]:
    """Options of `kvbm bench`: the arms, the defaults that are not given, and what is given."""
    peers = ("native", "lmcache") if has_lmcache else ("native",)
    arms = [word for name in peers for word in ("--compare", f"baseline:bench/peers/{name}.yaml")]
    names = {word.partition("=")[0] for word in given}
    defaults = [word for name, value in DEFAULTS.items() if name not in names for word in (name, value)]
    return ["--profile", "vllm-cpu-demo", "--compare", "baseline", *arms, *defaults, *given]


@contextlib.contextmanager
def lmcache_server() -> Iterator[None]:
    environment = {"PYTHONPATH": str(LMCACHE), "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}
    argv = [
        *(sys.executable, "-m", "lmcache.cli.main", "server", "--host", "localhost", "--port", str(PORT)),
        *("--http-host", "127.0.0.1", "--http-port", str(HTTP_PORT), "--chunk-size", "128"),
        *("--l1-size-gb", HOST_GB, "--l1-init-size-gb", HOST_GB, "--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "auto", "--shm-name", f"bench{os.getpid()}"),
    ]
    LOG.parent.mkdir(exist_ok=True)
    with LOG.open("wb") as log:
        command, variables = command_line(argv), {**os.environ, **environment}
        server = subprocess.Popen(command, env=variables, stdout=log, stderr=log, process_group=0)
    try:
        await_healthy(server)
        yield
    finally:
        server.terminate()
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def await_healthy(server: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"http://127.0.0.1:{HTTP_PORT}/healthcheck", timeout=5).close()
            return
        time.sleep(0.2)
    raise RuntimeError(f"LMCache's server did not start: see {LOG}")


def cached_when_cold(directory: Path) -> Mapping[tuple[str, int], Mapping[str, int]]:
    """Tokens of cold requests that were found in a cache, by cell and pair, then by arm."""
    found: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    with (directory / "requests.jsonl").open() as lines:
        for record in map(json.loads, lines):
            if record["phase"] == "cold" and record["arm"] != "recording":
                found[record["cell"], record["pair"]][record["arm"]] += record["cached_tokens"] or 0
    return found


def require_cold(directory: Path) -> None:
    """RuntimeError if an arm found tokens of its cold requests that the baseline did not find."""
    for (cell, pair), arms in cached_when_cold(directory).items():
        print(f"{cell}, pair {pair}: tokens of cold requests found in a cache: {dict(arms)}", file=sys.stderr)
        warm = [name for name, tokens in arms.items() if tokens > arms.get("baseline", tokens)]
        if warm:
            raise RuntimeError(f"{cell}, pair {pair}: not cold: {', '.join(warm)}")


def main(given: Sequence[str]) -> int:
    os.chdir(ROOT)
    directory = directory_of(given)
    has_lmcache = LMCACHE.is_dir()
    with lmcache_server() if has_lmcache and directory else contextlib.nullcontext():
        code = kvbm(["bench", *options_of(given, has_lmcache=has_lmcache)])
    if directory is not None and (directory / "requests.jsonl").exists():
        require_cold(directory)
    return code


def directory_of(given: Sequence[str]) -> Path | None:
    """The run directory; None for a dry run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], add_help=False, allow_abbrev=False)
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--dry-run", action="store_true")
    kinds.add_argument("--output", type=Path)
    kinds.add_argument("--resume", type=Path)
    known, _ = parser.parse_known_args(given)
    found: Path | None = known.output or known.resume
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
