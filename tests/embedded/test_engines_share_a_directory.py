"""Embedded engines share a directory, as in the profile `demo-shared`: one answers from what another one computed."""

import pytest
import tiny_models
import torch
from bookkeeping import tier_of
from kvbm_engine import assert_same, prompt, running
from safetensors.torch import load_file, save_file
from waiting import eventually

from kvbm.engines.table import load
from kvbm.types import Tier
from kvbm_cli.package_data import profiles_directory

SIZE = {"num_blocks": 100, "max_model_len": 1024}


def on(directory, *, model="synthetic:tiny", max_model_len=1024, **options):
    values = load("demo-shared", directories=(profiles_directory(),)).profile
    shared = {"url": f"file://{directory}/objects", **options}
    offload = {"to_shared": values.offload.to_shared}
    size = {**SIZE, "max_model_len": max_model_len}
    return running(model=model, host_blocks=100, shared=shared, offload=offload, **size)


def knows(engine, runs):
    def known():
        shared = tier_of(engine.leader, Tier.SHARED)
        shared.receive()
        return len(shared.presence)

    return engine.between_steps(known) >= runs


def test_the_first_request_of_an_engine_is_answered_from_what_another_one_computed(tmp_path):
    said = []
    with on(tmp_path) as first:
        said.append(first.ask(prompt(1, 600)).said())
        eventually(lambda: knows(first, 2), "two runs of 256 tokens are written")
        with on(tmp_path) as second:
            eventually(lambda: knows(second, 2), "the directory is listed")
            answer = second.ask(prompt(1, 600))
            said.append(answer.said())
            assert answer.last.num_shared_tokens == 512
            assert second.counters.shared.bad_objects == 0
    with running(**SIZE) as plain:
        assert_same(said, [plain.ask(prompt(1, 600)).said()] * 2)


def test_engines_with_different_secrets_keep_their_objects_apart(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).write_text(name * 16)
        (tmp_path / name).chmod(0o600)
    namespaces = tmp_path / "objects/v1"
    for number, name in enumerate(("one", "other", "one"), start=1):
        with on(tmp_path, protection="hmac", key_file=str(tmp_path / name)) as engine:
            answer = engine.ask(prompt(1, 300))
            eventually(lambda engine=engine: knows(engine, 1), "a run of 256 tokens is known")
            assert len(list(namespaces.iterdir())) == min(number, 2)
            assert engine.counters.shared.bad_objects == 0
            assert answer.last.num_shared_tokens in ((0,) if number < 3 else (0, 256))


def test_other_weights_under_the_same_name_share_nothing(tmp_path):
    model = tiny_models.save("llama", tmp_path / "model")
    weights = model / "model.safetensors"
    said = []
    tokens = [one % 199 for one in prompt(1, 400)]  # the model's vocabulary
    with on(tmp_path, model=str(model), max_model_len=512) as first:
        said.append(first.ask(tokens).said())
        eventually(lambda: knows(first, 1), "a run of 256 tokens is written")
        generator = torch.Generator().manual_seed(7)
        tuned = {
            name: one + 0.1 * torch.randn(one.shape, generator=generator) for name, one in load_file(weights).items()
        }
        save_file(tuned, weights, metadata={"format": "pt"})
        with on(tmp_path, model=str(model), max_model_len=512) as second:
            answer = second.ask(tokens)
            said.append(answer.said())
            assert answer.last.num_shared_tokens == 0
            eventually(lambda: knows(second, 1), "its own run is written")
        assert len(list((tmp_path / "objects/v1").iterdir())) == 2
        said.append(first.ask(tokens).said())
    with running(model=str(model), **SIZE | {"max_model_len": 512}) as plain:
        expected = plain.ask(tokens).said()
    assert_same([said[1]], [expected])
    assert_same([said[2]], [said[0]])
    with pytest.raises(AssertionError):
        assert_same([said[0]], [expected])


def test_tokens_of_a_run_that_could_not_be_read_are_not_reported(tmp_path):
    with on(tmp_path) as first:
        first.ask(prompt(1, 800))
        eventually(lambda: knows(first, 3), "three runs of 256 tokens are written")
    with on(tmp_path) as second:
        eventually(lambda: knows(second, 3), "the directory is listed")
        second.ask(prompt(1, 800)[:300])  # brings the first run into host memory
        second.settle()
        second.forget_g1()
        for path in (tmp_path / "objects").rglob("*"):
            if path.is_file() and not path.suffix:
                path.write_bytes(b"x" * path.stat().st_size)
        answer = second.ask(prompt(1, 800))
        assert second.counters.shared.bad_objects > 0
        assert answer.last.num_external_tokens > 0
        assert answer.last.num_shared_tokens == 0
