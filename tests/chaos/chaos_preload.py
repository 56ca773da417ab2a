"""Imported once by the fork server: torch, transformers and a loaded model, so that each engine starts in 0.2 s."""

import kvbm_engine  # noqa: F401
import pytest  # noqa: F401

from kvbm.engines.embedded.engine import model
from kvbm.engines.embedded.engine.config import EngineConfig

model.load(EngineConfig(model="synthetic:tiny", num_blocks=2, verify=False))
