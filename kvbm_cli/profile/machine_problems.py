"""Problems of this machine that would stop the engine of a valid profile: interpreter, mount, disk, ports, memory.

`kvbm serve` and `kvbm bench` refuse to start. `kvbm profile check` and `serve --dry-run` print the same problems as
warnings, because a profile may be meant for another machine, or for a later time. The mistakes of the profile itself
come first (preflight.py): a profile with mistakes is not examined here.
"""

from __future__ import annotations

import enum
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.config.sizes import format_size
from kvbm.engines.table import copy_count, kind_of
from kvbm.errors import EnvironmentProblem, EnvironmentProblems, ProfileError
from kvbm.host.machine_memory import THIS_MACHINE, HostMemory
from kvbm.host.mounts import IN_MEMORY, PSEUDO, mount_of
from kvbm.sizing import SizeUnknown, Sizing, StateLevel
from kvbm_cli.engine.process import choose_port
from kvbm_cli.profile.preflight import disk_state, metrics_ports
from kvbm_cli.profile.size import size_key, tier_warnings
from kvbm_cli.profile.state_check import state_findings
from kvbm_cli.runs.reservations import largest_run, living_runs, memory_lines, pending_memory, require_port
from kvbm_cli.runs.run_directory import EngineRun
from kvbm_cli.system.answering import ANSWER_LIMIT_S, answers
from kvbm_cli.system.filesystem import expanded, missing_mount, nearest_existing
from kvbm_cli.terminal.show_error import show_warning

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import Profile

LOOPBACK = ("127.0.0.1", "::1", "localhost")
DIRECTORY_KEY = "tiers.disk.directory"
ANOTHER_DIRECTORY = f"set `{DIRECTORY_KEY}` to another directory; `kvbm doctor --dir DIR` checks one"
INTERFACES = Path("/sys/class/net")
RUNTIMES = ("docker", "br-", "podman", "cni", "nerdctl")  # beginnings of the names of their bridges


class Severity(enum.Enum):
    """FATAL refuses the start. FORCEABLE: `--force` makes it a warning. NO_DISK: so does `kvbm serve`, whose engine
    starts without the disk tier. ORDER: it is a warning without `--strict`. RISK: it is a warning."""

    FATAL = enum.auto()
    FORCEABLE = enum.auto()
    NO_DISK = enum.auto()
    ORDER = enum.auto()
    RISK = enum.auto()


@dataclass(frozen=True, slots=True)
class MachineProblem:
    error: EnvironmentProblem
    severity: Severity = Severity.FATAL


def require_none(
    problems: Sequence[MachineProblem],
    *,
    is_forced: bool = False,
    is_strict: bool = False,
    may_lack_disk: bool = False,
) -> None:
    """Raise EnvironmentProblem for the problems, and print those that are only warnings."""
    accepted = {Severity.RISK}
    if is_forced:
        accepted |= {Severity.FORCEABLE, Severity.NO_DISK}
    if may_lack_disk:
        accepted.add(Severity.NO_DISK)
    if not is_strict:
        accepted.add(Severity.ORDER)
    warn_of([one for one in problems if one.severity in accepted])
    if errors := [one.error for one in problems if one.severity not in accepted]:
        raise errors[0] if len(errors) == 1 else EnvironmentProblems(errors)


def warn_of(problems: Sequence[MachineProblem]) -> None:
    for problem in problems:
        show_warning(problem.error.message)


def problems_here(
    resolved: ResolvedProfile, sizing: Sizing | SizeUnknown, *, has_cache: bool = True
) -> list[MachineProblem]:
    """Return all problems. Without `has_cache`, only those of the engine itself."""
    disk = _disk(resolved, sizing) if has_cache else ()
    states = state_findings(resolved, StateLevel.WARNING) if has_cache else []
    return [
        *_engine(resolved, has_cache=has_cache),
        *(MachineProblem(_at(resolved, one.key, one.message, None), Severity.RISK) for one in states),
        *disk,
        *(_metrics(resolved) if has_cache else ()),
        *reservation_problems(resolved, sizing, living_runs(), has_cache=has_cache),
    ]


def reservation_problems(
    resolved: ResolvedProfile, sizing: Sizing | SizeUnknown, living: Sequence[EngineRun], *, has_cache: bool
) -> list[MachineProblem]:
    """Return the problems with what the engine shares with the living runs: the server's port and memory."""
    memory = _memory(resolved, memory_bytes(resolved.profile, sizing), living) if has_cache else ()
    return [*_port(resolved, living), *memory]


