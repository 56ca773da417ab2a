"""Inputs and outputs of `kvbm size`, and the order of the tiers in `size`, `profile check` and `serve`."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from model_configs import write_model
from terminal import FAKE_ENGINE, Outcome, kvbm_here
from test_serve import serving

from kvbm.identity import machine
from kvbm_cli.serve.reported_sizes import ReportedSizes, difference_text

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 65536,
}


@pytest.fixture
def home(tmp_path):
    return tmp_path


@pytest.fixture
def model(home):
    directory = home / "llama"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return directory


def size(home: Path, *arguments: object) -> Any:
    outcome = kvbm_here("size", *map(str, arguments), "--json", home=home)
    assert outcome.exit_code == 0, outcome.stderr
    return json.loads(outcome.stdout)


def refused(home: Path, *arguments: object) -> Outcome:
    outcome = kvbm_here("size", *map(str, arguments), home=home)
    assert outcome.exit_code in (1, 2)
    return outcome


def test_a_block_of_llama_3_8b_is_2_mib(home, model):
    for name in (model, model / "config.json", "meta-llama/Meta-Llama-3-8B"):
        assert size(home, name, "--block-size", 16)["block"] == {"tokens": 16, "bytes": 2 * 2**20, "ranks": 1}


def test_a_configuration_in_a_file_of_another_name(home):
    file = home / "llama.json"
    file.write_text(json.dumps(LLAMA_3_8B))
    assert size(home, file)["token_bytes"] == 131_072
    file.write_text("[]")
    assert "is not a model configuration" in refused(home, file).stderr


def test_quantization_in_a_file_of_its_own(home, model):
    quantization = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    }
    (model / "hf_quant_config.json").write_text(json.dumps(quantization))
    assert size(home, model)["token_bytes"] == 65_536
    (model / "config.json").write_text(json.dumps({**LLAMA_3_8B, "quantization_config": {"quant_method": "fp8"}}))
    assert size(home, model)["token_bytes"] == 131_072


def test_each_engine_has_its_own_block(home, model):
    assert size(home, model, "--engine", "vllm")["block"]["tokens"] == 16
    assert size(home, model, "--engine", "sglang", "--tp", 4)["block"] == {"tokens": 1, "bytes": 32_768, "ranks": 4}
    page = size(home, model, "--engine", "sglang", "--block-size", 64, "--kv-cache-dtype", "fp8_e4m3")
    assert page["block"] == {"tokens": 64, "bytes": 64 * 65_536, "ranks": 1}
    assert "`--engine` must be one of" in refused(home, model, "--engine", "llama.cpp").stderr


def test_a_block_of_tensorrt_llm_has_32_tokens(home, model):
    command = (model, "--engine", "tensorrt-llm")
    assert size(home, *command, "--tp", 2)["block"] == {"tokens": 32, "bytes": 2 * 2**20, "ranks": 2}
    given = size(home, *command, "--block-size", 64, "--kv-cache-dtype", "fp8")
    assert given["block"] == {"tokens": 64, "bytes": 4 * 2**20, "ranks": 1}
    assert "only with vLLM" in refused(home, *command, "--layout", "BLHNC").stderr
    (model / "config.json").write_text(json.dumps({**LLAMA_3_8B, "dtype": "float32"}))
    assert "the model is in 32 bits" in refused(home, *command).stderr


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm"])
def test_a_quantized_checkpoint_of_another_engine_is_refused(home, model, engine):
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    for facts in ({**LLAMA_3_8B, **quantized}, {"text_config": quantized, **LLAMA_3_8B}):
        (model / "config.json").write_text(json.dumps(facts))
        assert "is quanti" in refused(home, model, "--engine", engine).stderr


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("google/gemma-3-27b-it", [], "layers that do not keep every token"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", [], "layers that do not keep every token"),
        ("nvidia/Kimi-K2.6-NVFP4", [], "the checkpoint is quantized"),
        ("Qwen/Qwen3-8B", ["--pp", "2"], "pipeline stages"),
        ("Qwen/Qwen3-8B", ["--set", "engine.arguments.swap_space=4"], "`swap_space` of vLLM"),
        ("Qwen/Qwen3-8B", ["--kv-cache-dtype", "int8"], "kv_cache_dtype: int8"),
    ],
)
def test_what_only_sglang_knows_is_refused(home, name, options, reason):
    assert reason in refused(home, name, "--engine", "sglang", *options).stderr


def test_sequences_of_a_given_and_of_the_maximum_length(home, model):
    text = kvbm_here("size", str(model), "--host", "100GB", "--length", "1000", home=home).stdout
    assert "a sequence of 32,768 tokens is 2,048 blocks, 4.0 GiB\nsequences that fit: G2 23\n" in text
    assert "a sequence of 1,000 tokens is 63 blocks, 126.0 MiB\nsequences that fit: G2 756\n" in text
    found = size(home, model, "--length", 1000)
    assert found["sequence"] == {"tokens": 1000, "blocks": 63}
    assert found["longest_sequence"] == {"tokens": 32768, "blocks": 2048}


def test_the_layout_changes_the_groups(home):
    assert size(home, "XiaomiMiMo/MiMo-V2-Flash")["block"]["bytes"] == 737_280
    assert size(home, "XiaomiMiMo/MiMo-V2-Flash", "--layout", "blhnc")["block"]["bytes"] == 368_640
    assert "`--layout` must be one of" in refused(home, "Qwen/Qwen3-8B", "--layout", "NHD").stderr


def test_the_estimate_of_g1_is_said_to_be_one(home):
    found = size(home, "Qwen/Qwen3-8B", "--gpu-memory", "80GiB", "--weights", "16GiB", "--tp", 2)
    left = int(80 * 2**30 * 0.92) - 8 * 2**30 - 2 * 2**30
    rank_block = 16 * 147_456 // 2
    assert found["tiers"]["G1"]["blocks"] == left // rank_block
    assert found["tiers"]["G1"]["is_estimate"]
    assert found["tiers"]["G1"]["rank_bytes"] == left // rank_block * rank_block
    assert found["tiers"]["G1"]["bytes"] == 2 * found["tiers"]["G1"]["rank_bytes"]
    assert found["notes"] == [
        "G1 is an estimate: 0.92 x 80.0 GiB of GPU memory - 16.0 GiB of weights / 2 ranks - 2.0 GiB for activations "
        "= 63.6 GiB on each rank"
    ]


def test_weights_are_read_from_the_files_of_the_model(home, model):
    assert "`--gpu` requires the size of the weights" in refused(home, model, "--gpu", "h100").stderr
    (model / "model.safetensors").write_bytes(bytes(1000))
    assert "1000 B of weights" in size(home, model, "--gpu", "h100")["notes"][0]
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 16 * 2**30}}))
    assert "16.0 GiB of weights" in size(home, model, "--gpu", "h100")["notes"][0]
    assert "no GPU memory for blocks" in refused(home, model, "--gpu", "l4", "--weights", "30GB").stderr
    assert "`--gpu` must be one of" in refused(home, model, "--gpu", "rtx").stderr
    assert "only with vLLM" in refused(home, model, "--gpu", "h100", "--engine", "sglang").stderr


def test_a_set_number_of_blocks_is_no_estimate(home, model):
    options = ("--gpu", "h100", "--weights", "16GB", "--set", "engine.arguments.num_gpu_blocks_override=100")
    found = size(home, model, *options)
    assert (found["tiers"]["G1"]["blocks"], found["tiers"]["G1"]["is_estimate"]) == (100, False)


def test_a_gpu_that_changes_the_cache(home):
    assert "8 bits by default" in refused(home, "zai-org/GLM-5", "--gpu", "b200", "--weights", "90GB").stderr
    assert len(size(home, "zai-org/GLM-5", "--gpu", "h200", "--weights", "90GB")["notes"]) == 2


def test_times_come_from_the_measurements_of_doctor(home):
    checks = [
        {"name": "allocation rate", "facts": {"bytes_per_s": 2e9}},
        {"name": "sequential", "facts": {"write_bytes_per_s": 1e9, "read_bytes_per_s": 3e9}},
    ]
    file = home / "doctor.json"
    file.write_text(json.dumps({"checks": checks}))
    found = size(home, "Qwen/Qwen3-8B", "--disk", "1TB", "--doctor", file)
    assert found["times"]["start_s"] == pytest.approx(50, rel=0.01)
    assert found["times"]["disk_fill_s"] == pytest.approx(1000, rel=0.01)
    text = kvbm_here("size", "Qwen/Qwen3-8B", "--disk", "1TB", "--doctor", str(file), home=home).stdout
    assert "filling G3 once takes 17 min, at 1.00 GB/s" in text
    file.write_text(json.dumps({"checks": []}))
    assert size(home, "Qwen/Qwen3-8B", "--doctor", file)["times"] == {"start_s": None, "disk_fill_s": None}
    for broken in ("{}", "x", '{"checks": [1]}'):
        file.write_text(broken)
        assert "is not a result of doctor" in refused(home, "Qwen/Qwen3-8B", "--doctor", file).stderr
    assert "cannot read" in refused(home, "Qwen/Qwen3-8B", "--doctor", home / "none").stderr


QWEN3_NEXT = "Qwen/Qwen3-Next-80B-A3B-Instruct"


def test_the_cost_of_a_snapshot_and_sequences_with_one_each(home):
    found = size(home, QWEN3_NEXT, "--host", "100GB", "--length", 32_768)
    slot = 13_369_344  # bytes of a block: 12 layers with 544 tokens of 2 KiB
    assert found["snapshot"] == {"state_bytes": 39_518_208, "as_tokens": 1608, "blocks": 3, "bytes": 3 * slot}
    assert found["sequence"] == {"tokens": 32_768, "blocks": 61 + 3}
    assert found["tiers"]["G2"]["blocks"] == 10**11 // slot
    assert found["tiers"]["G2"]["sequences"] == 10**11 // slot // 64
    assert not any("disables" in note for note in found["notes"])
    on_two = size(home, QWEN3_NEXT, "--tp", 2)
    assert on_two["snapshot"] == found["snapshot"]
    text = kvbm_here("size", QWEN3_NEXT, home=home).stdout
    assert "a snapshot is 37.7 MiB of states, as much as 1,608 tokens; it takes 3 blocks, 38.2 MiB\n" in text
    assert "a sequence of 32,768 tokens is 64 blocks (61 of attention, 3 of a snapshot), 816.0 MiB\n" in text
    assert size(home, "Qwen/Qwen3-8B")["snapshot"] is None


def test_g1_keeps_two_states_of_a_running_sequence_and_g2_one(home):
    found = size(home, QWEN3_NEXT, "--set", "engine.arguments.num_gpu_blocks_override=67", "--host", "900MB")
    assert found["tiers"]["G1"]["sequences"] == 1  # 61 + 2 x 3
    assert found["tiers"]["G1"]["tokens"] == 32_768
    assert found["tiers"]["G2"] == {**found["tiers"]["G2"], "blocks": 67, "sequences": 1, "tokens": 34_304}
    assert found["warnings"] == []


def test_host_memory_below_one_sequence_with_states_is_a_warning(home):
    options = ("--host", "840MB", "--set", "engine.arguments.block_size=544")
    [warning] = size(home, QWEN3_NEXT, *options)["warnings"]
    assert warning == (
        "G2 holds 62 blocks, fewer than the 64 blocks (61 of attention, 3 of a snapshot) of a sequence of 32,768 "
        "tokens, so no prompt of this length has a hit; raise `tiers.host.capacity`"
    )
    strict = kvbm_here("size", QWEN3_NEXT, *options, "--strict", home=home)
    assert (strict.exit_code, warning in strict.stderr) == (1, True)
    assert size(home, "Qwen/Qwen3-8B", "--host", "840MB")["warnings"] == []  # a part of a sequence is of use


def test_host_memory_for_a_short_length_only_is_a_warning_too(home):
    found = size(home, QWEN3_NEXT, "--host", "840MB", "--length", 2000, "--set", "engine.arguments.block_size=544")
    [warning] = found["warnings"]
    assert "of a sequence of 32,768 tokens, so no prompt of this length has a hit" in warning
    longest = size(home, QWEN3_NEXT, "--host", "14MB", "--length", 32_768)["warnings"]
    assert [one[:27] for one in longest] == ["G2 holds 1 block, fewer tha"]


def test_notes_about_snapshots(home):
    none = "a sequence of at most one block (544 tokens) has no snapshot and is never cached"
    assert none in size(home, QWEN3_NEXT, "--length", 544)["notes"]
    assert none not in size(home, QWEN3_NEXT, "--length", 545)["notes"]
    key = "prefix_cache_retention_interval"
    more = f"sizes assume one snapshot per sequence; `{key}` stores more"
    assert more in size(home, QWEN3_NEXT, "--set", f"engine.arguments.{key}=4352")["notes"]
    assert more not in size(home, QWEN3_NEXT, "--set", f"engine.arguments.{key}=0")["notes"]
    assert "a block is 1,056 tokens" in kvbm_here("size", "Qwen/Qwen3.5-35B-A3B", home=home).stdout


def test_fewer_sequences_with_states_than_asked_for_is_a_warning(home):
    users = ("--users", 10, "--turns", 8, "--turn-tokens", 1000)
    found = size(home, QWEN3_NEXT, "--host", "2GB", *users)
    assert found["needed"] == {"sequences": 10, "tokens": 80_000, "blocks": 10 * (15 + 3), "bytes": 180 * 13_369_344}
    assert found["warnings"] == ["G2 holds 8 of the 10 sequences, with one snapshot each"]
    assert size(home, QWEN3_NEXT, "--host", "3GB", *users)["warnings"] == []


def test_sizes_with_a_setting_that_disables_kvbm_are_refused_with_that_reason(home):
    for setting in ("enable_prefix_caching=false", 'speculative_config={"method": "mtp"}', "mamba_cache_mode=all"):
        stderr = refused(home, QWEN3_NEXT, "--set", f"engine.arguments.{setting}").stderr
        assert "error: kvbm is disabled with these settings, so there is no size: " in stderr
        assert f" (`{setting.partition('=')[0]}`)" in stderr
    assert "kvbm is disabled for models with KDA states" in size(home, "moonshotai/Kimi-K3")["notes"][0]


def test_settings_of_states_in_check_and_serve(home):
    key = "engine.arguments.prefix_cache_retention_interval"
    for command in (("profile", "check"), ("serve", "--dry-run", "--force", "-p")):
        plain = kvbm_here(*command, "vllm-hybrid-cpu-demo", home=home, VLLM_CPU_KVCACHE_SPACE="1")
        assert plain.exit_code == 0, plain.stderr
        assert f"`{key}` is not set, so vLLM uses 0" in plain.stdout
        assert "(8 to 15 blocks of 256 tokens; not measured)" in plain.stdout
        small = ("--set", f"{key}=300", "--set", "engine.arguments.enable_prefix_caching=false")
        warned = kvbm_here(*command, "vllm-hybrid-cpu-demo", *small[:2], home=home, VLLM_CPU_KVCACHE_SPACE="1")
        assert f"warning: `{key}: 300` is not a multiple of 256" in warned.stderr
        disabled = kvbm_here(*command, "vllm-hybrid-cpu-demo", *small[2:], home=home, VLLM_CPU_KVCACHE_SPACE="1")
        assert disabled.exit_code == 0
        assert "`engine.arguments.enable_prefix_caching`: this model keeps states, so kvbm is" in disabled.stderr
        assert "so vLLM uses 0" not in disabled.stdout
    checked = kvbm_here("profile", "check", "vllm-cpu-demo", "--json", home=home)
    assert json.loads(checked.stdout)["notes"] == []


def test_strict_check_fails_if_kvbm_is_disabled(home):
    disabled = ("--set", "engine.arguments.enable_prefix_caching=false")
    for options, exit_code in ((("--strict",), 0), (disabled, 0), ((*disabled, "--strict"), 1)):
        check = ("profile", "check", "vllm-hybrid-cpu-demo", *options)
        for form in ((), ("--json",)):
            assert kvbm_here(*check, *form, home=home, VLLM_CPU_KVCACHE_SPACE="1").exit_code == exit_code


def test_an_interval_with_which_an_installed_vllm_does_not_start_is_a_mistake(home, monkeypatch):
    monkeypatch.setattr("kvbm_cli.profile.state_check.installation_of", lambda profile: object())
    setting = "engine.arguments.prefix_cache_retention_interval=300"
    outcome = kvbm_here("profile", "check", "vllm-hybrid-cpu-demo", "--set", setting, home=home)
    assert outcome.exit_code == 2
    assert outcome.stderr.startswith(f"error: `{setting.replace('=', ': ')}` is not a multiple of the block size of ")
    assert f"\n  --set {setting}\n" in outcome.stderr


SMALL = ("--set", "tiers.host.blocks=4096", "--set", "engine.arguments.num_blocks=8192")
WARNING = "G2 holds 65,536 tokens, fewer than the 131,072 of G1, so it adds little"


@pytest.mark.parametrize(
    "command",
    [("size", "-p", "demo"), ("profile", "check", "demo"), ("serve", "-p", "demo", "--dry-run")],
    ids=["size", "check", "serve"],
)
def test_a_tier_smaller_than_the_one_above_it_is_a_warning_and_an_error_if_strict(home, command):
    warned = kvbm_here(*command, *SMALL, home=home)
    assert (warned.exit_code, WARNING in warned.stderr) == (0, True)
    strict = kvbm_here(*command, *SMALL, "--strict", home=home)
    assert (strict.exit_code, WARNING in strict.stderr) == (1, True)
    enough = kvbm_here(*command, "--set", "tiers.host.blocks=8192", *SMALL[2:], "--strict", home=home)
    assert (enough.exit_code, "adds little" in enough.stderr) == (0, False)


def test_serve_refuses_with_strict_before_it_starts_anything(home):
    refusal = kvbm_here("serve", "-p", "demo", *SMALL, "--strict", home=home)
    assert refusal.exit_code == 1
    assert refusal.stderr.startswith(f"error: {WARNING}")


def test_the_buffer_of_a_disk_tier_without_a_host_tier_is_no_tier(home):
    profile = home / "disk.yaml"
    profile.write_text(
        "engine: {model: 'synthetic:tiny', arguments: {num_blocks: 8192}}\n"
        "tiers: {disk: {directory: /tmp, blocks: 16384}}\n"
    )
    assert size(home, "-p", profile)["warnings"] == []


SERVED_PROFILE = f"""\
engine:
  kind: vllm
  model: ./model
  python: {FAKE_ENGINE.with_name("fake_vllm.py")}
  arguments: {{max_model_len: 4096, num_gpu_blocks_override: 40}}
