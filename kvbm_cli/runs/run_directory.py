"""Run directories: one for each `kvbm serve`, below ~/.local/state/kvbm/runs. Its launcher writes it, others read it.

    demo-1/
      run.json       facts about the run: processes, address, state, exit code; always replaced as a whole
      profile.yaml   the resolved profile, valid for `kvbm serve --profile`
      engine.log     output of the engine; further files if there are several engines
      kvbm.log       output of the launcher of a detached run after the start
      lock           held by the launcher while it lives, and names it; other containers that share the directory see it
      stop.json      timeout that `kvbm stop --timeout` requested
      prometheus-targets.json    where Prometheus (`file_sd_configs`) finds the metrics of a run that is healthy
      control-*.sock live control of the engines, for `kvbm cache ls RUN` and others
      admin-token    secret for requests that change the embedded engine, such as /reset_prefix_cache

A run is alive if its launcher is alive: the process that run.json names, and that holds the lock. The processes of a
run that is not alive are never signalled: their process ids may belong to others. Names are `PROFILE-NUMBER` with
increasing numbers. `kvbm serve` locks the parent directory from the check of the running engines until its own
directory records what it reserves. `RunDirectory` also holds the claim of the engine's memory (memory_claims.py).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from kvbm.config.files import is_missing
from kvbm.errors import EnvironmentProblem, UsageError, reason_of
from kvbm.host.directories import make_private_directories
from kvbm.text.reading import parse_json
from kvbm_cli.runs import memory_claims
from kvbm_cli.runs.locks import holder_state, is_locked, locked, locked_file, open_regular
from kvbm_cli.runs.memory_claims import MemoryClaim
from kvbm_cli.runs.run_facts import RunFacts, RunState, UnreadableFacts
from kvbm_cli.system.filesystem import no_temporary_file, remove_tree, state_directory, write_atomically
from kvbm_cli.system.open_files import writes
from kvbm_cli.system.process_identity import ProcessIdentity
from kvbm_cli.terminal.printable import commentable

KEPT_RUNS = 20
LONGEST_NAME = 100  # of a run without its number; file names may have 255 bytes
MOST_BYTES = 1 << 20  # of run.json
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
ABANDONED_AFTER_S = 3600.0  # age of a directory without run.json before it is removed
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
FACTS, PROFILE, LOCK, STOP, ADMIN_TOKEN = "run.json", "profile.yaml", "lock", "stop.json", "admin-token"
TARGETS = "prometheus-targets.json"
CONTROL_SOCKETS = "control-*.sock"
ENGINE_LOG, OWN_LOG = "engine.log", "kvbm.log"
_NUMBERED = re.compile(r"(.+)-(\d+)")


@dataclass(frozen=True, slots=True)
class EngineRun:
    """A run as another process sees it at one moment."""

    path: Path
    facts: RunFacts
    is_living: bool

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def launcher(self) -> ProcessIdentity:
        return self.facts.launcher

    @property
    def state(self) -> RunState:
        if self.is_living or self.facts.state is RunState.ENDED:
            return self.facts.state
        return RunState.DEAD

    @property
    def is_elsewhere(self) -> bool:
        """Whether it runs in another container, or on another machine that shares the home directory."""
        return self.is_living and not self.facts.launcher.is_here()

    def has_ended(self) -> bool:
        """Whether neither its launcher nor a process that it recorded is alive."""
        return not (self.is_living or self.facts.launcher.is_alive() or self.has_leftovers())

    def has_leftovers(self) -> bool:
        """Whether processes of a run that is not alive still exist. Its guard is removing them."""
        return not self.is_living and any(process.is_alive() for process in self.facts.processes.values())

    def last_sign_s(self) -> float:
        """Return the time of the last write of its launcher or engine, in seconds since 1970."""
        written = [self.path / FACTS, *self.facts.log_paths.values()]
        return max((path.stat().st_mtime for path in written if path.exists()), default=self.facts.started_s)

    def again(self) -> EngineRun:
        found = _read(self.path)
        return found if isinstance(found, EngineRun) else replace(self, is_living=False)


@dataclass(frozen=True, slots=True)
class UnreadableRun:
    """A directory whose run.json cannot be read, and why. `has_launcher`: whether its launcher is alive, None if
    unknown. `launcher` is what its lock says; None for a run of an earlier version or another user."""

    path: Path
    why: str
    has_launcher: bool | None
    launcher: ProcessIdentity | None

    @property
    def name(self) -> str:
        return self.path.name

    def problem(self) -> str:
        """Return what is wrong, and whether an engine runs."""
        certainty = {
            True: "an engine is running there",
            False: "its engine has ended",
            None: "an engine may be running there",
        }
        return f"`{self.path / FACTS}` {self.why}; {certainty[self.has_launcher]}"

    def again(self) -> EngineRun | UnreadableRun | None:
        """Return None if it was removed."""
        return None if is_missing(self.path / FACTS) else _read(self.path)


def write_stop_timeout(path: Path, timeout_s: float) -> None:
    """Set the stop timeout that the launcher of this run directory uses when it is signalled."""
    _write(path / STOP, json.dumps({"timeout_s": timeout_s}))


class RunDirectory:
    """Directory of one run, as its launcher writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: dict[str, str] = {}  # why run.json or the file for Prometheus could not be written
        self._targets = ""  # the content of that file, once the run is healthy
        self._facts: RunFacts | None = None
        self._lock = locked_file(path / LOCK)  # until the process ends
        self._claim: BinaryIO | None = None  # of the memory that the starting engine will allocate

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def log(self) -> Path:
        return self.path / ENGINE_LOG

    @property
    def _begun(self) -> RunFacts:
        assert self._facts is not None, "the run has not begun"
        return self._facts

    def begin(self, facts: RunFacts) -> None:
        """May raise OSError."""
        _write(self.path / FACTS, facts.to_json())
        self._facts = facts
        self._name_launcher()
        self._claim = memory_claims.make(MemoryClaim(facts.launcher.pid, facts.memory_bytes, facts.engine_bytes))

    def change(self, **changes: Any) -> None:
        if any(getattr(self._begun, name) != value for name, value in changes.items()):
            self._facts = replace(self._begun, **changes)
            self._save()

    def restore(self) -> None:
        """Write run.json and the file for Prometheus again if that has failed, or if they were removed. To be called
        now and then."""
        if self._facts is not None and (FACTS in self.problems or not (self.path / FACTS).exists()):
            self._save()
        if self._targets and not (self.path / TARGETS).is_file():
            self._save_targets()

    def enter(self, state: RunState) -> None:
        ready = {"ready_s": time.time()} if state is RunState.HEALTHY else {}
        self._release_claim()
        self.change(state=state, **ready)

    def end(self, exit_code: int, message: str) -> None:
        self._targets = ""
        self._release_claim()
        for left in (self.path / TARGETS, *self.path.glob(CONTROL_SOCKETS)):
            with contextlib.suppress(OSError):
                left.unlink()
        if self._facts is not None:
            self.change(state=RunState.ENDED, ended_s=time.time(), exit_code=exit_code, message=message)

    @property
    def logs(self) -> Mapping[str, Path]:
        return self._begun.log_paths

    @property
    def processes(self) -> Mapping[str, ProcessIdentity]:
        return self._begun.processes

    def stop_timeout_s(self) -> float:
        """Return how long the engine may take to stop: the timeout of `kvbm stop`, else that of the profile."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            return float(parse_json((self.path / STOP).read_text())["timeout_s"])
        return self._begun.stop_timeout_s

    def write_profile(self, content: Mapping[str, Any], head: str) -> None:
        import yaml

        _write(self.path / PROFILE, f"{commentable(head)}\n{yaml.safe_dump(dict(content), sort_keys=False)}")

    def write_targets(self, addresses: Sequence[str]) -> Path | None:
        """Write the file for Prometheus and return its path; None without addresses, or if it could not be written.

        It exists while the run is healthy: an engine that starts or has ended is no target that does not answer.
        """
        if not addresses:
            return None
        labels = {"run": self.name, "profile": self._begun.profile}
        self._targets = json.dumps([{"targets": list(addresses), "labels": labels}], indent=2) + "\n"
        self._save_targets()
        return None if TARGETS in self.problems else self.path / TARGETS

    def _save_targets(self) -> None:
        with self._problem_noted(TARGETS):
            _write(self.path / TARGETS, self._targets)

    @contextlib.contextmanager
    def _problem_noted(self, name: str) -> Iterator[None]:
        """Note in `problems` why a file could not be written: a full disk must not end the engine."""
        try:
            yield
            self.problems.pop(name, None)
        except OSError as error:
            self.problems[name] = f"cannot write `{self.path / name}`: {reason_of(error)}"

    def write_admin_token(self, token: str) -> None:
        """Write the token. Ignores errors, like `_write`."""
        with contextlib.suppress(OSError):
            _write(self.path / ADMIN_TOKEN, token)

    def remove(self) -> None:
        """Remove the directory of a run that has not begun."""
        remove_tree(self.path)
        self.close()

    def close(self) -> None:
        """Releases the lock and the claim, as the kernel does at the end of the process."""
        self._lock.close()
        self._release_claim()

    def _release_claim(self) -> None:
        if self._claim is not None:
            memory_claims.release(self._claim)
            self._claim = None

    def _name_launcher(self) -> None:
        """Name the launcher in its lock, so that it can be stopped whatever run.json says."""
        with contextlib.suppress(OSError):  # a full disk
            os.pwrite(self._lock.fileno(), json.dumps(asdict(self._begun.launcher)).encode(), 0)

    def _save(self) -> None:
        """Write run.json. Creates a removed directory again."""
        with self._problem_noted(FACTS):
            if not self.path.is_dir():
                self.path.mkdir(mode=0o700, parents=True)
                self._lock.close()
                self._lock = locked_file(self.path / LOCK)
                self._name_launcher()
            _write_without_space(self.path / FACTS, self._begun.to_json())


class Runs:
    """All run directories below one state directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "runs"

    @classmethod
    def of_user(cls) -> Runs:
        return cls(state_directory())

    @classmethod
    def of_user_if_known(cls) -> list[EngineRun]:
        """Return all runs of the user, none without a home directory or if it is not readable."""
        try:
            return cls.of_user().all()
        except (RuntimeError, OSError):
            return []

    @classmethod
    def writable(cls) -> Runs | None:
        """Return those of the user, None if the directory is not writable."""
        try:
            runs = cls.of_user()
            make_private_directories(runs._directory)
            runs._make_private()
            if os.access(runs._directory, os.W_OK | os.X_OK):
                return runs
        except (OSError, RuntimeError):  # RuntimeError: no home directory
            pass
        return None

    @property
    def directory(self) -> Path:
        """The directory itself, also if the state directory is a link."""
        return self._directory.resolve()

    def _make_private(self) -> None:
        """Remove permissions to change run directories from others, which an earlier umask may have given."""
        for path in (self._directory, self._directory.parent):
            found = path.stat()
            if found.st_uid == os.geteuid() and found.st_mode & OTHERS_WRITE:
                path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS_WRITE)

    @classmethod
    def temporary(cls) -> Runs:
        """Return runs in a temporary directory, which no other command finds."""
        try:
            elsewhere = cls(Path(tempfile.mkdtemp(prefix="kvbm-")))
        except OSError as error:
            raise no_temporary_file(error) from None
        elsewhere._directory.mkdir(mode=0o700)
        return elsewhere

    @contextlib.contextmanager
    def starting(self) -> Iterator[list[EngineRun]]:
        """Keep others from starting a run in the meantime. Yields the living runs."""
        with locked(self._directory):
            yield self.living()

    def create(self, profile: str) -> RunDirectory:
        """Create the next run of a profile and remove the oldest ended runs. Call it under `starting`."""
        self._prune()
        for run in self.all():
            if not run.is_living:  # its launcher was killed
                with contextlib.suppress(OSError):
                    (run.path / TARGETS).unlink()
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", profile)[:LONGEST_NAME].strip("-.") or "run"
        number = 1 + max((_number(path.name, stem) for path in self._paths()), default=0)
        path = self._directory / f"{stem}-{number}"
        try:
            path.mkdir(mode=0o700)
            return RunDirectory(path)
        except OSError as error:
            with contextlib.suppress(OSError):  # it was not created, or is not empty
                path.rmdir()
            raise EnvironmentProblem(f"cannot create the run directory `{path}`: {reason_of(error)}") from None

    def all(self) -> list[EngineRun]:
        """Return every readable run, by start time."""
        found = [run for run in map(_read, self._paths()) if isinstance(run, EngineRun)]
        return sorted(found, key=lambda run: (run.facts.started_s, run.name))

    def unreadable(self) -> list[UnreadableRun]:
        """Return runs whose run.json is damaged, not readable, or has the format of another version."""
        paths = [path for path in sorted(self._paths()) if not is_missing(path / FACTS)]
        return [run for run in map(_read, paths) if isinstance(run, UnreadableRun)]

    def living(self) -> list[EngineRun]:
        return [run for run in self.all() if run.is_living]

    def find(self, reference: str | None, *, ended: bool) -> list[EngineRun]:
        """Return the runs with this name, else of this profile, or all without a reference: the living ones, or if
        there are none and `ended` is set the last one. Raises UsageError if there is no such run."""
        every = self.all()
        named = [run for run in every if reference in (None, run.name)] or [
            run for run in every if run.facts.profile == reference
        ]
        living = [run for run in named if run.is_living]
        if not named and reference is not None:
            raise _not_found(reference, every)
        return living or (named[-1:] if ended else [])

    def with_leftovers(self, reference: str | None) -> list[EngineRun]:
        """Return the runs with this name or profile whose launcher was killed, but not all their processes."""
        return [run for run in self.all() if run.has_leftovers() and reference in (None, run.name, run.facts.profile)]

    def one(self, reference: str | None) -> EngineRun:
        """Return the one run that `reference` names, living or ended. Raises UsageError if it is none, or several, and
        EnvironmentProblem if it cannot be read."""
        self.require_readable(reference)
        found = self.find(reference, ended=True)
        if not found:
            raise UsageError("there are no runs yet", hint="start one with `kvbm serve --profile demo`")
        if len(found) > 1:
            names = ", ".join(f"`{run.name}`" for run in found)
            raise UsageError(f"several engines are running: {names}", hint="name one of them")
        return found[0]

    def require_readable(self, reference: str | None) -> None:
        """Raise EnvironmentProblem if this run, or without a reference one whose launcher is alive, cannot be read."""
        for run in self.unreadable():
            if reference == run.name or (reference is None and run.has_launcher):
                stops = run.has_launcher and run.launcher is not None
                hint = f"`kvbm stop {shlex.quote(run.name)}` stops it; the" if stops else "the"
                raise EnvironmentProblem(run.problem(), hint=f"{hint} log of an engine is `{run.path / ENGINE_LOG}`")

    def _prune(self) -> None:
        ended = [run.path for run in self.all() if not run.is_living]
        nameless = [path for path in self._paths() if not (path / FACTS).exists() and _age_s(path) > ABANDONED_AFTER_S]
        for path in (*ended[: max(0, len(ended) - KEPT_RUNS + 1)], *nameless):
            remove_tree(path)

    def _paths(self) -> list[Path]:
        try:
            return [path for path in self._directory.iterdir() if path.is_dir() and not path.is_symlink()]
        except (FileNotFoundError, NotADirectoryError):
            return []


