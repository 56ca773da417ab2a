"""The command `kvbm` with the toy engine. A row is there before anything reads the table."""

# ruff: noqa: E402

import sys

from kvbm.config.engine import ENGINES
from toy_engine.section import ToyEngine

ENGINES["toy"] = ToyEngine

from kvbm.engines.table import KINDS
from toy_engine.kind import ToyKind

KINDS["toy"] = ToyKind()

from kvbm_cli.app import main

sys.exit(main())
