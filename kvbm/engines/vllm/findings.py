"""What the settings of vLLM mean for a model: for its states (state_settings.py), and for latent attention on a CPU
(cpu.py). ProfileError if the model lacks a fact."""

from __future__ import annotations

from collections.abc import Mapping

from kvbm.config.engine import VllmArguments
from kvbm.engines.vllm.cpu import BACKEND_KEY
from kvbm.engines.vllm.sizing import BACKEND_NOTE, Model, Setting, default_block_tokens, latent_on_cpu, plan_of
from kvbm.engines.vllm.state_settings import StateSettings, without_effect
from kvbm.sizing.families.facts import SizeUnknown
from kvbm.sizing.families.layer_specs import Ranks
from kvbm.sizing.families.table import STATES_ONLY, architecture_of, layer_specs, state_kind
from kvbm.sizing.findings import StateFinding, StateLevel


def state_findings(
    arguments: VllmArguments, model_config: Mapping[str, object], setting: Setting, is_installed: bool
) -> list[StateFinding]:
    """Return what the settings mean for a model with states. For others, an interval is the only finding.

    `is_installed`: vLLM is installed, so `setting.on_cpu` is known.
    """
    kind, on_cpu = state_kind(model_config), setting.on_cpu
    if kind is None and not arguments.prefix_cache_retention_interval:
        return []
    model = Model(arguments, model_config, setting)
    try:
        plan = plan_of(model)
    except SizeUnknown:
        if kind is None:
            return []
        tokens = None
        if architecture_of(model_config) in STATES_ONLY:  # without attention, vLLM 0.32 on a CPU enlarges no block
            tokens = default_block_tokens(arguments, on_cpu=True) if on_cpu else arguments.block_size
        is_certain = tokens is not None and (is_installed or arguments.block_size is not None)
        return StateSettings(arguments, kind, tokens, is_certain, on_cpu).findings()
    if kind is None:
        return [] if plan.keeps_intervals else without_effect()
    is_certain = is_installed and BACKEND_NOTE not in plan.notes
    return StateSettings(arguments, kind, plan.block_tokens, is_certain, on_cpu).findings()


def latent_findings(
    arguments: VllmArguments, model_config: Mapping[str, object], setting: Setting
) -> list[StateFinding]:
    """Return which backend of latent attention vLLM uses on a CPU, nothing elsewhere and for other models. SizeUnknown
    if only vLLM knows."""
    latent = latent_on_cpu(Model(arguments, model_config, setting), layer_specs(model_config, Ranks(1)))
    return [] if latent is None else [StateFinding(StateLevel.NOTE, BACKEND_KEY, latent.note)]
