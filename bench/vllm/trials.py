"""Trials of `kvbm try` with a real vLLM: the announced and the real duration, the verdict and the exit code of each.

    python bench/vllm/trials.py --output bench/results/2cpu-x86-64-no-gpu-try.json [NAME ...]

Each case is one command as a user would type it, with small models that are made here. NAME chooses cases, by default
all of CASES; their results replace those in the file. A trial takes 3 to 14 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench" / "vllm")]

from facts import facts  # noqa: E402

from kvbm.engines.make_model import materialise  # noqa: E402

KVBM = (sys.executable, "-c", "from kvbm_cli.app import main; main()")
SMALL, LARGE = "vllm-25m", "vllm-81m"
SCRIPT = """\
#!/bin/bash
set -e
MODEL={model}
ARGS=(--max-model-len 8192 --port "${{PORT:-8000}}")
exec vllm serve "$MODEL" --dtype float32 --enforce-eager "${{ARGS[@]}}"
"""
COMPOSE = """\
services:
  engine:
    image: vllm/vllm-openai:v0.32.0
    ports: ["8000:8000"]
    command: ["--model", "{model}", "--max-model-len", "4096", "--enforce-eager"]
"""
POD = """\
apiVersion: v1
kind: Pod
metadata: {{name: engine}}
spec:
  containers:
    - name: vllm
      image: vllm/vllm-openai:v0.32.0
      args: ["--model", "{model}", "--max-model-len", "4096", "--dtype", "float32", "--enforce-eager"]
"""
# Model, words after `kvbm try --yes` with its directory in place of {model}, and the files that they name.
CASES: dict[str, tuple[str, str, dict[str, str]]] = {
    "long": (SMALL, "-- vllm serve {model} --dtype float32 --max-model-len 32768 --enforce-eager", {}),
    "larger model": (LARGE, "-- vllm serve {model} --max-model-len 4096 --enforce-eager", {}),
    "two ranks": (
        SMALL,
        "-- env VLLM_CPU_OMP_THREADS_BIND=nobind vllm serve {model} --dtype float32 --max-model-len 8192 "
        "--enforce-eager --tensor-parallel-size 2",  # bound, vLLM requires a NUMA node for each rank
        {},
    ),
    "script": (SMALL, "start.sh", {"start.sh": SCRIPT}),
    "compose": (LARGE, "compose.yaml", {"compose.yaml": COMPOSE}),
    "manifest": (SMALL, "pod.yaml", {"pod.yaml": POD}),
    "docker run": (
        SMALL,
        "-- docker run --rm -p 8000:8000 vllm/vllm-openai:v0.32.0 --model {model} --max-model-len 4096 --enforce-eager",
        {},
    ),
    "compiled": (SMALL, "-- vllm serve {model} --dtype float32 --max-model-len 4096", {}),
    "short": (SMALL, "--minutes 3 -- vllm serve {model} --dtype float32 --max-model-len 32768 --enforce-eager", {}),
}


def trial(name: str, directory: Path) -> dict[str, Any]:
    """Run one case in a directory of its own."""
    model, words, files = CASES[name]
    path = str(materialise(model))
    for file, text in files.items():
        (directory / file).write_text(text.format(model=path))
    environment = {**os.environ, "XDG_STATE_HOME": str(directory / "state"), "HF_HUB_OFFLINE": "1"}
    started, load = time.monotonic(), os.getloadavg()[0]
    argv = [*KVBM, "try", "--yes", "--json", *words.format(model=path).split()]
    done = subprocess.run(argv, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    took_s = time.monotonic() - started
    print(done.stderr, file=sys.stderr)
    summary = json.loads(done.stdout) if done.stdout else {"verdict": None, "explanation": done.stderr[-1000:]}
    announced_s = summary.get("try", {}).get("announced_s")
    return {
        "name": name,
        "command": f"kvbm try --yes {words.format(model=model)}",
        "announced_s": announced_s,
        "took_s": round(took_s),
        "within_factor_2": announced_s is not None and announced_s / 2 <= took_s <= announced_s * 2,
        "engine_starts": summary.get("try", {}).get("starts"),
        "pressure": summary.get("try", {}).get("pressure"),
        "verdict": summary["verdict"],
        "explanation": summary["explanation"].replace(str(directory), "DIR").replace(path, model),
        "exit_code": done.returncode,
        "load_before": round(load, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    kept = json.loads(options.output.read_text())["trials"] if options.output.exists() else []
    for name in options.names or CASES:
        with tempfile.TemporaryDirectory() as directory:
            found = trial(name, Path(directory))
        print(json.dumps(found, indent=1))
        kept = [*(one for one in kept if one["name"] != name), found]
        content = {**facts(("vllm-cpu", "torch")), "command": "python bench/vllm/trials.py", "trials": kept}
        options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
