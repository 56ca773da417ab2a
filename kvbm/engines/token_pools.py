"""Block sizes of engines whose pools hold tokens one after another: a block has all layers of one rank.

    bytes per block on one rank = sum over the layers of the bytes of one token x tokens per block

Only models whose layers keep every token have a known size. For windows and states, SGLang has pools of their own,
which it divides by ratios; TensorRT-LLM decides, or kvbm disables itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbm.sizing.checkpoint import is_quantized
from kvbm.sizing.families.facts import SizeUnknown, positions
from kvbm.sizing.families.layer_specs import LayerKind, Ranks
from kvbm.sizing.families.table import layer_specs
from kvbm.sizing.tiers import Device


@dataclass(frozen=True, slots=True)
class TokenPools:
    """The pools of the engine `title` by its arguments. `ranks` share every layer. G1 has `max_tokens`, which the key
    `set_by` says; None if the engine determines them at start-up. `longest`: tokens of a sequence, None if the model
    decides."""

    title: str
    block_tokens: int
    ranks: int
    max_tokens: int | None
    set_by: str
    longest: int | None

    def device(self, model_config: Mapping[str, object], cache_bytes: int) -> Device:
        """Return the blocks of G1, for elements of `cache_bytes`. ProfileError if the configuration lacks a fact,
        SizeUnknown if only the engine knows the size of its blocks."""
        specs = layer_specs(model_config, Ranks(self.ranks, cache_bytes=cache_bytes))
        if not {spec.kind for spec in specs} <= {LayerKind.FULL, LayerKind.LATENT}:
            raise SizeUnknown(
                f"this model has layers that do not keep every token, so only {self.title} knows the size of its blocks"
            )
        token_bytes = sum(spec.token_bytes for spec in specs)
        length = self.longest or positions(model_config) or 0
        return Device(
            block_tokens=self.block_tokens,
            rank_block_bytes=(token_bytes * self.block_tokens,) * self.ranks,
            block_count=None if self.max_tokens is None else self.max_tokens // self.block_tokens,
            set_by=None if self.max_tokens is None else self.set_by,
            token_bytes=token_bytes * self.ranks,
            sequence_tokens=length,
            sequence_blocks=-(-length // self.block_tokens),
        )

    def named_bytes(
        self, key: str, named: str | None, known: Mapping[str, int], model_config: Mapping[str, object], hint: str
    ) -> int | None:
        """Return the bytes of one element if `key` names their type, None if they follow the model. SizeUnknown for
        other types than the `known` ones, and without a type if the checkpoint is quantized."""
        if named not in (None, "auto"):
            if named not in known:
                raise SizeUnknown(f"with `{key}: {named}`, only {self.title} knows the size of a block")
            return known[named]
        if is_quantized(model_config):
            raise SizeUnknown(
                f"the checkpoint is quantized, so only {self.title} knows the data type of its KV cache", hint=hint
            )
        return None
