"""`kvbm cache`: what lies in a directory of the disk tier, whether it is sound, and how it is removed.

A cache that an engine uses is only read; who wants to change it is told which process holds it.
"""

from __future__ import annotations

import csv
import io
import json
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.errors import EnvironmentProblem, UsageError
from kvbm_cli.system.filesystem import write_atomically
from kvbm_cli.terminal.console import print_data, print_json, print_note, table

if TYPE_CHECKING:
    from kvbm.disk.directory import CacheFacts, InstanceLock
    from kvbm.disk.verify import Verified

FORMATS = ("json", "csv")
NOTE_INTERVAL_S = 2.0
LIVE_INTERVAL_S = 0.1
UNITS = (("s", 1, 60), ("min", 60, 60), ("h", 3600, 48))  # each up to how many
DAY_S = 86400


@dataclass(frozen=True, slots=True)
class CacheStats:
    """One cache. None is what cannot be told; times are in seconds since 1970."""

    cache: str
    path: str
    namespace: str
    model: str | None
    is_in_use: bool
    pid: int | None
    blocks: int | None
    block_bytes: int | None
    bytes: int | None
    slots: int | None
    space_bytes: int
    created: float | None
    last_used: float
    last_written: float | None
    problem: str | None
    facts: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `verify` found in one cache. `replaced` blocks went away while they were read."""

    cache: str
    path: str
    good: int
    bad: int
    dropped: int
    replaced: int
    problem: str | None

    @property
    def is_sound(self) -> bool:
        return not self.bad and self.problem is None


def list_caches(directory: Path | None, profile: str | None, *, as_json: bool) -> None:
    place = _place(directory, profile)
    caches = [_stats(cache) for cache in _caches(place)]
    if as_json:
        print_json([asdict(cache) for cache in caches])
    elif not caches:
        print_data(f"no caches in {place}")
    else:
        head = ("cache", "blocks", "bytes", "space", "age", "last used", "used by", "model")
        print_data(table([head, *map(_row, caches)], right=(1, 2, 3, 4, 5)))
        problems = [f"{cache.cache}: {cache.problem}" for cache in caches if cache.problem]
        print_data("\n".join(["", *problems, *[""] * bool(problems), f"{_caches_and_space(caches)} in {place}"]))


def verify_caches(directory: Path | None, profile: str | None, *, as_json: bool) -> int:
    """1 where something is not sound."""
    place = _place(directory, profile)
    caches = _caches(place)
    if not (caches or as_json):
        print_data(f"no caches in {place}")
    verdicts = []
    for cache in caches:
        verdicts.append(_verify(cache))
        if not as_json:
            print_data(_told(verdicts[-1]))
    if as_json:
        print_json([asdict(verdict) for verdict in verdicts])
    return 0 if all(verdict.is_sound for verdict in verdicts) else 1


def clear_caches(directory: Path | None, profile: str | None, *, salt: str | None, is_sure: bool) -> int:
    """1 where the answer to the question was no."""
    place = _place(directory, profile)
    caches = [cache for cache in _caches(place) if _is_of_this_format(cache)]
    if not caches:
        print_data(f"no caches in {place}")
        return 0
    _require_free(caches)
    if salt is not None:
        _require_indexes(caches)
    what = _caches_and_space([_stats(cache) for cache in caches])
    whose = "" if salt is None else "the blocks of one tenant from "
    if not is_sure and not _is_confirmed(f"remove {whose}{what} in {place}?"):
        return 1
    with _held(caches) as locks:
        if salt is None:
            _remove(locks)
            print_data(f"removed {what}")
        else:
            count = sum(_clear_tenant(cache, salt) for cache in caches)
            print_data(f"removed {_counted(count, 'block')} of that tenant")
    return 0


def export_stats(directory: Path | None, profile: str | None, *, form: str, output: Path | None) -> None:
    if form not in FORMATS:
        raise UsageError(f"`--format {form}` is not known", hint="`--format json` or `--format csv`")
    caches = [_stats(cache) for cache in _caches(_place(directory, profile))]
    text = _as_csv(caches) if form == "csv" else json.dumps([asdict(cache) for cache in caches], indent=2) + "\n"
    if output is None:
        print_data(text.removesuffix("\n"))
        return
    try:
        if output.is_symlink() or (output.exists() and not output.is_file()):  # not a file to be put in its place
            output.write_text(text, encoding="utf-8")
        else:
            write_atomically(output, text)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise EnvironmentProblem(f"cannot write `{output}`: {reason}") from None


def _place(directory: Path | None, profile: str | None) -> Path:
    """The directory that was asked for, the profile's, or that of a profile which does not say."""
    from kvbm.config.schema import DiskTierSection

    if directory is not None:
        if profile is not None:
            raise UsageError("`--dir` and `--profile` both name a directory", hint="leave one of them out")
        if not directory.is_dir():
            raise UsageError(f"`--dir {directory}` is no directory")
        _require_outside(directory)
        return directory
    if profile is None:
        return Path(DiskTierSection.model_fields["directory"].default).expanduser()
    from kvbm_cli.profile.resolve import resolve

    disk = resolve(profile).profile.tiers.disk
    if disk is None:
        raise UsageError(f"profile `{profile}` has no disk tier", hint="`--dir DIR` names the directory itself")
    return Path(disk.directory).expanduser()


