"""Readers of models in which some layers keep only the last tokens, or those of the current chunk."""

from __future__ import annotations

from kvbm.sizing.families.facts import READER, ModelFacts, SizeUnknown
from kvbm.sizing.families.layer_specs import LayerKind, LayerSpec, Ranks, full, local
from kvbm.sizing.families.layers import (
    Reader,
    all_layers,
    by_layer_types,
    head_dim,
    kv_heads,
    listed,
    with_windows,
    without_shared,
)


def qwen(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Qwen 2 and 3: the window is off unless `use_sliding_window` is true, and then of the layers from
    `max_window_layers` on. vLLM reads `layer_types`, which transformers derives from these."""
    specs, first = all_layers(facts, ranks), facts.get("max_window_layers")
    has_window = facts.get("sliding_window") is not None and facts.flag("use_sliding_window")
    facts.get("layer_types")
    if not has_window:
        return specs
    if facts.texts("layer_types") is not None:
        return by_layer_types(facts, ranks)
    window = facts.number("sliding_window")
    start = first if isinstance(first, int) else 28
    return [local(spec, LayerKind.WINDOW, window) if spec.layer >= start else spec for spec in specs]


def qwen_without_windows(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Families of which vLLM ignores windows, in part or in whole."""
    if facts.get("sliding_window") is not None and facts.flag("use_sliding_window"):
        raise SizeUnknown(f"{READER} ignores `use_sliding_window: true` for this model")
    return qwen(facts, ranks)


def smollm3(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    if kinds := set(facts.texts("layer_types") or ()) - {"full_attention"}:
        raise SizeUnknown(f"with `layer_types` of {listed(kinds)}, only the engine knows the size of a block")
    return qwen_without_windows(facts, ranks)


def qwen3_vl(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """vLLM applies a `sliding_window` whatever `use_sliding_window` says."""
    if facts.get("sliding_window") is not None:
        raise SizeUnknown("with `sliding_window`, only the engine knows the size of a block of this model")
    return qwen(facts, ranks)


def every(interval: int, *, can_change: bool = False, more_reach: int = 0) -> Reader:
    """Full attention in every `interval`-th layer unless `layer_types` says otherwise; a window in the others.

    `can_change`: the family reads another interval from `sliding_window_pattern`.
    """

    def read(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
        step = facts.number("sliding_window_pattern", default=interval) if can_change else interval
        if facts.texts("layer_types") is not None:
            for name in ("sliding_window_pattern", "_sliding_window_pattern"):
                facts.get(name)  # written beside the list that was made from it
            return by_layer_types(facts, ranks, more_reach=more_reach)
        has_window = lambda layer: (layer + 1) % step != 0  # noqa: E731
        return with_windows(all_layers(facts, ranks), facts, has_window, more_reach=more_reach)

    return read


def gemma3n(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    _require_full_at_the_end(facts)
    return without_shared(every(5)(facts, ranks), facts)


def _require_full_at_the_end(facts: ModelFacts) -> None:
    kinds, layers = facts.texts("layer_types"), facts.number("num_hidden_layers")
    if kinds is not None and len(kinds) >= layers and kinds[layers - 1] != "full_attention":
        raise SizeUnknown("transformers changes `layer_types` that do not end with `full_attention`")


def gemma4(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Layers with full attention have heads of their own; vLLM stores their values though they equal the keys."""
    kinds = facts.texts("layer_types")
    if kinds is None or len(kinds) != facts.number("num_hidden_layers"):
        raise SizeUnknown("a Gemma 4 model without `layer_types` has a cache that only the engine knows")
    _require_full_at_the_end(facts)
    heads, dim = kv_heads(facts), head_dim(facts)
    global_dim = facts.number("global_head_dim", default=dim)
    global_heads = facts.number("num_global_key_value_heads", default=heads)
    if not facts.flag("attention_k_eq_v"):
        global_heads = heads
    window = facts.number("sliding_window")
    specs = [
        local(full(layer, ranks, heads, dim), LayerKind.WINDOW, window)
        if kind == "sliding_attention"
        else full(layer, ranks, global_heads, global_dim)
        for layer, kind in enumerate(kinds)
    ]
    return without_shared(specs, facts)


def gpt_oss(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """vLLM gives a window to every other layer, the first one included, whatever `layer_types` says."""
    kinds, layers = facts.texts("layer_types"), facts.number("num_hidden_layers")
    if kinds is not None and kinds[:layers] != (["sliding_attention", "full_attention"] * layers)[:layers]:
        raise SizeUnknown(f"{READER} ignores `layer_types` of a gpt-oss model that do not alternate")
    return with_windows(all_layers(facts, ranks), facts, lambda layer: layer % 2 == 0)


def llama4(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Layers with rotary positions look at chunks; every fourth has neither and looks at all tokens."""
    specs, given = all_layers(facts, ranks), facts.get("no_rope_layers")
    facts.get("layer_types")
    step = facts.number("no_rope_layer_interval", default=4)
    rope = given if isinstance(given, list) and given else [(spec.layer + 1) % step != 0 for spec in specs]
    if len(rope) != len(specs):
        raise SizeUnknown(f"a model with {len(specs)} layers but `no_rope_layers` of {len(rope)} is not known")
    if not facts.get("attention_chunk_size"):
        return specs
    chunk = facts.number("attention_chunk_size")
    return [local(spec, LayerKind.CHUNKED, chunk) if rope[spec.layer] else spec for spec in specs]


def mimo_v2(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Layers with a window have heads and dimensions of their own, the `swa_` facts."""
    pattern = facts.get("hybrid_layer_pattern")
    if not isinstance(pattern, list) or len(pattern) != facts.number("num_hidden_layers"):
        raise SizeUnknown("a MiMo V2 model without `hybrid_layer_pattern` has a cache that only the engine knows")
    dim, heads = facts.number("head_dim"), kv_heads(facts)
    swa_dim = facts.number("swa_head_dim", default=dim)
    swa_heads = facts.number("swa_num_key_value_heads", default=heads)
    value_dim = facts.number("v_head_dim", default=dim)
    swa_value_dim = facts.number("swa_v_head_dim", default=swa_dim)
    window = facts.numbers("sliding_window_size", "sliding_window", default=128)
    for name in ("sliding_window", "attention_chunk_size", "swa_num_attention_heads", "swa_rope_theta"):
        facts.get(name)
    return [
        local(full(layer, ranks, swa_heads, swa_dim, swa_value_dim), LayerKind.WINDOW, window)
        if has_window
        else full(layer, ranks, heads, dim, value_dim)
        for layer, has_window in enumerate(pattern)
    ]


def step3p5(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Step 3.5 and 3.7: the layers of one type have heads of their own, in `attention_other_setting`."""
    kinds, layers = facts.texts("layer_types"), facts.number("num_hidden_layers")
    if kinds is None or len(kinds) < layers:
        raise SizeUnknown("a Step 3.5 model without `layer_types` has a cache that only the engine knows")
    usual = facts.number("num_attention_groups"), head_dim(facts)
    other = facts.section("attention_other_setting") if facts.get("attention_other_setting") else ModelFacts({})
    window = facts.get("sliding_window")
    specs = []
    for layer, kind in enumerate(kinds[:layers]):
        heads, dim = usual
        if kind == other.get("attention_type"):
            heads, dim = other.number("num_attention_groups"), other.number("head_dim", default=dim)
        spec = full(layer, ranks, heads, dim)
        has_window = kind == "sliding_attention" and window is not None
        specs.append(local(spec, LayerKind.WINDOW, facts.number("sliding_window")) if has_window else spec)
    return specs
