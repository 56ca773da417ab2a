"""The configuration of the model that a profile names: a synthetic preset, or config.json of a local directory."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path

from kvbm.errors import EnvironmentProblem, ProfileError

SYNTHETIC_PREFIX = "synthetic:"


def model_facts(model: str) -> Mapping[str, object]:
    """Facts under the names of a Hugging Face config.json. ProfileError if there is no such model."""
    if model.startswith(SYNTHETIC_PREFIX):
        return _synthetic(model)
    directory = Path(model).expanduser()
    if not directory.is_dir():
        raise ProfileError(
            f"`engine.model`: there is no directory `{model}`",
            hint="a model is a local directory, or `synthetic:tiny`, which needs no download",
        )
    return _read_config(directory / "config.json")


def _synthetic(model: str) -> Mapping[str, object]:
    from kvbm.embedded.presets import SYNTHETIC

    facts: Mapping[str, object] | None = SYNTHETIC.get(model.removeprefix(SYNTHETIC_PREFIX))
    if facts is None:
        names = [SYNTHETIC_PREFIX + name for name in SYNTHETIC]
        nearest = difflib.get_close_matches(model, names, n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"there are {', '.join(f'`{name}`' for name in names)}"
        raise ProfileError(f"`engine.model`: there is no `{model}`", hint=hint)
    return facts


def _read_config(path: Path) -> Mapping[str, object]:
    try:
        facts = json.loads(path.read_bytes())
    except OSError as error:
        raise EnvironmentProblem(f"cannot read `{path}`: {(error.strerror or str(error)).lower()}") from None
    except ValueError as error:
        raise EnvironmentProblem(f"`{path}` is not JSON: {error}") from None
    if not isinstance(facts, dict):
        raise EnvironmentProblem(f"`{path}` is not the configuration of a model")
    return facts