def _require_outside(place: Path) -> None:
    """UsageError for a cache itself, or what holds those of one kind: nothing would be found in it."""
    from kvbm.disk.directory import directory_around

    around = directory_around(place)
    if around is not None:
        models = {str(cache.facts.get("model")) for cache in _caches(around) if cache.path.is_relative_to(place)}
        whose = f" of {', '.join(sorted(models))}" if models else ""
        raise UsageError(f"`--dir {place}` lies inside a cache{whose}", hint=f"`--dir {around}`")


def _caches(place: Path) -> list[CacheFacts]:
    """The one used last first."""
    from kvbm.disk.directory import list_caches as found_in

    return found_in(place) if place.exists() else []


def _stats(cache: CacheFacts) -> CacheStats:
    from kvbm.disk.verify import holder

    superblock = cache.superblock
    block_bytes = superblock.payload_bytes if superblock else None
    model = cache.facts.get("model")
    return CacheStats(
        cache=cache.path.name,
        path=str(cache.path),
        namespace=cache.namespace,
        model=None if model is None else str(model),
        is_in_use=cache.is_locked,
        pid=holder(cache.path) if cache.is_locked else None,
        blocks=cache.block_count,
        block_bytes=block_bytes,
        bytes=None if block_bytes is None or cache.block_count is None else cache.block_count * block_bytes,
        slots=superblock.slot_count if superblock else None,
        space_bytes=cache.arena_bytes,
        created=superblock.created if superblock else None,
        last_used=cache.last_used,
        last_written=cache.last_written,
        problem=cache.problem,
        facts=dict(cache.facts),
    )


def _row(cache: CacheStats) -> tuple[str, ...]:
    return (
        cache.cache,
        "-" if cache.blocks is None else f"{cache.blocks:,}",
        _size(cache.bytes),
        _size(cache.space_bytes),
        _time_since(cache.created),
        _time_since(cache.last_used),
        _user(cache.pid) if cache.is_in_use else "-",
        cache.model or "-",
    )


