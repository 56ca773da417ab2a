"""The trace that the pages of the documentation use."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAD = Path(__file__).parent / "data/mooncake-conversation-head.jsonl.gz"
