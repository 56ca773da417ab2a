"""Readers of models in which some layers keep a state of fixed size (Mamba, GDN, KDA)."""

from __future__ import annotations

from collections.abc import Mapping

from kvbm.sizing.families.dense import require_usual_head_dim
from kvbm.sizing.families.facts import READER, ModelFacts, SizeUnknown
from kvbm.sizing.families.latent import mla
from kvbm.sizing.families.layer_specs import FLOAT32_BYTES, LayerSpec, Ranks, full, state
from kvbm.sizing.families.layers import all_layers, head_dim, kv_heads, listed

_NAMES_OF_TRANSFORMERS_5 = {"full_attention": "attention", "linear_attention": "state"}
MAMBA2_CHECKPOINTS = 1  # `num_prefill_checkpoint_blocks` of vLLM 0.32
GDN_STATE_TYPE = "mamba_ssm_dtype"
_STATE_TYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


# Facts of Nemotron-H that transformers keeps under another name, or that vLLM ignores: the groups are `n_groups`.
_WITHOUT_EFFECT_ON_NEMOTRON_H = (
    *("mamba_num_groups", "mamba_proj_bias", "mamba_expand", "mamba_conv_bias", "mamba_chunk_size", "mamba_dt_min"),
    *("mamba_dt_max", "mamba_dt_limit", "mamba_dt_init_floor"),
)


