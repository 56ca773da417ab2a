"""Weights and adapters that are exchanged under a real vLLM: between two starts, in memory, and by name."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from random import Random

import pytest
import torch
from pairs import NO_CACHE, adapters_of
from safetensors.torch import load_file, save_file
from traffic import assert_equal, tokens
from vllm_server import BLOCK_TOKENS, CONNECTOR, HERE, VllmServer, wait_until_old

from kvbm.engines.make_model import materialise

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(900)]
CACHED = 3 * BLOCK_TOKENS
ONE, OTHER = (tokens(Random(number), CACHED + 60) for number in range(2))
WRITTEN = "kvbm_offload_blocks_h2d"
WARNING = "no block of this engine will stay on disk"


def connector_on(directory):
    tiers = {"host": {"blocks": 60}, "disk": {"blocks": 100, "directory": str(directory)}}
    contents = {"tiers": tiers, "offload": {"to_disk": "always"}, "onboard": {"policy": "always"}}
    return CONNECTOR | {"kv_connector_extra_config": {"kvbm": contents}}


def start(model, disk, *arguments, **keys):
    return VllmServer(model, *arguments, blocks=40, connector=connector_on(disk), **keys)


def call(server, method, **keys):
    answer = server.http.post("/collective_rpc", json={"method": method, "kwargs": keys})
    assert answer.status_code == 200, f"{answer.text}\n{server.log_tail()}"


def kill(server):
    os.killpg(server.process.pid, signal.SIGKILL)


def differs(answer, other):
    """Whether two answers cannot come from the same weights."""
    return max(abs(one - two) for one, two in zip(answer.logprobs, other.logprobs, strict=True)) > 0.01


@pytest.fixture
def models(tmp_path):
    """A model, and a fine-tune of its last tensors with the same size and time."""
    one = shutil.copytree(materialise("vllm-25m"), tmp_path / "one")
    two = shutil.copytree(one, tmp_path / "two")
    (path,) = two.glob("*.safetensors")
    weights = load_file(path)
    last = max(int(name.split(".")[2]) for name in weights if ".layers." in name)
    for name in weights:
        if f".layers.{last}.self_attn" in name:
            weights[name] = weights[name] + 0.05 * torch.randn(
                weights[name].shape, generator=torch.Generator().manual_seed(1)
            ).to(weights[name].dtype)
    save_file(weights, path, metadata={"format": "pt"})
    facts = next(one.glob("*.safetensors")).stat()
    assert path.stat().st_size == facts.st_size
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    return one, two


def test_other_weights_on_disk_or_in_memory_never_answer_for_each_other(models, tmp_path):
    model, tuned = models
    former = shutil.copytree(model, tmp_path / "former")
    disk = tmp_path / "disk"
    with start(model, disk) as server:
        old = server.ask(ONE)
        server.wait_until("written blocks", lambda metrics: metrics[WRITTEN] >= CACHED // BLOCK_TOKENS)
        assert WARNING not in server.log()
        kill(server)
    shutil.copy2(next(tuned.glob("*.safetensors")), next(model.glob("*.safetensors")))
    with start(model, disk) as server:
        new = server.ask(ONE)
        assert new.cached == 0
        assert differs(new, old)
        server.wait_until("written blocks", lambda metrics: metrics[WRITTEN] >= CACHED // BLOCK_TOKENS)
        call(server, "reload_weights", weights_path=str(former))
        assert WARNING in server.log()
        again = server.ask(ONE)
        assert again.cached == 0
        assert_equal({"one": again}, {"one": old})
        assert server.ask(OTHER).cached == 0
        server.wait_until("written blocks", lambda metrics: metrics[WRITTEN] >= 3 * CACHED // BLOCK_TOKENS)
        assert server.reset_prefix_cache(external=False)
        assert server.ask(OTHER).cached == CACHED, "the cache goes on for this engine"
        kill(server)
    with start(model, disk) as server:  # with the weights of its files
        last, other = server.ask(ONE), server.ask(OTHER)
        assert (last.cached, other.cached) == (0, 0)
        assert_equal({"one": last}, {"one": new})


def test_a_replica_with_a_copy_elsewhere_answers_from_the_blocks_of_another_engine(models, tmp_path):
    """It has other limits and sizes. What both compute is equal to what an engine without a cache computes."""
    model, disk = models[0], tmp_path / "disk"
    copy = shutil.copytree(model, tmp_path / "other" / "place")
    for file in copy.iterdir():
        os.utime(file, ns=(1, 1))
    with start(model, disk) as server:
        first = server.ask(ONE)
        server.wait_until("written blocks", lambda metrics: metrics[WRITTEN] >= CACHED // BLOCK_TOKENS)
        assert WARNING not in server.log()
        kill(server)
    other = ("--max-num-seqs", "3", "--served-model-name", "mine", "--max-logprobs", "7", "--seed", "5")
    with VllmServer(copy, *other, blocks=50, max_model_len=1024, connector=connector_on(disk)) as server:
        second = server.ask(ONE, model="mine")
        assert second.cached == CACHED
        assert_equal({"one": second}, {"one": first})


def test_sleep_and_resets_leave_nothing_for_the_next_start(models, tmp_path):
    model, disk = models[0], tmp_path / "disk"
    with start(model, disk) as server:
        server.ask(ONE)
        assert server.http.post("/sleep", params={"level": "2"}).status_code == 200
        assert server.http.post("/wake_up").status_code == 200
        assert WARNING in server.log()
        assert server.ask(ONE).cached == 0
        server.wait_until("written blocks", lambda metrics: metrics[WRITTEN] >= 2 * CACHED // BLOCK_TOKENS)
        kill(server)
    with start(model, disk) as server:
        assert server.ask(ONE).cached == 0


def test_an_adapter_that_is_exchanged_under_its_name_answers_for_itself(tmp_path):
    place = shutil.copytree(materialise("vllm-25m-lora-a"), tmp_path / "adapter")
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    with start(materialise("vllm-25m"), tmp_path / "disk", *adapters_of("ab"), environment=environment) as server:

        def load(**keys):
            body = {"lora_name": "mine", "lora_path": str(place), **keys}
            assert server.http.post("/v1/load_lora_adapter", json=body).status_code == 200, server.log_tail()

        truth = {name: server.ask(ONE, model=name) for name in "ab"}
        assert differs(truth["a"], truth["b"])
        load()
        assert_equal({"a": server.ask(ONE, model="mine")}, {"a": truth["a"]})
        server.wait_until("a copy", lambda metrics: metrics["kvbm_offload_blocks_d2h"] >= 3 * CACHED // BLOCK_TOKENS)
        shutil.copytree(materialise("vllm-25m-lora-b"), place, dirs_exist_ok=True)
        load(load_inplace=True)
        exchanged = server.ask(ONE, model="mine")
        assert exchanged.cached == 0
        assert_equal({"b": exchanged}, {"b": truth["b"]})
        unload = {"lora_name": "mine"}
        assert server.http.post("/v1/unload_lora_adapter", json=unload).status_code == 200
        shutil.copytree(materialise("vllm-25m-lora-a"), place, dirs_exist_ok=True)
        load()
        back = server.ask(ONE, model="mine")
        assert back.cached == 0
        assert_equal({"a": back}, {"a": truth["a"]})


def test_an_adapter_below_the_home_directory_that_vllm_reads_again_answers_for_itself(tmp_path):
    """vLLM holds one adapter at a time, and resolves `~` when it reads the files."""
    place = shutil.copytree(materialise("vllm-25m-lora-a"), tmp_path / "adapter")
    mine = json.dumps({"name": "mine", "path": f"~/{place.name}"})
    one_at_a_time = ("--max-loras", "1", "--max-cpu-loras", "1")
    arguments, home = (*adapters_of("ab"), mine, *one_at_a_time), {"HOME": str(tmp_path)}
    with start(materialise("vllm-25m"), tmp_path / "disk", *arguments, environment=home) as server:
        first = server.ask(ONE, model="mine")
        server.wait_until("a copy", lambda metrics: metrics["kvbm_offload_blocks_d2h"] >= CACHED // BLOCK_TOKENS)
        shutil.copytree(materialise("vllm-25m-lora-b"), place, dirs_exist_ok=True)
        truth = {name: server.ask(ONE, model=name) for name in "ab"}
        assert_equal({"a": first}, {"a": truth["a"]})
        exchanged = server.ask(ONE, model="mine")
        assert exchanged.cached == 0
        assert_equal({"b": exchanged}, {"b": truth["b"]})


def test_an_engine_with_another_file_load_format_rope_or_override_starts_without_blocks(tmp_path):
    """Each start is compared with an engine without a cache; the original finds its blocks again at the end."""
    model = shutil.copytree(materialise("vllm-25m"), tmp_path / "model")
    original = shutil.copytree(model, tmp_path / "original")
    other_weights_as_pt(model)
    disk, seen = tmp_path / "disk", []

    def restart(*arguments, cached=0):
        with (
            VllmServer(model, NO_CACHE, *arguments, wait=False) as cold,
            start(model, disk, *arguments, wait=False) as server,
        ):
            server.wait_healthy()
            cold.wait_healthy()
            answer = server.ask(ONE)
            assert answer.cached == cached
            assert_equal({"one": answer}, {"one": cold.ask(ONE)})
            server.wait_until("written blocks", lambda metrics: metrics[WRITTEN] >= (CACHED - cached) // BLOCK_TOKENS)
            kill(server)
        assert cached or all(differs(answer, other) for other in seen)
        seen.append(answer)

    restart()
    restart("--load-format", "pt")
    change_a_middle_tensor(model)
    restart()
    restart("--hf-overrides", json.dumps({"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}))
    configuration = json.loads((model / "config.json").read_text())
    configuration["rope_parameters"]["rope_theta"] = 1000.0
    (model / "config.json").write_text(json.dumps(configuration))
    restart()
    for path in original.iterdir():
        shutil.copy2(path, model)
    restart(cached=CACHED)


OWN_CODE = """
from vllm import ModelRegistry
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.v1.worker.cpu_worker import CPUWorker

