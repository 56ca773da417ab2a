"""Groups that vLLM forms of a model's layers, which take blocks from one pool (vLLM 0.32, `v1/core/kv_cache_utils.py`).

    all layers of one type            one group; a block has the pages of all layers
    types with different pages        pages are made equal: the smaller one gets more tokens, or padding
    layout with blocks outermost      layers keep their pages and are packed side by side into a block

Then the layers of each type are split into groups of the same number of layers; the same tokens take one block in each:

    6 sliding + 1 full   ->   7 groups of one layer

A block has as many bytes as the largest group has on that pipeline stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil

from kvbm.sizing.families.facts import SizeUnknown
from kvbm.sizing.families.layer_specs import LayerKind, LayerSpec

_Bucket = dict[int, list[LayerSpec]]  # layers of one type, by the bytes of their pages
WIDEST_GROUP = 1.5  # if the most layers of a type are fewer than this times the fewest, groups have the most


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Specs that share block ids. `block_tokens` is the length of its block; 0 only for a group of states alone."""

    specs: tuple[LayerSpec, ...]

    @property
    def kind(self) -> LayerKind:
        return self.specs[0].kind

    @property
    def block_tokens(self) -> int:
        return self.specs[0].block_tokens

    def bytes_on(self, stage: range) -> int:
        """Bytes of one block on a pipeline stage with these layers."""
        return sum(spec.page_bytes for spec in self.specs if spec.layer in stage)

    def blocks(self, tokens: int, *, in_flight: int) -> int:
        """Blocks that a request of `tokens` needs while its last `in_flight` tokens are computed."""
        if self.kind is LayerKind.STATE:
            # With prefix caching: the running state, the one at the last boundary, and with Mamba 2 a checkpoint.
            return 2 + self.specs[0].checkpoint_blocks
        reach = self.specs[0].reach
        if self.kind is LayerKind.WINDOW:
            return ceil(min(reach - 1 + in_flight, tokens) / self.block_tokens) + 1
        if self.kind is LayerKind.CHUNKED:
            return ceil(min(reach + in_flight, tokens) / self.block_tokens)
        return ceil(tokens / self.block_tokens)

    def stored_blocks(self, tokens: int) -> int:
        """Blocks that kvbm stores of a sequence of `tokens`: of a state, the snapshot at the end of the prompt."""
        return 1 if self.kind is LayerKind.STATE else self.blocks(tokens, in_flight=0)


def cache_groups(
    specs: Sequence[LayerSpec], *, blocks_outermost: bool, promotes_windows: bool = False
) -> tuple[CacheGroup, ...]:
    """Form the groups of the whole model. `promotes_windows`: `--disable-hybrid-kv-cache-manager`.

    SizeUnknown if vLLM cannot make the pages equal.
    """
    if promotes_windows:
        specs = _promoted(specs)
    if len({_type_of(spec) for spec in specs}) == 1:
        return (CacheGroup(tuple(specs)),)
    if blocks_outermost and len({spec.page_bytes for spec in specs}) > 1:
        return tuple(_packed(specs))
    largest = max(spec.page_bytes for spec in specs)
    return tuple(_split_evenly([_with_page(spec, largest) for spec in specs]))


def _type_of(spec: LayerSpec) -> tuple[object, ...]:
    """Layers of one type need the same number of tokens, so that they can share block ids."""
    if spec.kind.keeps_all_tokens:
        return (LayerKind.FULL, spec.block_tokens)
    if spec.kind is LayerKind.STATE:
        return (LayerKind.STATE, spec.block_tokens, spec.page_bytes)
    return (spec.kind, spec.reach, spec.block_tokens)


