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


@pytest.mark.parametrize(
    ("specs", "engine", "replicas"),
    [
        ([LATENT], {}, 8),
        ([LATENT, LATENT], {"ranks": 2}, 2),
        ([LATENT], {"speculative": "the draft model has latent attention too"}, 8),
        *(([ONE_HEAD], {"heads": heads}, count) for heads, count in ((1, 8), (2, 4), (4, 2), (3, 1))),
        *(([FullAttentionSpec(**HEAD | {"num_kv_heads": heads // 8})], {"heads": heads}, 1) for heads in (8, 16)),
        ([ONE_HEAD, SlidingWindowSpec(**HEAD, sliding_window=64)], {"heads": 2}, 4),
        # In doubt, every rank has a copy of its own.
        ([ONE_HEAD], {"ranks": 1}, 1),
        ([ONE_HEAD, STATE], {}, 1),
        ([LATENT, STATE], {}, 1),
        ([LATENT, ONE_HEAD], {}, 1),
        ([ONE_HEAD], {"speculative": "a draft model may have other heads"}, 1),
        ([ONE_HEAD], {"num_global_key_value_heads": 4}, 1),
        ([ONE_HEAD], {"block_configs": [{"attention": {"n_heads_in_group": 8}}]}, 1),
    ],
)
def test_latent_vectors_and_heads_that_are_fewer_than_ranks_have_one_copy_for_several(specs, engine, replicas):
    assert count(*specs, **engine) == replicas
