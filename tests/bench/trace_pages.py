"""The trace that pages of the documentation use, and their examples."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAD = Path(__file__).parent / "data/mooncake-conversation-head.jsonl.gz"


def examples_in(page: str) -> list[tuple[str, str]]:
    """Return the command lines of a page, without `kvbm`, and what the page shows of their output."""
    return re.findall(r"^```console\n\$ kvbm (.*)\n((?:.*\n)*?)```$", page, re.MULTILINE)


def stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
