"""Synthetic models for engines that require directories: `synthetic:NAME` is one in the user's cache."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvbm.engines import make_model as models
from kvbm.engines.model_facts import SYNTHETIC_PREFIX

if TYPE_CHECKING:
    from kvbm.config.schema import Profile


def preset_of(profile: Profile) -> str | None:
    """Return the name of a model to generate, None for one that exists."""
    is_preset = profile.engine.model.startswith(SYNTHETIC_PREFIX)
    return profile.engine.model.removeprefix(SYNTHETIC_PREFIX) if is_preset else None


def with_local_model(profile: Profile) -> Profile:
    """Return the profile with a directory in place of `synthetic:...`, served under the name in the profile."""
    arguments = profile.engine.arguments
    preset = preset_of(profile)
    if preset is None:
        local, changed = os.path.expanduser(profile.engine.model), arguments
    else:
        local = str(models.directory_of(preset))
        changed = arguments.model_copy(update={"served_model_name": profile.engine.served_name})
    engine = profile.engine.model_copy(update={"model": local, "arguments": changed})
    return profile.model_copy(update={"engine": engine})
