"""What readers of several families share: heads, and layers with attention and windows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvbm.sizing.families.facts import ModelFacts, SizeUnknown
from kvbm.sizing.families.layer_specs import LayerKind, LayerSpec, Ranks, full, local

Reader = Callable[[ModelFacts, Ranks], list[LayerSpec]]


def query_heads(facts: ModelFacts) -> int:
    return facts.number("num_attention_heads")


def kv_heads(facts: ModelFacts) -> int:
    """`null` means as many as query heads. A missing number has the default of the family, or is an error."""
    if "num_key_value_heads" in facts and facts["num_key_value_heads"] is None:
        return query_heads(facts)
    return facts.number("num_key_value_heads")


def head_dim(facts: ModelFacts) -> int:
    dim = facts.get("head_dim")
    if dim == 0:
        raise SizeUnknown("with `head_dim: 0`, only the engine knows the size of a block")
    return usual_head_dim(facts) if dim is None else facts.number("head_dim")


def usual_head_dim(facts: ModelFacts) -> int:
    """Return the width that the heads share. SizeUnknown if there is less than one number for a head."""
    width, heads = facts.number("hidden_size"), query_heads(facts)
    if width < heads:
        raise SizeUnknown(f"a `hidden_size` of {width} cannot be divided among {heads} heads")
    return width // heads


def all_layers(facts: ModelFacts, ranks: Ranks) -> list[LayerSpec]:
    heads, dim = kv_heads(facts), head_dim(facts)
    return [full(layer, ranks, heads, dim) for layer in range(facts.number("num_hidden_layers"))]


def by_layer_types(facts: ModelFacts, ranks: Ranks, *, more_reach: int = 0) -> list[LayerSpec]:
    kinds, specs = facts.texts("layer_types") or [], all_layers(facts, ranks)
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) < len(specs):
        raise SizeUnknown(
            f"with `layer_types` of {listed(unknown) or f'{len(kinds)} entries'}, "
            "only the engine knows the size of a block"
        )
    return with_windows(specs, facts, lambda layer: kinds[layer] == "sliding_attention", more_reach=more_reach)


def with_windows(
    specs: list[LayerSpec], facts: ModelFacts, has_window: Callable[[int], bool], *, more_reach: int = 0
) -> list[LayerSpec]:
    window = facts.get("sliding_window")  # read in any case: without effect on these layers, it is harmless
    if window is None or not any(has_window(spec.layer) for spec in specs):
        return specs
    reach = facts.number("sliding_window") + more_reach
    return [local(spec, LayerKind.WINDOW, reach) if has_window(spec.layer) else spec for spec in specs]


def without_shared(specs: list[LayerSpec], facts: ModelFacts) -> list[LayerSpec]:
    """Return the specs without the last layers, which share the cache of earlier ones."""
    shared = facts.get("num_kv_shared_layers") or 0
    if not isinstance(shared, int) or not 0 <= shared < len(specs):
        raise SizeUnknown(f"with `num_kv_shared_layers: {shared}`, only the engine knows the size of a block")
    return specs[: len(specs) - shared]


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
