"""Checks of a profile on this machine before an engine starts: model, interpreter, address, lengths, memory, disk.

`kvbm profile check` and `kvbm serve` run them. A mistake is shown at the place of its key.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.config.document import together
from kvbm.config.sizes import format_size
from kvbm.config.values import count_of
from kvbm.errors import EnvironmentProblem, ProfileError, UsageError
from kvbm.host.machine_memory import THIS_MACHINE, Room
from kvbm.sizing import SizeUnknown, Sizing
from kvbm.sizing.model import text_facts
from kvbm_cli.engine.engines import copy_count, knows_block_tokens, vllm_problem
from kvbm_cli.engine.model_facts import model_facts
from kvbm_cli.engine.process import OWN_ADDRESS, choose_port
from kvbm_cli.profile.size import size_key, size_of
from kvbm_cli.profile.workload import load_workload
from kvbm_cli.system.filesystem import expanded, nearest_existing
from kvbm_cli.terminal.show_error import show_warning

MAX_PORT = 65535

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile


def check(resolved: ResolvedProfile, *, warns_of_space: bool = True, has_cache: bool = True) -> Sizing | SizeUnknown:
    """Returns the sizes of a profile, or the reason why only the engine knows them. ProfileError for mistakes.

    Prints a warning if memory or disk space is too small. Without `has_cache`, checks only what the engine needs.
    """
    sizing, mistakes = examine_here(resolved, warns_of_space=warns_of_space, has_cache=has_cache)
    if mistakes:
        raise together(mistakes)
    assert sizing is not None, "a profile without mistakes has sizes or a reason why not"
    return sizing


def examine_here(
    resolved: ResolvedProfile, *, warns_of_space: bool = True, has_cache: bool = True
) -> tuple[Sizing | SizeUnknown | None, list[ProfileError]]:
    """Returns the sizes, None if a mistake prevents computing them, and all mistakes found on this machine."""
    sizing: Sizing | SizeUnknown | None = None
    mistakes: list[ProfileError] = []
    try:
        sizing = size_of(resolved)
    except SizeUnknown as unknown:
        sizing = unknown
    except ProfileError as mistake:
        mistakes.append(mistake)
    of_cache = (_require_metrics, _require_directory) if has_cache else ()
    for require in (_require_program, _require_address, *of_cache):
        try:
            require(resolved)
        except ProfileError as mistake:
            mistakes.append(mistake)
    if sizing is not None and not isinstance(sizing, SizeUnknown):
        try:
            _require_length(resolved, sizing)
        except ProfileError as mistake:
            mistakes.append(mistake)
        if warns_of_space and has_cache:
            _warn_of_memory(resolved, sizing)
            if (problem := _lack_of_disk(resolved, sizing)) is not None:  # an earlier cache may hold the space
                show_warning(problem[1].message)
    return sizing, mistakes


def require_engine(resolved: ResolvedProfile, *, force: bool, has_cache: bool = True) -> None:
    """EnvironmentProblem if the engine's interpreter lacks the engine of the profile; only a warning with `force`.

    The embedded engine is checked by its own process.
    """
    if resolved.profile.engine.kind == "embedded":
        return
    problem = vllm_problem(resolved.profile, has_cache=has_cache)
    if problem is not None and not force:
        raise problem
    if problem is not None:
        show_warning(problem.message)


def require_log(path: Path) -> None:
    """EnvironmentProblem for a log that cannot be written, before anything is created."""
    if (reason := _reason_not_writable(path)) is not None:
        raise EnvironmentProblem(
            f"cannot write the engine's log `{path}`: {reason}",
            hint="name another file with `--log FILE`, or remove `--log`",
        )


def _reason_not_writable(path: Path) -> str | None:
    """Returns why the file cannot be written or created, None if it can."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        holder = nearest_existing(Path(os.path.abspath(path)).parent)
        if not os.path.isdir(holder):
            return f"{holder} is not a directory"
        return None if os.access(holder, os.W_OK | os.X_OK) else "permission denied"
    except NotADirectoryError:
        return f"{nearest_existing(Path(os.path.abspath(path)))} is not a directory"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    if stat.S_ISDIR(mode):
        return "is a directory"
    if not stat.S_ISREG(mode) and os.path.realpath(path) != os.devnull:
        return "is not a regular file"
    return None if os.access(path, os.W_OK) else "permission denied"


def require_workload(resolved: ResolvedProfile) -> None:
    """ProfileError for a workload of `kvbm bench` that is missing or invalid."""
    if (workload := resolved.profile.bench.workload) is not None:
        try:
            load_workload(workload)
        except UsageError as error:
            raise resolved.mistake("bench.workload", error.message, hint=error.hint) from None


def _require_program(resolved: ResolvedProfile) -> None:
    python = resolved.profile.engine.python
    if python is not None and shutil.which(python) is None:
        hint = "name an executable, or remove `engine.python` to use the interpreter of `kvbm`"
        raise resolved.mistake("engine.python", f"`engine.python`: `{python}` is not an executable", hint=hint)


def _require_address(resolved: ResolvedProfile) -> None:
    try:
        choose_port(resolved.profile.server.host, 0)
    except EnvironmentProblem as error:
        raise resolved.mistake("server.host", error.message, hint=OWN_ADDRESS) from None


def _require_metrics(resolved: ResolvedProfile) -> None:
    """Each engine with a cache serves its metrics on a port of its own."""
    ports = _metrics_ports(resolved)
    if ports and ports[-1] > MAX_PORT:
        needed = f"{len(ports)} engines need ports up to {ports[-1]}"
        message = f"`metrics.port` is too high: {needed}, but the maximum is {MAX_PORT}"
        raise resolved.mistake("metrics.port", message)
    if ports and resolved.profile.metrics.host is not None:
        try:
            choose_port(resolved.profile.metrics.host, 0)
        except EnvironmentProblem as error:
            hint = "set `metrics.host` to an address of this machine, or remove it to use `server.host`"
            raise resolved.mistake("metrics.host", error.message, hint=hint) from None


