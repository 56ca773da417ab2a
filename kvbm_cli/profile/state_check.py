"""What a profile's settings mean on this machine for the states of its model (kvbm/sizing/state_settings.py), and for
latent attention on a CPU (kvbm/sizing/cpu.py)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbm.config.document import Mistake
from kvbm.sizing import SizeUnknown, StateFinding, StateLevel, latent_findings, state_findings
from kvbm_cli.engine.engines import cpu_of, installation_of, runs_on_cpu
from kvbm_cli.engine.model_facts import model_facts

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
    if profile.engine.kind != "vllm":
        return []
    try:
        facts = model_facts(profile.engine.model, kind=profile.engine.kind)
    except SizeUnknown:
        return []
    is_installed = installation_of(profile) is not None
    on_cpu, cpu = runs_on_cpu(profile), cpu_of(profile)
    found = state_findings(profile, facts, environment=os.environ, on_cpu=on_cpu, is_installed=is_installed, cpu=cpu)
    with contextlib.suppress(SizeUnknown):
        found += latent_findings(profile, facts, environment=os.environ, on_cpu=on_cpu, cpu=cpu)
    return [one for one in found if one.level is level]
