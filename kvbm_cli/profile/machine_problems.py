"""Checks of what the engine of a valid profile needs of this machine: interpreter, mount, disk, ports, memory.

`kvbm serve` and `kvbm bench` refuse to start for a problem. `kvbm profile check` and `serve --dry-run` print the same
problems as warnings, because a profile may be meant for another machine, or for a later time. `kvbm doctor` prints some
of these checks, whatever their result. The mistakes of the profile itself come first (preflight.py): a profile with
mistakes is not examined here.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.config.sizes import format_size, whole_size
from kvbm.engines.table import copy_count, kind_of
from kvbm.errors import EnvironmentProblem
from kvbm.host.machine_memory import THIS_MACHINE, HostMemory
from kvbm.host.mounts import IN_MEMORY, PSEUDO, mount_of
from kvbm.sizing import SizeUnknown, Sizing, StateLevel
from kvbm_cli.engine.process import choose_port
from kvbm_cli.profile.machine_check import Check, Severity, failure, ok
from kvbm_cli.profile.preflight import disk_state, metrics_ports
from kvbm_cli.profile.size import size_key
from kvbm_cli.profile.state_check import state_findings
from kvbm_cli.runs.reservations import largest_run, living_runs, memory_lines, pending_memory, require_port
from kvbm_cli.runs.run_directory import EngineRun
from kvbm_cli.system.answering import ANSWER_LIMIT_S, answers
from kvbm_cli.system.filesystem import expanded, missing_mount, nearest_existing

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import DiskTierSection, Tiers

LOOPBACK = ("127.0.0.1", "::1", "localhost")
HOST_KEY, DIRECTORY_KEY = "tiers.host.capacity", "tiers.disk.directory"
LEAST_CAPACITY = 1 << 20  # a smaller one holds no block of most models
ANOTHER_DIRECTORY = f"set `{DIRECTORY_KEY}` to another directory; `kvbm doctor --dir DIR` checks one"


def problems_here(resolved: ResolvedProfile, sizing: Sizing | SizeUnknown, *, has_cache: bool = True) -> list[Check]:
    """Return all problems. Without `has_cache`, only those of the engine itself."""
    disk = resolved.profile.tiers.disk
    checks = [*engine_checks(resolved, has_cache=has_cache)]
    if has_cache:
        states = state_findings(resolved, StateLevel.WARNING)
        checks += [Check("states", Severity.WARNING, one.message, key=one.key) for one in states]
        checks += [] if disk is None else _disk(disk, sizing)
        checks += metrics_checks(resolved)
    return [*_problems(checks), *reservation_problems(resolved, sizing, living_runs(), has_cache=has_cache)]


def reservation_problems(
    resolved: ResolvedProfile, sizing: Sizing | SizeUnknown, living: Sequence[EngineRun], *, has_cache: bool
) -> list[Check]:
    """Return the problems with what the engine shares with the living runs: the server's port and memory."""
    host, copies = resolved.profile.tiers.host, copy_count(resolved.profile)
    checks = [server_check(resolved, living)]
    if has_cache and not (host is not None and host.is_auto):  # else the size is chosen under a lock, so that it fits
        needed = memory_bytes(resolved.profile.tiers, sizing, copies) or 0
        checks.append(memory_check(resolved, needed, copies, living, sizing=sizing))
    return _problems(checks)


def _problems(checks: Sequence[Check]) -> list[Check]:
    return [check for check in checks if check.severity is not Severity.OK]


def memory_bytes(tiers: Tiers, sizing: Sizing | SizeUnknown | None, copies: int) -> int | None:
    """Return the host memory for blocks (G2) of this many engines, buffers included, None if it is unknown."""
    if isinstance(sizing, Sizing):
        return (sizing.host.total_bytes + sizing.buffer_bytes) * copies
    host = tiers.host
    if host is None or host.is_auto or host.blocks is not None or host.capacity_bytes is None:
        return None
    return host.capacity_bytes * copies


def engine_checks(resolved: ResolvedProfile, *, has_cache: bool = True) -> Iterator[Check]:
    """Check the engine. Engines behind a proxy are private."""
    profile, kind = resolved.profile, kind_of(resolved.profile)
    is_private = profile.disaggregated.is_enabled or profile.server.host in LOOPBACK
    if not is_private and (public := kind.problem_of_address(profile)) is not None:
        yield Check("address", Severity.FORCEABLE, public.message, public.hint)
    if (problem := kind.problem(profile, has_cache=has_cache)) is not None:
        yield Check("version", Severity.FORCEABLE, problem.message, problem.hint)
    elif profile.disaggregated.is_enabled and (lacking := kind.problem_of_fleet(profile)) is not None:
        yield failure("fleet", lacking.message, lacking.hint)


def _disk(disk: DiskTierSection, sizing: Sizing | SizeUnknown) -> Iterator[Check]:
    """Check the disk tier. A directory that hangs is only a warning: the engine starts without the tier, and uses it
    when it answers. A directory below a missing mount would be created on the system's own drive. A pseudo filesystem
    holds no files, and one in memory takes host memory."""

    def check(severity: Severity, reason: str, remedy: str) -> Check:
        return Check("directory", severity, f"`{DIRECTORY_KEY}`: {reason}", remedy, key=DIRECTORY_KEY)

    directory = expanded(disk.directory)
    if not answers(directory):
        remedy = "mount its file system again; until it answers, the engine runs without the disk tier"
        reason = f"{disk.directory} does not answer within {ANSWER_LIMIT_S:g} s"
        yield check(Severity.WARNING, reason, remedy)
        return
    if (reason_of_mount := missing_mount(directory)) is not None:
        yield check(Severity.FAILURE, reason_of_mount, f"mount it, or set `{DIRECTORY_KEY}` to another directory")
    mount = mount_of(Path(os.path.realpath(nearest_existing(directory))))
    where, remedy = f"{mount.point} is a {mount.kind} filesystem", "use a directory on a drive"
    if mount.kind in PSEUDO:
        yield check(Severity.FAILURE, f"{where}, which cannot hold files", remedy)
    elif mount.kind in IN_MEMORY:
        yield check(Severity.WARNING, f"{where}, which uses host memory", remedy)
    if (state := disk_state(directory)) is not None:
        yield check(Severity.NO_DISK, state, ANOTHER_DIRECTORY)
    elif isinstance(sizing, Sizing):
        yield from _disk_space(disk, sizing)


