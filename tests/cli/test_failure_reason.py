"""Why an engine ended, read from its last words, its exit code and the kernel's counter."""

import pytest

from kvbm_cli.engine import failure_reason
from kvbm_cli.engine.engine_log import EngineLog
from kvbm_cli.engine.failure_reason import failure_reason_of, oom_kills

WORDS = {
    "OSError: [Errno 98] Address already in use": "its port is in use",
    "RuntimeError: No space left on device": "a disk is full",
    "OSError: [Errno 122] Disk quota exceeded": "a disk quota is exceeded",
    "(EngineCore pid=7) ERROR 11-21 18:03:38 [core.py:3] torch.OutOfMemoryError: CUDA out of memory. Tried": (
        "out of GPU memory"
    ),
    "ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU memory utilization": (
        "another program uses the GPU's memory"
    ),
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`": (
        "G1 is too small for one request of the maximum length"
    ),
    "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory": "out of memory",
    "ModuleNotFoundError: No module named 'nixl'": "its Python has no module `nixl`",
    "ImportError: libcudart.so.13: cannot open shared object file": (
        "a library cannot be imported: libcudart.so.13: cannot open shared object file"
    ),
    "huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error": "the model was not found",
    "OSError: We couldn't connect to 'https://huggingface.co' to load the files": (
        "the model is not on this machine, and Hugging Face is not reachable"
    ),
    "api_server.py: error: unrecognized arguments: --colour red": "unknown arguments: --colour red",
    "api_server.py: error: argument --dtype: invalid choice: 'float7'": "--dtype: invalid choice: 'float7'",
    "PermissionError: [Errno 13] Permission denied: '/data/model'": "no permission to use `/data/model`",
}


@pytest.mark.parametrize("line", WORDS)
def test_last_words_tell(line):
    lines = ["loading the weights", line, "RuntimeError: Engine core initialization failed. See root cause above."]
    reason = failure_reason_of(lines, 1)
    assert reason.text == WORDS[line]


USAGE = """\
usage: api_server.py [-h] [--headless] [--api-server-count API_SERVER_COUNT]
                     [--log-level {CRITICAL,ERROR,WARNING,INFO,DEBUG,NOTSET}]
                     [--max-model-len MAX_MODEL_LEN] [--dtype {auto,half}]
                     [model_tag]
"""
OF_CLICK = "Usage: trtllm-serve serve [OPTIONS] MODEL\nTry 'trtllm-serve serve --help' for help.\n\n"
PYDANTIC = "pydantic_core._pydantic_core.ValidationError:"
TOO_SMALL = "Input should be greater than or equal to 1"
# Last lines of an engine, as vLLM 0.32 and TensorRT-LLM write them: the reason, and its hint.
REFUSALS = {
    "an unknown flag": (
        f"{USAGE}api_server.py: error: unrecognized arguments: --max-model-lenn",
        "unknown arguments: --max-model-lenn",
        "change `engine.arguments.max_model_lenn`: did you mean `max_model_len`?",
    ),
    "an unknown flag like no other": (
        f"{USAGE}api_server.py: error: unrecognized arguments: --colour red",
        "unknown arguments: --colour red",
        "remove `engine.arguments.colour`: the engine has no such flag",
    ),
    "a wrong value": (
        f"{USAGE}api_server.py: error: argument --dtype: invalid choice: 'fp9' (choose from 'auto', 'half')",
        "--dtype: invalid choice: 'fp9' (choose from 'auto', 'half')",
        "check `engine.arguments.dtype`",
    ),
    "a wrong value of a flag with two names": (
        f"{USAGE}api_server.py: error: argument --gpu-memory-utilization/--share: invalid float value: '9%'",
        "--gpu-memory-utilization/--share: invalid float value: '9%'",
        "check `engine.arguments.gpu_memory_utilization`",
    ),
    "a flag whose JSON is wrong": (
        f"{USAGE}api_server.py: error: argument --compilation-config/-cc: 1 validation error for CompilationConfig\n"
        "  Invalid JSON: key must be a string at line 1 [type=json_invalid, input_value='{bad', input_type=str]\n"
        "    For further information visit https://errors.pydantic.dev/2.14/v/json_invalid",
        "--compilation-config/-cc: Invalid JSON: key must be a string at line 1",
        "check `engine.arguments.compilation_config`",
    ),
    "values that a configuration refuses": (
        f"{PYDANTIC} 2 validation errors for SchedulerConfig\n"
        f"max_num_batched_tokens\n  {TOO_SMALL} [type=greater_than_equal, input_value=-5, input_type=int]\n"
        "    For further information visit https://errors.pydantic.dev/2.14/v/greater_than_equal\n"
        f"max_num_seqs\n  {TOO_SMALL} [type=greater_than_equal, input_value=-1, input_type=int]\n"
        "    For further information visit https://errors.pydantic.dev/2.14/v/greater_than_equal",
        f"`max_num_batched_tokens`: {TOO_SMALL}, not `-5`; `max_num_seqs`: {TOO_SMALL}, not `-1`",
        "check `engine.arguments.max_num_batched_tokens`",
    ),
    "a value without a field": (
        f"{PYDANTIC} 1 validation error for ModelConfig\n  Value error, Unknown quantization method: foo. "
        "[type=value_error, input_value=ArgsKwargs((), {'model': 'm'}), input_type=ArgsKwargs]",
        "Unknown quantization method: foo.",
        "check `engine.arguments`: its keys are flags of the engine",
    ),
    "an option that click does not know": (
        f"{OF_CLICK}Error: No such option: --max_seqlen (Possible options: --max_batch_size, --max_seq_len)",
        "unknown arguments: --max_seqlen",
        "change `engine.arguments.max_seqlen`: did you mean `max_seq_len`?",
    ),
    "a value that click refuses": (
        f"{OF_CLICK}Error: Invalid value for '--max_batch_size': 'many' is not a valid integer.",
        "Invalid value for '--max_batch_size': 'many' is not a valid integer.",
        "check `engine.arguments.max_batch_size`",
    ),
    "an option of a file that TensorRT-LLM does not know": (
        f"{PYDANTIC} 1 validation error for TorchLlmArgs\nkv_cache_config.free_memory\n"
        "  Extra inputs are not permitted [type=extra_forbidden, input_value=0.5, input_type=float]",
        "`kv_cache_config.free_memory`: Extra inputs are not permitted, not `0.5`",
        "check `engine.arguments.kv_cache_config.free_memory`",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refused_flag_is_named_and_the_usage_is_not_shown(case, tmp_path):
    text, reason, hint = REFUSALS[case]
    log = tmp_path / "engine.log"
    log.write_text(f"INFO loading\n{text}\n")
    found = failure_reason_of(EngineLog(log, 0).lines(), 2)
    assert found == failure_reason.FailureReason(reason, hint)
    tail = EngineLog(log, 0).tail()
    assert "usage" not in tail.lower()
    assert "{CRITICAL" not in tail
    assert text.splitlines()[-1] in tail


def test_the_first_exception_before_the_last_lines_is_shown_rather_than_its_announcement(tmp_path):
    log = tmp_path / "engine.log"
    prefix = "(VllmWorker-0 pid=7) ERROR 11-26 15:21:32 [multiproc_executor.py:953]"
    later = "\n".join(f"  File {number}" for number in range(20))
    log.write_text(f"{prefix} WorkerProc failed to start.\n{prefix} ValueError: no head of 17\n{later}\n")
    assert EngineLog(log, 0).tail().endswith(f"{prefix} ValueError: no head of 17")


def test_own_error_comes_with_its_hint():
    reason = failure_reason_of(["error: no room: 3 of 5 GiB", "  caused by: x", "", "hint: lower it"], 1)
    assert reason == failure_reason.FailureReason("no room: 3 of 5 GiB", "lower it")


def test_the_latest_word_counts():
    reason = failure_reason_of(["MemoryError", "OSError: [Errno 28] No space left on device"], 1)
    assert reason.text == "a disk is full"


@pytest.mark.parametrize(
    ("code", "text"), [(137, "killed by SIGKILL, by a user or by the kernel's OOM killer"), (139, "killed by SIGSEGV")]
)
def test_signal_is_a_reason(code, text):
    reason = failure_reason_of(["loading"], code)
    assert reason.text == text


@pytest.mark.parametrize("code", [0, 1, 9, 128, 255])
def test_nothing_is_made_up(code):
    assert failure_reason_of(["loading the weights", "ImportError may be ignored here"], code) is None


def test_kill_for_want_of_memory_is_known_by_the_kernels_counter(tmp_path, monkeypatch):
    monkeypatch.setattr(failure_reason, "VMSTAT", tmp_path / "vmstat")
    assert oom_kills() == 0
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 3\n")
    assert oom_kills() == 3
    reason = failure_reason_of(["MemoryError"], 1, oom_kill_count=1)
    assert reason.text == "out of memory: the kernel's OOM killer killed a process"
    assert failure_reason_of([], 0, oom_kill_count=1) is None
