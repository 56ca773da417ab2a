"""The catalogue: facts of the configurations of well-known models, by their names on the Hugging Face hub.

It has only what sizing needs, so that `kvbm size` works without a download.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

CATALOGUE_FILE = Path(__file__).with_name("catalogue.json")


@cache
def catalogue() -> Mapping[str, Mapping[str, object]]:
    """Return the configurations by name."""
    models: Mapping[str, Mapping[str, object]] = json.loads(CATALOGUE_FILE.read_bytes())
    return models
