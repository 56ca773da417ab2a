"""Moves a pattern through the tiers and compares it. The argument is the JSON of a `RoundTripRequest`.

Prints `{"legs": [...], "io": ...}`. Each leg has a name, its seconds, and an error with a hint or null. It stops at the
first leg that fails. `io` names the I/O implementation of the disk, or null. Without torch there is no device leg: the
pattern starts in host memory.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DISK_TIMEOUT_S = 30.0
TICKET = 1


@dataclass(frozen=True, slots=True)
class RoundTripRequest:
    """`disk` are settings of a DiskStorage, None without a disk tier; `device` is the device of G1."""

    block_bytes: int
    block_count: int
    device: str
    disk: dict[str, Any] | None


class BytesDiffer(Exception):
    """A leg did not return the bytes that were sent."""


class RoundTrip:
    """Moves blocks 0..n-1 of G1 to slots 0..n-1 of G2, to G3 in reverse order, back to slots n..2n-1 of G2, and to
    blocks n..2n-1 of G1."""

    def __init__(self, request: RoundTripRequest) -> None:
        import numpy as np

        from kvbm.host.layout import BlockLayout
        from kvbm.host.segment import Segment

        self._request = request
        self._count = request.block_count
        self._layout = BlockLayout.block_contiguous(block_count=2 * self._count, block_bytes=request.block_bytes)
        self._pattern = np.random.default_rng(0).integers(0, 256, (self._count, request.block_bytes), np.uint8)
        is_cuda = request.device == "cuda"
        self._segment = Segment.create(rank=0, layout=self._layout, slot_count=2 * self._count, pin=is_cuda)
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
                2 * self._count * self._request.block_bytes, dtype=torch.uint8, device=self._request.device
            )
            legs = [("device to host", self._offload)]
        if self._request.disk is not None:
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
        self._segment.payload[self._near, : self._request.block_bytes] = self._pattern
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
        from kvbm.disk.orders import Read, Write
        from kvbm.disk.settings import DiskSettings, Namespace
        from kvbm.disk.storage import DiskStorage

        assert self._request.disk is not None
        given = {**self._request.disk, "directory": Path(self._request.disk["directory"])}
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
        start = self._count * self._request.block_bytes
        found = self._device_memory[start:].cpu().numpy().reshape(self._pattern.shape)
        if not (found == self._pattern).all():
            raise BytesDiffer("the bytes in device memory differ from those sent")

    def _compare_host(self, slots: list[int]) -> None:
        if not (self._segment.payload[slots, : self._request.block_bytes] == self._pattern).all():
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


def main() -> None:
    request = RoundTripRequest(**json.loads(sys.argv[1]))
    trip = RoundTrip(request)
    print(json.dumps({"legs": trip.run(), "io": trip.io_name}), flush=True)


if __name__ == "__main__":
    main()
