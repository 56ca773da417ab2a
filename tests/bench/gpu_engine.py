#!/usr/bin/env python3
"""Stands for an interpreter with vLLM for GPUs, on a device with DEVICE_BLOCKS blocks: MockEngine behind its flags.

As vLLM does, it refuses to start if G1 holds no sequence of the maximum length, runs out of memory with more blocks
than the device has, and reports its G1 only after the start, which takes a while. Every start is a line in GPU_STARTS.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # kvbm starts it with PYTHONSAFEPATH
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

HELD = '{"distribution": "vllm", "version": "0.32.0", "script": null, "has_kvbm": true}'
DEVICE_BLOCKS = 160
START_S = 1.0


def flag(name: str) -> str | None:
    """Return the value of a flag, with a blank or `=` before it."""
    words = sys.argv
    after = [words[place + 1] for place, word in enumerate(words) if word == f"--{name}"]
    joined = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return next(iter([*after, *joined]), None)


def main() -> None:
    from mock_engine import BLOCK, MockEngine, Options

    wanted, longest = flag("num-gpu-blocks-override"), int(flag("max-model-len") or 0)
    blocks = int(wanted or DEVICE_BLOCKS)
    has_kvbm = flag("kv-transfer-config") is not None
    with open(os.environ["GPU_STARTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps([has_kvbm, None if wanted is None else blocks]) + "\n")
    time.sleep(START_S)
    if blocks * BLOCK < longest:
        sys.exit(f"ValueError: To serve at least one request with the models's max seq len ({longest}), more is needed")
    if blocks > DEVICE_BLOCKS:
        sys.exit("torch.OutOfMemoryError: CUDA out of memory.")
    options = Options(g1_blocks=blocks, g2_blocks=10_000 if has_kvbm else 0, is_like_vllm=True, computed_token_ms=0.1)
    MockEngine(options, port=int(flag("port") or 0)).serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "-c":
        print(HELD)
    else:
        main()
