"""Mistakes of a profile that only this machine can find: model, interpreter, address, lengths, directory.

`kvbm profile check`, `serve` and `bench` run the same checks. A mistake is shown at the place of its key. What the
machine lacks for a valid profile is found by machine_problems.py.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.config.document import together
from kvbm.config.values import count_of
from kvbm.engines.table import kind_of, metrics_count
from kvbm.errors import EnvironmentProblem, ProfileError, reason_of
from kvbm.sizing import SizeUnknown, Sizing, StateLevel
from kvbm.sizing.families.facts import text_facts
from kvbm.tiers.disk.files import MAX_DIRECTORY_BYTES
from kvbm_cli.engine.process import OWN_ADDRESS, choose_port
from kvbm_cli.profile.size import size_of
from kvbm_cli.profile.state_check import state_findings
from kvbm_cli.system.answering import answers
from kvbm_cli.system.filesystem import expanded, nearest_existing

MAX_PORT = 65535

if TYPE_CHECKING:
    from kvbm.config.load import Examined, ResolvedProfile


def check(resolved: ResolvedProfile, *, has_cache: bool = True, verifies_flags: bool = True) -> Sizing | SizeUnknown:
    """Return the sizes of a profile, or the reason why only the engine knows them. ProfileError for mistakes.

    Without `has_cache`, checks only what the engine needs.
    """
    sizing, mistakes = examine_here(resolved, has_cache=has_cache, verifies_flags=verifies_flags)
    if mistakes:
        raise together(mistakes)
    assert sizing is not None, "a profile without mistakes has sizes or a reason why not"
    return sizing


def all_mistakes(
    examined: Examined, *, has_cache: bool = True
) -> tuple[Sizing | SizeUnknown | None, list[ProfileError]]:
    """Return the sizes if known, and all mistakes of a profile: its own, and in valid keys those that only this machine
    can find."""
    if examined.resolved is None:
        return None, list(examined.mistakes)
    sizing, found = examine_here(examined.resolved, has_cache=has_cache)
    known = {getattr(one, "key", "") for one in examined.mistakes}
    return sizing, [*examined.mistakes, *(one for one in found if getattr(one, "key", None) not in known)]


def examine_here(
    resolved: ResolvedProfile, *, has_cache: bool = True, verifies_flags: bool = True
) -> tuple[Sizing | SizeUnknown | None, list[ProfileError]]:
    """Return the sizes, None if a mistake prevents computing them, and all mistakes found on this machine."""
    sizing: Sizing | SizeUnknown | None = None
    mistakes: list[ProfileError] = []
    try:
        sizing = size_of(resolved)
    except SizeUnknown as unknown:
        sizing = unknown
    except ProfileError as mistake:
        mistakes.append(mistake)
    if sizing is not None:
        wrong = state_findings(resolved, StateLevel.MISTAKE)
        mistakes += [resolved.mistake(one.key, one.message, hint=one.hint) for one in wrong]
    if verifies_flags:
        mistakes += _unknown_arguments(resolved)
    of_cache = (require_arguments, _require_metrics, _require_directory) if has_cache else ()
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
    return sizing, mistakes


def _require_program(resolved: ResolvedProfile) -> None:
    python = resolved.profile.engine.python
    if python is not None and shutil.which(python) is None:
        hint = "name an executable, or remove `engine.python` to use the interpreter of `kvbm`"
        raise resolved.mistake("engine.python", f"`engine.python`: `{python}` is not an executable", hint=hint)


def _unknown_arguments(resolved: ResolvedProfile) -> Iterator[ProfileError]:
    """Yield the arguments that the engine in the profile's interpreter does not have."""
    for name, message, hint in kind_of(resolved.profile).unknown_arguments(resolved.profile):
        yield resolved.mistake(f"engine.arguments.{name}", message, hint=hint)


def require_arguments(resolved: ResolvedProfile) -> None:
    """ProfileError for arguments of an engine with which kvbm cannot keep its blocks."""
    for name, message, hint in kind_of(resolved.profile).unstorable_arguments(resolved.profile):
        raise resolved.mistake(f"engine.arguments.{name}", message, hint=hint)


def _require_address(resolved: ResolvedProfile) -> None:
    try:
        choose_port(resolved.profile.server.host, 0)
    except EnvironmentProblem as error:
        raise resolved.mistake("server.host", error.message, hint=OWN_ADDRESS) from None


