"""Makes `tests/embedded/engine_process.py` importable, so that this folder runs alone."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "embedded"))