def _promoted(specs: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Treat windows and chunks as full attention if there is full attention."""
    full_blocks = {spec.block_tokens for spec in specs if spec.kind.keeps_all_tokens}
    if not full_blocks:
        return list(specs)
    tokens = full_blocks.pop()
    local_kinds = (LayerKind.WINDOW, LayerKind.CHUNKED)
    return [
        replace(spec, kind=LayerKind.FULL, reach=0, block_tokens=tokens) if spec.kind in local_kinds else spec
        for spec in specs
    ]


def _with_page(spec: LayerSpec, page_bytes: int) -> LayerSpec:
    ratio, rest = divmod(page_bytes, spec.page_bytes)
    if spec.kind is not LayerKind.STATE and not rest:
        return spec.with_block(spec.block_tokens * ratio)
    if spec.kind in (LayerKind.LATENT, LayerKind.INDEX):
        raise SizeUnknown(f"vLLM cannot pad the latent cache of layer {spec.layer} to the pages of the other layers")
    return spec.with_block(spec.block_tokens, padded_bytes=page_bytes)


def _split_evenly(specs: Sequence[LayerSpec]) -> list[CacheGroup]:
    buckets: dict[tuple[object, ...], list[LayerSpec]] = defaultdict(list)
    for spec in specs:
        buckets[spec.kind, spec.shape, spec.reach, spec.block_tokens, spec.page_bytes, spec.state_bytes].append(spec)
    counts = [len(bucket) for bucket in buckets.values()]
    size = max(counts) if max(counts) < min(counts) * WIDEST_GROUP else min(counts)
    groups = []
    for bucket in buckets.values():
        group_count = ceil(len(bucket) / size)
        groups += [CacheGroup(tuple(bucket[first::group_count])) for first in range(group_count)]
    return groups


def _packed(specs: Sequence[LayerSpec]) -> list[CacheGroup]:
    by_type: dict[tuple[object, ...], _Bucket] = defaultdict(lambda: defaultdict(list))
    for spec in specs:
        by_type[_type_of(spec)][spec.page_bytes].append(spec)
    buckets = list(by_type.values())
    mixed = [_repeats(bucket) for bucket in buckets if _is_pattern(bucket) and len(bucket) > 1]
    per_group = None
    if mixed:
        per_group = _least_padding([_repeats(bucket) for bucket in buckets if _is_pattern(bucket)], max(mixed))

    def group_count(bucket: _Bucket) -> int:
        return ceil(_repeats(bucket) / per_group) if per_group is not None and _is_pattern(bucket) else 1

    def can_shrink(bucket: _Bucket) -> bool:
        kind = _specs(bucket)[0].kind
        return kind is LayerKind.STATE or (kind is LayerKind.WINDOW and per_group is None)

    def widest(bucket: _Bucket) -> int:
        """Bytes of the largest of the groups that a bucket is split into, of as many as possible if it can shrink."""
        count = len(_specs(bucket)) if can_shrink(bucket) else group_count(bucket)
        return sum(ceil(len(members) / count) * page for page, members in bucket.items())

    anchor = max(map(widest, buckets))
    groups = []
    for bucket in buckets:
        count = group_count(bucket)
        if can_shrink(bucket):
            fitting = max(anchor // next(iter(bucket)), 1)
            count = max(count, ceil(len(_specs(bucket)) / fitting))
        pattern = [_specs(bucket)] if count == 1 else list(zip(*bucket.values(), strict=True))
        groups += [CacheGroup(tuple(chain(*pattern[first::count]))) for first in range(count)]
    return groups


def _specs(bucket: _Bucket) -> list[LayerSpec]:
    return list(chain(*bucket.values()))


def _repeats(bucket: _Bucket) -> int:
    return max(map(len, bucket.values()))


def _is_pattern(bucket: _Bucket) -> bool:
    """Whether a bucket repeats a pattern: it has the same number of layers of each page size."""
    return len(set(map(len, bucket.values()))) == 1


def _least_padding(counts: Sequence[int], at_least: int) -> int:
    """Return the group size that pads the counts the least; the larger one of two."""
    sizes = range(at_least, max(counts) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size), default=at_least)
