"""What an engine's interpreter holds and does. The first argument names the probe:

`connector`: imports the modules in the other arguments: `{"seconds": ..., "error": null or its first line}`.

`compiler`: what is missing of that with which SGLang builds an extension when it starts: `{"missing": [...]}`.

`cuda`: versions of torch, its CUDA and the driver, and the number of usable devices.

`nixl`: whether the disk tier could use NIXL's plugins: `{"version": ..., "plugins": {name: null or the reason}}`. The
other arguments are the directory in which they move bytes, and the beginning of a name; without it, all are tried, as
the disk tier does when it starts.

`round_trip`: moves a pattern through the tiers and compares it. The other argument is JSON of those of `RoundTrip`:
`{"legs": [...], "io": ...}`. Each leg has a name, its seconds, and an error with a hint or null. It stops at the first
leg that fails. `io` names the I/O implementation of the disk, or null. Without torch there is no device leg: the
pattern starts in host memory.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DRIVER = Path("/proc/driver/nvidia/version")
DISTRIBUTIONS = ("nixl", "nixl-cu13", "nixl-cu12")
QUEUES = {"POSIX (io_uring)": "uring", "POSIX (aio)": "aio", "GDS": "gds"}
DISK_TIMEOUT_S = 30.0
TICKET = 1


def connector(modules: Sequence[str]) -> dict[str, object]:
    started = time.monotonic()
    error = None
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as caught:
        error = _first_line(caught)
    return {"seconds": time.monotonic() - started, "error": error}


def compiler(ignored: Sequence[str]) -> dict[str, object]:
    """Torch takes the compiler from the variable CXX, and ninja from PATH."""
    command = shlex.split(os.environ.get("CXX", "c++"))
    missing = [] if shutil.which("ninja") else ["ninja"]
    if shutil.which(command[0]) is None:
        return {"missing": [f"a C++ compiler (`{command[0]}`)", *missing]}
    headers = {"Python.h": "the headers of Python", "openssl/sha.h": "the headers of OpenSSL"}
    missing += [name for header, name in headers.items() if not _compiles(command, header, "-fsyntax-only")]
    if headers["openssl/sha.h"] not in missing and not _compiles(command, "openssl/sha.h", "-lcrypto"):
        missing.append("OpenSSL's library `libcrypto`")
    return {"missing": missing}


def _compiles(command: Sequence[str], header: str, *flags: str) -> bool:
    from kvbm.child.run import run

    include = f"-I{sysconfig.get_paths()['include']}"
    with tempfile.TemporaryDirectory() as directory:
        source, program = Path(directory, "a.cpp"), Path(directory, "a.out")
        source.write_text(f"#include <{header}>\nint main() {{ return 0; }}\n")
        built = [*command, include, str(source), "-o", str(program), *flags]
        return run(built, timeout_s=None).code == 0


def cuda(ignored: Sequence[str]) -> dict[str, object]:
    answer: dict[str, object] = {"torch": None, "cuda": None, "driver": _driver(), "devices": 0, "error": None}
    try:
        import torch
    except Exception as error:
        return {**answer, "error": _first_line(error)}
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {**answer, "torch": torch.__version__, "cuda": torch.version.cuda, "devices": devices}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _driver() -> str | None:
    try:
        found = re.search(r"Kernel Module\D*([\d.]+)", DRIVER.read_text())
    except OSError:
        return None
    return found[1] if found else None


def nixl(arguments: Sequence[str]) -> dict[str, object]:
    from kvbm.tiers.disk.io.nixl import GDS
    from kvbm.tiers.disk.io.select import try_nixl, why_no_gds

    directory, *names = arguments
    held = next((found for name in DISTRIBUTIONS if (found := _version(name)) is not None), None)
    tried = {} if held is None else {name: QUEUES[name] for name in QUEUES if name.startswith(tuple(names) or "")}

    def reason(queue: str) -> str | None:
        return (why_no_gds() if queue == GDS else None) or try_nixl(Path(directory), queue)

    with ThreadPoolExecutor(len(QUEUES)) as threads:
        return {"version": held, "plugins": dict(zip(tried, threads.map(reason, tried.values()), strict=True))}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


class BytesDiffer(Exception):
    """A leg did not return the bytes that were sent."""


class RoundTrip:
    """Moves blocks 0..n-1 of G1 to slots 0..n-1 of G2, to G3 in reverse order, back to slots n..2n-1 of G2, and to
    blocks n..2n-1 of G1. `device` holds G1; `disk` are settings of a DiskStorage, None without a disk tier."""

    def __init__(self, block_bytes: int, block_count: int, device: str, disk: dict[str, Any] | None) -> None:
        import numpy as np

        from kvbm.host.layout import BlockLayout
        from kvbm.host.segment import Segment

        self._block_bytes, self._count, self._device, self._disk = block_bytes, block_count, device, disk
        self._layout = BlockLayout.block_contiguous(block_count=2 * block_count, block_bytes=block_bytes)
        self._pattern = np.random.default_rng(0).integers(0, 256, (block_count, block_bytes), np.uint8)
        is_cuda = device == "cuda"
        self._segment = Segment.create(rank=0, layout=self._layout, slot_count=2 * block_count, pin=is_cuda)
        self._near, self._far = list(range(self._count)), list(range(self._count, 2 * self._count))
        self.io_name: str | None = None
        self._back = self._near  # the slots from which G1 is filled

    def run(self) -> list[dict[str, Any]]:
        try:
            import torch
        except ImportError:
            legs: list[tuple[str, Callable[[], None]]] = [("host memory", self._fill_host)]
        else:
            self._device_memory = torch.zeros(
                2 * self._count * self._block_bytes, dtype=torch.uint8, device=self._device
            )
            legs = [("device to host", self._offload)]
        if self._disk is not None:
            legs += [("through the disk", self._through_disk)]
        if hasattr(self, "_device_memory"):
            legs += [("host to device", self._onboard)]
        results: list[dict[str, Any]] = []
        for name, leg in legs:
            results.append(_timed(name, leg))
            if results[-1]["error"] is not None:
                break
        return results

    def _fill_host(self) -> None:
        self._segment.payload[self._near, : self._block_bytes] = self._pattern
        self._compare_host(self._near)

    def _offload(self) -> None:
        import torch

        flat = torch.from_numpy(self._pattern).reshape(-1)
        self._device_memory[: flat.numel()].copy_(flat)
        self._copier().offload(self._near, self._near, self._copier().fence())
        self._device_memory.zero_()
        self._compare_host(self._near)

    def _copier(self) -> Any:
        from kvbm.device.copier import DeviceCopier

        return DeviceCopier(self._layout, [self._device_memory], self._segment)

    def _through_disk(self) -> None:
        from kvbm.tiers.disk.orders import Read, Write
        from kvbm.tiers.disk.settings import DiskSettings, Namespace
        from kvbm.tiers.disk.storage import DiskStorage

        assert self._disk is not None
        given = {**self._disk, "directory": Path(self._disk["directory"])}
        settings = DiskSettings(**given, block_count=2 * self._count)
        tier = DiskStorage.open(
            settings, Namespace(b"doctor", {"model": "kvbm doctor"}), [self._segment.payload], hash_bytes=8
        )
        self.io_name = tier.io_name
        try:
            hashes = [block.to_bytes(8, "little") for block in self._near]
            elsewhere = self._far[::-1]
            tenants, generations = [b""] * self._count, [0] * self._count
            tier.submit(Write(TICKET, hashes, elsewhere, self._near, tenants, generations))
            _wait(tier, "write")
            self._segment.payload[:] = 0
            tier.submit(Read(TICKET, hashes, elsewhere, self._far))
            _wait(tier, "read")
        finally:
            tier.close(DISK_TIMEOUT_S)
        self._compare_host(self._far)
        self._back = self._far

    def _onboard(self) -> None:
        self._copier().onboard(self._back, self._far, self._copier().fence())
        start = self._count * self._block_bytes
        found = self._device_memory[start:].cpu().numpy().reshape(self._pattern.shape)
        if not (found == self._pattern).all():
            raise BytesDiffer("the bytes in device memory differ from those sent")

    def _compare_host(self, slots: list[int]) -> None:
        if not (self._segment.payload[slots, : self._block_bytes] == self._pattern).all():
            raise BytesDiffer("the bytes in host memory differ from those sent")


def _wait(tier: Any, kind: str) -> None:
    deadline = time.monotonic() + DISK_TIMEOUT_S
    while time.monotonic() < deadline:
        for result in tier.poll():
            if not all(result.is_good):
                raise BytesDiffer(f"disk {kind} failed: {result.error or 'checksums differ'}")
            return
        time.sleep(0.001)
    raise BytesDiffer(f"the disk did not finish within {DISK_TIMEOUT_S:.0f} s")


def _timed(name: str, leg: Callable[[], None]) -> dict[str, Any]:
    started = time.monotonic()
    error = hint = None
    try:
        leg()
    except Exception as caught:
        error, hint = str(caught).splitlines()[0] or type(caught).__name__, getattr(caught, "hint", None)
    return {"name": name, "seconds": time.monotonic() - started, "error": error, "hint": hint}


def round_trip(arguments: Sequence[str]) -> dict[str, object]:
    trip = RoundTrip(**json.loads(arguments[0]))
    return {"legs": trip.run(), "io": trip.io_name}


PROBES = {"compiler": compiler, "connector": connector, "cuda": cuda, "nixl": nixl, "round_trip": round_trip}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]](sys.argv[2:])), flush=True)
    os._exit(0)  # without the cleanup of the engine's libraries, which may crash
