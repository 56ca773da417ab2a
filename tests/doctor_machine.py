"""A machine whose facts a test chooses: files of /proc and /sys in a directory, and answers that are written down."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvbm.host.machine_memory import HostMemory
from kvbm.host.mounts import Mount
from kvbm_cli.doctor.machine import Machine, NoAnswerInTime, ProbeFailed
from kvbm_cli.doctor.probes.disk import DiskReport, RecommendedSettings, Speed
from kvbm_cli.doctor.probes.disk_file import DirectIO, ProbeOutcome
from kvbm_cli.doctor.probes.store import StoreReport

WORKS = ProbeOutcome(True)
DIRECT = DirectIO(True, None, 512, False)
GOOD = DiskReport(
    mount=Mount("ext4", "/dev/nvme0n1p1", "/data"),
    total_bytes=2 * 10**12,
    free_bytes=10**12,
    write=WORKS,
    has_unnamed_files=True,
    fallocate=WORKS,
    by_open=DIRECT,
    by_fcntl=DIRECT,
    settings=RecommendedSettings("default", True, False),
    speed=Speed(131072, 1 << 30, 4, 2.5e9, 3.2e9, 2.4e9, 2.9e9, 0.0002),
)
GOOD_STORE = StoreReport(clock_s=0.0, small_get_s=0.004, object_get_s=0.02, put_rate=9e8, get_rate=1.2e9)
ANSWERS: Mapping[str, Mapping[str, Any]] = {
    "compiler": {"missing": []},
    "connector": {"seconds": 0.7, "error": None},
    "cuda": {"torch": "2.13.0", "cuda": "13.0", "driver": "580.65.06", "devices": 2, "error": None},
    "round_trip": {
        "legs": [
            {"name": name, "seconds": 0.01, "error": None, "hint": None}
            for name in ("device to host", "through the disk", "host to device")
        ],
        "io": "threads",
    },
    "nixl": {"version": "1.5.1", "plugins": {"POSIX (io_uring)": None, "POSIX (aio)": None, "GDS": "no GPU"}},
}
MEMINFO = """\
MemTotal:       65536000 kB
MemAvailable:   48828125 kB
HugePages_Free:        0
HugePages_Rsvd:        0
Hugepagesize:       2048 kB
"""

# The command with time limits that a busy machine keeps too: they are for what hangs, and nothing here does.
PATIENT = [
    sys.executable,
    "-c",
    "import sys; from kvbm_cli.app import main; from kvbm_cli.doctor import command, disk, engine, self_test; "
    "command.QUICK_WORK_S = disk.QUICK_PROBE_TIMEOUT_S = engine.QUICK_TIMEOUT_S = self_test.QUICK_TIMEOUT_S = 600; "
    "sys.argv[0] = 'kvbm'; main()",
]


def machine(
    root: Path,
    *,
    report: DiskReport | str = GOOD,
    answers: Mapping[str, Mapping[str, Any] | str] = ANSWERS,
    meminfo: str = MEMINFO,
    shmem: str = "always within_size [advise] never deny force",
    gpus: Mapping[str, int] | None = None,
    nodes: int = 1,
    prefault_rate: float = 4e9,
    store: StoreReport | str = GOOD_STORE,
    probes: Mapping[str, Callable[..., dict[str, Any]]] | None = None,
    **changes: Any,
) -> Machine:
    """A `report` or answer that is text makes its probe fail with that text. `probes` run instead.
    `gpus` maps PCI addresses to nodes."""
    write(root / "proc/meminfo", meminfo)
    write(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled", shmem)
    (root / "dev").mkdir()
    for node in range(nodes):
        (root / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    for address, at in (gpus or {}).items():
        for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", str(at))):
            write(root / "sys/bus/pci/devices" / address / name, text)
        write(root / "dev/nvidiactl", "")

    def run_fake(python: str, program: str, arguments: Any = (), **how: Any) -> dict[str, Any]:
        program = arguments[0] if program == "engine" else program
        if program in (probes or {}):
            return probes[program](python, program, arguments, **how)
        found = _known({**ANSWERS, "disk": report, "store": store, **answers}[program])
        return {"report": asdict(found)} if program in ("disk", "store") else dict(found)

    base = Machine({}, HostMemory(root / "proc", root / "sys"), root / "dev", root, True, None, None, run_fake)
    return replace(base, prefault_rate=lambda byte_count: prefault_rate, **changes)


def _known(answer: Any) -> Any:
    if isinstance(answer, str):
        raise (NoAnswerInTime if answer.startswith("no answer within") else ProbeFailed)(answer)
    return answer


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
