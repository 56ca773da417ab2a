"""The configuration of the model that a profile names: a synthetic preset, or config.json of a local directory.

Whatever is wrong is a ProfileError about `engine.model`; `size_of` adds where that was written.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from kvbm.errors import ProfileError

SYNTHETIC_PREFIX = "synthetic:"
_CONTENTS = "the directory of a model holds `config.json`, weights and a tokenizer, as Hugging Face has them"


def model_facts(model: str) -> Mapping[str, object]:
    """Facts under the names of a Hugging Face config.json. ProfileError for a model that is absent or not supported."""
    if model.startswith(SYNTHETIC_PREFIX):
        return _synthetic(model)
    from kvbm.embedded.supported import require_supported

    directory = os.path.expanduser(model)
    if not os.path.isdir(directory):
        raise ProfileError(
            f"`engine.model`: there is no directory `{model}`",
            hint="a model is a local directory, or `synthetic:tiny`, which needs no download",
        )
    facts = _read_config(Path(directory) / "config.json")
    require_supported(Path(directory), facts)
    return facts


def _synthetic(model: str) -> Mapping[str, object]:
    from kvbm.embedded.presets import SYNTHETIC

    name = model.removeprefix(SYNTHETIC_PREFIX)
    facts: Mapping[str, object] | None = SYNTHETIC.get(name)
    if facts is None:
        nearest = difflib.get_close_matches(name, SYNTHETIC, n=1)
        names = ", ".join(f"`{SYNTHETIC_PREFIX}{name}`" for name in SYNTHETIC)
        hint = f"did you mean `{SYNTHETIC_PREFIX}{nearest[0]}`?" if nearest else f"there are {names}"
        raise ProfileError(f"`engine.model`: there is no `{model}`", hint=hint)
    return facts


def _read_config(path: Path) -> Mapping[str, object]:
    try:
        facts = json.loads(path.read_bytes())
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ProfileError(f"`engine.model`: cannot read `{path}`: {reason}", hint=_CONTENTS) from None
    except ValueError as error:
        raise ProfileError(f"`engine.model`: `{path}` is not JSON: {error}", hint=_CONTENTS) from None
    if not isinstance(facts, dict):
        raise ProfileError(f"`engine.model`: `{path}` is not the configuration of a model", hint=_CONTENTS)
    return facts
