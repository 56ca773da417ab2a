"""How much a block weighs and how many blocks each tier holds, from a model's configuration and a profile. Pure.

Model facts have the names of a Hugging Face `config.json`. What a token weighs depends on the engine; the modules here
say it for each. A block in G2 takes a slot on every rank, which is the rank's part of the block rounded up to whole
pages; `tiers.host.capacity` is the sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvbm.config.engine import EmbeddedArguments
from kvbm.config.schema import Profile
from kvbm.sizing import embedded, vllm
from kvbm.sizing.model import SizeUnknown
from kvbm.sizing.tiers import PAGE_BYTES, Device, Sizing, TierSize, sizing_of

__all__ = ["PAGE_BYTES", "Device", "SizeUnknown", "Sizing", "TierSize", "check_model", "size"]


def size(
    profile: Profile,
    model_config: Mapping[str, object],
    *,
    environment: Mapping[str, str] | None = None,
    on_cpu: bool = False,
) -> Sizing:
    """Sizes of the tiers of one engine.

    `environment` is what vLLM will see beside the profile's own variables, `on_cpu` whether it is a build for CPUs.
    ProfileError if host memory holds no block or the model's configuration lacks a fact; SizeUnknown if vLLM makes
    something of the model that is not known here.
    """
    engine = profile.engine
    if isinstance(engine.arguments, EmbeddedArguments):
        return sizing_of(embedded.device(engine.arguments, model_config), profile.tiers)
    variables = {**(environment or {}), **engine.environment}
    device = vllm.device(engine.arguments, model_config, variables=variables, on_cpu=on_cpu)
    return sizing_of(device, profile.tiers)


def check_model(profile: Profile, model_config: Mapping[str, object]) -> None:
    """ProfileError or SizeUnknown for what is wrong with the model, whatever host memory there is."""
    arguments = profile.engine.arguments
    if isinstance(arguments, EmbeddedArguments):
        embedded.bytes_per_token(model_config, element_bytes=1)
    else:
        vllm.cache_groups(arguments, model_config)