def memory_bytes(profile: Profile, sizing: Sizing | SizeUnknown) -> int:
    """Return the host memory for blocks (G2) of all engines of a profile, 0 if unknown."""
    if not isinstance(sizing, SizeUnknown):
        return sizing.host.total_bytes * copy_count(profile)
    host = profile.tiers.host
    if host is None or host.is_auto or host.blocks is not None:
        return 0
    return (host.capacity_bytes or 0) * copy_count(profile)


def _engine(resolved: ResolvedProfile, *, has_cache: bool) -> Iterator[MachineProblem]:
    """Yield problems of the engine. Engines behind a proxy are private."""
    profile, kind = resolved.profile, kind_of(resolved.profile)
    is_private = profile.disaggregated.is_enabled or profile.server.host in LOOPBACK
    if not is_private and (public := kind.problem_of_address(profile)) is not None:
        yield MachineProblem(public, Severity.FORCEABLE)
    if (problem := kind.problem(profile, has_cache=has_cache)) is not None:
        yield MachineProblem(problem, Severity.FORCEABLE)
    elif profile.disaggregated.is_enabled and (lacking := kind.problem_of_fleet(profile)) is not None:
        yield MachineProblem(lacking)


def _disk(resolved: ResolvedProfile, sizing: Sizing | SizeUnknown) -> tuple[MachineProblem, ...]:
    """Yield problems of the disk tier. A directory that hangs is a risk only: the engine starts without the tier, and
    uses it when it answers."""
    disk = resolved.profile.tiers.disk
    if disk is not None and not answers(expanded(disk.directory)):
        message = f"`{DIRECTORY_KEY}`: {disk.directory} does not answer within {ANSWER_LIMIT_S:g} s"
        hint = "mount its file system again; until it answers, the engine runs without the disk tier"
        return (MachineProblem(_at(resolved, DIRECTORY_KEY, message, hint), Severity.RISK),)
    if disk is not None and (reason := disk_state(expanded(disk.directory))) is not None:
        error = _at(resolved, DIRECTORY_KEY, f"`{DIRECTORY_KEY}`: {reason}", ANOTHER_DIRECTORY)
        return (*_mount(resolved), *_filesystem(resolved), MachineProblem(error, Severity.NO_DISK))
    return (*_mount(resolved), *_filesystem(resolved), *_disk_space(resolved, sizing))


def _mount(resolved: ResolvedProfile) -> Iterator[MachineProblem]:
    """Yield problems of the mount. A directory below a missing mount would be created on the system's own drive."""
    disk = resolved.profile.tiers.disk
    if disk is not None and (reason := missing_mount(expanded(disk.directory))) is not None:
        hint = f"mount it, or set `{DIRECTORY_KEY}` to another directory"
        yield MachineProblem(_at(resolved, DIRECTORY_KEY, f"`{DIRECTORY_KEY}`: {reason}", hint))


def _filesystem(resolved: ResolvedProfile) -> Iterator[MachineProblem]:
    """Yield problems of the filesystem. A disk tier needs a drive: a pseudo filesystem holds no files, and one in
    memory takes host memory."""
    disk = resolved.profile.tiers.disk
    if disk is None:
        return
    mount = mount_of(Path(os.path.realpath(nearest_existing(expanded(disk.directory)))))
    where, hint = f"`{DIRECTORY_KEY}`: {mount.point} is a {mount.kind} filesystem", "use a directory on a drive"
    if mount.kind in PSEUDO:
        yield MachineProblem(_at(resolved, DIRECTORY_KEY, f"{where}, which cannot hold files", hint))
    elif mount.kind in IN_MEMORY:
        yield MachineProblem(_at(resolved, DIRECTORY_KEY, f"{where}, which uses host memory", hint), Severity.RISK)


def _disk_space(resolved: ResolvedProfile, sizing: Sizing | SizeUnknown) -> Iterator[MachineProblem]:
    """Yield problems of the space. A disk tier must fit, if necessary in the space of unused caches, which are reused
    or removed."""
    from kvbm_cli.store.caches import list_caches

    disk = resolved.profile.tiers.disk
    if disk is None or disk.is_auto or disk.fit or isinstance(sizing, SizeUnknown) or sizing.disk is None:
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
    hint = f"lower the capacity, or use another `{DIRECTORY_KEY}`; `--force` starts anyway"
    missing_bytes = needed_bytes - free_bytes
    caches = list_caches(directory)
    has_room = missing_bytes <= sum(cache.arena_bytes for cache in caches if not cache.is_locked)
    error = _at(resolved, key, message, hint)
    yield MachineProblem(error, Severity.RISK if has_room else severity)


