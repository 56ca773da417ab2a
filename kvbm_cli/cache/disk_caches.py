"""`kvbm cache`: lists, verifies and removes the caches in a directory of the disk tier.

A cache that an engine uses is only read. An attempt to change it is an error that names the process using it.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import sqlite3
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from kvbm.config.files import is_missing
from kvbm.config.schema import DiskTierSection
from kvbm.errors import EnvironmentProblem, UsageError, reason_of
from kvbm.hashing import tenant
from kvbm.text.outside import shown
from kvbm.tiers.disk.directory import (
    SUPERBLOCK,
    InstanceLock,
    Skipped,
    remove_instance,
)
from kvbm.tiers.disk.superblock import OtherFormat, read_superblock
from kvbm_cli.cache.disk_verification import drop, holder, verify
from kvbm_cli.cache.tenant_clearing import clear_tenant
from kvbm_cli.profile.resolve import resolve
from kvbm_cli.store.caches import CacheFacts, directory_around, why_not_own
from kvbm_cli.store.caches import list_caches as found_in
from kvbm_cli.system.answering import require_answering
from kvbm_cli.system.filesystem import expanded, write_atomically
from kvbm_cli.terminal.console import is_confirmed, print_data, print_json, print_note, table
from kvbm_cli.terminal.progress import ProgressDisplay
from kvbm_cli.terminal.quantities import counted, shown_size, time_since

FORMATS = ("json", "csv")
COLUMNS = (  # of `--format csv`
    *("cache", "path", "namespace", "model", "is_in_use", "pid", "blocks", "block_bytes", "bytes", "slots"),
    *("space_bytes", "created", "last_used", "last_written", "problem", "facts"),
)
SHOWN_SKIPPED = 10
PROGRESS_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Result of `kvbm cache verify` for one cache. `replaced` blocks were evicted while they were read."""

    cache: str
    path: str
    good: int = 0
    bad: int = 0
    dropped: int = 0
    replaced: int = 0
    problem: str | None = None

    @property
    def is_intact(self) -> bool:
        return not self.bad and self.problem is None


def list_caches(directory: Path | None, profiles: Sequence[str], *, as_json: bool) -> int:
    """Return 1 if a part of the directory cannot be read."""
    place, skipped = _place(directory, profiles), list[Skipped]()
    caches = _caches(place, skipped)
    if as_json:
        print_json(list(map(_as_data, caches)))
    elif not caches:
        print_data(f"no caches in {place}")
    else:
        head = ("cache", "blocks", "bytes", "space", "age", "last used", "used by", "model")
        print_data(table([head, *map(_row, caches)], right=(1, 2, 3, 4, 5)))
        problems = [f"{cache.path.name}: {cache.problem}" for cache in caches if cache.problem]
        print_data("\n".join(["", *problems, *[""] * bool(problems), f"{_caches_and_space(caches)} in {place}"]))
    return _note_skipped(skipped)


def verify_caches(directory: Path | None, profiles: Sequence[str], *, as_json: bool) -> int:
    """Return 1 if a cache is damaged, or a part of the directory cannot be read."""
    place, skipped = _place(directory, profiles, changes=True), list[Skipped]()
    caches = _caches(place, skipped)
    if not (caches or as_json):
        print_data(f"no caches in {place}")
    results = []
    for cache in caches:
        results.append(_verify(cache))
        if not as_json:
            print_data(_summary(results[-1]))
    if as_json:
        print_json([asdict(result) for result in results])
    return max(_note_skipped(skipped), *(0 if result.is_intact else 1 for result in results), 0)


def clear_caches(directory: Path | None, profiles: Sequence[str], *, salt: str | None, is_sure: bool) -> int:
    """Return 1 if the user did not confirm, or if a cache cannot be removed."""
    place, skipped = _place(directory, profiles, changes=True), list[Skipped]()
    caches = [cache for cache in _caches(place, skipped) if _is_of_this_format(cache) and _is_own(cache, skipped)]
    status = _note_skipped(skipped)
    if not caches:
        print_data(f"no caches in {place}")
        return status
    for cache in caches:
        if cache.is_locked:
            raise _in_use(cache)
    if salt is not None:
        _require_indexes(caches)
    summary = _caches_and_space(caches)
    blocks = "" if salt is None else "the blocks of one cache salt from "
    if not is_sure and not is_confirmed(f"remove {blocks}{summary} in {place}?"):
        return 1
    with _all_locked(caches) as locks:
        if salt is None:
            for lock in locks:
                remove_instance(lock)
            print_data(f"removed {summary}")
        else:
            count = sum(_clear_tenant(cache, salt) for cache in caches)
            print_data(f"removed {counted(count, 'block')} with this cache salt")
    return status


