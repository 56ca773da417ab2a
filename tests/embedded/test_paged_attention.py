"""The attention function against a plain one, for every form of it; and the GPU's packed way on the CPU."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from kvbm.engines.embedded.engine import attention
from kvbm.engines.embedded.engine.attention import Batch, PackedSequence
from kvbm.engines.embedded.engine.kv_pool import KVGeometry, KVPool

BLOCK, HEADS, KV_HEADS = 4, 6, 3


@dataclass
class Case:
    """Three sequences in one packed row: one cold, one chunk after context, one that decodes."""

    key_dim: int
    value_dim: int
    kv_layout: str = "block_first"

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        geometry = KVGeometry(2, KV_HEADS, self.key_dim, self.value_dim, "float32")
        self.pool = KVPool(geometry, block_count=20, block_size=BLOCK, kv_layout=self.kv_layout, device="cpu")
        self.pool.storages[0].view(torch.float32).fill_(torch.nan)
        spans, tables = ((0, 9), (11, 18), (22, 23)), ((7, 3, 12), (1, 15, 0, 9, 4), (2, 19, 5, 11, 8, 6))
        self.spans = spans
        self.keys = [torch.randn(KV_HEADS, end, self.key_dim) for _, end in spans]
        self.values = [torch.randn(KV_HEADS, end, self.value_dim) for _, end in spans]
        self.queries = [torch.randn(HEADS, end - start, self.key_dim) for start, end in spans]
        rows = 0
        self.sequences = []
        for (start, end), table, key, value in zip(spans, tables, self.keys, self.values, strict=True):
            self.sequences.append(PackedSequence(rows, end - start, end, table))
            rows += end - start
            for position in range(start):
                block, offset = table[position // BLOCK], position % BLOCK
                self.pool.keys[1][block, offset] = key[:, position]
                self.pool.values[1][block, offset] = value[:, position]
        self.batch = Batch(self.pool, self.sequences)

    def packed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        new_keys = [key[:, start:end] for key, (start, end) in zip(self.keys, self.spans, strict=True)]
        new_values = [value[:, start:end] for value, (start, end) in zip(self.values, self.spans, strict=True)]
        return tuple(torch.cat(parts, dim=1)[None] for parts in (self.queries, new_keys, new_values))

    def expected(self, scale, window=None) -> torch.Tensor:
        """Every query by itself, every weight by hand; [1, T, HEADS, value_dim]."""
        outputs = []
        for query, key, value, (start, end) in zip(self.queries, self.keys, self.values, self.spans, strict=True):
            for position in range(start, end):
                first = 0 if window is None else max(0, position - window + 1)
                for head in range(HEADS):
                    group = head // (HEADS // KV_HEADS)
                    scores = key[group, first : position + 1] @ query[head, position - start] * scale
                    outputs.append(scores.softmax(0) @ value[group, first : position + 1])
        return torch.stack(outputs).view(1, -1, HEADS, self.value_dim)


FORMS = {
    "plain": {},
    "window": {"window": 5},
    "window as long as the context": {"window": 23},
}


@pytest.mark.parametrize("kv_layout", ["block_first", "layer_first"])
@pytest.mark.parametrize("dims", [(8, 8), (12, 8)], ids=["equal dims", "unequal dims"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_the_plain_sum(form, dims, kv_layout):
    case = Case(*dims, kv_layout)
    options = FORMS[form]
    with attention.current(case.batch):
        output, _ = attention.paged_attention(
            SimpleNamespace(layer_idx=1),
            *case.packed(),
            None,
            scaling=0.3,
            sliding_window=options.get("window"),
        )
    assert torch.allclose(output, case.expected(0.3, **options), atol=1e-5)


def test_only_tokens_of_the_row_are_written():
    case = Case(8, 8)
    _, key, value = case.packed()
    before = case.pool.storages[0].clone()
    # The writing half of a forward pass.
    attention._write(case.batch, 1, key, value)
    changed = (case.pool.storages[0] != before).view(torch.float32.itemsize, -1)
    written = sum(end - start for start, end in case.spans) * KV_HEADS * (8 + 8)
    now = case.pool.storages[0].view(torch.float32)
    assert int((now != before.view(torch.float32)).logical_and(~now.isnan()).sum()) == written
    assert changed.any()


@pytest.mark.parametrize("kv_layout", ["block_first", "layer_first"])
def test_the_layout_names_the_bytes_of_a_block(kv_layout):
    pool = KVPool(KVGeometry(3, 2, 8, 4, "float32"), block_count=5, block_size=4, kv_layout=kv_layout, device="cpu")
    for layer in range(3):
        pool.keys[layer][2] = 1.0 + layer
        pool.values[layer][2] = 10.0 + layer
    layout = pool.layout()
    assert layout.block_bytes == pool.block_bytes == 3 * 2 * (8 + 4) * 4 * 4
    pieces = [
        pool.storages[piece.storage][piece.offset + 2 * piece.block_stride :][: piece.length].view(torch.float32)
        for piece in layout.pieces
    ]
    runs = torch.unique_consecutive(torch.cat(pieces)).tolist()
    assert runs == [1.0, 10.0, 2.0, 11.0, 3.0, 12.0]
    assert float(pool.storages[0].view(torch.float32).count_nonzero()) == pool.block_bytes / 4


def test_another_process_can_map_the_pool():
    import mmap
    import os

    pool = KVPool(KVGeometry(1, 1, 8, 8, "float32"), block_count=4, block_size=4, kv_layout="block_first", device="cpu")
    pool.keys[0][3] = 7.0
    with open(f"/proc/{os.getpid()}/fd/{pool.fd}", "r+b") as memory:
        mapping = mmap.mmap(memory.fileno(), pool.storages[0].numel())
    theirs = torch.frombuffer(mapping, dtype=torch.float32)
    assert float(theirs.sum()) == 7.0 * 4 * 8
    pool.close()


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers():
    from kvbm.errors import EnvironmentProblem

    geometry = KVGeometry(64, 64, 256, 256, "float32")
    with pytest.raises(EnvironmentProblem, match=r"G1 requires \d+ bytes, but \d+ are available"):
        KVPool(geometry, block_count=10**7, block_size=16, kv_layout="block_first", device="cpu")
