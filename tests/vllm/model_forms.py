"""Small configurations of every architecture that sizing accepts, in forms that files may have, hostile ones too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Config = dict[str, Any]

DATA: dict[str, Config] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def configurations() -> dict[str, Config]:
    """Return all forms by name; also each with one fact left out, and with one fact that is null."""
    models = {}
    kept = {"architectures", "model_type", "vocab_size", "pad_token_id", *DATA["experts"]}
    for architecture, base in _bases():
        for form, facts in DATA["forms"].items():
            models[f"{architecture} {form}"] = {**base, **facts}
        for name in set(base) - kept:
            models[f"{architecture} without {name}"] = {key: value for key, value in base.items() if key != name}
            models[f"{architecture} null {name}"] = {**base, name: None}
    return models


def _bases() -> Iterator[tuple[str, Config]]:
    for architecture, model_type in DATA["model_types"].items():
        names: Config = {"architectures": [architecture], "model_type": model_type}
        yield architecture, {**names, **DATA["shape"], **DATA["experts"], **DATA["more"].get(model_type, {})}
