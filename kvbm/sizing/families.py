"""Readers of model families: from a model's `config.json` to the spec of each layer.

`layer_specs` accepts only the architectures in READERS. Each reader applies the defaults of its family, which a
configuration may leave out, and reads every fact that changes the cache; a configuration that has another such fact is
refused. Sources: the model classes of vLLM 0.32 and the configuration classes of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvbm.errors import ProfileError
from kvbm.sizing.layer_specs import LayerKind, LayerSpec, Ranks, full, index, latent, local, state
from kvbm.sizing.model import ModelFacts, SizeUnknown

Reader = Callable[[ModelFacts, Ranks], list[LayerSpec]]

FLOAT32_BYTES = 4
_STATE_TYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


def layer_specs(model_config: Mapping[str, object], ranks: Ranks) -> list[LayerSpec]:
    """Return the specs of all layers. SizeUnknown for an architecture or a fact that no reader here knows."""
    architecture = architecture_of(model_config)
    reader = READERS.get(architecture)
    if reader is None:
        raise SizeUnknown(f"for the architecture `{architecture}`, only the engine knows the size of a block")
    facts = ModelFacts(model_config)
    specs = reader(facts, ranks)
    facts.require_known()
    heads = facts.get("num_attention_heads")
    if isinstance(heads, int) and heads % ranks.tensor_parallel:
        raise SizeUnknown(f"{heads} attention heads cannot be divided among {ranks.tensor_parallel} ranks")
    if not specs:
        raise SizeUnknown(f"a model of the architecture `{architecture}` without attention has no KV cache")
    return specs


def architecture_of(model_config: Mapping[str, object]) -> str:
    """Return the first of `architectures`. ProfileError if there is none."""
    names = model_config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ProfileError("the model's configuration has no `architectures`")
    return names[0]


# -- attention heads -------------------------------------------------------------------------------------------------


def _heads(facts: ModelFacts) -> int:
    return facts.number("num_attention_heads")


def _kv_heads(facts: ModelFacts) -> int:
    return facts.numbers("num_key_value_heads", default=_heads(facts))


def _head_dim(facts: ModelFacts) -> int:
    if facts.get("head_dim"):
        return facts.number("head_dim")
    return facts.number("hidden_size") // _heads(facts)


def _dense(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Attention in every layer, with the windows that `layer_types` lists. Without it, vLLM applies a `sliding_window`
    to all layers."""
    if facts.texts("layer_types") is not None:
        return _by_layer_types(facts, ranks)
    return _with_windows(_all_layers(facts, ranks), facts, lambda _: facts.get("sliding_window") is not None)


