"""Why an engine ended or did not start, in a few words: from its exit code, the kernel's counters and its own log.

The engine's own words are always shown beside it; a reason is given only where one of them is certain. Our embedded
engine says `error:` and `hint:` itself.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True)
class Reason:
    text: str
    hint: str | None = None


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since it was started; 0 where it does not count."""
    try:
        found = re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def reason_of(lines: Sequence[str], exit_code: int, *, oom_kill_count: int = 0) -> Reason | None:
    """`lines` are the last ones of the log, `oom_kill_count` is how many the kernel killed in the engine's time."""
    if oom_kill_count and exit_code != 0:
        return Reason("the kernel's OOM killer ended a process: memory ran out", LESS_MEMORY)
    return _own_words(lines) or _known(lines) or _signal(exit_code)


LESS_MEMORY = "`tiers.host.capacity` is the memory for blocks; `kvbm status` shows what else runs"
_HINT = re.compile(r"^hint: (.+)")
_OWN = re.compile(r"^error: (.+)")


def _own_words(lines: Sequence[str]) -> Reason | None:
    """The last `error:` of our own engine, with its `hint:`."""
    for index in range(len(lines) - 1, -1, -1):
        if found := _OWN.match(lines[index]):
            hints = filter(None, map(_HINT.match, lines[index + 1 :]))
            return Reason(found[1], next((hint[1] for hint in hints), None))
    return None


@dataclass(frozen=True, slots=True)
class _Sign:
    pattern: re.Pattern[str]
    text: Callable[[re.Match[str]], str]
    hint: str | None = None


def _sign(pattern: str, text: str, hint: str | None = None) -> _Sign:
    return _Sign(re.compile(pattern), lambda found: text.format(*(group or "" for group in found.groups())), hint)


_SIGNS = (
    _sign(r"Address already in use|EADDRINUSE", "its port is taken", "`--port 0` chooses a free one"),
    _sign(r"No space left on device|\[Errno 28\]", "a disk is full", "`df -h`, and `tiers.disk.directory`"),
    _sign(r"Disk quota exceeded|\[Errno 122\]", "a disk quota is used up", "`quota -s`, and `tiers.disk.directory`"),
    _sign(
        r"(?:CUDA|HIP) out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA error: out of memory",
        "the GPU's memory ran out",
        "lower `engine.arguments.gpu_memory_utilization` or `max_model_len`; `nvidia-smi` shows who else uses it",
    ),
    _sign(
        r"Free memory on device.*is less than desired GPU memory utilization",
        "another program uses the GPU's memory",
        "`nvidia-smi`, or lower `engine.arguments.gpu_memory_utilization`",
    ),
    _sign(
        r"No available memory for the cache blocks|larger than the available KV cache memory"
        r"|larger than the maximum number of tokens",
        "G1 has too little memory for one request of the greatest length",
        "lower `engine.arguments.max_model_len`, or give G1 more",
    ),
    _sign(r"[Cc]annot allocate memory|can't allocate memory|std::bad_alloc|MemoryError", "memory ran out", LESS_MEMORY),
    _sign(
        r"ModuleNotFoundError: No module named '([^']+)'",
        "its interpreter has no module `{0}`",
        "install it there, or set `engine.python` to another interpreter",
    ),
    _sign(
        r"(?:^|\] ?)ImportError: (.+)",
        "a library cannot be imported: {0}",
        "`engine.python` is the interpreter that was used",
    ),
    _sign(
        r"GatedRepoError|Cannot access gated repo", "the model has a licence to accept on its hub", "`hf auth login`"
    ),
    _sign(
        r"Repository Not Found|RepositoryNotFoundError|is not a local folder and is not a valid model identifier",
        "no such model was found",
        "`engine.model` is a local directory or a name on the hub",
    ),
    _sign(
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|We couldn't connect to|couldn't find them in the cached files",
        "the model is not on this machine, and its hub was not reached",
        "set `engine.model` to a local directory",
    ),
    _sign(
        r"Model architectures \[?'?([\w]+)'?\]? .*not supported", "the engine does not know models of the kind `{0}`"
    ),
    _sign(
        r"error: unrecognized arguments: (.+)",
        "it does not know {0}",
        "keys of `engine.arguments` are flags of the engine",
    ),
    _sign(r"error: argument (\S+): (.+)", "{0}: {1}", "keys of `engine.arguments` are flags of the engine"),
    _sign(r"PermissionError: .*: '([^']+)'", "`{0}` may not be used by this user", "`ls -ld` shows whose it is"),
)


def _known(lines: Sequence[str]) -> Reason | None:
    """What the latest line tells that has a sign of the table."""
    for line in reversed(lines):
        for sign in _SIGNS:
            if found := sign.pattern.search(line):
                return Reason(sign.text(found), sign.hint)
    return None


_SIGNALS = {
    signal.SIGKILL: "killed by SIGKILL: by somebody, or by the kernel for want of memory",
    signal.SIGBUS: "killed by SIGBUS: memory or a file that it had mapped was not there, as when /dev/shm is full",
    signal.SIGILL: "killed by SIGILL: a library was built for another processor",
}


def _signal(exit_code: int) -> Reason | None:
    try:
        number = signal.Signals(exit_code - 128)
    except ValueError:
        return None
    text = _SIGNALS.get(number, f"killed by {number.name}")
    return Reason(text, "`dmesg | tail` has what the kernel says" if number in _SIGNALS else None)
