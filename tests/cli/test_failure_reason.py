"""Why an engine ended, read from its last words, its exit code and the kernel's counter."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbm_cli.engine import failure_reason
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
def test_last_words_tell(line: str) -> None:
    lines = ["loading the weights", line, "RuntimeError: Engine core initialization failed. See root cause above."]
    reason = failure_reason_of(lines, 1)
    assert reason is not None
    assert reason.text == WORDS[line]


def test_own_error_comes_with_its_hint() -> None:
    reason = failure_reason_of(["error: no room: 3 of 5 GiB", "  caused by: x", "", "hint: lower it"], 1)
    assert reason == failure_reason.FailureReason("no room: 3 of 5 GiB", "lower it")


def test_the_latest_word_counts() -> None:
    reason = failure_reason_of(["MemoryError", "OSError: [Errno 28] No space left on device"], 1)
    assert reason is not None
    assert reason.text == "a disk is full"


@pytest.mark.parametrize(
    ("code", "text"),
    [(137, "killed by SIGKILL, by a user or by the kernel's OOM killer"), (139, "killed by SIGSEGV")],
)
def test_signal_is_a_reason(code: int, text: str) -> None:
    reason = failure_reason_of(["loading"], code)
    assert reason is not None
    assert reason.text == text


@pytest.mark.parametrize("code", [0, 1, 9, 128, 255])
def test_nothing_is_made_up(code: int) -> None:
    assert failure_reason_of(["loading the weights", "ImportError may be ignored here"], code) is None


def test_kill_for_want_of_memory_is_known_by_the_kernels_counter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_reason, "VMSTAT", tmp_path / "vmstat")
    assert oom_kills() == 0
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 3\n")
    assert oom_kills() == 3
    reason = failure_reason_of(["MemoryError"], 1, oom_kill_count=1)
    assert reason is not None
    assert reason.text == "out of memory: the kernel's OOM killer killed a process"
    assert failure_reason_of([], 0, oom_kill_count=1) is None
