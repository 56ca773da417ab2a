"""Who reads a result that is not of `kvbm bench`: the tool that wrote it, recognised by the names in it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

PLAN = "plan.json"
HEAD_BYTES = 64 << 10
MAX_FILES = 20
OWN = "`kvbm bench report` and `kvbm bench diff` read only directories that `kvbm bench` wrote"
_SUFFIXES = (".json", ".jsonl", ".csv")
_TOOLS = {  # all of these names are in the beginning of its results
    "GuideLLM": (b'"benchmarks"', b'"metrics"'),
    "aiperf or GenAI-Perf": (b'"time_to_first_token"', b'"avg"'),
    "SGLang's `bench_serving`": (b'"mean_ttft_ms"', b'"sharegpt_output_len"'),
    "`vllm bench serve`": (b'"mean_ttft_ms"',),
    "a client made from `vllm bench serve`": (b'"request_throughput"', b'"total_output_tokens"'),
    "LMBenchmark": (b"prompt_tokens", b"generation_time", b"ttft"),
}


def reader_of(path: Path) -> str:
    """Return a hint for a path that is not the directory of a run."""
    if path.is_file() and (path.parent / PLAN).is_file():
        return f"give the directory: `{shlex.quote(str(path.parent))}`"
    tool = next((found for file in _files(path) if (found := _tool_of(file)) is not None), None)
    return OWN if tool is None else f"{OWN}; this seems to be of {tool}, whose own tools read it"


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from islice((file for file in path.iterdir() if file.suffix in _SUFFIXES and file.is_file()), MAX_FILES)


def _tool_of(file: Path) -> str | None:
    try:
        with open(file, "rb") as opened:
            head = opened.read(HEAD_BYTES)
    except OSError:
        return None
    return next((tool for tool, names in _TOOLS.items() if all(name in head for name in names)), None)