def _disk_space(disk: DiskTierSection, sizing: Sizing) -> Iterator[Check]:
    """Check the space: the tier must fit, if necessary in that of unused caches, which are reused or removed."""
    from kvbm_cli.store.caches import list_caches

    if disk.is_auto or disk.fit or sizing.disk is None:
        return
    directory = expanded(disk.directory)
    facts = os.statvfs(nearest_existing(directory))
    needed_bytes, free_bytes = sizing.disk.total_bytes, facts.f_bavail * facts.f_frsize
    if not facts.f_blocks or needed_bytes <= free_bytes:  # some filesystems do not report their size
        return
    key, needed, free = sizing.disk.set_by, format_size(needed_bytes), format_size(free_bytes)
    message = f"`{key}` requires {needed}, but {disk.directory} has only {free} free"
    # a larger tier than the file system is a mistake
    severity = Severity.NO_DISK if needed_bytes <= facts.f_blocks * facts.f_frsize else Severity.FORCEABLE
    remedy = f"lower the capacity, or use another `{DIRECTORY_KEY}`"
    missing_bytes = needed_bytes - free_bytes
    caches = list_caches(directory)
    has_room = missing_bytes <= sum(cache.arena_bytes for cache in caches if not cache.is_locked)
    yield Check("free space", Severity.WARNING if has_room else severity, message, remedy, key=key)


def server_check(resolved: ResolvedProfile, living: Sequence[EngineRun]) -> Check:
    """Check the address of the engine's server. The block manager needs no port: results travel in shared memory."""
    server = resolved.profile.server
    try:
        require_port(server.host, server.port, living)
    except EnvironmentProblem as error:
        return failure("server", error.message, error.hint)
    try:
        choose_port(server.host, server.port)
    except EnvironmentProblem as error:
        return Check("server", Severity.FAILURE, error.message, error.hint, key="server.port")
    port = f"port {server.port} is free" if server.port else "a free port is chosen at start-up"
    return ok("server", f"{server.host}, {port}", host=server.host, port=server.port)


def metrics_checks(resolved: ResolvedProfile) -> Iterator[Check]:
    """Check the ports of the metrics, if they have any."""
    metrics = resolved.profile.metrics
    if not metrics.serve:
        return
    host = metrics.host or resolved.profile.server.host
    try:
        for port in metrics_ports(resolved):
            choose_port(host, port)
    except EnvironmentProblem as error:
        key = "metrics.port" if "metrics.port" in resolved.sources else "metrics.serve"
        remedy = "`metrics.port: 0` chooses a free port; `metrics.serve: false` needs none"
        finding = error.message.replace(": ", " for metrics: ", 1)
        yield Check("metrics", Severity.FAILURE, finding, remedy, key=key)
    else:
        yield ok("metrics", f"port {metrics.port} is free" if metrics.port else "a free port is chosen at start-up")


def memory_check(
    resolved: ResolvedProfile | None,
    needed_bytes: int | None,
    copies: int,
    living: Sequence[EngineRun],
    *,
    sizing: Sizing | SizeUnknown | None = None,
    memory: HostMemory = THIS_MACHINE,
) -> Check:
    """Check the memory: G2 of all engines must fit together with what the living runs will still allocate. Of a number
    of bytes that is not known, only report what is available."""
    buffer_bytes = sizing.buffer_bytes if isinstance(sizing, Sizing) else 0  # of each engine, whatever its G2
    room, pending = memory.room(), pending_memory(living)
    facts = {"available_bytes": room.available_bytes, "needed_bytes": needed_bytes, "pending_bytes": pending}
    left = max(0, memory.bytes_for_blocks() - pending)
    available = format_size(room.available_bytes)
    if needed_bytes is None or needed_bytes <= left:
        finding = f"{available} available ({room.limit})"
        finding += f", of which starting engines will take {format_size(pending)}" if pending else ""
        finding += "" if needed_bytes is None else f", G2 requires {format_size(needed_bytes)}"
        return ok("available", finding, **facts)
    key = None if resolved is None else size_key(resolved)
    finding = f"{'G2' if key is None else f'`{key}`'} requires {format_size(needed_bytes)}"
    if pending:
        in_all = format_size(needed_bytes + pending)
        finding += f", and starting engines another {format_size(pending)}, in all {in_all}"
    finding += f", but only {available} are available ({room.limit})"
    fitting, largest = left * 9 // 10 // copies - buffer_bytes, largest_run(living)
    remedies = [] if largest is None else [f"run `kvbm stop {shlex.quote(largest.name)}`"]
    if fitting >= LEAST_CAPACITY:
        is_size = key in (None, HOST_KEY)
        remedies.append(f"set `{HOST_KEY}: {whole_size(fitting)}` or less" if is_size else f"lower `{key}`")
    elif not remedies:
        remedies.append("free memory, or stop an engine that is starting" if pending else "free memory")
    place, lines = (key, ()) if largest is None else (None, memory_lines(living))
    return Check("available", Severity.FORCEABLE, finding, ", or ".join(remedies), facts, place, lines)
