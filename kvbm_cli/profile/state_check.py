"""What a profile's settings mean on this machine for the states of its model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from kvbm.engines.engine_kind import Place
from kvbm.engines.table import cpu_of, installation_of, kind_of
from kvbm.sizing import SizeUnknown, StateFinding, StateLevel, Wanted

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile


def state_findings(resolved: ResolvedProfile, level: StateLevel) -> list[StateFinding]:
    """Return the findings of a level. ProfileError for a wrong model."""
    return [one for one in _all_findings(resolved) if one.level is level]


def state_notes(resolved: ResolvedProfile) -> list[str]:
    """Return what the settings mean."""
    return [one.message for one in state_findings(resolved, StateLevel.NOTE)]


@lru_cache(maxsize=8)  # a command asks several times for the profiles that it has resolved
def _all_findings(resolved: ResolvedProfile) -> Sequence[StateFinding]:
    profile, kind = resolved.profile, kind_of(resolved.profile)
    if not kind.judges_states:
        return ()
    try:
        facts = kind.model_facts(profile.engine.model)
    except SizeUnknown:
        return ()
    place = Place(os.environ, kind.runs_on_cpu(profile), is_installed=installation_of(profile) is not None)
    return kind.findings(profile, facts, place, Wanted(cpu=cpu_of(profile)))