def export_stats(directory: Path | None, profiles: Sequence[str], *, form: str, output: Path | None) -> None:
    if form not in FORMATS:
        raise UsageError(f"unknown format `{form}`", hint="use `--format json` or `--format csv`")
    caches = list(map(_as_data, _caches(_place(directory, profiles), [])))
    text = _as_csv(caches) if form == "csv" else json.dumps(caches, indent=2) + "\n"
    if output is None:
        print_data(text.removesuffix("\n"))
        return
    try:
        if output.is_symlink() or (output.exists() and not output.is_file()):  # not a regular file that can be replaced
            output.write_text(text, encoding="utf-8")
        else:
            write_atomically(output, text)
    except OSError as error:
        reason = reason_of(error)
        raise EnvironmentProblem(f"cannot write `{output}`: {reason}") from None


def _place(directory: Path | None, profiles: Sequence[str], *, changes: bool = False) -> Path:
    """Return `--dir`, the directory of the profile, or the default directory. `changes`: the command changes caches."""
    if directory is not None and profiles:
        raise UsageError("`--dir` and `--profile` cannot be used together", hint="remove one of them")
    disk = resolve(*profiles).profile.tiers.disk if profiles else None
    if profiles and disk is None:
        named = ", ".join(profiles)
        raise UsageError(f"profile `{named}` has no disk tier", hint="name the directory with `--dir DIR`")
    named_by_profile = DiskTierSection.model_fields["directory"].default if disk is None else disk.directory
    place = directory or expanded(named_by_profile)
    require_answering(place, changes=changes)
    if directory is not None:
        try:
            is_directory = stat.S_ISDIR(os.stat(directory).st_mode)
        except OSError as error:
            raise UsageError(f"`--dir {directory}`: {reason_of(error)}") from None
        if not is_directory:
            raise UsageError(f"`--dir {directory}`: not a directory")
        _require_outside(directory)
    return place


def _require_outside(place: Path) -> None:
    """UsageError for a path inside a cache directory, where no cache would be found."""
    around = directory_around(place)
    if around is not None:
        inside = os.path.abspath(place)
        models = {str(cache.facts.get("model")) for cache in _caches(around, []) if cache.path.is_relative_to(inside)}
        of_models = f" of {', '.join(sorted(models))}" if models else ""
        raise UsageError(
            f"`--dir {place}` is inside a cache{of_models}", hint=f"use `--dir {shlex.quote(str(around))}`"
        )


def _caches(place: Path, skipped: list[Skipped]) -> list[CacheFacts]:
    """Return the caches, the most recently used first."""
    return [] if is_missing(place) else found_in(place, skipped)


def _is_own(cache: CacheFacts, skipped: list[Skipped]) -> bool:
    """Whether its directories and its lock are private and of this user. Other caches are not changed."""
    why = why_not_own(cache.path)
    skipped += [] if why is None else [why]
    return why is None


def _note_skipped(skipped: Sequence[Skipped]) -> int:
    """Names what was not touched. Returns 1 if there may be caches of this user."""
    for one in skipped[:SHOWN_SKIPPED]:
        print_note(f"skipped {shown(str(one.path))}: {one.why}")
    if len(skipped) > SHOWN_SKIPPED:
        print_note(f"skipped {len(skipped) - SHOWN_SKIPPED:,} more")
    return 1 if any(one.is_failure for one in skipped) else 0


def _as_data(cache: CacheFacts) -> dict[str, object]:
    """Return one cache for `--json` and `export-stats`. Unknown values are None; times are in seconds since 1970."""
    superblock = cache.superblock
    return {
        "cache": cache.path.name,
        "path": str(cache.path),
        "namespace": cache.namespace,
        "model": cache.model,
        "is_in_use": cache.is_locked,
        "pid": holder(cache.path) if cache.is_locked else None,
        "blocks": cache.block_count,
        "block_bytes": superblock.payload_bytes if superblock else None,
        "bytes": cache.byte_count,
        "slots": superblock.slot_count if superblock else None,
        "space_bytes": cache.arena_bytes,
        "created": superblock.created if superblock else None,
        "last_used": cache.last_used,
        "last_written": cache.last_written,
        "problem": cache.problem,
        "facts": dict(cache.facts),
    }


