"""CPU time of commits to a disk tier's index, with its schema and with one that has a `UNIQUE` hash column.

    python bench/disk/index_commits.py --output bench/results/<machine>-disk-index-commits.json

The index has `--rows` rows. As for writes, 4096 random slots are changed in parts of 128: each commit inserts the
blocks of one part and deletes the rows of the next. The result is the median CPU time in milliseconds; the two
alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "vllm"))

from facts import facts

from kvbm.tiers.disk import index as module
from kvbm.tiers.disk.index import BlockIndex, IndexRow

SCHEMAS = {"as it is": module.SCHEMA, "unique hashes": module.SCHEMA.replace("hash BLOB NOT NULL", "hash BLOB UNIQUE")}
CHANGED = 4096
TOGETHER = 128
HASH_BYTES = 16


class Contender:
    def __init__(self, path: Path, schema: str, row_count: int) -> None:
        module.SCHEMA = schema
        self.index = BlockIndex.open(path)
        hashes = [os.urandom(HASH_BYTES) for _ in range(row_count)]
        self.rows = [
            IndexRow(slot, hashes[slot], slot, 1 << 20, random.getrandbits(64), b"", 0.0) for slot in range(row_count)
        ]
        self.index.change(self.rows, [])

    def change(self) -> float:
        """CPU time of all commits in milliseconds."""
        order = random.sample(range(len(self.rows)), CHANGED)
        parts = [order[start : start + TOGETHER] for start in range(0, CHANGED, TOGETHER)]
        started = time.process_time()
        for named, deleted in zip([[], *parts], [*parts, []], strict=True):
            self.index.change([self.rows[slot] for slot in named], sorted(deleted))
        return (time.process_time() - started) * 1000


def measure(row_count: int, rounds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as directory:
        contenders = {
            name: Contender(Path(directory) / f"{number}.sqlite", schema, row_count)
            for number, (name, schema) in enumerate(SCHEMAS.items())
        }
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name in random.sample(list(contenders), len(contenders)):
                taken[name].append(contenders[name].change())
        for contender in contenders.values():
            contender.index.close()
    medians = {name: round(statistics.median(times), 1) for name, times in taken.items()}
    print(f"{row_count:>9,} rows, CPU ms for {CHANGED} blocks: {medians}", flush=True)
    return {"rows": row_count, "cpu_ms": medians}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[CHANGED, 1_000_000])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    arguments = parser.parse_args()
    report = {
        "benchmark": "disk_index_commits",
        "command": f"python bench/disk/{Path(__file__).name} " + " ".join(sys.argv[1:]),
        **facts(("xxhash",)),
        "changed_blocks": CHANGED,
        "results": [measure(row_count, arguments.rounds) for row_count in arguments.rows],
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