def _mistral(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """A configuration without `sliding_window` has one of 4096 tokens; `null` means none."""
    return _dense(facts if "sliding_window" in facts else _with_defaults(facts, sliding_window=4096), ranks)


def _wide(head_dim: int) -> Reader:
    """Families whose heads have this dimension unless the configuration says otherwise."""

    def read(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
        return _dense(_with_defaults(facts, head_dim=head_dim), ranks)

    return read


def _alike(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Families of which vLLM treats all layers alike, whatever `layer_types` says."""
    kinds = set(facts.texts("layer_types") or ())
    if len(kinds) > 1:
        raise SizeUnknown(f"vLLM ignores `layer_types` with {_listed(kinds)} for this model")
    return _dense(facts, ranks)


def _alike_and_narrow(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    _require_usual_head_dim(facts)
    return _alike(facts, ranks)


def _narrow(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    _require_usual_head_dim(facts)
    return _dense(facts, ranks)


def _require_usual_head_dim(facts: ModelFacts) -> None:
    """Refuse a `head_dim` that vLLM would ignore for this family."""
    dim, usual = facts.get("head_dim"), facts.number("hidden_size") // _heads(facts)
    if dim not in (None, usual):
        raise SizeUnknown(f"vLLM ignores `head_dim: {dim}` for this model")


def _gemma(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    return _alike(_with_defaults(facts, head_dim=256), ranks)


def _glm4(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    return _alike(_with_defaults(facts, head_dim=128), ranks)


def _olmo3(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    return _every(4)(_with_defaults(facts, sliding_window=4096), ranks)


def _minimax_m2(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    kinds = facts.get("attn_type_list")
    if isinstance(kinds, list) and set(map(str, kinds)) != {"1"}:
        raise SizeUnknown("a MiniMax M2 model with linear attention has a cache that only the engine knows")
    return _dense(facts, ranks)


def _all_layers(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    heads, dim = _kv_heads(facts), _head_dim(facts)
    return [full(layer, ranks, heads, dim) for layer in range(facts.number("num_hidden_layers"))]


# -- windows ---------------------------------------------------------------------------------------------------------


def _qwen(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Qwen 2 and 3: the window is off unless `use_sliding_window` is true, and then of the layers from
    `max_window_layers` on. vLLM reads `layer_types`, which transformers derives from these."""
    if architecture_of(facts) in ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM"):
        _require_usual_head_dim(facts)
    specs, first = _all_layers(facts, ranks), facts.get("max_window_layers")
    has_window = facts.get("sliding_window") is not None and facts.flag("use_sliding_window")
    facts.get("layer_types")
    if not has_window:
        return specs
    if facts.texts("layer_types") is not None:
        return _by_layer_types(facts, ranks)
    window = facts.number("sliding_window")
    start = first if isinstance(first, int) else 28
    return [local(spec, LayerKind.WINDOW, window) if spec.layer >= start else spec for spec in specs]


def _every(interval: int) -> Reader:
    """Full attention in every `interval`-th layer unless `layer_types` says otherwise; a window in the others."""

    def read(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
        step = facts.number("sliding_window_pattern", default=interval)
        if facts.texts("layer_types") is not None:
            return _by_layer_types(facts, ranks)
        return _with_windows(_all_layers(facts, ranks), facts, lambda layer: (layer + 1) % step != 0)

    return read


def _by_layer_types(facts: ModelFacts, ranks: Ranks, *, more_reach: int = 0) -> list[LayerSpec]:
    kinds, specs = facts.texts("layer_types") or [], _all_layers(facts, ranks)
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) < len(specs):
        raise SizeUnknown(
            f"with `layer_types` of {_listed(unknown) or f'{len(kinds)} entries'}, "
            "only the engine knows the size of a block"
        )
    return _with_windows(specs, facts, lambda layer: kinds[layer] == "sliding_attention", more_reach=more_reach)


def _with_windows(
    specs: list[LayerSpec], facts: ModelFacts, has_window: Callable[[int], bool], *, more_reach: int = 0
) -> list[LayerSpec]:
    window = facts.get("sliding_window")  # read in any case: without effect on these layers, it is harmless
    if window is None or not any(has_window(spec.layer) for spec in specs):
        return specs
    reach = facts.number("sliding_window") + more_reach
    return [local(spec, LayerKind.WINDOW, reach) if has_window(spec.layer) else spec for spec in specs]


def _gemma2(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    return _every(2)(_with_defaults(facts, head_dim=256, sliding_window=4096), ranks)


def _gemma3(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Gemma 3's configurations on the Hub leave out what equals the defaults of the 4B model."""
    defaults = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "num_hidden_layers": 26}
    return _every(6)(_with_defaults(facts, sliding_window=4096, **defaults), ranks)


def _gemma3n(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """The last layers share the cache of earlier ones."""
    specs = _every(5)(_with_defaults(facts, head_dim=256, num_kv_shared_layers=15), ranks)
    return _without_shared(specs, facts)


def _without_shared(specs: list[LayerSpec], facts: ModelFacts) -> list[LayerSpec]:
    shared = facts.get("num_kv_shared_layers") or 0
    return specs[: len(specs) - shared] if isinstance(shared, int) else specs


def _gemma4(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Layers with full attention have heads of their own; vLLM stores their values though they equal the keys."""
    kinds = facts.texts("layer_types")
    if kinds is None:
        raise SizeUnknown("a Gemma 4 model without `layer_types` has a cache that only the engine knows")
    heads, dim = _kv_heads(facts), _head_dim(facts)
    global_dim = facts.number("global_head_dim", default=dim)
    global_heads = (
        facts.number("num_global_key_value_heads", default=heads) if facts.flag("attention_k_eq_v") else heads
    )
    facts.get("num_global_key_value_heads")
    window = facts.number("sliding_window")
    specs = [
        local(full(layer, ranks, heads, dim), LayerKind.WINDOW, window)
        if kind == "sliding_attention"
        else full(layer, ranks, global_heads, global_dim)
        for layer, kind in enumerate(kinds[: facts.number("num_hidden_layers")])
    ]
    return _without_shared(specs, facts)


def _cohere2(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """vLLM keeps one token more than `sliding_window`."""
    facts = _with_defaults(facts, sliding_window=4096)
    step = facts.number("sliding_window_pattern", default=4)
    if facts.texts("layer_types") is not None:
        return _by_layer_types(facts, ranks, more_reach=1)
    return _with_windows(_all_layers(facts, ranks), facts, lambda layer: (layer + 1) % step != 0, more_reach=1)


def _gpt_oss(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """vLLM gives a window to every other layer, the first one included."""
    facts.get("layer_types")
    return _with_windows(_all_layers(facts, ranks), facts, lambda layer: layer % 2 == 0)


def _llama4(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Layers with rotary positions look at chunks; every fourth has neither and looks at all tokens."""
    specs, listed = _all_layers(facts, ranks), facts.get("no_rope_layers")
    facts.get("layer_types")
    step = facts.number("no_rope_layer_interval", default=4)
    rope = listed if isinstance(listed, list) and listed else [(spec.layer + 1) % step != 0 for spec in specs]
    if not facts.get("attention_chunk_size"):
        return specs
    chunk = facts.number("attention_chunk_size")
    return [local(spec, LayerKind.CHUNKED, chunk) if rope[spec.layer] else spec for spec in specs]


def _mimo_v2(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Layers with a window have heads and dimensions of their own, the `swa_` facts."""
    pattern = facts.get("hybrid_layer_pattern")
    if not isinstance(pattern, list):
        raise SizeUnknown("a MiMo V2 model without `hybrid_layer_pattern` has a cache that only the engine knows")
    dim, heads = facts.number("head_dim"), _kv_heads(facts)
    swa_dim, swa_heads = (
        facts.number("swa_head_dim", default=dim),
        facts.number("swa_num_key_value_heads", default=heads),
    )
    value_dim = facts.number("v_head_dim", default=dim)
    swa_value_dim = facts.number("swa_v_head_dim", default=swa_dim)
    window = facts.numbers("sliding_window_size", "sliding_window", default=128)
    for name in ("sliding_window", "attention_chunk_size", "swa_num_attention_heads", "swa_rope_theta"):
        facts.get(name)
    return [
        local(full(layer, ranks, swa_heads, swa_dim, swa_value_dim), LayerKind.WINDOW, window)
        if has_window
        else full(layer, ranks, heads, dim, value_dim)
        for layer, has_window in enumerate(pattern[: facts.number("num_hidden_layers")])
    ]


# -- unusual heads ---------------------------------------------------------------------------------------------------


def _falcon(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    heads = facts.numbers("num_attention_heads", "n_head", default=71)
    is_multi_query = bool(facts.get("multi_query", True)) and not facts.flag("new_decoder_architecture")
    kv_heads = 1 if is_multi_query else facts.numbers("num_kv_heads", "n_head_kv", default=heads)
    dim = facts.number("hidden_size") // heads
    layers = facts.numbers("num_hidden_layers", "n_layer", default=32)
    return [full(layer, ranks, kv_heads, dim) for layer in range(layers)]


def _step3(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    heads, dim = facts.number("num_attention_groups"), facts.number("head_dim")
    return [full(layer, ranks, heads, dim) for layer in range(facts.number("num_hidden_layers"))]


def _deci(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Nemotron Super and Ultra of Llama 3: some layers have no attention."""
    blocks = facts.get("block_configs")
    if not isinstance(blocks, list):
        raise SizeUnknown("a DeciLM model without `block_configs` has a cache that only the engine knows")
    heads, dim = _heads(facts), _head_dim(facts)
    facts.get("num_key_value_heads")
    specs = []
    for layer, block in enumerate(blocks):
        attention = ModelFacts(block).section("attention") if isinstance(block, Mapping) else ModelFacts({})
        if attention.flag("replace_with_linear") or attention.flag("sparsify"):
            raise SizeUnknown("a DeciLM model with linear or sparse attention has a cache that only the engine knows")
        if not attention.flag("no_op"):
            specs.append(full(layer, ranks, heads // attention.number("n_heads_in_group"), dim))
    return specs


# -- latent and sparse attention -------------------------------------------------------------------------------------


def _mla(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    facts.get("head_dim")
    width = facts.number("kv_lora_rank") + facts.number("qk_rope_head_dim")
    return [latent(layer, ranks, width) for layer in range(facts.number("num_hidden_layers"))]


def _glm4_lite(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """transformers stores `head_dim` of this family as `qk_rope_head_dim`, so they must not differ."""
    if facts.get("head_dim") not in (None, facts.get("qk_rope_head_dim")):
        raise SizeUnknown("vLLM confuses `head_dim` and `qk_rope_head_dim` of this model")
    return _mla(facts, ranks)


def _sparse_mla(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """DeepSeek V3.2 and GLM 5: the layers that select tokens keep an index of 8-bit values and their scales."""
    facts.number("index_topk")
    dim = facts.number("index_head_dim")
    token_bytes = dim + dim // 128 * FLOAT32_BYTES
    kinds = facts.texts("layer_types")
    if kinds is not None and set(kinds) != {"deepseek_sparse_attention"}:
        raise SizeUnknown(f"layers of type {_listed(set(kinds))} are not known for this model")
    specs = _mla(facts, ranks)
    return specs + [index(spec.layer, token_bytes) for spec in specs if _selects_tokens(facts, spec.layer)]


def _selects_tokens(facts: ModelFacts, layer: int) -> bool:
    kinds, pattern = facts.texts("indexer_types"), facts.get("index_topk_pattern")
    if isinstance(pattern, str):
        return not (layer < len(pattern) and pattern[layer] == "S")
    frequency = facts.number("index_topk_freq", default=1)
    by_frequency = max(layer - facts.number("index_skip_topk_offset", default=2) + 1, 0) % frequency == 0
    if kinds is not None and frequency == 1 and layer < len(kinds):
        return kinds[layer] == "full"
    return by_frequency


def _minimax_m3(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Keys and values in every layer; in those with sparse attention, an index of one key in 16 bits."""
    sparse = facts.section("sparse_attention_config")
    frequency, dim = sparse.get("sparse_attention_freq"), sparse.number("sparse_index_dim")
    specs = _all_layers(facts, ranks)
    if not isinstance(frequency, list) or len(frequency) < len(specs):
        raise SizeUnknown("a MiniMax M3 model without `sparse_attention_freq` has a cache that only the engine knows")
    return specs + [index(spec.layer, dim * 2) for spec in specs if frequency[spec.layer]]


# -- states ----------------------------------------------------------------------------------------------------------


def _gdn(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Qwen3-Next and Qwen 3.5: gated delta nets, and full attention in every fourth layer."""
    kinds, layers = facts.texts("layer_types"), facts.number("num_hidden_layers")
    step = facts.number("full_attention_interval", default=4)
    kinds = kinds or ["full_attention" if (layer + 1) % step == 0 else "linear_attention" for layer in range(layers)]
    key_width = facts.number("linear_num_key_heads") * facts.number("linear_key_head_dim")
    value_width = facts.number("linear_num_value_heads") * facts.number("linear_value_head_dim")
    conv_elements = (2 * key_width + value_width) * (facts.number("linear_conv_kernel_dim", default=4) - 1)
    element_bytes = _state_bytes(facts, ranks, "mamba_ssm_dtype", default=ranks.model_bytes)
    bytes_of_state = _shared(ranks, conv_elements) * ranks.model_bytes
    bytes_of_state += _shared(ranks, value_width * facts.number("linear_key_head_dim")) * element_bytes
    return _mixed(facts, ranks, kinds, {"full_attention": "attention", "linear_attention": "state"}, bytes_of_state)


def _nemotron_h(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    kinds, pattern = facts.texts("layers_block_type"), facts.get("hybrid_override_pattern")
    if kinds is None and isinstance(pattern, str):
        kinds = list(pattern)
    if kinds is None:
        raise SizeUnknown("a Nemotron-H model without a pattern of layers has a cache that only the engine knows")
    for name in ("layer_types", "mamba_proj_bias", "sliding_window", "attention_head_dim"):
        facts.get(name)
    inner = facts.number("mamba_num_heads") * facts.number("mamba_head_dim")
    size = facts.number("ssm_state_size")
    element_bytes = _state_bytes(facts, ranks, "mamba_ssm_cache_dtype", default=FLOAT32_BYTES)
    bytes_of_state = _mamba2(ranks, inner, facts.number("n_groups"), size, facts.number("conv_kernel"), element_bytes)
    if facts.get("head_dim") is None and facts.get("attention_head_dim") is not None:
        facts = _with_defaults(facts, head_dim=facts.number("attention_head_dim"))
    names = {"mamba": "state", "M": "state", "attention": "attention", "*": "attention"}
    names |= dict.fromkeys(("mlp", "moe", "-", "E"), "none")
    return _mixed(facts, ranks, kinds, names, bytes_of_state)


def _granite_hybrid(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    kinds = facts.texts("layer_types") or facts.texts("layers_block_type")
    if kinds is None:
        raise SizeUnknown("a hybrid Granite model without `layer_types` has a cache that only the engine knows")
    inner = facts.number("mamba_expand", default=2) * facts.number("hidden_size")
    bytes_of_state = _bamba_state(facts, ranks, inner)
    return _mixed(facts, ranks, kinds, {"attention": "attention", "mamba": "state"}, bytes_of_state)


def _falcon_h1(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Every layer has attention and a state."""
    inner = facts.get("mamba_d_ssm") or facts.number("mamba_expand", default=2) * facts.number("hidden_size")
    facts.get("mamba_expand")
    bytes_of_state = _bamba_state(facts, ranks, int(str(inner)))
    specs = _all_layers(facts, ranks)
    return [one for spec in specs for one in (spec, state(spec.layer, bytes_of_state))]


def _bamba_state(facts: ModelFacts, ranks: Ranks, inner: int) -> int:
    for name in ("mamba_n_heads", "mamba_d_head", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias"):
        facts.get(name)
    for name in ("mamba_norm_before_gate", "mamba_rms_norm", "mamba_use_mlp"):
        facts.get(name)
    groups, size = facts.number("mamba_n_groups", default=1), facts.number("mamba_d_state", default=256)
    element_bytes = ranks.state_bytes or ranks.model_bytes
    return _mamba2(ranks, inner, groups, size, facts.number("mamba_d_conv", default=4), element_bytes)


def _jamba(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Mamba 1, and full attention in every eighth layer."""
    step, offset = facts.number("attn_layer_period", default=8), facts.get("attn_layer_offset")
    offset = offset if isinstance(offset, int) else 4
    kinds = ["attention" if layer % step == offset else "state" for layer in range(facts.number("num_hidden_layers"))]
    inner = facts.number("mamba_expand", default=2) * facts.number("hidden_size")
    for name in ("mamba_conv_bias", "mamba_dt_rank", "mamba_proj_bias", "mamba_inner_layernorms", "sliding_window"):
        facts.get(name)
    conv = _shared(ranks, inner) * (facts.number("mamba_d_conv", default=4) - 1) * ranks.model_bytes
    element_bytes = ranks.state_bytes or ranks.model_bytes
    bytes_of_state = conv + _shared(ranks, inner) * facts.number("mamba_d_state", default=16) * element_bytes
    return _mixed(facts, ranks, kinds, {"attention": "attention", "state": "state"}, bytes_of_state)


def _kimi_linear(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Kimi delta attention, and latent attention in the layers that `linear_attn_config` counts from 1."""
    linear = facts.section("linear_attn_config")
    layers = linear.get("full_attn_layers")
    if not isinstance(layers, list):
        raise SizeUnknown("a Kimi Linear model without `full_attn_layers` has a cache that only the engine knows")
    heads, dim = linear.number("num_heads"), linear.number("head_dim")
    conv = _shared(ranks, 3 * heads * dim) * (linear.number("short_conv_kernel_size", default=4) - 1)
    element_bytes = ranks.state_bytes or FLOAT32_BYTES
    bytes_of_state = conv * ranks.model_bytes + _shared(ranks, heads * dim * dim) * element_bytes
    return [spec if spec.layer + 1 in layers else state(spec.layer, bytes_of_state) for spec in _mla(facts, ranks)]


def _mixed(
    facts: ModelFacts, ranks: Ranks, kinds: list[str], meanings: Mapping[str, str], bytes_of_state: int
) -> list[LayerSpec]:
    """Return the specs of layers that have attention, a state or neither, as `meanings` says of their kinds."""
    if unknown := set(kinds) - set(meanings):
        raise SizeUnknown(f"layers of type {_listed(unknown)} are not known for this model")
    heads, dim = _kv_heads(facts), _head_dim(facts)
    specs = []
    for layer, kind in enumerate(kinds):
        if meanings[kind] == "attention":
            specs.append(full(layer, ranks, heads, dim))
        elif meanings[kind] == "state":
            specs.append(state(layer, bytes_of_state))
    return specs


def _mamba2(ranks: Ranks, inner: int, groups: int, size: int, kernel: int, element_bytes: int) -> int:
    """Bytes of a Mamba 2 state on one rank. Groups are repeated if they cannot be divided by the ranks."""
    if groups % ranks.tensor_parallel:
        groups = ranks.tensor_parallel
    conv_bytes = _shared(ranks, inner + 2 * groups * size) * (kernel - 1) * ranks.model_bytes
    return conv_bytes + _shared(ranks, inner) * size * element_bytes


def _shared(ranks: Ranks, elements: int) -> int:
    """Return one rank's part. SizeUnknown if vLLM refuses to divide the state by this many ranks."""
    part, rest = divmod(elements, ranks.tensor_parallel)
    if rest:
        raise SizeUnknown(f"vLLM cannot divide a state of this model by {ranks.tensor_parallel} ranks")
    return part


def _state_bytes(facts: ModelFacts, ranks: Ranks, name: str, *, default: int) -> int:
    """Return the bytes of an element of a recurrent state: from the arguments, the configuration, or the default."""
    named = facts.get(name)
    if ranks.state_bytes is not None:
        return ranks.state_bytes
    if named is None:
        return default
    if named not in _STATE_TYPES:
        raise SizeUnknown(f"with `{name}: {named}`, only the engine knows the size of a block")
    return _STATE_TYPES[str(named)]


def _with_defaults(facts: ModelFacts, **defaults: int) -> ModelFacts:
    return facts.with_defaults(defaults)


def _listed(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


# -- the allow list ---------------------------------------------------------------------------------------------------

_BY_FAMILY: dict[Reader, str] = {
    _dense: "LLaMAForCausalLM LlamaForCausalLM GraniteForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM "
    "OlmoForCausalLM Olmo2ForCausalLM Phi3ForCausalLM Starcoder2ForCausalLM",
    _wide(128): "Ernie4_5ForCausalLM Ministral3ForCausalLM SeedOssForCausalLM",
    _alike: "CohereForCausalLM Ernie4_5_MoeForCausalLM Glm4MoeForCausalLM MixtralForCausalLM NemotronForCausalLM",
    _alike_and_narrow: "OlmoeForCausalLM StableLmForCausalLM",
    _narrow: "GraniteMoeForCausalLM",
    _gemma: "GemmaForCausalLM",
    _glm4: "Glm4ForCausalLM",
    _olmo3: "Olmo3ForCausalLM",
    _mistral: "MistralForCausalLM Mistral3ForConditionalGeneration",
    _minimax_m2: "MiniMaxM2ForCausalLM",
    _qwen: "MiMoForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM "
    "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration "
    "Qwen3VLMoeForConditionalGeneration",
    _gemma2: "Gemma2ForCausalLM",
    _gemma3: "Gemma3ForCausalLM Gemma3ForConditionalGeneration",
    _gemma3n: "Gemma3nForCausalLM Gemma3nForConditionalGeneration",
    _gemma4: "Gemma4ForCausalLM Gemma4ForConditionalGeneration",
    _cohere2: "Cohere2ForCausalLM",
    _gpt_oss: "GptOssForCausalLM",
    _llama4: "Llama4ForCausalLM Llama4ForConditionalGeneration",
    _mimo_v2: "MiMoV2FlashForCausalLM",
    _falcon: "FalconForCausalLM",
    _step3: "Step3TextForCausalLM",
    _deci: "DeciLMForCausalLM",
    _mla: "DeepseekV2ForCausalLM DeepseekV3ForCausalLM KimiK25ForConditionalGeneration MistralLarge3ForCausalLM",
    _glm4_lite: "Glm4MoeLiteForCausalLM",
    _sparse_mla: "DeepseekV32ForCausalLM GlmMoeDsaForCausalLM",
    _minimax_m3: "MiniMaxM3SparseForCausalLM MiniMaxM3ForCausalLM MiniMaxM3SparseForConditionalGeneration",
    _gdn: "Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen3_5ForConditionalGeneration "
    "Qwen3_5MoeForConditionalGeneration",
    _nemotron_h: "NemotronHForCausalLM",
    _granite_hybrid: "GraniteMoeHybridForCausalLM",
    _falcon_h1: "FalconH1ForCausalLM",
    _jamba: "JambaForCausalLM",
    _kimi_linear: "KimiLinearForCausalLM KimiK3ForConditionalGeneration",
}
READERS: dict[str, Reader] = {name: reader for reader, names in _BY_FAMILY.items() for name in names.split()}
