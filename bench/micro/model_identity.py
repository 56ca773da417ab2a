"""Time to identify the files of a model: every byte at first, metadata with known digests, and what steps notice.

    python bench/micro/model_identity.py      # prints the result; --output bench/results/<machine>-model-identity.json

The model has 4 shards of 1 GB of random bytes, in the page cache, as after loading. `digest_s` is the time of the
process that reads them, `of_it_start_s` that of its start; `warm_s` is a look at the files with known digests. A step
multiplies matrices on all cores; its median is taken without and with a digest under way, in turns. Exits with 1 if a
digest takes more than 15 s per 100 GB, or a look more than 0.1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPOSITORY))

from kvbm.identity import digest_cache, digests  # noqa: E402
from kvbm.identity.content import METHOD  # noqa: E402
from kvbm.identity.digest_cache import DigestCache  # noqa: E402
from kvbm.identity.look import look  # noqa: E402

SHARDS, SHARD_BYTES = 4, 1_000_000_000
LIMIT_S_PER_100_GB, WARM_LIMIT_S = 15.0, 0.1
ROUNDS, STEPS, WIDTH = 5, 40, 512


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    parser.add_argument("--directory", type=Path, help="where the files of the model are made")
    arguments = parser.parse_args()
    digest_cache.QUIET_NS = 0  # the files are new
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        model, state = Path(directory) / "model", Path(directory) / "digests.json"
        make(model)
        digest_s = min(timed(model, None) for _ in range(ROUNDS))
        start_s = min(start_of_process(Path(directory)) for _ in range(ROUNDS))
        timed(model, state)
        warm_s = statistics.median(timed(model, state) for _ in range(ROUNDS))
        alone_ms, beside_ms = steps(model)
    total_gb = SHARDS * SHARD_BYTES / 1e9
    row = {
        "digest_s": round(digest_s, 3),
        "of_it_start_s": round(start_s, 3),
        "gb_per_s": round(total_gb / (digest_s - start_s), 2),
        "digest_s_of_100_gb": round(start_s + 100 * (digest_s - start_s) / total_gb, 1),
        "load": round(os.getloadavg()[0], 1),
        "warm_s": round(warm_s, 4),
        "step_ms": round(alone_ms, 2),
        "step_ms_during_a_digest": round(beside_ms, 2),
    }
    print(json.dumps(row, indent=1))
    result = {
        "benchmark": "model_identity",
        "command": "python bench/micro/model_identity.py",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{len(os.sched_getaffinity(0))}cpu-{platform.machine()}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout.strip(),
        "method": METHOD,
        "bytes": SHARDS * SHARD_BYTES,
        "target": f"{LIMIT_S_PER_100_GB:g} s per 100 GB; with known digests {WARM_LIMIT_S:g} s",
        **row,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if row["digest_s_of_100_gb"] <= LIMIT_S_PER_100_GB and warm_s <= WARM_LIMIT_S else 1


def make(model: Path) -> None:
    model.mkdir()
    (model / "config.json").write_text("{}")
    for shard in range(SHARDS):
        with (model / f"model-{shard:05}.safetensors").open("wb") as file:
            for _ in range(SHARD_BYTES // 10_000_000):
                file.write(os.urandom(10_000_000))
            os.fsync(file.fileno())


def timed(model: Path, state: Path | None) -> float:
    """Time a look and the digests of what is not known."""
    begin_s = time.perf_counter()
    digests.begin(look(model).paths(), DigestCache(state)).result()
    return time.perf_counter() - begin_s


def start_of_process(directory: Path) -> float:
    """Time the process with nothing to read."""
    (directory / "small").write_bytes(b"1")
    files, limit = look(directory / "small").paths(), digests.INLINE_BYTES
    digests.INLINE_BYTES = 0
    begin_s = time.perf_counter()
    digests.begin(files, DigestCache(None)).result()
    digests.INLINE_BYTES = limit
    return time.perf_counter() - begin_s


def steps(model: Path) -> tuple[float, float]:
    """Return the median time of a step alone, and while the files are digested, in milliseconds."""
    import numpy as np

    matrix = np.random.default_rng(0).random((WIDTH, WIDTH), np.float32)
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(ROUNDS):
        alone += [step(matrix) for _ in range(STEPS)]
        files, found = look(model).paths(), None
        for _ in range(STEPS):
            if found is None or found.done():
                found = digests.begin(files, DigestCache(None))
            beside.append(step(matrix))
        assert found is not None
        found.result()
    return 1e3 * statistics.median(alone), 1e3 * statistics.median(beside)


def step(matrix: object) -> float:
    begin_s = time.perf_counter()
    for _ in range(8):
        matrix @ matrix  # type: ignore[operator]
    return time.perf_counter() - begin_s


if __name__ == "__main__":
    sys.exit(main())
