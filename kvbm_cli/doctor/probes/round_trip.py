"""Moves a pattern through the tiers and compares. The argument is JSON, see `Request`.

Answers `{"legs": [...], "io": ...}`: each leg has a name, seconds, and null or what is wrong and a hint; after one that
fails there are no more. `io` is who did the I/O of the disk, null for nobody. Without torch the first leg is left out,
and the pattern starts in host memory.
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
class Request:
    """`disk` are the settings of a DiskTier, None for none; `device` is where G1 is."""

    block_bytes: int
    block_count: int
    device: str
    disk: dict[str, Any] | None


class Wrong(Exception):
    """A leg that did not bring the bytes."""


class RoundTrip:
    """Blocks 0..n-1 of G1 go to slots 0..n-1 of G2, from there to G3 in another order, back into slots n..2n-1, and
    into blocks n..2n-1."""

    def __init__(self, request: Request) -> None:
        import numpy as np

        from kvbm.host.layout import BlockLayout
        from kvbm.host.region import Segment

        self._request = request
        self._count = request.block_count
        self._layout = BlockLayout.block_contiguous(block_count=2 * self._count, block_bytes=request.block_bytes)
        self._pattern = np.random.default_rng(0).integers(0, 256, (self._count, request.block_bytes), np.uint8)
        is_cuda = request.device == "cuda"
        self._segment = Segment.create(rank=0, layout=self._layout, slot_count=2 * self._count, pin=is_cuda)
        self._near, self._far = list(range(self._count)), list(range(self._count, 2 * self._count))
        self.io_name: str | None = None
        self._back = self._near  # the slots from which G1 is filled again

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
            raise Wrong("device memory has other bytes than were sent")

    def _compare_host(self, slots: list[int]) -> None:
        if not (self._segment.payload[slots, : self._request.block_bytes] == self._pattern).all():
            raise Wrong("host memory has other bytes than were sent")


def _wait(tier: Any, kind: str) -> None:
    deadline = time.monotonic() + DISK_TIMEOUT_S
    while time.monotonic() < deadline:
        for result in tier.poll():
            if not all(result.is_good):
                raise Wrong(f"the {kind} failed: {result.error or 'checksums differ'}")
            return
        time.sleep(0.001)
    raise Wrong(f"no end within {DISK_TIMEOUT_S:.0f} s")


def _timed(name: str, leg: Callable[[], None]) -> dict[str, Any]:
    started = time.monotonic()
    error = hint = None
    try:
        leg()
    except Exception as caught:
        error, hint = str(caught).splitlines()[0] or type(caught).__name__, getattr(caught, "hint", None)
    return {"name": name, "seconds": time.monotonic() - started, "error": error, "hint": hint}


def main() -> None:
    request = Request(**json.loads(sys.argv[1]))
    trip = RoundTrip(request)
    print(json.dumps({"legs": trip.run(), "io": trip.io_name}), flush=True)


if __name__ == "__main__":
    main()