tiers:
  host: {{capacity: 2GiB}}
server: {{port: 0}}
"""
CONNECTOR = "(Worker pid=7) INFO 11-22 [w.py:9] kvbm: rank 0 allocated {} blocks of {} bytes in host memory (2.13 GB)"
ENGINE = "(EngineCore pid=6) INFO 11-22 [k.py:1] GPU KV cache size: {} tokens"
AS_COMPUTED = "\n".join((CONNECTOR.format(113, 18_874_368), ENGINE.format("5,120")))
OTHERS = "\n".join((CONNECTOR.format(226, 9_437_184), ENGINE.format("4,992")))
DIFFERENT = (
    "warning: the engine reports sizes that differ from the computed ones: 9,437,184 bytes in a block, not 18,874,368; "
    "226 blocks in G2, not 113; 4,992 tokens in G1, not 5,120"
)


@pytest.fixture
def served_home(tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "mine.yaml").write_text(SERVED_PROFILE)
    return tmp_path


@pytest.mark.parametrize(("says", "expected"), [("", ""), (AS_COMPUTED, ""), (OTHERS, DIFFERENT)])
def test_a_difference_is_one_line(served_home, says, expected):
    with serving(served_home, "--set", f"engine.environment.FAKE_SAYS={json.dumps(says)}") as program:
        program.code_after(signal.SIGTERM)
        lines = program.stderr.read().splitlines()
    assert [line for line in lines if "the engine reports sizes" in line] == ([expected] if expected else [])


def test_the_last_engine_in_a_log_counts():
    assert ReportedSizes.of(f"{OTHERS}\n{AS_COMPUTED}") == ReportedSizes(18_874_368, 113, 5120)
    assert ReportedSizes.of("") == ReportedSizes(None, None, None)


def test_the_largest_block_and_the_fewest_blocks_of_all_ranks_count():
    ranks = (CONNECTOR.format(100, 4096), CONNECTOR.format(90, 8192).replace("rank 0", "rank 1"))
    assert ReportedSizes.of("\n".join(ranks)) == ReportedSizes(8192, 90, None)


def test_unknown_sizes_are_not_compared(tmp_path):
    log = tmp_path / "log"
    log.write_text(OTHERS)
    assert difference_text(ValueError("unknown"), [log]) is None


DEEPSEEK = """\
engine:
  kind: vllm
  model: deepseek-ai/DeepSeek-V3
  arguments:
    {more}
  environment:
    VLLM_CPU_KVCACHE_SPACE: 4
