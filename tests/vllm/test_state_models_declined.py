"""Set-ups of models with states that kvbm declines by name, because they give wrong tokens or have never been run."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import MambaSpec

from kvbm.engines.vllm import cache_groups

STATE = MambaSpec(block_size=128, shapes=((3, 4), (2, 4)), dtypes=(torch.float32,) * 2, mamba_cache_mode="align")


def reason(**parallel):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(),
        cache_config=SimpleNamespace(),
        speculative_config=None,
    )
    groups = [SimpleNamespace(kv_cache_spec=STATE, layer_names=["layer.0"])]
    return cache_groups.decline_reason(config, SimpleNamespace(kv_cache_groups=groups))


@pytest.fixture(autouse=True)
def knows_failed_requests(monkeypatch):
    monkeypatch.setattr(cache_groups, "KNOWS_FAILED_REQUESTS", True)


def test_one_group_of_states_is_served_where_failed_loads_end_requests(monkeypatch):
    """With 0.29, vLLM continues a request after a failed load without its state: other tokens (pure Mamba-2)."""
    assert reason() is None
    monkeypatch.setattr(cache_groups, "KNOWS_FAILED_REQUESTS", False)
    assert "vLLM before 0.30 does not accept failed loads of the states" in reason()


def test_pipeline_parallelism_with_states_is_declined():
    assert "pipeline parallelism with states" in reason(pipeline_parallel_size=2)
