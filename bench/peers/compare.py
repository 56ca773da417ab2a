"""`kvbm bench` of vLLM on a CPU: kvbm against no cache, vLLM's own KV offloading and LMCache, at two pressures.

    pip install --no-deps --target .nox/lmcache lmcache==0.5.6 aiofile caio aiofiles awscrt nvtx redis \\
        sortedcontainers opentelemetry-exporter-prometheus
    python bench/peers/compare.py --output kvbm-runs/peers

Run it with an interpreter that has vLLM 0.32 for CPUs and this repository. Its options are passed on to `kvbm bench`;
`--dry-run` shows the plan. Without the first command the arm `lmcache` is left out.

    baseline  no connector: a prompt that was evicted from G1 is computed again
    kvbm      DynamoConnector with 2 GiB of host memory
    native    vLLM's OffloadingConnector with 2 GiB of host memory; `native_on_cpu.py` replaces its copier
    lmcache   LMCacheMPConnector, and a server with 2 GiB of host memory, in the mode that supports CPUs
    floor     no connector, and a G1 that holds everything

Every run starts a new vLLM. LMCache's server starts once: before every run, `kvbm bench` empties it through vLLM's
`/reset_prefix_cache?reset_external=true`. At the end this program requires that no run found more tokens of its cold
requests in a cache than the baseline, which finds only the shared system prompt.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LMCACHE = Path(".nox/lmcache")  # profiles name it relative to ROOT
PORT, HTTP_PORT = 15557, 15558  # the profile lmcache.yaml names the first
START_TIMEOUT_S = 120
HOST_GB = "2"