tiers:
  host:
    blocks: 100
"""


@pytest.fixture(params=["amx_tile", "avx2"])
def block_tokens(request, tmp_path, monkeypatch):
    """The tokens in a block on a CPU with this flag."""
    monkeypatch.setattr(machine, "CPU_FACTS", tmp_path / "cpuinfo")
    machine.CPU_FACTS.write_text(f"processor\t: 0\nflags\t\t: fpu {request.param}\n")
    return 128 if request.param == "amx_tile" else 16


def told(home: Path, *arguments: str, more: str = "max_model_len: 4096") -> Outcome:
    (home / "p.yaml").write_text(DEEPSEEK.format(more=more))
    return kvbm_here(*arguments, home=home)


def data(home: Path, *arguments: str) -> Any:
    outcome = told(home, *arguments, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    return json.loads(outcome.stdout)


def test_the_commands_name_the_backend_and_its_block(tmp_path, block_tokens):
    backend = "AMX_MLA" if block_tokens == 128 else "CPU_MLA"
    said = "this CPU has AMX, so vLLM" if block_tokens == 128 else "on this CPU, which has no AMX"
    found = data(tmp_path, "size", "--profile", "p.yaml")
    assert (found["block"]["tokens"], found["attention_backend"]) == (block_tokens, backend)
    assert any(said in note for note in found["notes"])
    assert f"a block is {block_tokens} tokens" in told(tmp_path, "size", "--profile", "p.yaml").stdout
    checked = data(tmp_path, "profile", "check", "p.yaml")
    assert any(said in note and backend in note for note in checked["notes"])
    planned = told(tmp_path, "serve", "--profile", "p.yaml", "--dry-run").stdout
    assert f"a block is {block_tokens} tokens" in planned
    assert said in planned
    assert data(tmp_path, "serve", "--profile", "p.yaml", "--dry-run")["attention_backend"] == backend


def test_weights_of_32_bits_are_refused_before_the_start_where_vllm_refuses_them(tmp_path, block_tokens):
    outcome = told(tmp_path, "serve", "--profile", "p.yaml", "--dry-run", more="dtype: float32")
    assert outcome.exit_code == (2 if block_tokens == 128 else 0)
    if block_tokens == 128:
        assert "p.yaml:5:12" in outcome.stderr
        assert "AMX_MLA" in outcome.stderr
