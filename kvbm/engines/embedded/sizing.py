"""Block sizes of the embedded engine, which has one rank and stores all layers in the same way.

    bytes per token = layers x KV heads x (key dim + value dim) x bytes per element

Layers with a sliding window count fully, because the engine keeps all their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvbm.config.engine import EmbeddedArguments
from kvbm.sizing.families.facts import count, positions, text_facts
from kvbm.sizing.tiers import Device

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def device(
    arguments: EmbeddedArguments, model_config: Mapping[str, object], *, sequence_tokens: int | None = None
) -> Device:
    length = sequence_tokens or arguments.max_model_len or positions(model_config) or 0
    token_bytes = bytes_per_token(model_config, element_bytes=ELEMENT_BYTES[arguments.dtype])
    return Device(
        block_tokens=arguments.block_size,
        rank_block_bytes=(token_bytes * arguments.block_size,),
        block_count=arguments.num_blocks,
        set_by="engine.arguments.num_blocks",
        token_bytes=token_bytes,
        sequence_tokens=length,
        sequence_blocks=-(-length // arguments.block_size),
    )


def bytes_per_token(model_config: Mapping[str, object], *, element_bytes: int) -> int:
    """KV bytes of one token over all layers."""
    facts = text_facts(model_config)
    layers, heads = count(facts, "num_hidden_layers"), count(facts, "num_attention_heads")
    if "qk_rope_head_dim" in facts and "qk_nope_head_dim" in facts:
        # Latent attention is cached in expanded form: every query head has a key and a value.
        key_dim = count(facts, "qk_nope_head_dim") + count(facts, "qk_rope_head_dim")
        return layers * heads * (key_dim + count(facts, "v_head_dim")) * element_bytes
    kv_heads = count(facts, "num_key_value_heads", default=heads)
    head_dim = count(facts, "head_dim", default=count(facts, "hidden_size") // heads)
    return layers * kv_heads * 2 * head_dim * element_bytes
