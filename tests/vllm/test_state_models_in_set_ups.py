"""A model with states in other set-ups than the plain one: conversations get the answers of a server without cache.

The model is Granite 4 (Mamba-2). Chunks are blocks, because vLLM for CPUs keeps no states from inside a chunk.
"""

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

import pytest
from pairs import MAX_MODEL_LEN, NO_CACHE, ONBOARDED, ONBOARDS_FAILED, Faults, Pair, is_at_rest
from traffic import asker, assert_equal, compare, conversations, hold, repeat, tokens
from vllm_server import BLOCK_TOKENS, CONNECTOR, EXTERNAL_HITS, FAULTS_FILE, FAULTY_CONNECTOR, VllmServer, host_blocks

from kvbm.engines.make_model import materialise

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(900)]
TALKS = conversations(8, turns=3, seed=3)
ONE_BLOCK = ("--block-size", str(BLOCK_TOKENS), "--max-num-batched-tokens", str(BLOCK_TOKENS))
ADAPTED = ["q_proj", "v_proj", "in_proj", "out_proj"]
RETAIN = "--prefix-cache-retention-interval"


@dataclass(frozen=True)
class SetUp:
    """A tested server: its arguments and environment, and the orders to its copier."""

    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)


SET_UPS = {
    "copies fail": SetUp(faults={"fail_every": 7}),
    "tensor parallel": SetUp(("--tensor-parallel-size", "2")),
    "tensor parallel, copies fail": SetUp(("--tensor-parallel-size", "2"), faults={"fail_every": 7}),
    "batches that overlap": SetUp(("--async-scheduling",)),
    "batches that overlap, copies fail": SetUp(("--async-scheduling",), faults={"fail_every": 7}),
    "no batches that overlap": SetUp(("--no-async-scheduling",)),
    "a snapshot at every block": SetUp((RETAIN, str(BLOCK_TOKENS))),
    "a snapshot wherever vLLM has one": SetUp((RETAIN, "None")),
    "states and convolutions in the layout of NIXL": SetUp(environment={"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}),
}


@pytest.fixture(scope="module")
def truth():
    with VllmServer(materialise("vllm-granite4"), NO_CACHE, *ONE_BLOCK, max_model_len=MAX_MODEL_LEN) as server:
        return hold(asker(server), TALKS)


@contextmanager
def tested_server(set_up, faults):
    with VllmServer(
        materialise("vllm-granite4"),
        *ONE_BLOCK,
        *set_up.arguments,
        blocks=60,
        connector=FAULTY_CONNECTOR,
        environment=host_blocks(1000) | {FAULTS_FILE: str(faults.path)} | set_up.environment,
        max_model_len=MAX_MODEL_LEN,
    ) as server:
        yield Pair(None, server, faults)


@pytest.mark.parametrize("name", SET_UPS)
def test_answers_are_those_of_a_server_without_cache(name, truth, tmp_path):
    set_up, faults = SET_UPS[name], Faults(tmp_path)
    faults.order(**set_up.faults)
    with tested_server(set_up, faults) as pair:
        pair.check_against(truth)
        pair.forget_g1()
        _, moved = pair.check_against(truth)
        assert moved[ONBOARDED] >= 20, str(moved)
        assert moved[EXTERNAL_HITS] > 0, str(moved)
        assert bool(moved[ONBOARDS_FAILED]) == bool(set_up.faults), str(moved)


def test_wrong_bytes_would_be_noticed(truth, tmp_path):
    with tested_server(SetUp(), Faults(tmp_path)) as pair:
        pair.check_against(truth)
        pair.forget_g1()
        pair.faults.order(lie=True)
        comparison = compare(repeat(asker(pair.tested), list(truth)), truth)
        assert len(comparison.wrong) >= len(truth) // 4, comparison


def adapter(model, directory):
    """An adapter of attention and state layers that changes every answer."""
    import torch
    from safetensors.torch import load_file, save_file

    generator, tensors = torch.Generator().manual_seed(5), {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith(tuple(f"{layer}.weight" for layer in ADAPTED)):
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            for half, shape in (("lora_A", (8, weight.shape[1])), ("lora_B", (weight.shape[0], 8))):
                tensors[f"{layer}.{half}.weight"] = torch.randn(shape, generator=generator) * 0.1
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    facts = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "m", "r": 8, "lora_alpha": 8}
    (directory / "adapter_config.json").write_text(json.dumps(facts | {"target_modules": ADAPTED, "bias": "none"}))
    return ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"a={directory}")


@pytest.mark.parametrize("name", ["an adapter", "attention in fp8"])
def test_a_prompt_comes_back_from_host_memory(name, tmp_path):
    """The truth is the answer of the same server under a salt of its own, in the same chunks."""
    model = materialise("vllm-granite4")
    fp8 = ("--dtype", "bfloat16", "--kv-cache-dtype", "fp8", "--block-size", "256", "--max-num-batched-tokens", "256")
    arguments = (*ONE_BLOCK, *adapter(model, tmp_path)) if name == "an adapter" else fp8
    asked = {"model": "a"} if name == "an adapter" else {}
    prompt, cached = tokens(Random(name), 5 * 256 + 30), 5 * 256
    options = {"connector": CONNECTOR, "environment": host_blocks(400), "max_model_len": MAX_MODEL_LEN}
    with VllmServer(model, *arguments, blocks=60, **options) as server:
        truth = server.ask(prompt, 16, cache_salt="truth", **asked)
        assert_equal({0: server.ask(prompt, 16, **asked)}, {0: truth})
        server.wait_until("rest", is_at_rest)
        assert server.reset_prefix_cache(external=False)
        again = server.ask(prompt, 16, **asked)
        assert (again.cached, server.metrics()[EXTERNAL_HITS]) == (cached, cached)
        assert_equal({0: again}, {0: truth})
        if asked:
            other = server.ask(prompt, 16)
            assert other.cached == 0
            assert other.tokens != truth.tokens
