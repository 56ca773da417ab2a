"""Time that identifying the files of a large model takes at a start, cold and warm.

    python bench/micro/model_identity.py        # prints a table; --output bench/results/<machine>-model-identity.json

The model has 25 safetensors shards of 4 GB, with 9 tensors each (as a dense model of 100 GB), with 100 or with 600
(experts). The files are sparse: holes read as zeros from the page cache, so the numbers contain no time of a drive.
Cold: no digests are known. Warm: the state file has them, as at each start but the first. Exits with 1 if a warm start
takes more than a second per 100 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPOSITORY))

from kvbm.identity.content import METHOD  # noqa: E402
from kvbm.identity.digest_cache import RACY_NS, DigestCache  # noqa: E402
from kvbm.identity.fingerprint import fingerprint  # noqa: E402

SHARDS, SHARD_BYTES, LIMIT_S = 25, 4_000_000_000, 1.0
ROUNDS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    arguments = parser.parse_args()
    rows = [measure(tensors) for tensors in (9, 100, 600)]
    for row in rows:
        print(f"{row['tensors']:6} tensors  cold {row['cold_s']:.3f} s  warm {row['warm_s']:.4f} s")
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
        "target": f"warm: {LIMIT_S} s per 100 GB",
        "rows": rows,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row["warm_s"] <= LIMIT_S for row in rows) else 1


def measure(tensors_per_shard: int) -> dict[str, float]:
    """Time one model of 100 GB."""
    with tempfile.TemporaryDirectory() as directory:
        model, state = Path(directory) / "model", Path(directory) / "digests.json"
        make(model, tensors_per_shard)
        time.sleep(RACY_NS / 1e9 + 0.5)  # digests of recent files are not kept
        cold_s = timed(model, state)
        warm_s = sorted(timed(model, state) for _ in range(ROUNDS))[ROUNDS // 2]
    return {"tensors": SHARDS * tensors_per_shard, "cold_s": round(cold_s, 4), "warm_s": round(warm_s, 4)}


def make(model: Path, tensors: int) -> None:
    model.mkdir()
    (model / "config.json").write_text("{}")
    for shard in range(SHARDS):
        size = SHARD_BYTES // tensors
        header = {
            f"layers.{shard}.{index}": {
                "dtype": "BF16",
                "shape": [size // 2],
                "data_offsets": [index * size, (index + 1) * size],
            }
            for index in range(tensors)
        }
        text = json.dumps(header).encode()
        with (model / f"model-{shard:05}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + tensors * size)


def timed(model: Path, state: Path) -> float:
    begin = time.perf_counter()
    fingerprint(model, DigestCache(state))
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
