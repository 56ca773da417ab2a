"""Mistakes of a profile that only this machine can find: model, interpreter, address, lengths, directory.

`kvbm profile check`, `serve` and `bench` run the same checks. A mistake is shown at the place of its key. What the
machine lacks for a valid profile is found by machine_problems.py.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.config.document import together
from kvbm.config.values import count_of
from kvbm.engines.table import kind_of, metrics_count
from kvbm.errors import EnvironmentProblem, ProfileError, reason_of
from kvbm.sizing import SizeUnknown, Sizing, StateLevel
from kvbm.sizing.families.facts import text_facts
from kvbm.tiers.disk.files import MAX_DIRECTORY_BYTES, require_usable_parent
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
        mistakes += _of_arguments(resolved, kind_of(resolved.profile).unknown_arguments(resolved.profile))
    mistakes += [*_wrong_program(resolved), *_wrong_address(resolved, "server.host", OWN_ADDRESS)]
    if has_cache:
        mistakes += [*unstorable_arguments(resolved), *_wrong_metrics(resolved), *_wrong_directories(resolved)]
    if isinstance(sizing, Sizing):
        mistakes += _wrong_length(resolved, sizing)
    return sizing, mistakes


def _wrong_program(resolved: ResolvedProfile) -> Iterator[ProfileError]:
    python = resolved.profile.engine.python
    if python is not None and shutil.which(python) is None:
        hint = "name an executable, or remove `engine.python` to use the interpreter of `kvbm`"
        yield resolved.mistake("engine.python", f"`engine.python`: `{python}` is not an executable", hint=hint)


def unstorable_arguments(resolved: ResolvedProfile) -> list[ProfileError]:
    """Return the arguments of an engine with which kvbm cannot keep its blocks."""
    return _of_arguments(resolved, kind_of(resolved.profile).unstorable_arguments(resolved.profile))


def _of_arguments(resolved: ResolvedProfile, found: Iterable[tuple[str, str, str | None]]) -> list[ProfileError]:
    return [resolved.mistake(f"engine.arguments.{name}", message, hint=hint) for name, message, hint in found]


def _wrong_address(resolved: ResolvedProfile, key: str, hint: str) -> Iterator[ProfileError]:
    """Yield the mistake of an address that is not of this machine."""
    section, _, name = key.partition(".")
    host = getattr(getattr(resolved.profile, section), name)
    try:
        choose_port(host, 0)
    except EnvironmentProblem as error:
        yield resolved.mistake(key, error.message, hint=hint)


def _wrong_metrics(resolved: ResolvedProfile) -> Iterator[ProfileError]:
    """Each engine with a cache serves its metrics on a port of its own."""
    ports = metrics_ports(resolved)
    if ports and ports[-1] > MAX_PORT:
        needed = f"{len(ports)} engines need ports up to {ports[-1]}"
        message = f"`metrics.port` is too high: {needed}, but the maximum is {MAX_PORT}"
        yield resolved.mistake("metrics.port", message)
    elif ports and resolved.profile.metrics.host is not None:
        hint = "set `metrics.host` to an address of this machine, or remove it to use `server.host`"
        yield from _wrong_address(resolved, "metrics.host", hint)


def metrics_ports(resolved: ResolvedProfile) -> range:
    metrics = resolved.profile.metrics
    is_fixed = metrics.serve and metrics.port
    return range(metrics.port, metrics.port + metrics_count(resolved.profile)) if is_fixed else range(0)


def _wrong_length(resolved: ResolvedProfile, sizing: Sizing) -> Iterator[ProfileError]:
    """Yield the mistake of a maximum length that exceeds the positions of the model or the tokens of G1."""
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
            yield resolved.mistake(key, message, hint=f"lower `{key}`{or_raise}")
            return


def _wrong_directories(resolved: ResolvedProfile) -> Iterator[ProfileError]:
    """Yield directories that cannot be used; else they would fail only after the model is loaded."""
    disk, metrics = resolved.profile.tiers.disk, resolved.profile.metrics
    reasons: dict[str, str | None] = {}
    if disk is not None and answers(directory := expanded(disk.directory)):  # else problems_here says so
        reasons["tiers.disk.directory"] = _reason_refused(directory) or _reason_not_usable(directory)
    if metrics.record:
        directory = expanded(metrics.record_directory)
        reasons["metrics.record_directory"] = _reason_not_usable(directory) or disk_state(directory)
    for key, reason in reasons.items():
        if reason is not None:
            hint = f"set `{key}` to another directory; `kvbm doctor --dir DIR` checks one"
            yield resolved.mistake(key, f"`{key}`: {reason}", hint=hint)


def _reason_refused(directory: Path) -> str | None:
    """Return why the disk tier refuses the directory, None if it does not. One that is missing is not created here."""
    try:
        if os.path.lexists(directory) or len(os.fsencode(directory)) > MAX_DIRECTORY_BYTES:
            require_usable_parent(directory)
    except EnvironmentProblem as error:
        return error.message
    return None


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