def _not_found(reference: str, every: Sequence[EngineRun]) -> UsageError:
    import difflib

    names = {run.name for run in every} | {run.facts.profile for run in every}
    nearest = difflib.get_close_matches(reference, sorted(names), n=1)
    hint = f"did you mean `{nearest[0]}`?" if nearest else "`kvbm status --all` lists the runs"
    return UsageError(f"no run is named `{reference}`", hint=hint)


def _number(name: str, stem: str) -> int:
    found = _NUMBERED.fullmatch(name)
    return int(found[2]) if found is not None and found[1] == stem else 0


def _read(path: Path) -> EngineRun | UnreadableRun:
    """Read a run. Without run.json, which is also the case while a run is being created, it is unreadable."""
    try:
        with open(open_regular(path / FACTS), encoding="utf-8", errors="replace") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise UnreadableFacts(f"is larger than {MOST_BYTES} bytes")
        facts = RunFacts.from_json(text)
    except OSError as error:
        return _unreadable(path, f"cannot be read ({reason_of(error)}{_owner(path)})")
    except UnreadableFacts as error:
        return _unreadable(path, str(error))
    if not _is_launcher(facts.launcher, path):
        return _unreadable(path, f"names a launcher that does not hold `{LOCK}`")
    has_ended = facts.state is RunState.ENDED
    return EngineRun(
        path, facts, is_living=not has_ended and (facts.launcher.is_alive() or _is_locked_elsewhere(path, facts))
    )


