"""Makes the modules of tests/embedded importable, which the harness shares."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "embedded"))