def _as_csv(caches: Sequence[CacheStats]) -> str:
    """`facts` as JSON in one field, and an empty field for what cannot be told."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(CacheStats)])
    for cache in caches:
        writer.writerow([json.dumps(value) if isinstance(value, dict) else value for value in asdict(cache).values()])
    return text.getvalue()


def _verify(cache: CacheFacts) -> Verdict:
    from kvbm.disk.directory import InstanceLock

    name = cache.path.name
    if cache.problem is not None:
        return _verdict(cache, None, problem=cache.problem)
    lock = InstanceLock.take(cache.path)
    if lock is None:
        print_note(f"{name} is in use by {_user(_stats(cache).pid)}: it is only read, and nothing is dropped")
    try:
        return _read_all(cache, may_drop=lock is not None)
    except OSError as error:
        return _verdict(cache, None, problem=f"{error.filename or cache.path}: {error.strerror}")
    except (EnvironmentProblem, sqlite3.Error) as error:
        return _verdict(cache, None, problem=str(error))
    finally:
        if lock is not None:
            lock.release()


def _read_all(cache: CacheFacts, *, may_drop: bool) -> Verdict:
    """Raises OSError, EnvironmentProblem or sqlite3.Error."""
    from kvbm.disk.verify import drop, verify

    assert cache.superblock is not None, f"{cache.path} has neither a superblock nor a problem"
    found = verify(cache.path, cache.superblock, progress=_ReadProgress(cache.path.name))
    if found.bad and may_drop:
        drop(cache.path, found.bad)
    return _verdict(cache, found, dropped=len(found.bad) if may_drop else 0)


def _verdict(cache: CacheFacts, found: Verified | None, *, dropped: int = 0, problem: str | None = None) -> Verdict:
    good, bad, replaced = (found.good_count, len(found.bad), found.replaced_count) if found else (0, 0, 0)
    return Verdict(cache.path.name, str(cache.path), good, bad, dropped, replaced, problem)


def _told(verdict: Verdict) -> str:
    if verdict.problem:
        return f"{verdict.cache}: {verdict.problem}"
    text = f"{verdict.cache}: {_counted(verdict.good + verdict.bad, 'block')} read, {verdict.bad:,} damaged"
    if verdict.bad:
        text += " and dropped" if verdict.dropped else ", not dropped"
    return text + (f"; {verdict.replaced:,} replaced meanwhile" if verdict.replaced else "")


class _ReadProgress:
    """One live line on a terminal; a line every two seconds anywhere else."""

    def __init__(self, name: str) -> None:
        self._name, self._is_live = name, sys.stderr.isatty()
        self._interval_s = LIVE_INTERVAL_S if self._is_live else NOTE_INTERVAL_S
        self._started_s = self._shown_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if self._is_live and done == total:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        elif now_s - self._shown_s >= self._interval_s:
            self._shown_s = now_s
            rate = done / (now_s - self._started_s)
            line = f"{self._name}  {_size(done)} of {_size(total)}, {_size(int(rate))}/s"
            line += f", {(total - done) / rate:.0f} s left" if rate else ""
            if self._is_live:
                print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
            else:
                print_note(line)


def _is_of_this_format(cache: CacheFacts) -> bool:
    """Another version's cache is left alone, and named."""
    from kvbm.disk.directory import SUPERBLOCK
    from kvbm.disk.superblock import OtherFormat, read_superblock

    try:
        read_superblock(cache.path / SUPERBLOCK)
    except OtherFormat as error:
        print_note(f"left alone: {error.message}")
        return False
    except EnvironmentProblem:
        return True  # damaged or strange, and of no other version: taking its lock says what is wrong
    return True


def _require_free(caches: Sequence[CacheFacts]) -> None:
    for cache in caches:
        if cache.is_locked:
            raise _in_use(cache)


def _in_use(cache: CacheFacts) -> EnvironmentProblem:
    user = _user(_stats(cache).pid)
    return EnvironmentProblem(f"cache {cache.path.name} is in use by {user}", hint="stop that engine first")


def _require_indexes(caches: Sequence[CacheFacts]) -> None:
    for cache in caches:
        if cache.problem is not None:
            raise EnvironmentProblem(
                f"cache {cache.path.name} does not tell whose its blocks are: {cache.problem}",
                hint="`kvbm cache clear` without `--salt` removes it as a whole",
            )


def _is_confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to be asked before something is removed", hint="`--yes` does not ask")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@contextmanager
def _held(caches: Sequence[CacheFacts]) -> Iterator[list[InstanceLock]]:
    """All of them, so that nothing is removed where something is in use."""
    from kvbm.disk.directory import InstanceLock

    with ExitStack() as stack:
        locks = []
        for cache in caches:
            lock = InstanceLock.take(cache.path)
            if lock is None:
                raise _in_use(cache)
            stack.callback(lock.release)
            locks.append(lock)
        yield locks


def _remove(locks: Sequence[InstanceLock]) -> None:
    from kvbm.disk.directory import remove_instance

    for lock in locks:
        remove_instance(lock)


def _clear_tenant(cache: CacheFacts, salt: str) -> int:
    from kvbm.disk.clear import clear_tenant
    from kvbm.hashing import tenant

    assert cache.superblock is not None, f"{cache.path} has neither a superblock nor a problem"
    try:
        return clear_tenant(cache.path, cache.superblock, tenant(salt))
    except (OSError, sqlite3.Error) as error:
        raise EnvironmentProblem(f"cache {cache.path.name} is not cleared: {error}") from None


def _caches_and_space(caches: Sequence[CacheStats]) -> str:
    return f"{_counted(len(caches), 'cache')}, {_size(sum(cache.space_bytes for cache in caches))}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _user(pid: int | None) -> str:
    return "another process" if pid is None else f"process {pid}"


def _size(byte_count: int | None) -> str:
    from kvbm.config.sizes import format_size

    return "-" if byte_count is None else format_size(byte_count)


def _time_since(moment: float | None) -> str:
    if moment is None:
        return "-"
    seconds = max(0, int(time.time() - moment))
    for unit, length, most in UNITS:
        if seconds < length * most:
            return f"{seconds // length} {unit}"
    return f"{seconds // DAY_S:,} d"
