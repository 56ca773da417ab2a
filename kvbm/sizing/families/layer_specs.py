"""LayerSpec: what one layer of a model keeps in the KV cache of one rank.

The kinds follow vLLM's `KVCacheSpec` (vLLM 0.32, `v1/kv_cache_interface.py`):

    FULL     a key and a value of every token
    LATENT   one compressed vector of every token (MLA), the same on every rank
    INDEX    one small vector of every token with which sparse attention selects tokens, the same on every rank
    WINDOW   keys and values of the last `reach` tokens
    CHUNKED  keys and values of the current chunk of `reach` tokens
    STATE    one state of fixed size (Mamba, GDN, KDA), whatever the number of tokens
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from kvbm.config.heads import replicas_of_heads
from kvbm.sizing.families.facts import SizeUnknown

FLOAT32_BYTES = 4


class LayerKind(Enum):
    FULL = "full"
    LATENT = "latent"
    INDEX = "index"
    WINDOW = "window"
    CHUNKED = "chunked"
    STATE = "state"

    @property
    def keeps_all_tokens(self) -> bool:
        return self in (LayerKind.FULL, LayerKind.LATENT, LayerKind.INDEX)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """`layer` counts from 0 over the whole model; one layer may have several specs.

    `token_bytes` are bytes of one token on one rank, 0 for a state. `shape` is (heads, key dim, value dim) on one rank:
    vLLM groups only layers of equal shape. `replicas` is the number of ranks that keep the same bytes.
    `checkpoint_blocks` are more blocks of a state for a step that computes the end of a block and the tokens behind it.
    `block_tokens` and `padded_bytes` are filled in while groups are formed.
    """

    layer: int
    kind: LayerKind
    token_bytes: int
    shape: tuple[int, ...]
    reach: int = 0
    replicas: int = 1
    state_bytes: int = 0
    checkpoint_blocks: int = 0
    block_tokens: int = 0
    padded_bytes: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of this layer on one rank."""
        return self.padded_bytes or self.state_bytes or self.token_bytes * self.block_tokens

    def with_block(self, tokens: int, *, padded_bytes: int = 0) -> LayerSpec:
        return replace(self, block_tokens=tokens, padded_bytes=padded_bytes)


@dataclass(frozen=True, slots=True)
class Ranks:
    """What the arguments of an engine say about every layer. All `_bytes` are the bytes of one element.

    `state_bytes` is the element of a recurrent state, None if the model's configuration decides.
    """

    tensor_parallel: int
    cache_bytes: int = 2
    model_bytes: int = 2
    state_bytes: int | None = None

    def heads(self, kv_heads: int) -> int:
        """Return the KV heads of one rank: they are divided, and repeated if there are more ranks than heads.

        SizeUnknown if that is not possible; no engine starts then.
        """
        ranks = self.tensor_parallel
        if max(kv_heads, ranks) % min(kv_heads, ranks):
            raise SizeUnknown(f"{kv_heads} KV heads cannot be divided among {ranks} ranks")
        return max(1, kv_heads // ranks)


def full(layer: int, ranks: Ranks, kv_heads: int, key_dim: int, value_dim: int | None = None) -> LayerSpec:
    heads, value_dim = ranks.heads(kv_heads), key_dim if value_dim is None else value_dim
    token_bytes = heads * (key_dim + value_dim) * ranks.cache_bytes
    replicas = replicas_of_heads(kv_heads, ranks.tensor_parallel)
    return LayerSpec(layer, LayerKind.FULL, token_bytes, (heads, key_dim, value_dim), replicas=replicas)


def local(spec: LayerSpec, kind: LayerKind, reach: int) -> LayerSpec:
    """Return the spec of a layer that looks only at the last `reach` tokens or at its chunk."""
    return replace(spec, kind=kind, reach=reach)


def latent(layer: int, ranks: Ranks, width: int) -> LayerSpec:
    return LayerSpec(layer, LayerKind.LATENT, width * ranks.cache_bytes, (1, width, 0), replicas=ranks.tensor_parallel)


def index(layer: int, ranks: Ranks, token_bytes: int) -> LayerSpec:
    return LayerSpec(layer, LayerKind.INDEX, token_bytes, (1, token_bytes, 0), replicas=ranks.tensor_parallel)


def state(layer: int, state_bytes: int, *, checkpoint_blocks: int = 0) -> LayerSpec:
    return LayerSpec(layer, LayerKind.STATE, 0, (), state_bytes=state_bytes, checkpoint_blocks=checkpoint_blocks)
