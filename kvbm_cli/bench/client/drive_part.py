"""`drive_part`: sends a part of a plan to all targets from this process, measured by a monitor."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_cli.bench.client.health import HealthMonitor
from kvbm_cli.bench.client.launcher import Launcher, OnRecord, Part
from kvbm_cli.bench.client.request import Target, open_session
from kvbm_cli.bench.client.together import together


async def drive_part(
    part: Part, targets: Sequence[Target], start_ns: int, on_record: OnRecord, monitor: HealthMonitor
) -> None:
    """Send the requests of one part. The first target's schedule starts at `start_ns`."""
    async with open_session() as session:
        with monitor.running():
            await together(Launcher(part, target, session, start_ns, on_record).run() for target in targets)
