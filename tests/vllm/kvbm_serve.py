"""`kvbm serve` of a profile with a real vLLM."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PROGRAM = (sys.executable, "-c", "from kvbm_cli.app import main; main()")
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCH_COMPILE_DISABLE": "1"}


@contextmanager
def started(
    directory: Path, environment: Mapping[str, str], *options: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve `mine.yaml` of a directory, with messages in its `stderr`. Yields the program and its URL when it is
    healthy, and kills it at the end."""
    stderr = directory / "stderr"
    with (
        stderr.open("w") as errors,
        subprocess.Popen(
            [*PROGRAM, "serve", "--profile", "./mine.yaml", *options],
            cwd=directory,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as program,
    ):
        try:
            assert program.stdout is not None
            url = program.stdout.readline().strip()
            assert url, stderr.read_text()[-4000:]
            yield program, url
        finally:
            program.kill()
