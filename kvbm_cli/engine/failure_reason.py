"""FailureReason: why an engine exited or did not start, from its exit code, the kernel's counters and its log.

The error also shows the last lines of the log. A reason is given only if it is certain. The embedded engine prints
`error:` and `hint:` itself.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvbm.engines.vllm.versions import INSTALL_FOR_CPU
from kvbm_cli.engine.refused_flag import refusal

VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True)
class FailureReason:
    text: str
    hint: str | None = None


def oom_kills() -> int:
    """Return how many processes the kernel's OOM killer has killed since boot, 0 if unknown."""
    try:
        found = re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def failure_reason_of(lines: Sequence[str], exit_code: int, *, oom_kill_count: int = 0) -> FailureReason | None:
    """Return the reason, None if it is not certain. `lines` are the last ones of the log, `oom_kill_count` counts OOM
    kills during the run."""
    if oom_kill_count and exit_code != 0:
        return FailureReason("out of memory: the kernel's OOM killer killed a process", LESS_MEMORY)
    if (own := _own_error(lines)) is not None:
        return own
    if (refused := refusal(lines)) is not None:
        return FailureReason(*refused)
    return _known(lines) or _signal(exit_code)


LESS_MEMORY = "lower `tiers.host.capacity`; `kvbm status` lists the running engines"
_HINT = re.compile(r"^hint: (.+)")
_OWN = re.compile(r"^error: (.+)")


def _own_error(lines: Sequence[str]) -> FailureReason | None:
    """Return the last `error:` of the embedded engine with its `hint:`."""
    for index in range(len(lines) - 1, -1, -1):
        if found := _OWN.match(lines[index]):
            hints = filter(None, map(_HINT.match, lines[index + 1 :]))
            return FailureReason(found[1], next((hint[1] for hint in hints), None))
    return None


class _Pattern(NamedTuple):
    """`{0}` in the text is the first group of the pattern."""

    pattern: str
    text: str
    hint: str | None = None


_PATTERNS = (
    _Pattern(r"Address already in use|EADDRINUSE", "its port is in use", "choose a free port with `--port 0`"),
    _Pattern(r"No space left on device|\[Errno 28\]", "a disk is full", "check `df -h` and `tiers.disk.directory`"),
    _Pattern(
        r"Disk quota exceeded|\[Errno 122\]", "a disk quota is exceeded", "check `quota -s` and `tiers.disk.directory`"
    ),
    _Pattern(
        r"(?:CUDA|HIP) out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA error: out of memory",
        "out of GPU memory",
        "lower `engine.arguments.gpu_memory_utilization` or `max_model_len`, with TensorRT-LLM "
        "`kv_cache_config.free_gpu_memory_fraction` or `max_seq_len`; `nvidia-smi` lists other users of the GPU",
    ),
    _Pattern(
        r"Free memory on device.*is less than desired GPU memory utilization",
        "another program uses the GPU's memory",
        "check `nvidia-smi`, or lower `engine.arguments.gpu_memory_utilization`",
    ),
    _Pattern(
        r"Available memory on node.*is less than desired CPU memory utilization",
        "the machine has less free memory than the engine reserves for G1",
        "lower `engine.arguments.gpu_memory_utilization`, or set `VLLM_CPU_KVCACHE_SPACE` in `engine.environment`",
    ),
    _Pattern(
        r"No available memory for the cache blocks|larger than the available KV cache memory"
        r"|larger than the maximum number of tokens",
        "G1 is too small for one request of the maximum length",
        "lower `engine.arguments.max_model_len`, or give G1 more memory",
    ),
    _Pattern(
        r"[Cc]annot allocate memory|can't allocate memory|std::bad_alloc|MemoryError", "out of memory", LESS_MEMORY
    ),
    _Pattern(
        r"ModuleNotFoundError: No module named '([^']+)'",
        "its Python has no module `{0}`",
        "install it there, or set `engine.python` to another interpreter",
    ),
    _Pattern(
        r"(?:^|\] ?)ImportError: (.+)",
        "a library cannot be imported: {0}",
        "check the interpreter in `engine.python`",
    ),
    _Pattern(
        r"GatedRepoError|Cannot access gated repo",
        "the model requires accepting its licence on Hugging Face",
        "accept it there, then run `hf auth login`",
    ),
    _Pattern(
        r"Repository Not Found|RepositoryNotFoundError|is not a local folder and is not a valid model identifier",
        "the model was not found",
        "set `engine.model` to a local directory or a name on Hugging Face",
    ),
    _Pattern(
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|We couldn't connect to|couldn't find them in the cached files",
        "the model is not on this machine, and Hugging Face is not reachable",
        "set `engine.model` to a local directory",
    ),
    _Pattern(
        r"Model architectures \[?'?([\w]+)'?\]? .*not supported", "the engine does not support the architecture `{0}`"
    ),
    _Pattern(r"PermissionError: .*: '([^']+)'", "no permission to use `{0}`", "check its owner with `ls -ld`"),
)


def _known(lines: Sequence[str]) -> FailureReason | None:
    """Return the reason of the last line that matches a pattern of the table."""
    for line in reversed(lines):
        for known in _PATTERNS:
            if found := re.search(known.pattern, line):
                return FailureReason(known.text.format(*found.groups("")), known.hint)
    return None


_DMESG = "check the kernel's messages with `dmesg | tail`"
_SIGNALS = {
    signal.SIGKILL: FailureReason("killed by SIGKILL, by a user or by the kernel's OOM killer", _DMESG),
    signal.SIGBUS: FailureReason(
        "killed by SIGBUS: a mapped page was not available, for example because /dev/shm is full", _DMESG
    ),
    signal.SIGILL: FailureReason(
        "killed by SIGILL: a library uses instructions that this CPU does not have",
        "for vLLM on a CPU, run `pip uninstall vllm` in its environment, then "
        f"`{INSTALL_FOR_CPU} --force-reinstall --no-deps`",
    ),
}


def _signal(exit_code: int) -> FailureReason | None:
    try:
        number = signal.Signals(exit_code - 128)
    except ValueError:
        return None
    return _SIGNALS.get(number, FailureReason(f"killed by {number.name}"))
