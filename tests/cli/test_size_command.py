"""Inputs and outputs of `kvbm size`, and the order of the tiers in `size`, `profile check` and `serve`."""

import json
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from model_configs import write_model
from terminal import FAKE_ENGINE, Outcome, assert_entry, kvbm_here
from test_serve import serving

from kvbm.identity import machine
from kvbm_cli.serve.reported_sizes import ReportedSizes, difference_text

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 65536,
}
FP8 = {"quantization_config": {"quant_method": "fp8"}}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
RATES = [
    {"name": "allocation rate", "facts": {"bytes_per_s": 2e9}},
    {"name": "sequential", "facts": {"write_bytes_per_s": 1e9, "read_bytes_per_s": 3e9}},
]
# Text, bytes, or what becomes JSON.
FILES: dict[str, object] = {
    "llama/config.json": LLAMA,
    "llama.json": LLAMA,
    "list.json": [],
    "modelopt/config.json": LLAMA,
    "modelopt/hf_quant_config.json": MODELOPT,
    "both/config.json": {**LLAMA, **FP8},
    "both/hf_quant_config.json": MODELOPT,
    "float32/config.json": {**LLAMA, "dtype": "float32"},
    "fp8/config.json": {**LLAMA, **FP8},
    "fp8-inside/config.json": {"text_config": FP8, **LLAMA},
    "weights/config.json": LLAMA,
    "weights/model.safetensors": bytes(1000),
    "index/config.json": LLAMA,
    "index/model.safetensors": bytes(1000),
    "index/model.safetensors.index.json": {"metadata": {"total_size": 16 * 2**30}},
    "doctor.json": {"checks": RATES},
    "doctor-without-rates.json": {"checks": []},
    "doctor-without-checks.json": {},
    "doctor-of-nothing.json": "x",
    "doctor-of-numbers.json": {"checks": [1]},
    "disk.yaml": "engine: {model: 'synthetic:tiny', arguments: {num_blocks: 8192}}\n"
    "tiers: {disk: {directory: /tmp, blocks: 16384}}\n",
}
MIMO, QWEN, NEXT = "XiaomiMiMo/MiMo-V2-Flash", "Qwen/Qwen3-8B", "Qwen/Qwen3-Next-80B-A3B-Instruct"
SET = "--set engine.arguments"
SMALL = "--set tiers.host.blocks=4096 --set engine.arguments.num_blocks=8192"
EQUAL = SMALL.replace("4096", "8192")
CASES = {
    "a block of Llama 3 8B is 2 MiB": "./llama --block-size 16",
    "a block of the model in this file": "./llama/config.json --block-size 16",
    "a block of the model of this name": "meta-llama/Meta-Llama-3-8B --block-size 16",
    "a configuration in a file of another name": "./llama.json",
    "a file that is no configuration": "./list.json",
    "quantization in a file of its own": "./modelopt",
    "quantization in the configuration too": "./both",
    "a block of vLLM": "./llama --engine vllm",
    "a block of SGLang": "./llama --engine sglang --tp 4",
    "a page of SGLang with 8 bits": "./llama --engine sglang --block-size 64 --kv-cache-dtype fp8_e4m3",
    "a block of TensorRT-LLM": "./llama --engine tensorrt-llm --tp 2",
    "a larger block of TensorRT-LLM with 8 bits": (
        "./llama --engine tensorrt-llm --block-size 64 --kv-cache-dtype fp8"
    ),
    "a block of no engine": "./llama --engine llama.cpp",
    "TensorRT-LLM has no layouts": "./llama --engine tensorrt-llm --layout BLHNC",
    "TensorRT-LLM and 32 bits": "./float32 --engine tensorrt-llm",
    "SGLang and a quantized checkpoint": "./fp8 --engine sglang",
    "TensorRT-LLM and a quantized checkpoint": "./fp8 --engine tensorrt-llm",
    "SGLang and a checkpoint with quantized text": "./fp8-inside --engine sglang",
    "TensorRT-LLM and a checkpoint with quantized text": "./fp8-inside --engine tensorrt-llm",
    "only SGLang knows sliding windows": "google/gemma-3-27b-it --engine sglang",
    "only SGLang knows states": f"{NEXT} --engine sglang",
    "only SGLang knows a quantized checkpoint": "nvidia/Kimi-K2.6-NVFP4 --engine sglang",
    "only SGLang knows pipeline stages": f"{QWEN} --engine sglang --pp 2",
    "only SGLang knows its arguments": f"{QWEN} --engine sglang {SET}.swap_space=4",
    "only SGLang knows its types": f"{QWEN} --engine sglang --kv-cache-dtype int8",
    "sequences of a given and of the maximum length": "./llama --host 100GB --length 1000",
    "lengths in JSON": "./llama --length 1000 --json",
    "groups of layers": MIMO,
    "groups of layers in another layout": f"{MIMO} --layout blhnc",
    "an unknown layout": f"{QWEN} --layout NHD",
    "an estimate of G1": f"{QWEN} --gpu-memory 80GiB --weights 16GiB --tp 2 --json",
    "weights that are not there": "./llama --gpu h100",
    "weights in a file": "./weights --gpu h100",
    "weights in an index": "./index --gpu h100",
    "weights that fill the GPU": "./llama --gpu l4 --weights 30GB",
    "an unknown GPU": "./llama --gpu rtx",
    "a GPU for SGLang": "./llama --gpu h100 --engine sglang",
    "a set number of blocks is no estimate": (
        f"./llama --gpu h100 --weights 16GB {SET}.num_gpu_blocks_override=100 --json"
    ),
    "a GPU that changes the cache": "zai-org/GLM-5 --gpu b200 --weights 90GB",
    "a GPU that does not change the cache": "zai-org/GLM-5 --gpu h200 --weights 90GB",
    "times from the measurements of doctor": f"{QWEN} --disk 1TB --doctor doctor.json",
    "times in JSON": f"{QWEN} --disk 1TB --doctor doctor.json --json",
    "doctor without rates": f"{QWEN} --doctor doctor-without-rates.json --json",
    "doctor without checks": f"{QWEN} --doctor doctor-without-checks.json",
    "doctor of nothing": f"{QWEN} --doctor doctor-of-nothing.json",
    "doctor of numbers": f"{QWEN} --doctor doctor-of-numbers.json",
    "doctor that is missing": f"{QWEN} --doctor none",
    "the cost of a snapshot": NEXT,
    "the cost of a snapshot in JSON": f"{NEXT} --host 100GB --length 32768 --json",
    "a snapshot on two ranks": f"{NEXT} --tp 2 --json",
    "G1 keeps two snapshots of a running sequence and G2 one": (
        f"{NEXT} {SET}.num_gpu_blocks_override=67 --host 900MB --json"
    ),
    "host memory below one sequence with a snapshot": f"{NEXT} --host 840MB {SET}.block_size=544",
    "host memory below one sequence with a snapshot is refused if strict": (
        f"{NEXT} --host 840MB {SET}.block_size=544 --strict"
    ),
    "host memory for a part of a sequence without snapshots": f"{QWEN} --host 840MB",
    "host memory for a snapshot of a short length only": f"{NEXT} --host 840MB --length 2000 {SET}.block_size=544",
    "host memory below one snapshot": f"{NEXT} --host 14MB --length 32768",
    "a length that has no snapshot": f"{NEXT} --length 544",
    "a length that has a snapshot": f"{NEXT} --length 545",
    "an interval that stores more snapshots": f"{NEXT} {SET}.prefix_cache_retention_interval=4352",
    "an interval that stores no more snapshots": f"{NEXT} {SET}.prefix_cache_retention_interval=0",
    "blocks of another hybrid": "Qwen/Qwen3.5-35B-A3B",
    "fewer sequences with a snapshot than asked for": (
        f"{NEXT} --host 2GB --users 10 --turns 8 --turn-tokens 1000 --json"
    ),
    "as many sequences with a snapshot as asked for": f"{NEXT} --host 3GB --users 10 --turns 8 --turn-tokens 1000",
    "kvbm is disabled without prefix caching": f"{NEXT} {SET}.enable_prefix_caching=false",
    "kvbm is disabled with speculation": f'{NEXT} --set \'engine.arguments.speculative_config={{"method": "mtp"}}\'',
    "kvbm is disabled with all states": f"{NEXT} {SET}.mamba_cache_mode=all",
    "kvbm is disabled for other states": "moonshotai/Kimi-K3",
    "a tier smaller than the one above": f"-p demo {SMALL}",
    "a tier smaller than the one above is refused if strict": f"-p demo {SMALL} --strict",
    "the buffer of a disk tier without a host tier is no tier": "-p disk.yaml",
}