def require_free_port(resolved: ResolvedProfile) -> None:
    """EnvironmentProblem if the server's port is in use. Called just before the start."""
    server = resolved.profile.server
    try:
        choose_port(server.host, server.port)
    except EnvironmentProblem as error:
        raise EnvironmentProblem(resolved.mistake("server.port", error.message).message, hint=error.hint) from None


def require_metrics_ports(resolved: ResolvedProfile) -> None:
    """EnvironmentProblem if a port for metrics is in use. Called just before the start."""
    metrics, server = resolved.profile.metrics, resolved.profile.server
    try:
        for port in _metrics_ports(resolved):
            choose_port(metrics.host or server.host, port)
    except EnvironmentProblem as error:
        key = "metrics.port" if "metrics.port" in resolved.sources else "metrics.serve"
        hint = "`metrics.port: 0` chooses a free port; `metrics.serve: false` needs none"
        message = error.message.replace(": ", " for metrics: ", 1)
        raise EnvironmentProblem(resolved.mistake(key, message).message, hint=hint) from None


def _metrics_ports(resolved: ResolvedProfile) -> range:
    metrics = resolved.profile.metrics
    is_fixed = metrics.serve and metrics.port
    return range(metrics.port, metrics.port + copy_count(resolved.profile)) if is_fixed else range(0)


def _require_length(resolved: ResolvedProfile, sizing: Sizing) -> None:
    """ProfileError if `max_model_len` exceeds the positions of the model or the tokens of G1."""
    engine = resolved.profile.engine
    key, length = "engine.arguments.max_model_len", count_of(engine.arguments.max_model_len)
    positions = text_facts(model_facts(engine.model, kind=engine.kind)).get("max_position_embeddings")
    limits = [(positions, "the model accepts", "")]
    if sizing.device is not None and knows_block_tokens(resolved.profile):
        reserved_tokens = sizing.block_tokens if engine.kind == "vllm" else 0  # vLLM reserves one block
        holds = sizing.device.token_count - reserved_tokens
        limits.append((holds, "G1 holds", f", or raise `{sizing.device.set_by}`"))
    for limit, holder, or_raise in limits:
        if length is not None and isinstance(limit, int) and length > limit:
            message = f"`max_model_len` is {length} tokens, but {holder} at most {limit}"
            raise resolved.mistake(key, message, hint=f"lower `{key}`{or_raise}")


def _require_directory(resolved: ResolvedProfile) -> None:
    """ProfileError for a directory that cannot be created; else it would fail only after the model is loaded."""
    if resolved.profile.tiers.disk is None:
        return
    key, holder = "tiers.disk.directory", nearest_existing(expanded(resolved.profile.tiers.disk.directory))
    for is_wrong, text in (
        (not holder.is_dir(), "is not a directory"),
        (not os.access(holder, os.W_OK | os.X_OK), "is not writable"),
    ):
        if is_wrong:
            raise resolved.mistake(
                key,
                f"`{key}`: {holder} {text}",
                hint=f"set `{key}` to another directory; `kvbm doctor --dir DIR` checks one",
            )


def require_disk_space(resolved: ResolvedProfile, sizing: Sizing | SizeUnknown) -> None:
    """EnvironmentProblem if the disk tier does not fit even after unused caches are reused or removed.

    Prints a warning if it fits only in the space of such a cache. Called just before the start.
    """
    from kvbm.disk.directory import list_caches

    problem = _lack_of_disk(resolved, sizing)
    if problem is None:
        return
    missing_bytes, mistake = problem
    disk = resolved.profile.tiers.disk
    assert disk is not None, "its space was checked"
    caches = list_caches(expanded(disk.directory))
    if missing_bytes <= sum(cache.arena_bytes for cache in caches if not cache.is_locked):
        show_warning(mistake.message)
        return
    hint = "lower the capacity, or use another `tiers.disk.directory`; `--force` starts anyway"
    raise EnvironmentProblem(mistake.message, hint=hint)


def _lack_of_disk(resolved: ResolvedProfile, sizing: Sizing | SizeUnknown) -> tuple[int, ProfileError] | None:
    """Returns the bytes missing for the disk tier and the mistake to show, None if it fits."""
    disk = resolved.profile.tiers.disk
    if disk is None or isinstance(sizing, SizeUnknown) or sizing.disk is None:
        return None
    facts = os.statvfs(nearest_existing(expanded(disk.directory)))
    needed_bytes, free_bytes = sizing.disk.total_bytes, facts.f_bavail * facts.f_frsize
    if not facts.f_blocks or needed_bytes <= free_bytes:  # some filesystems do not report their size
        return None
    key = sizing.disk.set_by
    needed, free = format_size(needed_bytes), format_size(free_bytes)
    message = f"`{key}` requires {needed}, but {disk.directory} has only {free} free"
    return needed_bytes - free_bytes, resolved.mistake(key, message)


def _warn_of_memory(resolved: ResolvedProfile, sizing: Sizing) -> None:
    room = THIS_MACHINE.room()
    taken_bytes = sizing.host.total_bytes * copy_count(resolved.profile)
    if taken_bytes > room.available_bytes:
        show_warning(too_much_memory(resolved, taken_bytes, room).message)


def too_much_memory(resolved: ResolvedProfile, taken_bytes: int, room: Room) -> ProfileError:
    key, taken, available = size_key(resolved), format_size(taken_bytes), format_size(room.available_bytes)
    return resolved.mistake(key, f"`{key}` requires {taken}, but only {available} are available ({room.limit})")
