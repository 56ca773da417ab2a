"""Which ranks have equal KV, from vLLM's own specs and no engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from kvbm.engines.vllm.replicas import replica_count

HEAD = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
ONE_HEAD = FullAttentionSpec(**HEAD)
PARTS = {"max_tp_shards": 1} if "max_tp_shards" in MLAAttentionSpec.__dataclass_fields__ else {}  # from 0.32 on
LATENT = MLAAttentionSpec(**HEAD | {"head_size": 576}, **PARTS)
STATE = MambaSpec(block_size=16, shapes=((2, 4),), dtypes=(torch.float32,))


def count(*specs, ranks=8, heads=1, speculative=None, **config):
    """Replicas of an engine with these layers; `config` are more entries of the model's configuration."""
    model = SimpleNamespace(
        get_total_num_kv_heads=lambda: heads,
        hf_text_config=SimpleNamespace(to_dict=lambda: {"num_key_value_heads": heads, **config}),
    )
    engine = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks), model_config=model, speculative_config=speculative
    )
    return replica_count(engine, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=one) for one in specs]))


def test_all_ranks_have_the_same_latent_vectors():
    assert count(LATENT) == 8
    assert count(LATENT, LATENT, ranks=2) == 2
    assert count(LATENT, speculative="the draft model has latent attention too") == 8


@pytest.mark.parametrize(("heads", "replicas"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (3, 1)])
def test_fewer_heads_than_ranks_are_repeated(heads, replicas):
    assert count(FullAttentionSpec(**HEAD | {"num_kv_heads": max(1, heads // 8)}), heads=heads) == replicas


def test_windows_next_to_full_attention_are_repeated_in_the_same_way():
    assert count(ONE_HEAD, SlidingWindowSpec(**HEAD, sliding_window=64), heads=2) == 4


@pytest.mark.parametrize(
    "engine",
    [
        {"ranks": 1},
        {"specs": [ONE_HEAD, STATE]},
        {"specs": [LATENT, STATE]},
        {"specs": [LATENT, ONE_HEAD]},
        {"speculative": "a draft model may have other heads"},
        {"num_global_key_value_heads": 4},
        {"block_configs": [{"attention": {"n_heads_in_group": 8}}]},
    ],
)
def test_in_doubt_every_rank_has_a_copy_of_its_own(engine):
    engine = dict(engine)
    assert count(*engine.pop("specs", [ONE_HEAD]), **engine) == 1
