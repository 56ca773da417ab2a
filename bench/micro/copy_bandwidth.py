"""Bandwidth of copies between G1 and G2 on the CPU, against memcpy of the same bytes in the same run.

    python bench/micro/copy_bandwidth.py        # prints a table; --output bench/results/<machine>-copy-bandwidth.json

Pieces of 64 KiB to 2 MiB, block-contiguous and layer-separate caches, both directions, slots scattered and consecutive;
one thread. `bench/gpu/check_and_measure.py` measures, checks every byte and documents the method. Exits with 1 if a row
is below the target.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPOSITORY / "bench" / "gpu"))

import check_and_measure  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few bytes and rounds, to check that the script works")
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    arguments = parser.parse_args()
    result = check_and_measure.run("cpu", quick=arguments.quick)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    worst = min(row["ratio"] for row in result["rows"])
    print(f"worst ratio {worst:.2f}, target {result['aim']:.2f}")
    return 0 if arguments.quick or worst >= result["aim"] else 1


if __name__ == "__main__":
    sys.exit(main())