@pytest.fixture
def home(tmp_path):
    return tmp_path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    for name, content in FILES.items():
        (home / name).parent.mkdir(exist_ok=True)
        data = content if isinstance(content, str | bytes) else json.dumps(content)
        (home / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return home


@pytest.mark.parametrize("name", CASES)
def test_size(models, name):
    text = kvbm_here("size", *shlex.split(CASES[name]), home=models).text(f"kvbm size {CASES[name]}")
    assert_entry("size_cases", name, text, names=CASES)


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


WARNING = "G2 holds 65,536 tokens, fewer than the 131,072 of G1, so it adds little"


@pytest.mark.parametrize("command", ["size -p demo", "profile check demo", "serve -p demo --dry-run"])
def test_a_tier_smaller_than_the_one_above_it_is_a_warning_and_an_error_if_strict(home, command):
    for options, exit_code, is_warned in (
        (SMALL, 0, True),
        (f"{SMALL} --strict", 1, True),
        (f"{EQUAL} --strict", 0, False),
    ):
        outcome = kvbm_here(*command.split(), *options.split(), home=home)
        assert (outcome.exit_code, WARNING in outcome.stderr) == (exit_code, is_warned)


def test_serve_refuses_with_strict_before_it_starts_anything(home):
    refusal = kvbm_here("serve", "-p", "demo", *SMALL.split(), "--strict", home=home)
    assert (refusal.exit_code, refusal.stderr.startswith(f"error: {WARNING}")) == (1, True)


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
