"""Sizing: computes the bytes of a block and the number of blocks of each tier from a model and a profile.

Pure functions. Model facts have the names of a Hugging Face `config.json`. The bytes of a token depend on the engine;
each engine has a module here. A block in G2 occupies a slot on every rank: the rank's part of the block, rounded up to
whole pages. `tiers.host.capacity` is the sum over the ranks. Ranks with equal KV share one slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbm.config.engine import EmbeddedArguments, SglangArguments, TrtllmArguments, VllmArguments
from kvbm.config.schema import Profile
from kvbm.sizing import embedded, sglang, trtllm, vllm
from kvbm.sizing.cpu import PLAIN, Cpu
from kvbm.sizing.families import STATES_ONLY, architecture_of, layer_specs, state_kind
from kvbm.sizing.families.facts import SizeUnknown
from kvbm.sizing.families.layer_specs import Ranks
from kvbm.sizing.gpu import MemoryEstimate
from kvbm.sizing.state_settings import StateFinding, StateLevel, StateSettings, without_effect
from kvbm.sizing.tiers import ESTIMATE, PAGE_BYTES, Device, Sizing, SnapshotSize, TierSize, sizing_of

__all__ = [
    "ESTIMATE",
    "PAGE_BYTES",
    "Cpu",
    "Device",
    "SizeUnknown",
    "Sizing",
    "SnapshotSize",
    "StateFinding",
    "StateLevel",
    "TierSize",
    "Wanted",
    "check_model",
    "latent_findings",
    "size",
    "state_findings",
]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What sizes are computed for, beyond the profile.

    `sequence_tokens` is the length for which sequences are counted, by default the maximum length. `memory` and
    `capability` describe the GPUs, `cpu` the CPU of a CPU build. `for_sglang`: the rules of SGLang, with the arguments
    of a vLLM profile.
    """

    sequence_tokens: int | None = None
    memory: MemoryEstimate | None = None
    capability: int | None = None
    cpu: Cpu = PLAIN
    for_sglang: bool = False


def size(
    profile: Profile,
    model_config: Mapping[str, object],
    *,
    environment: Mapping[str, str] | None = None,
    on_cpu: bool = False,
    wanted: Wanted = Wanted(),
) -> Sizing:
    """Compute the sizes of the tiers of one engine.

    `environment` has the variables that vLLM gets besides those of the profile; `on_cpu` is true for a CPU build.
    ProfileError if a tier holds no block or the model's configuration lacks a fact; SizeUnknown if only the engine
    knows the layout of the model's cache.
    """
    engine, length = profile.engine, wanted.sequence_tokens
    if isinstance(engine.arguments, EmbeddedArguments):
        return sizing_of(embedded.device(engine.arguments, model_config, sequence_tokens=length), profile.tiers)
    if isinstance(engine.arguments, TrtllmArguments):
        return sizing_of(trtllm.device(engine.arguments, model_config, sequence_tokens=length), profile.tiers)
    if isinstance(engine.arguments, SglangArguments):
        return sizing_of(sglang.device_of(engine.arguments, model_config, sequence_tokens=length), profile.tiers)
    if wanted.for_sglang:
        return sizing_of(sglang.device(engine.arguments, model_config, sequence_tokens=length), profile.tiers)
    setting = vllm.Setting({**(environment or {}), **engine.environment}, on_cpu, wanted.capability, wanted.cpu)
    device = vllm.device(
        vllm.Model(engine.arguments, model_config, setting),
        sequence_tokens=length,
        memory=wanted.memory,
        shares_equal_kv=profile.transfer.share_equal_kv,
    )
    return sizing_of(device, profile.tiers)


def check_model(profile: Profile, model_config: Mapping[str, object]) -> None:
    """ProfileError or SizeUnknown for a problem of the model alone, independent of the tiers."""
    arguments = profile.engine.arguments
    if isinstance(arguments, EmbeddedArguments):
        embedded.bytes_per_token(model_config, element_bytes=1)
    elif isinstance(arguments, TrtllmArguments):
        trtllm.specs(arguments, model_config)
    elif isinstance(arguments, SglangArguments):
        sglang.device_of(arguments, model_config)
    else:
        vllm.check(arguments, model_config)


def state_findings(
    profile: Profile,
    model_config: Mapping[str, object],
    *,
    environment: Mapping[str, str],
    on_cpu: bool,
    is_installed: bool,
    cpu: Cpu = PLAIN,
) -> list[StateFinding]:
    """Return what the settings of vLLM mean for a model with states. For others, an interval is the only finding.

    The arguments have the meaning of `size` and `Wanted`; `is_installed`: vLLM is installed, so `on_cpu` is known.
    ProfileError if the model lacks a fact.
    """
    arguments = profile.engine.arguments
    if not isinstance(arguments, VllmArguments):
        return []
    kind = state_kind(model_config)
    if kind is None and not arguments.prefix_cache_retention_interval:
        return []
    setting = vllm.Setting({**environment, **profile.engine.environment}, on_cpu, cpu=cpu)
    model = vllm.Model(arguments, model_config, setting)
    longest = model.longest_tokens
    try:
        plan = vllm.plan_of(model)
    except SizeUnknown:
        if kind is None:
            return []
        tokens = None
        if architecture_of(model_config) in STATES_ONLY:  # without attention, vLLM 0.32 on a CPU enlarges no block
            tokens = vllm.default_block_tokens(arguments, on_cpu=True) if on_cpu else arguments.block_size
        is_certain = tokens is not None and (is_installed or arguments.block_size is not None)
        return StateSettings(arguments, kind, tokens, is_certain, on_cpu, longest).findings()
    if kind is None:
        return [] if plan.keeps_intervals else without_effect()
    is_certain = is_installed and vllm.BACKEND_NOTE not in plan.notes
    return StateSettings(arguments, kind, plan.block_tokens, is_certain, on_cpu, longest).findings()


def latent_findings(
    profile: Profile, model_config: Mapping[str, object], *, environment: Mapping[str, str], on_cpu: bool, cpu: Cpu
) -> list[StateFinding]:
    """Return what the settings of vLLM mean for latent attention on a CPU, nothing elsewhere and for other models.

    The arguments have the meaning of `size` and `Wanted`. SizeUnknown if only vLLM knows; ProfileError if the model
    lacks a fact.
    """
    arguments = profile.engine.arguments
    if not isinstance(arguments, VllmArguments):
        return []
    setting = vllm.Setting({**environment, **profile.engine.environment}, on_cpu, cpu=cpu)
    model = vllm.Model(arguments, model_config, setting)
    latent = vllm.latent_on_cpu(model, layer_specs(model_config, Ranks(1)))
    return [] if latent is None else list(latent.findings())