def _unreadable(path: Path, why: str) -> UnreadableRun:
    return UnreadableRun(path, why, holder_state(path / LOCK), _named_in_lock(path))


def _is_launcher(process: ProcessIdentity, path: Path) -> bool:
    """Whether the lock names this process. A lock that was removed, or written on a full disk, names none: then
    whether the process has it open, if it is alive."""
    named = _named_in_lock(path)
    return process == named if named is not None else not process.is_alive() or writes(process.pid, path / LOCK)


def _named_in_lock(path: Path) -> ProcessIdentity | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        with open(open_regular(path / LOCK), encoding="utf-8") as file:
            named = ProcessIdentity(**parse_json(file.read(MOST_BYTES)))
        return named if named.is_valid() else None
    return None


def _owner(path: Path) -> str:
    """Return whose directory it is, if it belongs to another user."""
    with contextlib.suppress(OSError):
        if (owner := path.lstat().st_uid) != os.geteuid():
            return f"; it belongs to user {owner}"
    return ""


def _is_locked_elsewhere(path: Path, facts: RunFacts) -> bool:
    """Check the lock of a launcher in another container or on another machine. False for a local launcher."""
    return not facts.launcher.is_here() and is_locked(path / LOCK)


def _age_s(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime
    return 0.0


def _write_without_space(path: Path, text: str) -> None:
    """Write a file atomically. On a full disk, overwrites it in place, which needs no new block."""
    try:
        _write(path, text)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        length = path.stat().st_size
        with path.open("r+b", buffering=0) as file:
            file.write(text.encode().ljust(length))


def _write(path: Path, text: str) -> None:
    """Write a file that only the user can read: it may hold the engine's environment."""
    write_atomically(path, text, mode=0o600)
