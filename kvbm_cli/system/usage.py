"""What an engine uses of its machine: memory, CPU time and disk traffic from /proc, and the GPUs from `pynvml`.

The processes are found by parent and by process group. The kernel adds the CPU time and the traffic of a process that
has ended to its parent, so the sums continue to rise. What the user of the sampler may not read is unknown.

Only the GPUs on which the engine's processes run count. Inside a container NVML may not know their process ids; then
all visible GPUs count.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESCAN_SAMPLES = 5  # a scan reads one file for each process of the machine
DEAD = (b"Z", b"X")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_KIB = 1024


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """`rss_bytes` counts memory that processes share in each of them; `shared_bytes` is that part of shared memory.
    None if not known."""

    processes: int
    rss_bytes: int | None
    shared_bytes: int | None
    cpu_s: float | None
    read_bytes: int | None
    written_bytes: int | None


class ProcessTree:
    def __init__(self, pid: int, *, proc: Path = Path("/proc")) -> None:
        self._root = pid
        self._proc = proc
        self._members: set[int] = set()
        self._samples = 0

    def usage(self) -> TreeUsage:
        if self._samples % RESCAN_SAMPLES == 0:
            self._members = self._descendants()
        self._samples += 1
        cpu = [_cpu_s(stat) for pid in self._members if (stat := self._stat(pid))]
        memory = [found for pid in self._members if (found := self._fields(pid, "status")) and "VmRSS" in found]
        traffic = [self._fields(pid, "io") for pid in self._members]
        is_known = bool(traffic) and all("read_bytes" in found for found in traffic if found is not None)
        io = [found for found in traffic if found] if is_known else []
        return TreeUsage(
            processes=len(cpu),
            rss_bytes=sum(found["VmRSS"] for found in memory) * _KIB if memory else None,
            shared_bytes=sum(found.get("RssShmem", 0) for found in memory) * _KIB if memory else None,
            cpu_s=sum(cpu) if cpu else None,
            read_bytes=sum(found["read_bytes"] for found in io) if io else None,
            written_bytes=sum(found["write_bytes"] - found["cancelled_write_bytes"] for found in io) if io else None,
        )

    @property
    def pids(self) -> set[int]:
        return self._members

    def _descendants(self) -> set[int]:
        table = {}
        for name in filter(str.isdigit, os.listdir(self._proc)):
            if stat := self._stat(int(name)):
                table[int(name)] = (int(stat[1]), int(stat[2]))
        if self._root not in table:
            return set()
        members = {pid for pid, (_, group) in table.items() if group == self._root} | {self._root}
        while found := {pid for pid, (parent, _) in table.items() if parent in members and pid not in members}:
            members |= found
        return members

    def _stat(self, pid: int) -> list[bytes]:
        """Return the fields after the name, which may contain anything; empty if no such process is alive."""
        try:
            fields = (self._proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return []
        return [] if fields[0] in DEAD else fields

    def _fields(self, pid: int, name: str) -> dict[str, int] | None:
        """Return the numbers of a file of a process. None if it has ended, empty if the file may not be read."""
        try:
            text = (self._proc / str(pid) / name).read_text(errors="replace")
        except PermissionError:
            return {}
        except OSError:
            return None
        pairs = (line.partition(":") for line in text.splitlines())
        values = ((key, rest.split()) for key, _, rest in pairs)
        return {key: int(words[0]) for key, words in values if words and words[0].isdigit()}


def _cpu_s(stat: list[bytes]) -> float:
    """User and system time, with that of children that have ended."""
    return sum(map(int, stat[11:15])) * _TICK_S


class Gpus:
    """`nvml` is the module pynvml, None if it is missing or finds no driver."""

    def __init__(self, nvml: Any | None) -> None:
        self._nvml = nvml

    @classmethod
    def open(cls) -> Gpus:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return cls(None)
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return cls(None)
        return cls(nvml)

    def sample(self, pids: Collection[int]) -> list[dict[str, float | int | None]]:
        """Return one entry per GPU. What a GPU does not report is None."""
        if self._nvml is None:
            return []
        nvml = self._nvml
        count = self._ask(nvml.nvmlDeviceGetCount) or 0
        asked = [(index, self._ask(nvml.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]
        handles = [(index, handle) for index, handle in asked if handle is not None]
        used = [(index, handle) for index, handle in handles if self._processes(handle) & set(pids)]
        return [self._state(index, handle) for index, handle in used or handles]

    def _processes(self, handle: Any) -> set[int]:
        assert self._nvml is not None
        return {process.pid for process in self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()}

    def _state(self, index: int, handle: Any) -> dict[str, float | int | None]:
        assert self._nvml is not None
        rates = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
        energy_mj = self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        return {
            "index": index,
            "utilisation": None if rates is None else rates.gpu / 100,
            "memory_bytes": None if memory is None else int(memory.used),
            "energy_j": None if energy_mj is None else energy_mj / 1e3,
        }

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """None if the GPU does not answer this question."""
        assert self._nvml is not None
        try:
            return question(*arguments)
        except self._nvml.NVMLError:
            return None
