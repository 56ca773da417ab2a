"""What a profile's settings mean on this machine for the states of its model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbm.config.document import Mistake
from kvbm.engines.engine_kind import Place
from kvbm.engines.table import cpu_of, installation_of, kind_of, runs_on_cpu
from kvbm.sizing import SizeUnknown, StateFinding, StateLevel, Wanted

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile


def state_mistakes(resolved: ResolvedProfile) -> list[Mistake]:
    """Return the settings with which vLLM does not start."""
    found = _findings(resolved, StateLevel.MISTAKE)
    return [resolved.mistake(one.key, one.message, hint=one.hint) for one in found]


def state_warnings(resolved: ResolvedProfile) -> list[Mistake]:
    """Return the settings that turn kvbm off, prevent hits or let vLLM fail later."""
    return [resolved.mistake(one.key, one.message) for one in _findings(resolved, StateLevel.WARNING)]


def is_disabled(resolved: ResolvedProfile) -> bool:
    """Return whether kvbm is disabled by the model or the settings."""
    return any(one.disables for one in _findings(resolved, StateLevel.WARNING))


def state_notes(resolved: ResolvedProfile) -> list[str]:
    """Return what the settings mean."""
    return [one.message for one in _findings(resolved, StateLevel.NOTE)]


def _findings(resolved: ResolvedProfile, level: StateLevel) -> Sequence[StateFinding]:
    """Return the findings of a level. ProfileError for a wrong model."""
    profile = resolved.profile
    if not kind_of(profile).judges_states:
        return []
    try:
        facts = kind_of(profile).model_facts(profile.engine.model)
    except SizeUnknown:
        return []
    place = Place(os.environ, runs_on_cpu(profile), is_installed=installation_of(profile) is not None)
    found = kind_of(profile).findings(profile, facts, place, Wanted(cpu=cpu_of(profile)))
    return [one for one in found if one.level is level]
