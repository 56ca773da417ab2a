"""Paged attention for every transformers model that gets its attention function from `AttentionInterface`.

All requests of a step are packed in one row of tokens. The runner describes the row in a Batch and makes it current for
the forward pass. The attention function receives the layer's K and V, writes them into the pool, and attends each
sequence to its own blocks. The model passes no mask, because none is registered under our name.

    one sequence in the packed row:   [ context: in the pool already | query: in this row ]
                                      0               key_count - query_count      key_count

The current batch is thread-local, so two engines can run in one process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvbm.engines.embedded.engine.kv_pool import KVPool

ATTENTION_NAME = "kvbm_paged"
FOLDED_ROWS = 64  # above this length, longer queries do not make torch's kernel faster


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """`query_count` tokens from row `first_row` on; with them, the sequence has `key_count` tokens in `block_ids`."""

    first_row: int
    query_count: int
    key_count: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _ReadPlan:
    """What a kind of layer reads: the blocks to fetch, and per sequence its first key and number of keys in them."""

    block_ids: torch.Tensor
    first_keys: list[int]
    key_counts: list[int]
    masks: list[torch.Tensor | None]


@dataclass(slots=True)
class Batch:
    """One step's packed row of tokens."""

    pool: KVPool
    sequences: list[PackedSequence]
    write_blocks: torch.Tensor = field(init=False)
    write_offsets: torch.Tensor = field(init=False)
    is_cold: bool = field(init=False)
    _plans: dict[int | None, _ReadPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Cold: no sequence has context, so every key is in this row and nothing has to be fetched."""
        self.is_cold = all(sequence.query_count == sequence.key_count for sequence in self.sequences)
        size = self.pool.block_size
        blocks: list[int] = []
        offsets: list[int] = []
        for sequence in self.sequences:
            for position in range(sequence.key_count - sequence.query_count, sequence.key_count):
                blocks.append(sequence.block_ids[position // size])
                offsets.append(position % size)
        device = self.pool.storages[0].device
        self.write_blocks = torch.tensor(blocks, device=device)
        self.write_offsets = torch.tensor(offsets, device=device)

    def plan(self, window: int | None) -> _ReadPlan:
        if window not in self._plans:
            self._plans[window] = self._make_plan(window)
        return self._plans[window]

    def _make_plan(self, window: int | None) -> _ReadPlan:
        """Make the plan. A query at position p sees keys p - window + 1 to p, so blocks before the first query's window
        stay out."""
        size, device = self.pool.block_size, self.write_blocks.device
        block_ids: list[int] = []
        first_keys: list[int] = []
        key_counts: list[int] = []
        masks: list[torch.Tensor | None] = []
        for sequence in self.sequences:
            first_query = sequence.key_count - sequence.query_count
            first_seen = 0 if window is None else max(0, first_query - window + 1)
            first_block = first_seen // size
            first_keys.append(len(block_ids) * size + first_seen % size)
            key_counts.append(sequence.key_count - first_seen)
            if first_query:  # the keys of a cold sequence are in the row
                block_ids += sequence.block_ids[first_block : -(-sequence.key_count // size)]
            masks.append(_mask(sequence.query_count, key_counts[-1], window, device))
        return _ReadPlan(torch.tensor(block_ids, device=device), first_keys, key_counts, masks)


def _mask(query_count: int, key_count: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return a mask [query_count, key_count], True where one of the last `query_count` positions sees a key.

    None if causal order is sufficient: one query, or as many queries as keys within the window.
    """
    if query_count == 1 or (query_count == key_count and (window is None or window >= key_count)):
        return None
    queries = torch.arange(key_count - query_count, key_count, device=device)[:, None]
    keys = torch.arange(key_count, device=device)[None, :]
    return (keys <= queries) & (keys > queries - (window or key_count))


_of_this_thread = threading.local()


@contextmanager
def current(batch: Batch) -> Iterator[None]:
    """Make `batch` the current batch of forward passes in this thread."""
    assert getattr(_of_this_thread, "batch", None) is None, "a forward pass inside a forward pass"
    _of_this_thread.batch = batch
    try:
        yield
    finally:
        _of_this_thread.batch = None


def register() -> None:
    """Register our attention function with transformers as ATTENTION_NAME."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over the packed row: query [1, heads, T, D], key and value [1, kv_heads, T, D].

    Returns [1, T, heads, value_dim].
    """
    batch: Batch = _of_this_thread.batch
    layer = int(module.layer_idx)
    _write(batch, layer, key, value)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return _attend_each(batch, layer, query, key, value, sliding_window, scale), None


def _write(batch: Batch, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    rows = (batch.write_blocks, batch.write_offsets)
    batch.pool.keys[layer].index_put_(rows, key[0].transpose(0, 1))
    batch.pool.values[layer].index_put_(rows, value[0].transpose(0, 1))


def _attend_each(
    batch: Batch,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """One kernel call per sequence."""
    plan = batch.plan(window)
    _, heads, row_count, _ = query.shape
    output = query.new_empty(row_count, heads, value.shape[-1])
    if not batch.is_cold:
        fetched_keys, fetched_values = batch.pool.fetch(layer, plan.block_ids)
        all_keys, all_values = fetched_keys.transpose(0, 1), fetched_values.transpose(0, 1)
    for index, sequence in enumerate(batch.sequences):
        rows = slice(sequence.first_row, sequence.first_row + sequence.query_count)
        if sequence.query_count == sequence.key_count:
            keys, values = key[0, :, rows], value[0, :, rows]
        else:
            seen = slice(plan.first_keys[index], plan.first_keys[index] + plan.key_counts[index])
            keys, values = all_keys[:, seen], all_values[:, seen]
        output[rows] = _attend(query[0, :, rows], keys, values, plan.masks[index], scale)
    return output[None]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """query [heads, T, D], key and value [kv_heads, S, D]; returns [T, heads, value_dim].

    Query heads that share a KV head are folded. With few queries they become the query length of that head. Otherwise
    they become the heads of a batch whose keys are expanded without a copy; `enable_gqa` of torch copies them on CPU.
    """
    heads, query_count, dim = query.shape
    kv_heads, key_count, value_dim = value.shape
    group = heads // kv_heads
    if query_count == 1 or (mask is not None and query_count * group <= FOLDED_ROWS):
        folded = query.reshape(1, kv_heads, group * query_count, dim)
        tiled = None if mask is None else mask.repeat(group, 1)
        mixed = scaled_dot_product_attention(folded, key[None], value[None], attn_mask=tiled, scale=scale)
        return mixed.reshape(heads, query_count, value_dim).transpose(0, 1)
    mixed = scaled_dot_product_attention(
        query.reshape(kv_heads, group, query_count, dim),
        key[:, None].expand(kv_heads, group, key_count, dim),
        value[:, None].expand(kv_heads, group, key_count, value_dim),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return mixed.reshape(heads, query_count, value_dim).transpose(0, 1)
