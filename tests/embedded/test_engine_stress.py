"""Random load on the torch engine: shared prefixes, a tiny G1, chunks, asynchronous loads that sometimes fail. All
outputs equal those of `generate`, and every block comes back."""

import random

import host_connector
import pytest
import tiny_models
from engine_rig import EngineRig

BLOCK = 8
MODELS = ("qwen3", "gemma3")
REQUESTS = 24
CONFIGS = [
    {"num_blocks": 24, "max_num_batched_tokens": 17},
    {"num_blocks": 30, "max_num_batched_tokens": 64, "kv_layout": "layer_first"},
    {"num_blocks": 40, "max_num_batched_tokens": 33, "max_num_seqs": 5},
]


def draw_prompts(numbers: random.Random) -> list[tuple[list[int], int]]:
    """(prompt, tokens to generate): some begin alike, some are prefixes of others."""
    vocabulary = tiny_models.VOCABULARY
    shared = [[numbers.randrange(vocabulary) for _ in range(length)] for length in (24, 50, 75)]
    drawn = []
    for _ in range(REQUESTS):
        prefix = numbers.choice([[], *shared])
        tail = [numbers.randrange(vocabulary) for _ in range(numbers.randrange(1, 40))]
        drawn.append(((prefix + tail)[: numbers.randrange(20, 110)], numbers.randrange(1, 16)))
    return drawn


@pytest.fixture(scope="module")
def path(request, tmp_path_factory):
    return tiny_models.save(request.param, tmp_path_factory.mktemp("stress"))


def serve_randomly(path, seed: int, *, config: dict) -> None:
    numbers = random.Random(seed)
    work = draw_prompts(numbers)
    connector = host_connector.create(block_size=BLOCK, latency_steps=numbers.randrange(4))
    with EngineRig(path, block_size=BLOCK, threads=1, verify=False, connector=connector, **config) as rig:
        results, waiting = [], list(work)
        while waiting or rig.core.has_work:
            for _ in range(min(len(waiting), numbers.choice([0, 0, 1, 3]))):
                prompt, new_tokens = waiting.pop(0)
                results.append(rig.add(prompt, max_tokens=new_tokens))
            if numbers.random() < 0.05:
                connector[1].fail_next = numbers.randrange(3)
            if numbers.random() < 0.03:
                rig.core.scheduler.reset_prefix_cache()
            rig.step()
        rig.check_idle()
        expected = tiny_models.generate(path, *map(list, zip(*work, strict=True)))
        assert [result.token_ids for result in results] == expected
        assert connector[0].finished == dict.fromkeys(connector[0].finished, 1)


@pytest.mark.parametrize(
    ("path", "index"),
    [
        *(("qwen3", index) for index in range(len(CONFIGS))),
        ("gemma3", 0),
        *(pytest.param("gemma3", index, marks=pytest.mark.soak) for index in (1, 2)),
    ],
    indirect=["path"],
)
def test_outputs_are_equal_under_random_load(path, index):
    """Every configuration with the model of one group of layers, and one with windows, whose `generate` is slow."""
    serve_randomly(path, index, config=CONFIGS[index])


@pytest.mark.soak
@pytest.mark.parametrize("path", MODELS, indirect=True)
@pytest.mark.parametrize("seed", range(100, 140))
def test_outputs_are_equal_under_random_load_for_long(path, seed):
    serve_randomly(path, seed, config=CONFIGS[seed % len(CONFIGS)])
