"""Readers of models with latent attention (MLA) and with sparse attention, which keeps an index."""

from __future__ import annotations

from kvbm.sizing.families.facts import READER, ModelFacts, SizeUnknown
from kvbm.sizing.families.layer_specs import FLOAT32_BYTES, LayerSpec, Ranks, index, latent
from kvbm.sizing.families.layers import all_layers, listed


def mla(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    facts.get("head_dim")
    width = facts.number("kv_lora_rank") + facts.number("qk_rope_head_dim")
    return [latent(layer, ranks, width) for layer in range(facts.number("num_hidden_layers"))]


def glm4_lite(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Return the layers. transformers stores `head_dim` of this family as `qk_rope_head_dim`, so they must not
    differ."""
    if facts.get("head_dim") not in (None, facts.get("qk_rope_head_dim")):
        raise SizeUnknown(f"{READER} confuses `head_dim` and `qk_rope_head_dim` of this model")
    return mla(facts, ranks)


def sparse_mla(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """DeepSeek V3.2 and GLM 5: the layers that select tokens keep an index of 8-bit values and their scales."""
    facts.number("index_topk")
    dim = facts.number("index_head_dim")
    token_bytes = dim + dim // 128 * FLOAT32_BYTES
    kinds = facts.texts("layer_types")
    if kinds is not None and not set(kinds) <= {"deepseek_sparse_attention", "indexed_attention"}:
        raise SizeUnknown(f"layers of type {listed(kinds)} are not known for this model")
    specs = mla(facts, ranks)
    selects = [_selects_tokens(facts, spec.layer) for spec in specs]
    indexers = facts.texts("indexer_types")
    if indexers is not None and [kind == "full" for kind in indexers] != selects:
        differing = "`indexer_types` that differ from `index_topk_freq` or `index_topk_pattern`"
        raise SizeUnknown(f"{READER} ignores {differing}")
    return specs + [index(spec.layer, ranks, token_bytes) for spec, one in zip(specs, selects, strict=True) if one]


def _selects_tokens(facts: ModelFacts, layer: int) -> bool:
    pattern = facts.get("index_topk_pattern")
    if isinstance(pattern, str | list):
        return not (layer < len(pattern) and pattern[layer] == "S")
    offset = facts.number("index_skip_topk_offset", default=2)
    return max(layer - offset + 1, 0) % facts.number("index_topk_freq", default=1) == 0


def minimax_m3(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Keys and values in every layer; in those with sparse attention, an index of one key in 16 bits."""
    sparse = facts.section("sparse_attention_config")
    frequency, dim = sparse.get("sparse_attention_freq"), sparse.number("sparse_index_dim")
    specs = all_layers(facts, ranks)
    if not isinstance(frequency, list) or len(frequency) != len(specs):
        raise SizeUnknown("a MiniMax M3 model without `sparse_attention_freq` has a cache that only the engine knows")
    return specs + [index(spec.layer, ranks, dim * 2) for spec in specs if frequency[spec.layer]]
