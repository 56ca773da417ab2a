"""Weights that are exchanged between two starts or during one: no answer comes from blocks of the other weights.

Each test runs the model once with a disk, exchanges files, and compares the answer of the next engine on that disk with
the answer of an engine without a cache. Greedy tokens and log-probabilities must be equal.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from kvbm_engine import assert_same, prompt, running
from safetensors.torch import load_file, save_file

from kvbm.engines.embedded.engine import model as models
from kvbm.engines.embedded.engine.config import EngineConfig

PROMPT = prompt(1, 100)
LONG_AGO_NS = 1_000_000_000_000_000_000
WEIGHTS = "model.safetensors"
MIDDLE, LAST = "model.layers.0.self_attn.v_proj.weight", "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tiny_models.save("llama", tmp_path_factory.mktemp("saved"))


@pytest.fixture
def directory(saved, tmp_path):
    path = shutil.copytree(saved, tmp_path / "model")
    normalise(path)
    return path


def normalise(directory):
    """Give all files one time, as tools do that build images."""
    for path in directory.rglob("*"):
        os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))


def tuned(weights, *names):
    """The weights after a fine-tune of these tensors, or of all."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: weight + 0.1 * torch.randn(weight.shape, generator=generator) if not names or name in names else weight
        for name, weight in weights.items()
    }


def fine_tuned(directory, target, *names):
    """A copy of the model with other weights of the same size and time."""
    shutil.copytree(directory, target)
    save_file(tuned(load_file(directory / WEIGHTS), *names), target / WEIGHTS, metadata={"format": "pt"})
    normalise(target)
    return target


def ask(directory, disk=None):
    """Answer and blocks that came from disk."""
    keys = {} if disk is None else {"host_blocks": 50, "disk": {"directory": str(disk), "blocks": 100}}
    more = {"offload": {"to_disk": "always"}, "onboard": {"policy": "always"}} if disk is not None else {}
    with running(model=str(directory), **keys, **more) as engine:
        answer = engine.ask(PROMPT).said()
        if disk is None:
            return answer, 0
        engine.settle()
        return answer, engine.counters.disk.fetched_blocks


def cached(directory, disk):
    """Leave the blocks of one prompt on disk, and check that an unchanged model finds them."""
    first, _ = ask(directory, disk)
    again, found = ask(directory, disk)
    assert found == (len(PROMPT) - 1) // 16
    assert_same([again], [first])
    return first


def assert_not_deceived(directory, disk, former):
    """The engine on this disk answers like one without any cache, which differs from the former answer."""
    expected, _ = ask(directory)
    with pytest.raises(AssertionError):
        assert_same([expected], [former])
    answer, found = ask(directory, disk)
    assert_same([answer], [expected])
    assert found == 0


def by_cp(new, directory):
    subprocess.run(["cp", "-p", new / WEIGHTS, directory / WEIGHTS], check=True)


def by_rename(new, directory):
    """What rsync -a does with a file whose time differs, and every deployment that replaces files atomically."""
    shutil.copy2(new / WEIGHTS, directory / ".part")
    os.replace(directory / ".part", directory / WEIGHTS)


def by_rsync(new, directory):
    if shutil.which("rsync") is None:
        pytest.skip("no rsync")
    subprocess.run(["rsync", "-a", "--checksum", f"{new}/", f"{directory}/"], check=True)


def by_directory(new, directory):
    directory.rename(directory.with_name("former"))
    new.rename(directory)


