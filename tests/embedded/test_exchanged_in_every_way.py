"""Weights, tokenizers and adapters that are exchanged in every way, for the embedded engine: all answers are compared.

Each way runs two engines on one disk or on one store: before the exchange or during it, and after it. Their answers are
compared with those of engines without a cache. `exchanges.py` has the ways.
"""

from __future__ import annotations

import json
from pathlib import Path

import exchanges
import pytest
import tiny_models
from exchanges import CHANGES, WAYS, WEIGHTS
from kvbm_engine import assert_same, prompt, running
from safetensors.torch import load_file, save_file

LENGTH = 300
PROMPTS = [[token % tiny_models.VOCABULARY for token in prompt(seed, LENGTH)] for seed in range(4)]
BLOCKS = {"disk": len(PROMPTS) * (LENGTH // 16), "shared": len(PROMPTS) * 16}  # a run of the store has 16


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two models of equal sizes and times; the second differs in some rows of the embedding."""
    one = tiny_models.save("llama", tmp_path_factory.mktemp("saved")).rename(tmp_path_factory.mktemp("models") / "v1")
    byte_tokenizer_in(one)
    exchanges.save_twin(one, sorted({token for tokens in PROMPTS for token in tokens[:5]}))
    return one.parent


def byte_tokenizer_in(directory):
    from kvbm.engines.embedded.engine.tokenizer import byte_tokenizer

    byte_tokenizer().save_pretrained(directory)


@pytest.fixture(scope="module")
def truth(saved):
    found = {name: answers(saved / name)[0] for name in ("v1", "v2")}
    with pytest.raises(AssertionError):
        assert_same(found["v1"], found["v2"])
    return found


@pytest.fixture
def home(saved, tmp_path):
    yield from exchanges.placed(saved, tmp_path)


def answers(model, tier=None, place=None):
    """Answers of one engine, and how many blocks it found on a disk or in a store."""
    sections = {
        None: {},
        "disk": {"disk": {"directory": str(place), "blocks": 200}, "offload": {"to_disk": "always"}},
        "shared": {
            "shared": {"url": f"file://{place}", "protection": "none"},
            "offload": {"to_shared": "always"},
        },
    }[tier]
    cache = {"host_blocks": 100, "onboard": {"policy": "always"}} if tier else {}
    with running(model=str(model), **cache, **sections) as engine:
        said = [engine.ask(tokens).said() for tokens in PROMPTS]
        if tier is None:
            return said, 0
        engine.settle()
        counters = engine.counters
        return said, counters.disk.fetched_blocks + counters.shared.fetched_blocks


def tokens_of(said):
    return [[token for token, _ in answer] for answer in said]


def loading(monkeypatch, *, before=lambda: None, after=lambda: None):
    """Run something while the engine loads: before it reads its weights, or after."""
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained

    def from_pretrained(*arguments, **keys):
        before()
        loaded = load(*arguments, **keys)
        after()
        return loaded

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)


@pytest.mark.soak
@pytest.mark.parametrize("tier", ["disk", "shared"])
@pytest.mark.parametrize("when", ["between", "before the read", "after the read"])
@pytest.mark.parametrize("way", WAYS)
def test_every_answer_is_that_of_the_loaded_weights(home, truth, tmp_path, monkeypatch, way, when, tier):
    model, place = home / "models" / "current", tmp_path / "cache"
    place.mkdir(mode=0o700)
    with monkeypatch.context() as during:
        if when == "before the read":
            loading(during, before=lambda: way(home))
        elif when == "after the read":
            loading(during, after=lambda: way(home))
        first, found = answers(model, tier, place)
    assert found == 0
    # A write into the mapped file after the read, before the engine copies its weights, changes what it computes with.
    loaded = "v2" if tokens_of(first) == tokens_of(truth["v2"]) else "v1"
    assert loaded == {"between": "v1", "before the read": "v2"}.get(when, loaded)
    assert_same(first, truth[loaded])
    if when == "between":
        way(home)
    second, found = answers(model, tier, place)
    assert_same(second, truth["v2"])
    assert found == 0 if loaded == "v1" else found > 0
    print(f"{len(first) + len(second)} compared, 0 wrong: {way.__name__}, {when}, {tier}")


@pytest.mark.soak
@pytest.mark.parametrize("tier", ["disk", "shared"])
@pytest.mark.parametrize("way", CHANGES)
def test_a_header_or_a_configuration_alone_is_another_model(home, truth, tmp_path, way, tier):
    model, place = home / "models" / "current", tmp_path / "cache"
    place.mkdir(mode=0o700)
    first, _ = answers(model, tier, place)
    assert_same(first, truth["v1"])
    way(home)
    second, found = answers(model, tier, place)
    assert_same(second, answers(model)[0])
    assert found == 0
    print(f"{len(first) + len(second)} compared, 0 wrong: {way.__name__}, between, {tier}")


@pytest.mark.soak
@pytest.mark.parametrize("tier", ["disk", "shared"])
def test_unchanged_weights_find_their_blocks(home, truth, tmp_path, tier):
    """So that the absence of wrong answers above is not the absence of a cache."""
    place = tmp_path / "cache"
    place.mkdir(mode=0o700)
    for expected in (False, True):
        said, found = answers(home / "models" / "current", tier, place)
        assert_same(said, truth["v1"])
        assert found == (expected and BLOCKS[tier])
    print(f"{2 * len(PROMPTS)} compared, 0 wrong: unchanged, {found} blocks found, {tier}")


@pytest.mark.soak
@pytest.mark.parametrize("way", [exchanges.replaced, exchanges.mapped, exchanges.file_becomes_a_link])
def test_one_shard_of_several_is_another_model(home, tmp_path, way, monkeypatch):
    for name in ("v1", "v2"):
        split(home / "models" / name)
    monkeypatch.setattr(exchanges, "WEIGHTS", "part-1.safetensors")
    model, place = home / "models" / "current", tmp_path / "cache"
    first, _ = answers(model, "disk", place)
    way(home)
    expected, _ = answers(model)
    with pytest.raises(AssertionError):
        assert_same(expected, first)
    second, found = answers(model, "disk", place)
    assert_same(second, expected)
    assert found == 0
    print(f"{len(second)} compared, 0 wrong: a shard {way.__name__}, between, disk")


def split(directory: Path) -> None:
    """Put the embedding into a shard of its own."""
    weights = load_file(directory / WEIGHTS)
    places = {name: f"part-{int('embed' in name)}.safetensors" for name in weights}
    for place in set(places.values()):
        part = {name: weight for name, weight in weights.items() if places[name] == place}
        save_file(part, directory / place, metadata={"format": "pt"})
    (directory / WEIGHTS).unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.soak
@pytest.mark.parametrize("when", ["between", "during"])
def test_another_tokenizer_changes_token_ids_and_no_block(home, truth, tmp_path, monkeypatch, when):
    """Blocks are found by token ids. A tokenizer decides which ids a text has, and they belong to the same KV."""
    model, place = home / "models" / "current", tmp_path / "cache"

    with monkeypatch.context() as during:
        if when == "during":
            loading(during, before=lambda: exchanges.tokenizer(home))
        first, _ = answers(model, "disk", place)
    if when == "between":
        exchanges.tokenizer(home)
    second, found = answers(model, "disk", place)
    assert_same([*first, *second], truth["v1"] * 2)
    assert found == BLOCKS["disk"]
    print(f"{len(first) + len(second)} compared, 0 wrong: tokenizer, {when}, disk")
