"""A pattern that goes through every configured tier and back, and is compared: by the code that an engine runs, in the
engine's interpreter, with the settings of the profile or else those that the directory needs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvbm.config.sizes import format_size
from kvbm_cli.doctor.machine import NoAnswer
from kvbm_cli.doctor.result import Check, failure, ok, skipped
from kvbm_cli.doctor.scratch_directory import scratch_directory
from kvbm_cli.doctor.subject import Subject

if TYPE_CHECKING:
    from kvbm_cli.doctor.probe import Settings

TIMEOUT_S, QUICK_TIMEOUT_S = 120.0, 10.0
BLOCK_BYTES = 1 << 20
MOST_BYTES, QUICK_MOST_BYTES = 64 << 20, 16 << 20
MOST_BLOCKS = 16
SHARE_OF_FREE = 20
OF_PROFILE = ("allocator", "zerofill", "o_direct", "io", "threads", "persist")


def checks(subject: Subject, settings: Settings | None) -> Iterator[Check]:
    """`settings` are what the directory needs, None if it cannot be used."""
    disk = _disk_settings(subject, settings)
    if subject.resolved is None and disk is None:
        yield skipped("pattern", "a profile says which tiers there are", "`--profile PROFILE`")
        return
    subject.say("moving a pattern through the tiers")
    try:
        if disk is None or subject.directory is None:
            yield from _legs(subject, None, MOST_BYTES)
        else:
            with scratch_directory(subject.directory) as place:
                space = os.statvfs(place)
                room = space.f_bavail * space.f_frsize // SHARE_OF_FREE if space.f_blocks else MOST_BYTES
                yield from _legs(subject, {**disk, "directory": str(place)}, room)
    except OSError as error:
        yield skipped("pattern", f"the directory cannot be written: {(error.strerror or str(error)).lower()}")


def _disk_settings(subject: Subject, settings: Settings | None) -> dict[str, Any] | None:
    if settings is None:
        return None
    if subject.disk is None:
        return asdict(settings)
    return {name: getattr(subject.disk, name) for name in OF_PROFILE}


def _legs(subject: Subject, disk: dict[str, Any] | None, room: int) -> Iterator[Check]:
    block_bytes = BLOCK_BYTES if subject.sizing is None else subject.sizing.block_bytes
    most = min(room, QUICK_MOST_BYTES if subject.is_quick else MOST_BYTES)
    block_count = min(MOST_BLOCKS, most // (2 * block_bytes))  # the tiers hold each twice
    if not block_count:
        yield skipped("pattern", f"{format_size(most)} may be taken, and a block has {format_size(block_bytes)}")
        return
    request = {"block_bytes": block_bytes, "block_count": block_count, "device": _device(subject), "disk": disk}
    python = (subject.resolved and subject.resolved.profile.engine.python) or sys.executable
    try:
        timeout_s = QUICK_TIMEOUT_S if subject.is_quick else TIMEOUT_S
        answer = subject.machine.ask(python, "round_trip", [json.dumps(request)], timeout_s=timeout_s)
    except NoAnswer as error:
        if subject.is_quick:
            yield skipped("pattern", str(error), "`kvbm doctor` without --quick waits longer")
        else:
            yield failure("pattern", f"`{python}`: {error}", "see the checks of the engine")
        return
    for leg in answer["legs"]:
        if leg["error"] is not None:
            yield failure(leg["name"], leg["error"], leg["hint"] or "see the checks of the engine")
        else:
            by = f", by {answer['io']}" if "disk" in leg["name"] else ""
            what = f"{block_count} blocks of {format_size(block_bytes)} came back equal{by}"
            yield ok(leg["name"], what, seconds=leg["seconds"])


def _device(subject: Subject) -> str:
    """Where G1 is: on a GPU if there is a driver for one and the profile's engine does not say otherwise."""
    from kvbm_cli.engine.engines import runs_on_cpu

    if not (subject.machine.devices / "nvidiactl").exists():
        return "cpu"
    if subject.resolved is None:
        return "cpu"
    engine = subject.resolved.profile.engine
    if engine.kind == "embedded":
        return "cpu" if engine.arguments.device == "cpu" else "cuda"
    return "cpu" if runs_on_cpu(subject.resolved.profile) else "cuda"
