"""Readers of models with keys and values in every layer, and of those with unusual heads."""

from __future__ import annotations

from collections.abc import Mapping

from kvbm.sizing.families.facts import READER, ModelFacts, SizeUnknown
from kvbm.sizing.families.layer_specs import LayerSpec, Ranks, full
from kvbm.sizing.families.layers import (
    Reader,
    all_layers,
    by_layer_types,
    head_dim,
    listed,
    query_heads,
    usual_head_dim,
    with_windows,
)


def dense(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Attention in every layer, with the windows that `layer_types` lists. Without it, vLLM applies a `sliding_window`
    to all layers."""
    if facts.texts("layer_types") is not None:
        return by_layer_types(facts, ranks)
    return with_windows(all_layers(facts, ranks), facts, lambda _: True)


def alike(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Families of which vLLM treats all layers alike, whatever `layer_types` says."""
    kinds = set(facts.texts("layer_types") or ())
    if len(kinds) > 1:
        raise SizeUnknown(f"{READER} ignores `layer_types` with {listed(kinds)} for this model")
    return dense(facts, ranks)


def narrow(reader: Reader) -> Reader:
    """Return the reader of a family of which vLLM ignores `head_dim`."""

    def read(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
        require_usual_head_dim(facts)
        return reader(facts, ranks)

    return read


def require_usual_head_dim(facts: ModelFacts) -> None:
    """Refuse a `head_dim` that vLLM would ignore for this family."""
    dim, usual = facts.get("head_dim"), usual_head_dim(facts)
    if dim not in (None, usual):
        raise SizeUnknown(f"{READER} ignores `head_dim: {dim}` for this model")


def minimax_m2(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    kinds = facts.get("attn_type_list")
    if isinstance(kinds, list) and set(map(str, kinds)) != {"1"}:
        raise SizeUnknown("a MiniMax M2 model with linear attention has a cache that only the engine knows")
    return alike(facts, ranks)


def falcon(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    heads = query_heads(facts)
    if facts.flag("new_decoder_architecture"):
        kv_heads = facts.number("num_kv_heads", default=heads)
    else:
        kv_heads = 1 if facts.flag("multi_query") else heads
    for name in ("multi_query", "num_kv_heads"):
        facts.get(name)
    dim = usual_head_dim(facts)
    return [full(layer, ranks, kv_heads, dim) for layer in range(facts.number("num_hidden_layers"))]


def step3(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    heads, dim = facts.number("num_attention_groups"), facts.number("head_dim")
    return [full(layer, ranks, heads, dim) for layer in range(facts.number("num_hidden_layers"))]


def deci(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Nemotron Super and Ultra of Llama 3: some layers have no attention."""
    blocks = facts.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != facts.number("num_hidden_layers"):
        raise SizeUnknown("a DeciLM model without `block_configs` of each layer has a cache that only the engine knows")
    heads, dim = query_heads(facts), head_dim(facts)
    facts.get("num_key_value_heads")
    specs = []
    for layer, block in enumerate(blocks):
        attention = ModelFacts(block).section("attention") if isinstance(block, Mapping) else ModelFacts({})
        if attention.flag("replace_with_linear") or attention.flag("sparsify"):
            raise SizeUnknown("a DeciLM model with linear or sparse attention has a cache that only the engine knows")
        if attention.flag("no_op"):
            continue
        group = attention.number("n_heads_in_group")
        if heads % group:
            raise SizeUnknown(f"{heads} attention heads cannot be divided into groups of {group}")
        specs.append(full(layer, ranks, heads // group, dim))
    return specs