def _require_metrics(resolved: ResolvedProfile) -> None:
    """Each engine with a cache serves its metrics on a port of its own."""
    ports = metrics_ports(resolved)
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


def metrics_ports(resolved: ResolvedProfile) -> range:
    metrics = resolved.profile.metrics
    is_fixed = metrics.serve and metrics.port
    return range(metrics.port, metrics.port + metrics_count(resolved.profile)) if is_fixed else range(0)


def _require_length(resolved: ResolvedProfile, sizing: Sizing) -> None:
    """ProfileError if the maximum length exceeds the positions of the model or the tokens of G1."""
    engine, kind = resolved.profile.engine, kind_of(resolved.profile)
    name = engine.arguments.LENGTH
    key, length = f"engine.arguments.{name}", count_of(getattr(engine.arguments, name))
    positions = text_facts(kind.model_facts(engine.model)).get("max_position_embeddings")
    limits = [(positions, "the model accepts", "")]
    if sizing.device is not None and kind.knows_block_tokens(resolved.profile):
        reserved_tokens = sizing.block_tokens * kind.reserved_blocks
        holds = sizing.device.token_count - reserved_tokens
        limits.append((holds, "G1 holds", f", or raise `{sizing.device.set_by}`"))
    for limit, holder, or_raise in limits:
        if length is not None and isinstance(limit, int) and length > limit:
            message = f"`{name}` is {length} tokens, but {holder} at most {limit}"
            raise resolved.mistake(key, message, hint=f"lower `{key}`{or_raise}")


def _require_directory(resolved: ResolvedProfile) -> None:
    """ProfileError for a directory that cannot be used; else it would fail only after the model is loaded."""
    disk, metrics = resolved.profile.tiers.disk, resolved.profile.metrics
    if disk is not None and answers(directory := expanded(disk.directory)):  # else problems_here says so
        reason = _reason_not_private(directory) or _reason_too_long(directory) or _reason_not_usable(directory)
        _require_none(resolved, "tiers.disk.directory", reason)
    if metrics.record:
        directory = expanded(metrics.record_directory)
        reason = _reason_not_usable(directory) or disk_state(directory)
        _require_none(resolved, "metrics.record_directory", reason)


def _require_none(resolved: ResolvedProfile, key: str, reason: str | None) -> None:
    if reason is not None:
        hint = f"set `{key}` to another directory; `kvbm doctor --dir DIR` checks one"
        raise resolved.mistake(key, f"`{key}`: {reason}", hint=hint)


def _reason_not_private(directory: Path) -> str | None:
    """Return why the disk tier refuses an existing directory, None if it does not."""
    try:
        mode = os.lstat(directory).st_mode
    except OSError:
        return None  # missing, or not usable for another reason
    if stat.S_ISLNK(mode):
        return f"{directory} is a symbolic link, which is not followed"
    if stat.S_ISDIR(mode) and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return f"{directory} is writable by everyone (mode {stat.S_IMODE(mode):04o})"
    return None


def _reason_too_long(directory: Path) -> str | None:
    length = len(os.fsencode(directory))
    if length <= MAX_DIRECTORY_BYTES:
        return None
    return f"the path has {length} bytes; the index of the disk tier allows {MAX_DIRECTORY_BYTES}"


def disk_state(directory: Path) -> str | None:
    """Return why files cannot be created in the directory at present, None if they can."""
    holder = nearest_existing(directory)
    try:
        if os.statvfs(holder).f_flag & os.ST_RDONLY:
            return f"{holder} is on a read-only file system"
    except OSError as error:
        return f"cannot use {holder}: {reason_of(error)}"
    return None if os.access(holder, os.W_OK | os.X_OK) else f"{holder} is not writable"


def _reason_not_usable(directory: Path) -> str | None:
    """Return why no files can ever be created in the directory, None if they can."""
    holder = nearest_existing(directory)
    try:
        mode = os.stat(holder).st_mode
    except OSError as error:
        may_pass = error.errno in (errno.EACCES, errno.EIO, errno.ESTALE)
        return None if may_pass else f"cannot use {holder}: {reason_of(error)}"
    if not stat.S_ISDIR(mode):
        return f"{holder} is not a directory"
    try:
        os.lstat(directory)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return f"the name of {directory} is too long"
    return None
