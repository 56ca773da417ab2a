"""The embedded engine on a GPU: its attention against the model's own, and repeatable answers. Token equality with
`generate` is a promise of float32 on the CPU; here rounding depends on the batch."""

import host_connector
import pytest
import torch
from engine_rig import EngineRig, prompts_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = prompts_of([5, 40, 333, 700], vocabulary=256)


@pytest.mark.parametrize("kv_layout", ["block_first", "layer_first"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_answer_from_host_memory_equals_one_from_g1(dtype, kv_layout):
    connector = host_connector.create(block_size=16)
    config = {"num_blocks": 200, "dtype": dtype, "kv_layout": kv_layout, "device": "cuda", "verify": True}
    with EngineRig("synthetic:tiny", connector=connector, **config) as rig:
        rig.generate(PROMPTS, max_tokens=1)
        from_g1 = [rig.generate([prompt], max_tokens=20)[0] for prompt in PROMPTS]
        rig.lose_g1()
        for prompt, expected in zip(PROMPTS, from_g1, strict=True):
            result = rig.generate([prompt], max_tokens=20)[0]
            assert result.token_ids == expected.token_ids
            assert result.last.num_external_tokens == expected.last.num_cached_tokens