def order_problems(
    resolved: ResolvedProfile, sizing: Sizing | SizeUnknown, *, has_cache: bool = True
) -> list[MachineProblem]:
    """Each tier must be at least as large as the one above it, and hold a sequence of a model with states."""
    if isinstance(sizing, SizeUnknown) or not has_cache:
        return []
    hint = "raise the capacity of the tier; without `--strict`, this is only a warning"
    return [
        MachineProblem(EnvironmentProblem(message, hint=hint), Severity.ORDER)
        for message in tier_warnings(resolved, sizing)
    ]


def _port(resolved: ResolvedProfile, living: Sequence[EngineRun]) -> Iterator[MachineProblem]:
    server = resolved.profile.server
    try:
        require_port(server.host, server.port, living)
    except EnvironmentProblem as error:
        yield MachineProblem(error)
        return
    try:
        choose_port(server.host, server.port)
    except EnvironmentProblem as error:
        yield MachineProblem(_at(resolved, "server.port", error.message, error.hint))


def _metrics(resolved: ResolvedProfile) -> Iterator[MachineProblem]:
    try:
        require_metrics_ports(resolved)
    except EnvironmentProblem as error:
        yield MachineProblem(error)
    metrics = resolved.profile.metrics
    host = metrics.host or resolved.profile.server.host
    if metrics.serve and host in LOOPBACK and (bridges := container_bridges()):
        yield MachineProblem(
            EnvironmentProblem(
                f"a Prometheus in a container cannot reach the metrics at {host} (this machine has the container "
                f"bridge {bridges[0]}): set `metrics.host`, or give the container the network of the host"
            ),
            Severity.RISK,
        )


def container_bridges(interfaces: Path = INTERFACES) -> list[str]:
    """Return the network bridges of container runtimes, none if they cannot be read."""
    try:
        names = sorted(path.name for path in interfaces.iterdir() if (path / "bridge").is_dir())
    except OSError:
        return []
    return [name for name in names if name.startswith(RUNTIMES)]


def require_metrics_ports(resolved: ResolvedProfile) -> None:
    """EnvironmentProblem if a port for metrics is in use."""
    metrics, server = resolved.profile.metrics, resolved.profile.server
    try:
        for port in metrics_ports(resolved):
            choose_port(metrics.host or server.host, port)
    except EnvironmentProblem as error:
        key = "metrics.port" if "metrics.port" in resolved.sources else "metrics.serve"
        hint = "`metrics.port: 0` chooses a free port; `metrics.serve: false` needs none"
        raise _at(resolved, key, error.message.replace(": ", " for metrics: ", 1), hint) from None


def _memory(
    resolved: ResolvedProfile, needed_bytes: int, living: Sequence[EngineRun], *, memory: HostMemory = THIS_MACHINE
) -> Iterator[MachineProblem]:
    """Yield problems of memory. The tiers in memory must fit together with what the living runs will still allocate."""
    host = resolved.profile.tiers.host
    if host is not None and host.is_auto:  # the size is chosen under a lock, so that it fits
        return
    room, pending = memory.room(), pending_memory(living)
    if needed_bytes + pending <= memory.bytes_for_blocks():
        return
    key, available = size_key(resolved), f"only {format_size(room.available_bytes)} are available ({room.limit})"
    demand = f"`{key}` requires {format_size(needed_bytes)}"
    if pending:
        sum_text = format_size(needed_bytes + pending)
        demand += f", and starting engines another {format_size(pending)}, in all {sum_text}"
    lines, largest = memory_lines(living), largest_run(living)
    hint = f"lower `{key}`; `--force` starts it anyway"
    if largest is None:
        error = _at(resolved, key, f"{demand}, but {available}", hint)
    else:
        hint = f"run `kvbm stop {shlex.quote(largest.name)}`, or {hint}"
        error = EnvironmentProblem("\n".join([f"{demand}, but {available}", *lines]), hint=hint)
    yield MachineProblem(error, Severity.FORCEABLE)


def _at(resolved: ResolvedProfile, key: str, message: str, hint: str | None) -> EnvironmentProblem:
    """Return a problem that is shown at the place of `key`."""
    mistake: ProfileError = resolved.mistake(key, message)
    return EnvironmentProblem(mistake.message, hint=hint)
