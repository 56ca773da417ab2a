"""Self test: moves a pattern through every configured tier and back, and compares it.

It runs the code that an engine runs, in the engine's interpreter, with the disk settings of the profile or, without
one, the recommended settings.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvbm.config.sizes import format_size
from kvbm.engines.table import kind_of
from kvbm.errors import reason_of
from kvbm_cli.doctor.check import DoctorContext
from kvbm_cli.doctor.machine import scratch_directory
from kvbm_cli.profile.machine_check import Check, failure, ok, skipped

if TYPE_CHECKING:
    from kvbm_cli.doctor.probes.disk import RecommendedSettings

TIMEOUT_S, QUICK_TIMEOUT_S = 120.0, 10.0
BLOCK_BYTES = 1 << 20
MOST_BYTES, QUICK_MOST_BYTES = 64 << 20, 16 << 20
MOST_BLOCKS = 16
SHARE_OF_FREE = 20
PROFILE_SETTINGS = ("allocator", "zerofill", "o_direct", "io", "threads", "persist")


def checks(context: DoctorContext, settings: RecommendedSettings | None) -> Iterator[Check]:
    """Yield the checks. `settings` are the recommended ones, None if the directory cannot be used."""
    disk = _disk_settings(context, settings)
    if context.resolved is None and disk is None:
        yield skipped("pattern", "the tiers are unknown without a profile", "add `--profile PROFILE`")
        return
    context.on_phase("moving a pattern through the tiers")
    try:
        if disk is None or context.directory is None:
            yield from _legs(context, None, MOST_BYTES)
        else:
            with scratch_directory(context.directory) as place:
                space = os.statvfs(place)
                room = space.f_bavail * space.f_frsize // SHARE_OF_FREE if space.f_blocks else MOST_BYTES
                yield from _legs(context, {**disk, "directory": str(place)}, room)
    except OSError as error:
        yield skipped("pattern", f"the directory is not writable: {reason_of(error)}")


def _disk_settings(context: DoctorContext, settings: RecommendedSettings | None) -> dict[str, Any] | None:
    if settings is None:
        return None
    if context.disk is None:
        return asdict(settings)
    return {name: getattr(context.disk, name) for name in PROFILE_SETTINGS}


def _legs(context: DoctorContext, disk: dict[str, Any] | None, room: int) -> Iterator[Check]:
    block_bytes = BLOCK_BYTES if context.sizing is None else context.sizing.block_bytes
    most = min(room, QUICK_MOST_BYTES if context.is_quick else MOST_BYTES)
    block_count = min(MOST_BLOCKS, most // (2 * block_bytes))  # the tiers hold each twice
    if not block_count:
        yield skipped(
            "pattern",
            f"the test may use {format_size(most)}, and two copies of a block of {format_size(block_bytes)} do not fit",
        )
        return
    request = {"block_bytes": block_bytes, "block_count": block_count, "device": _device(context), "disk": disk}
    python = (context.resolved and context.resolved.profile.engine.python) or sys.executable
    timeout_s = QUICK_TIMEOUT_S if context.is_quick else TIMEOUT_S
    remedy = "see the group `engine` below"
    answer = context.answer_of(
        "pattern", python, "engine", ["round_trip", json.dumps(request)], timeout_s=timeout_s, remedy=remedy
    )
    if isinstance(answer, Check):
        yield answer
        return
    for leg in answer["legs"]:
        if leg["error"] is not None:
            yield failure(leg["name"], leg["error"], leg["hint"] or remedy)
        else:
            by = f" (io: {answer['io']})" if "disk" in leg["name"] else ""
            what = f"{block_count} blocks of {format_size(block_bytes)} came back unchanged{by}"
            yield ok(leg["name"], what, seconds=leg["seconds"])


def _device(context: DoctorContext) -> str:
    """Return the device of G1: `cuda` if there is a driver and the profile does not choose the CPU."""
    if context.resolved is None or not (context.machine.devices / "nvidiactl").exists():
        return "cpu"
    engine = context.resolved.profile.engine
    if engine.kind == "embedded":
        return "cpu" if engine.arguments.device == "cpu" else "cuda"
    return "cpu" if kind_of(context.resolved.profile).runs_on_cpu(context.resolved.profile) else "cuda"