def _row(cache: CacheFacts) -> tuple[str, ...]:
    return (
        cache.path.name,
        "-" if cache.block_count is None else f"{cache.block_count:,}",
        shown_size(cache.byte_count),
        shown_size(cache.arena_bytes),
        time_since(cache.superblock.created if cache.superblock else None),
        time_since(cache.last_used),
        _user(cache) if cache.is_locked else "-",
        cache.model or "-",
    )


def _as_csv(caches: Sequence[Mapping[str, object]]) -> str:
    """Format the caches as CSV, with `facts` as JSON in one field and unknown values empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**cache, "facts": json.dumps(cache["facts"])} for cache in caches)
    return text.getvalue()


def _verify(cache: CacheFacts) -> VerifyResult:
    name, path = cache.path.name, str(cache.path)
    if cache.problem is not None:
        return VerifyResult(name, path, problem=cache.problem)
    assert cache.superblock is not None, f"{path} has neither a superblock nor a problem"
    lock = InstanceLock.take(cache.path)
    if lock is None:
        print_note(f"{name} is in use by {_user(cache)}: damaged blocks are reported but not dropped")
    try:
        with ProgressDisplay("verifying", delay_s=PROGRESS_AFTER_S) as progress:
            found = verify(cache.path, cache.superblock, progress=partial(progress.report_bytes, name))
        if found.bad and lock is not None:
            drop(cache.path, found.bad)
    except OSError as error:
        return VerifyResult(name, path, problem=f"{error.filename or path}: {error.strerror}")
    except (EnvironmentProblem, sqlite3.Error) as error:
        return VerifyResult(name, path, problem=str(error))
    finally:
        if lock is not None:
            lock.release()
    bad = len(found.bad)
    return VerifyResult(name, path, found.good_count, bad, 0 if lock is None else bad, found.replaced_count)


def _summary(result: VerifyResult) -> str:
    if result.problem:
        return f"{result.cache}: {result.problem}"
    text = f"{result.cache}: {counted(result.good + result.bad, 'block')} read, {result.bad:,} damaged"
    if result.bad:
        text += " and dropped" if result.dropped else ", not dropped"
    return text + (f"; {result.replaced:,} replaced meanwhile" if result.replaced else "")


def _is_of_this_format(cache: CacheFacts) -> bool:
    """Return False, with a note, for a cache of another format version, which is not touched."""
    try:
        read_superblock(cache.path / SUPERBLOCK)
    except OtherFormat as error:
        print_note(f"not removed: {error.message}")
        return False
    except EnvironmentProblem:
        return True  # damaged, not of another version: taking its lock reports the reason
    return True


def _in_use(cache: CacheFacts) -> EnvironmentProblem:
    name, user = cache.path.name, _user(cache)
    return EnvironmentProblem(f"cache {name} is in use by {user}", hint="stop that engine first (`kvbm stop`)")


def _require_indexes(caches: Sequence[CacheFacts]) -> None:
    for cache in caches:
        if cache.problem is not None:
            raise EnvironmentProblem(
                f"cannot find the blocks with this cache salt in cache {cache.path.name}: {cache.problem}",
                hint="`kvbm cache clear` without `--salt` removes the whole cache",
            )


@contextmanager
def _all_locked(caches: Sequence[CacheFacts]) -> Iterator[list[InstanceLock]]:
    """Locks all caches, so that nothing is removed if one of them is in use."""
    with ExitStack() as stack:
        locks = []
        for cache in caches:
            lock = InstanceLock.take(cache.path)
            if lock is None:
                raise _in_use(cache)
            stack.callback(lock.release)
            locks.append(lock)
        yield locks


def _clear_tenant(cache: CacheFacts, salt: str) -> int:
    assert cache.superblock is not None, f"{cache.path} has neither a superblock nor a problem"
    try:
        return clear_tenant(cache.path, cache.superblock, tenant(salt))
    except (OSError, sqlite3.Error) as error:
        raise EnvironmentProblem(f"cannot clear cache {cache.path.name}: {error}") from None


def _caches_and_space(caches: Sequence[CacheFacts]) -> str:
    return f"{counted(len(caches), 'cache')}, {shown_size(sum(cache.arena_bytes for cache in caches))}"


def _user(cache: CacheFacts) -> str:
    pid = holder(cache.path)
    return "another process" if pid is None else f"process {pid}"