SCALE = 1.0


def scaled(name, weight):
    return weight * SCALE if name.endswith("v_proj.weight") else weight


class Model(Qwen3ForCausalLM):
    def load_weights(self, weights):
        return super().load_weights((name, scaled(name, weight)) for name, weight in weights)


class Worker(CPUWorker):
    def load_model(self, *arguments, **keys):
        super().load_model(*arguments, **keys)
        for name, weight in self.model_runner.model.named_parameters():
            if ".layers.3.input_layernorm" in name:
                weight.data.mul_(SCALE)


def register():
    ModelRegistry.register_model("Qwen3ForCausalLM", Model)
"""


def own_code(home, scale):
    """Write a module whose version stays, as of an editable install. Return where it is found."""
    (home / "own_code.py").write_text(OWN_CODE.replace("SCALE = 1.0", f"SCALE = {scale}"))
    return {"PYTHONPATH": os.pathsep.join((str(home), str(HERE), str(HERE.parent.parent)))}


@pytest.fixture
def home():
    """A directory next to which no other test makes entries: those could hide that it was renamed."""
    with tempfile.TemporaryDirectory(prefix="kvbm-code-") as directory:
        yield Path(directory)


def as_plugin(home):
    info = home / "own_code-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: own-code\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nown_code = own_code:register\n")


@pytest.mark.parametrize("is_worker", [False, True], ids=["model class", "worker"])
def test_a_model_class_or_worker_that_was_edited_between_two_starts_answers_for_itself(home, tmp_path, is_worker):
    """The edited code finds no block of the former one. The former code, put back, finds its own."""
    model, disk = materialise("vllm-25m"), tmp_path / "disk"
    arguments = ("--worker-cls", "own_code.Worker") if is_worker else ()
    if not is_worker:
        as_plugin(home)
    seen = []

    def restart(scale, *, is_known):
        environment = own_code(home, scale) | {"PYTHONDONTWRITEBYTECODE": "1"}
        wait_until_old(home, has_code=True)
        with start(model, disk, *arguments, environment=environment) as server:
            answer = server.ask(ONE)
            assert "will not stay on disk" not in server.log()
            assert answer.cached == (CACHED if is_known else 0)
            if not is_known:
                server.wait_until("written blocks", lambda metrics: metrics[WRITTEN] >= CACHED // BLOCK_TOKENS)
            kill(server)
        seen.append(answer)

    restart("1.0", is_known=False)
    restart("1.5", is_known=False)
    assert differs(*seen)
    restart("1.0", is_known=True)
    assert_equal({"one": seen[2]}, {"one": seen[0]})


def other_weights_as_pt(model):
    """Next to the .safetensors file, which vLLM prefers."""
    (path,) = model.glob("*.safetensors")
    weights = load_file(path)
    for name in weights:
        if name.endswith("v_proj.weight"):
            weights[name] = weights[name].flip(0)
    torch.save(weights, model / "model.pt")


def change_a_middle_tensor(model):
    """In place, with the same size and time of modification, as `cp -p` from a copy that was edited."""
    (path,) = model.glob("*.safetensors")
    facts, weights = path.stat(), load_file(path)
    names = sorted(name for name in weights if ".layers.3.self_attn.k_proj" in name)
    weights[names[0]] = weights[names[0]].flip(0)
    save_file(weights, path, metadata={"format": "pt"})
    assert path.stat().st_size == facts.st_size
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