def gdn(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Qwen3-Next and Qwen 3.5: gated delta nets, and full attention in every fourth layer."""
    kinds, layers = facts.texts("layer_types"), facts.number("num_hidden_layers")
    step = facts.number("full_attention_interval", default=4)
    kinds = kinds or ["full_attention" if (layer + 1) % step == 0 else "linear_attention" for layer in range(layers)]
    key_width = facts.number("linear_num_key_heads") * facts.number("linear_key_head_dim")
    value_width = facts.number("linear_num_value_heads") * facts.number("linear_value_head_dim")
    conv_elements = (2 * key_width + value_width) * (facts.number("linear_conv_kernel_dim", default=4) - 1)
    element_bytes = _state_bytes(facts, ranks, GDN_STATE_TYPE, default=ranks.model_bytes)
    bytes_of_state = _shared(ranks, conv_elements) * ranks.model_bytes
    bytes_of_state += _shared(ranks, value_width * facts.number("linear_key_head_dim")) * element_bytes
    return _mixed(facts, ranks, kinds, _NAMES_OF_TRANSFORMERS_5, bytes_of_state)


def nemotron_h(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    kinds, pattern = facts.texts("layers_block_type"), facts.get("hybrid_override_pattern")
    if kinds is None and pattern is None:
        kinds = facts.texts("layer_types")  # transformers reads both names as one
    elif facts.get("layer_types") is not None:
        raise SizeUnknown("a Nemotron-H model with two lists of layers has a cache that only the engine knows")
    if kinds is None and isinstance(pattern, str):
        kinds = list(pattern)
    if kinds is None:
        raise SizeUnknown("a Nemotron-H model without a pattern of layers has a cache that only the engine knows")
    for name in _WITHOUT_EFFECT_ON_NEMOTRON_H:
        facts.get(name)
    if facts.get("sliding_window") is not None:
        raise SizeUnknown("a Nemotron-H model with a window has a cache that only the engine knows")
    if facts.get("attention_head_dim") not in (None, facts.get("head_dim")):
        raise SizeUnknown(f"{READER} ignores `attention_head_dim: {facts['attention_head_dim']}` for this model")
    inner = facts.number("mamba_num_heads") * facts.number("mamba_head_dim")
    size = facts.number("ssm_state_size")
    element_bytes = _state_bytes(facts, ranks, "mamba_ssm_cache_dtype", default=FLOAT32_BYTES)
    groups, kernel = facts.either("mamba_n_groups", "n_groups"), facts.either("mamba_d_conv", "conv_kernel")
    bytes_of_state = _mamba2(ranks, inner, groups, size, kernel, element_bytes)
    names = _NAMES_OF_TRANSFORMERS_5 | {"mamba": "state", "M": "state", "attention": "attention", "*": "attention"}
    names |= dict.fromkeys(("mlp", "moe", "-", "E"), "none")
    return _mixed(facts, ranks, kinds, names, bytes_of_state, checkpoint_blocks=MAMBA2_CHECKPOINTS)


def granite_hybrid(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    kinds = facts.texts("layer_types") or facts.texts("layers_block_type")
    if kinds is None:
        raise SizeUnknown("a hybrid Granite model without `layer_types` has a cache that only the engine knows")
    inner = facts.number("mamba_expand", default=2) * facts.number("hidden_size")
    bytes_of_state = _bamba_state(facts, ranks, inner)
    names = _NAMES_OF_TRANSFORMERS_5 | {"attention": "attention", "mamba": "state"}
    return _mixed(facts, ranks, kinds, names, bytes_of_state, checkpoint_blocks=MAMBA2_CHECKPOINTS)


def falcon_h1(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Every layer has attention and a state."""
    expanded = facts.number("mamba_expand", default=2) * facts.number("hidden_size")
    inner = expanded if facts.get("mamba_d_ssm") is None else facts.number("mamba_d_ssm")
    bytes_of_state = _bamba_state(facts, ranks, inner)
    specs = all_layers(facts, ranks)
    states = [state(spec.layer, bytes_of_state, checkpoint_blocks=MAMBA2_CHECKPOINTS) for spec in specs]
    return [one for pair in zip(specs, states, strict=True) for one in pair]


def _bamba_state(facts: ModelFacts, ranks: Ranks, inner: int) -> int:
    for name in ("mamba_n_heads", "mamba_d_head", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias"):
        facts.get(name)
    for name in ("mamba_norm_before_gate", "mamba_rms_norm", "mamba_use_mlp"):
        facts.get(name)
    groups, size = facts.number("mamba_n_groups", default=1), facts.number("mamba_d_state", default=256)
    element_bytes = ranks.state_bytes or ranks.model_bytes
    return _mamba2(ranks, inner, groups, size, facts.number("mamba_d_conv", default=4), element_bytes)


def jamba(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Mamba 1, and full attention in every eighth layer."""
    require_usual_head_dim(facts)
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


def kimi_linear(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    """Kimi delta attention, and latent attention in the layers that `linear_attn_config` counts from 1."""
    linear = facts.section("linear_attn_config")
    layers = linear.get("full_attn_layers")
    if not isinstance(layers, list):
        raise SizeUnknown("a Kimi Linear model without `full_attn_layers` has a cache that only the engine knows")
    heads, dim = linear.number("num_heads"), linear.number("head_dim")
    conv = _shared(ranks, 3 * heads * dim) * (linear.number("short_conv_kernel_size", default=4) - 1)
    element_bytes = ranks.state_bytes or FLOAT32_BYTES
    bytes_of_state = conv * ranks.model_bytes + _shared(ranks, heads * dim * dim) * element_bytes
    return [spec if spec.layer + 1 in layers else state(spec.layer, bytes_of_state) for spec in mla(facts, ranks)]


def _mixed(
    facts: ModelFacts,
    ranks: Ranks,
    kinds: list[str],
    meanings: Mapping[str, str],
    bytes_of_state: int,
    *,
    checkpoint_blocks: int = 0,
) -> list[LayerSpec]:
    """Return the specs of layers that have attention, a state or neither, as `meanings` says of their kinds."""
    layers = facts.number("num_hidden_layers", default=len(kinds))
    if len(kinds) != layers:
        raise SizeUnknown(f"a model with {layers} layers but types of {len(kinds)} layers is not known")
    if unknown := set(kinds) - set(meanings):
        raise SizeUnknown(f"layers of type {listed(unknown)} are not known for this model")
    heads, dim = kv_heads(facts), head_dim(facts)
    specs = []
    for layer, kind in enumerate(kinds):
        if meanings[kind] == "attention":
            specs.append(full(layer, ranks, heads, dim))
        elif meanings[kind] == "state":
            specs.append(state(layer, bytes_of_state, checkpoint_blocks=checkpoint_blocks))
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
        raise SizeUnknown(f"{READER} cannot divide a state of this model by {ranks.tensor_parallel} ranks")
    return part


def _state_bytes(facts: ModelFacts, ranks: Ranks, name: str, *, default: int) -> int:
    """Return the bytes of an element of a recurrent state: from the arguments, the configuration, or the default."""
    named = facts.get(name)
    if ranks.state_bytes is not None:
        return ranks.state_bytes
    if named is None:
        return default
    if str(named) not in _STATE_TYPES:
        raise SizeUnknown(f"with `{name}: {named}`, only the engine knows the size of a block")
    return _STATE_TYPES[str(named)]
