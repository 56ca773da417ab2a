"""How much a block weighs and how many blocks each tier holds, from a model's configuration and a profile. Pure.

Model facts have the names of a Hugging Face `config.json`. A token's KV is, in every layer, one key and one value per
KV head:

    bytes per token = layers x KV heads x (key dim + value dim) x bytes per element

Layers with a sliding window count like the others, because the embedded engine keeps all their tokens. A block in G2
takes a slot, which is the block rounded up to whole pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbm.config.engine import EmbeddedArguments
from kvbm.config.schema import Profile
from kvbm.config.sizes import exact_size
from kvbm.errors import ProfileError
from kvbm.types import Tier

PAGE_BYTES = 4096
CPU_BLOCK_TOKENS = 128
GPU_BLOCK_TOKENS = 16
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class TierSize:
    """What one tier holds. `total_bytes` is what it takes from its memory, padding included."""

    tier: Tier
    block_count: int
    token_count: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Sizing:
    token_bytes: int
    block_bytes: int
    block_tokens: int
    device: TierSize
    host: TierSize


def size(profile: Profile, model_config: Mapping[str, object]) -> Sizing:
    """Sizes of one rank's tiers. ProfileError if host memory holds no block or the model's config lacks a fact."""
    arguments, host = profile.engine.arguments, profile.tiers.host
    if not isinstance(arguments, EmbeddedArguments):
        raise ProfileError("the size of a block of vLLM is not known yet")
    token_bytes = bytes_per_token(model_config, element_bytes=ELEMENT_BYTES[arguments.dtype])
    block_bytes = token_bytes * arguments.block_size
    slot_bytes = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
    host_blocks = host.blocks or (host.capacity or 0) // slot_bytes
    if host_blocks == 0:
        raise ProfileError(
            f"host memory of {exact_size(host.capacity or 0)} holds no block: one takes {exact_size(slot_bytes)}",
            hint="raise `tiers.host.capacity`",
        )

    def tier(name: Tier, block_count: int, bytes_each: int) -> TierSize:
        return TierSize(name, block_count, block_count * arguments.block_size, block_count * bytes_each)

    return Sizing(
        token_bytes=token_bytes,
        block_bytes=block_bytes,
        block_tokens=arguments.block_size,
        device=tier(Tier.DEVICE, arguments.num_blocks, block_bytes),
        host=tier(Tier.HOST, host_blocks, slot_bytes),
    )


def bytes_per_token(model_config: Mapping[str, object], *, element_bytes: int) -> int:
    """KV bytes of one token over all layers."""
    text_config = model_config.get("text_config")
    facts = text_config if isinstance(text_config, Mapping) else model_config
    layers, heads = _fact(facts, "num_hidden_layers"), _fact(facts, "num_attention_heads")
    if "qk_rope_head_dim" in facts and "qk_nope_head_dim" in facts:
        # Latent attention reaches the cache expanded: every query head has a key and a value of its own.
        key_dim = _fact(facts, "qk_nope_head_dim") + _fact(facts, "qk_rope_head_dim")
        return layers * heads * (key_dim + _fact(facts, "v_head_dim")) * element_bytes
    kv_heads = _fact(facts, "num_key_value_heads", default=heads)
    head_dim = _fact(facts, "head_dim", default=_fact(facts, "hidden_size") // heads)
    return layers * kv_heads * 2 * head_dim * element_bytes


def _fact(facts: Mapping[str, object], name: str, *, default: int | None = None) -> int:
    value = facts.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ProfileError(f"the model's configuration has no usable `{name}`: {value!r}")
    return value