def by_link(new, directory):
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).symlink_to(new / WEIGHTS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("exchange", [by_cp, by_rename, by_rsync, by_directory, by_link])
def test_weights_of_the_same_size_and_time_are_other_weights(directory, tmp_path, exchange):
    former = cached(directory, tmp_path / "disk")
    new = fine_tuned(directory, tmp_path / "new")
    before = (directory / WEIGHTS).stat()
    exchange(new, directory)
    after = (directory / WEIGHTS).stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert_not_deceived(directory, tmp_path / "disk", former)


@pytest.mark.parametrize("names", [(MIDDLE,), (LAST,), (MIDDLE, LAST)], ids=["middle", "last", "merged adapter"])
def test_a_fine_tune_of_few_tensors_is_another_model(directory, tmp_path, names):
    former = cached(directory, tmp_path / "disk")
    by_cp(fine_tuned(directory, tmp_path / "new", *names), directory)
    assert_not_deceived(directory, tmp_path / "disk", former)


def sharded(directory):
    """Move the weights into shards in a subdirectory, which only the index names."""
    weights = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    (directory / "shards").mkdir()
    names = sorted(weights)
    places = {name: f"shards/part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for place in sorted(set(places.values())):
        part = {name: weights[name] for name in names if places[name] == place}
        save_file(part, directory / place, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    normalise(directory)
    return directory / places[LAST]


def test_shards_in_a_subdirectory_are_weights(directory, tmp_path):
    shard = sharded(directory)
    former = cached(directory, tmp_path / "disk")
    save_file(tuned(load_file(shard), LAST), shard, metadata={"format": "pt"})
    normalise(directory)
    assert_not_deceived(directory, tmp_path / "disk", former)


def test_a_pytorch_file_is_weights(directory, tmp_path):
    weights = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    torch.save(weights, directory / "pytorch_model.bin")
    normalise(directory)
    former = cached(directory, tmp_path / "disk")
    torch.save(tuned(weights, LAST), directory / "pytorch_model.bin")
    normalise(directory)
    assert_not_deceived(directory, tmp_path / "disk", former)


def test_a_link_to_another_snapshot_is_another_model(directory, tmp_path):
    new = fine_tuned(directory, tmp_path / "new")
    current = tmp_path / "current"
    current.symlink_to(directory)
    former = cached(current, tmp_path / "disk")
    (tmp_path / "next").symlink_to(new)
    os.replace(tmp_path / "next", current)
    assert_not_deceived(current, tmp_path / "disk", former)


def test_a_field_of_the_configuration_is_another_model(directory, tmp_path):
    former = cached(directory, tmp_path / "disk")
    facts = json.loads((directory / "config.json").read_text())
    facts["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    (directory / "config.json").write_text(json.dumps(facts))
    normalise(directory)
    assert_not_deceived(directory, tmp_path / "disk", former)


def test_one_row_of_the_embedding_is_another_model(directory, tmp_path):
    """As after a training of new tokens."""
    former = cached(directory, tmp_path / "disk")
    weights = load_file(directory / WEIGHTS)
    weights["model.embed_tokens.weight"][PROMPT[3]] += 0.5
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    assert_not_deceived(directory, tmp_path / "disk", former)


def test_weights_on_tmpfs_edited_through_a_mapping_are_another_model(directory, tmp_path):
    """No time of the file moves."""
    place = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        model = shutil.copytree(directory, place / "model")
        mapped = np.memmap(model / WEIGHTS, mode="r+", dtype=np.uint8)
        mapped[:] = np.array(mapped)  # the first store to a page moves times
        former = cached(model, tmp_path / "disk")
        before = (model / WEIGHTS).stat()
        mapped[:] = np.fromfile(fine_tuned(directory, tmp_path / "new") / WEIGHTS, np.uint8)
        after = (model / WEIGHTS).stat()
        assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
        assert_not_deceived(model, tmp_path / "disk", former)
    finally:
        shutil.rmtree(place)


def test_a_renamed_copy_finds_the_blocks_of_the_original(directory, tmp_path):
    former = cached(directory, tmp_path / "disk")
    copy = shutil.copytree(directory, tmp_path / "elsewhere" / "renamed", copy_function=shutil.copyfile)
    answer, found = ask(copy, tmp_path / "disk")
    assert_same([answer], [former])
    assert found == (len(PROMPT) - 1) // 16


# -- during a start and after it ---------------------------------------------------------------------------------------


@pytest.fixture(params=["before", "after", "back"])
def exchanging(request, directory, tmp_path, monkeypatch):
    """Exchange the weights while the engine loads: before or after it reads them, or before and back again after."""
    import transformers

    new, old = fine_tuned(directory, tmp_path / "new"), shutil.copytree(directory, tmp_path / "old")
    load = transformers.AutoModelForCausalLM.from_pretrained

    def from_pretrained(*arguments, **keys):
        if request.param != "after":
            by_rename(new, directory)
        loaded = load(*arguments, **keys)
        by_rename(old if request.param == "back" else new, directory)
        return loaded

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    return monkeypatch


def test_blocks_of_files_exchanged_while_an_engine_loads_belong_to_the_loaded_weights(
    directory, tmp_path, exchanging, request
):
    ask(directory, tmp_path / "disk")
    exchanging.undo()
    answer, found = ask(directory, tmp_path / "disk")
    assert_same([answer], [ask(directory)[0]])
    has_loaded_these = request.node.callspec.params["exchanging"] == "before"
    assert found == (has_loaded_these and (len(PROMPT) - 1) // 16)


def parent_exchanged(directory, new):
    """Exchange all directories on the way to the model. The model's own directory and its files keep their times."""
    directory.parent.rename(directory.parent.with_name("former"))
    new.parent.rename(directory.parent)


def parent_restored(directory, new):
    directory.parent.rename(new.parent)
    directory.parent.with_name("former").rename(directory.parent)


def test_a_parent_exchanged_while_an_engine_loads_and_put_back_is_another_model(directory, tmp_path, monkeypatch):
    import transformers

    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    model, new = shutil.copytree(directory, home / "model"), fine_tuned(directory, other / "model")
    load = transformers.AutoModelForCausalLM.from_pretrained

    def from_pretrained(*arguments, **keys):
        parent_exchanged(model, new)
        loaded = load(*arguments, **keys)
        parent_restored(model, new)
        return loaded

    with monkeypatch.context() as exchanging:
        exchanging.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
        former, _ = ask(model, tmp_path / "disk")
    assert_not_deceived(model, tmp_path / "disk", former)


def test_weights_in_a_hidden_directory_are_weights(directory, tmp_path):
    """`transformers_weights` names them. The file with the usual name is not read."""
    (directory / ".hidden").mkdir()
    shutil.copy(directory / WEIGHTS, directory / ".hidden" / WEIGHTS)
    facts = json.loads((directory / "config.json").read_text())
    facts["transformers_weights"] = f".hidden/{WEIGHTS}"
    (directory / "config.json").write_text(json.dumps(facts))
    normalise(directory)
    former = cached(directory, tmp_path / "disk")
    new = tuned(load_file(directory / ".hidden" / WEIGHTS))
    save_file(new, directory / ".hidden" / WEIGHTS, metadata={"format": "pt"})
    normalise(directory)
    assert_not_deceived(directory, tmp_path / "disk", former)


def test_files_overwritten_after_loading_do_not_change_the_engine(directory, tmp_path):
    loaded = models.load(EngineConfig(model=str(directory), verify=False))
    before = {name: weight.clone() for name, weight in loaded.network.state_dict().items()}
    by_cp(fine_tuned(directory, tmp_path / "new"), directory)
    for name, weight in loaded.network.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_a_model_that_cannot_be_identified_runs_and_leaves_nothing(directory, tmp_path, caplog):
    (tmp_path / "tables").mkdir()
    facts = json.loads((directory / "config.json").read_text())
    facts["tables"] = str(tmp_path / "tables")
    (directory / "config.json").write_text(json.dumps(facts))
    first, _ = ask(directory, tmp_path / "disk")
    again, found = ask(directory, tmp_path / "disk")
    assert_same([again], [first])
    assert found == 0
    assert "cannot be identified" in caplog.text


def test_a_reset_of_the_embedded_engine_keeps_the_disk_for_later_blocks(directory, tmp_path):
    """Nothing can change its weights, so that an empty cache is all that a reset promises."""
    keys = {"host_blocks": 50, "disk": {"directory": str(tmp_path / "disk"), "blocks": 100}}
    with running(model=str(directory), offload={"to_disk": "always"}, **keys) as engine:
        assert engine.engine.begin_reset().result()
        engine.ask(PROMPT)
        engine.settle()
    assert ask(directory, tmp_path / "disk")[1] == (len(PROMPT) - 1) // 16
