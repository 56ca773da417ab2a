"""The run directories: one per `kvbm serve`, below ~/.local/state/kvbm/runs, written by its launcher, read by all.

    demo-1/
      run.json       what is known of the run: processes, address, state, how it ended; replaced as a whole
      profile.yaml   the resolved profile: `kvbm serve --profile` takes it
      engine.log     what the engine prints; one file more per engine where there are several
      kvbm.log       what the launcher of a detached run says after the start
      lock           held by the launcher as long as it lives, also where another container cannot see its process
      stop.json      what `kvbm stop --timeout` asks for

A run lives if its launcher does. Nothing in a directory is believed of a run that does not: its processes are never
signalled. Names are `PROFILE-NUMBER`, and numbers go up. The directory of all is locked by whoever starts a run, from
its look at the living ones until its own directory says what it takes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvbm.errors import EnvironmentProblem, UsageError
from kvbm_cli.system.filesystem import no_temporary_file, state_directory, write_whole
from kvbm_cli.system.process_identity import ProcessIdentity

FORMAT = 1
KEPT_RUNS = 20
LATEST_S = 1e11  # in the year 5138
MOST_BYTES = 1 << 20  # of run.json
ABANDONED_AFTER_S = 3600.0  # a directory whose run was killed before it was described
FACTS, PROFILE, ENGINE_LOG, OWN_LOG, LOCK, STOP = (
    "run.json",
    "profile.yaml",
    "engine.log",
    "kvbm.log",
    "lock",
    "stop.json",
)
_NUMBERED = re.compile(r"(.+)-(\d+)")


class State(StrEnum):
    """What a launcher says of its run; DEAD is what others see of one whose launcher was killed."""

    STARTING = "starting"
    HEALTHY = "healthy"
    STOPPING = "stopping"
    ENDED = "ended"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Facts:
    """The content of run.json. Times are seconds since 1970; `memory_bytes` is host memory for blocks (G2)."""

    name: str
    profile: str
    profile_path: str
    engine: str
    model: str
    url: str
    ports: tuple[int, ...]
    logs: Mapping[str, str]
    launcher: ProcessIdentity
    memory_bytes: int
    disk_directory: str | None
    directory: str
    command: tuple[str, ...]
    versions: Mapping[str, str]
    stop_timeout_s: float
    started_s: float
    processes: Mapping[str, ProcessIdentity] = field(default_factory=dict)
    is_detached: bool = False
    state: State = State.STARTING
    ready_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    message: str = ""
    format: int = FORMAT

    @classmethod
    def from_json(cls, text: str) -> Facts:
        """ValueError, TypeError or KeyError for what is none. What a later version has added is passed over."""
        try:
            content = json.loads(text)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        known = {name: content[name] for name in (one.name for one in fields(cls)) if name in content}
        known["launcher"] = ProcessIdentity(**known["launcher"])
        known["processes"] = {name: ProcessIdentity(**one) for name, one in known.get("processes", {}).items()}
        known["state"] = State(known["state"])
        facts = cls(**{**known, "ports": tuple(known["ports"]), "command": tuple(known["command"])})
        if not facts._are_of_a_run():
            raise ValueError("not what a launcher writes")
        return facts

    def _are_of_a_run(self) -> bool:
        """Whether a reader can rely on every kind. ValueError or TypeError where that cannot even be asked."""
        texts = [self.name, self.profile, self.profile_path, self.engine, self.model, self.url, self.directory]
        texts += [self.message, *self.command, *self.logs.values(), *self.versions.values()]
        texts += [self.disk_directory] if self.disk_directory is not None else []
        times = [self.started_s, self.stop_timeout_s, *(one for one in (self.ready_s, self.ended_s) if one is not None)]
        numbers = [*self.ports, self.memory_bytes, *([self.exit_code] if self.exit_code is not None else [])]
        processes = [self.launcher, *self.processes.values()]
        address = urlsplit(self.url)
        return (
            all(isinstance(text, str) and "\0" not in text for text in texts)
            and all(0 <= moment < LATEST_S for moment in times)
            and all(isinstance(number, int) for number in numbers)
            and all(isinstance(one.pid, int) and one.pid > 0 for one in processes)
            and bool(self.logs and address.hostname and address.port is not None)
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class Run:
    """A run as another process sees it, at one moment."""

    path: Path
    facts: Facts
    is_living: bool

    @property
    def state(self) -> State:
        if self.is_living or self.facts.state is State.ENDED:
            return self.facts.state
        return State.DEAD

    @property
    def is_elsewhere(self) -> bool:
        """Whether it lives in another container or on another machine that has the same home directory."""
        return self.is_living and not self.facts.launcher.is_here()

    def last_sign_s(self) -> float:
        """When its launcher or its engine has written anything for the last time, in seconds since 1970."""
        written = [self.path / FACTS, *map(Path, self.facts.logs.values())]
        return max((path.stat().st_mtime for path in written if path.exists()), default=self.facts.started_s)

    def again(self) -> Run:
        return _read(self.path) or replace(self, is_living=False)


def ask_to_stop_within(run: Run, timeout_s: float) -> None:
    """For the launcher, when it is signalled."""
    _write(run.path / STOP, json.dumps({"timeout_s": timeout_s}))


class RunDirectory:
    """One run's directory in the hands of its launcher."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._facts: Facts | None = None
        self._lock = (path / LOCK).open("wb")  # until the process ends
        with contextlib.suppress(OSError):  # a filesystem without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def log(self) -> Path:
        return self.path / ENGINE_LOG

    def begin(self, facts: Facts) -> None:
        self._write(facts)

    def change(self, **changes: Any) -> None:
        assert self._facts is not None, "no run has begun"
        if any(getattr(self._facts, name) != value for name, value in changes.items()):
            self._write(replace(self._facts, **changes))

    def enter(self, state: State) -> None:
        ready = {"ready_s": time.time()} if state is State.HEALTHY else {}
        self.change(state=state, **ready)

    def end(self, exit_code: int, message: str) -> None:
        if self._facts is not None:
            self.change(state=State.ENDED, ended_s=time.time(), exit_code=exit_code, message=message)

    @property
    def processes(self) -> Mapping[str, ProcessIdentity]:
        assert self._facts is not None, "no run has begun"
        return self._facts.processes

    def stop_timeout_s(self) -> float:
        """How long the engine may take to stop: what `kvbm stop` has asked for, or what its profile needs."""
        assert self._facts is not None, "no run has begun"
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            return float(json.loads((self.path / STOP).read_text())["timeout_s"])
        return self._facts.stop_timeout_s

    def write_profile(self, content: Mapping[str, Any], head: str) -> None:
        import yaml

        head = "".join(character if character.isprintable() else "?" for character in head)  # paths may hold anything
        _write(self.path / PROFILE, f"{head}\n{yaml.safe_dump(dict(content), sort_keys=False)}")

    def remove(self) -> None:
        """A run that has not begun."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Gives the lock back, as the kernel does at the end of the process."""
        self._lock.close()

    def _write(self, facts: Facts) -> None:
        """A disk that is full, or a directory that is gone, does not end the engine."""
        self._facts = facts
        with contextlib.suppress(OSError):
            _write(self.path / FACTS, facts.to_json())


class Runs:
    """All run directories below one state directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "runs"

    @classmethod
    def of_user(cls) -> Runs:
        return cls(state_directory())

    @classmethod
    def writable(cls) -> Runs | None:
        """Those of the user, None where none can be written."""
        try:
            runs = cls.of_user()
            runs._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(runs._directory, os.W_OK | os.X_OK):
                return runs
        except (OSError, RuntimeError):  # RuntimeError: there is no home
            pass
        return None

    @classmethod
    def temporary(cls) -> Runs:
        """In a directory that nobody else finds."""
        try:
            elsewhere = cls(Path(tempfile.mkdtemp(prefix="kvbm-")))
        except OSError as error:
            raise no_temporary_file(error) from None
        elsewhere._directory.mkdir(mode=0o700)
        return elsewhere

    @contextlib.contextmanager
    def starting(self) -> Iterator[list[Run]]:
        """Nobody else starts a run in the meantime. Yields those that live."""
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(OSError):  # a filesystem without locks
                fcntl.flock(directory, fcntl.LOCK_EX)
            yield self.living()
        finally:
            os.close(directory)

    def create(self, profile: str) -> RunDirectory:
        """A directory for the next run of a profile; the oldest ended runs go. To be called under `starting`."""
        self._prune()
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", profile).strip("-.") or "run"
        number = 1 + max((_number(path.name, stem) for path in self._paths()), default=0)
        path = self._directory / f"{stem}-{number}"
        try:
            path.mkdir(mode=0o700)
            return RunDirectory(path)
        except OSError as error:
            raise EnvironmentProblem(f"cannot make the run directory {path}: {error.strerror}") from None

    def all(self) -> list[Run]:
        """Every run that can be read, the one started last at the end."""
        found = [run for run in map(_read, self._paths()) if run is not None]
        return sorted(found, key=lambda run: (run.facts.started_s, run.facts.name))

    def unreadable(self) -> list[Path]:
        """Files that should describe a run and do not: damaged, or of a version that has changed them."""
        return [path / FACTS for path in self._paths() if os.path.lexists(path / FACTS) and _read(path) is None]

    def living(self) -> list[Run]:
        return [run for run in self.all() if run.is_living]

    def find(self, reference: str | None, *, ended: bool) -> list[Run]:
        """The runs that are meant: by name, else by profile; without a reference any. Those that live go first; where
        none does and `ended` says so, the last one. UsageError if there is no such run at all."""
        every = self.all()
        named = [run for run in every if reference in (None, run.facts.name)] or [
            run for run in every if run.facts.profile == reference
        ]
        living = [run for run in named if run.is_living]
        if not named and reference is not None:
            raise _not_found(reference, every)
        return living or (named[-1:] if ended else [])

    def one(self, reference: str | None) -> Run:
        """The run that is meant, living or ended. UsageError if it is none, or more than one."""
        found = self.find(reference, ended=True)
        if not found:
            raise UsageError("nothing has run yet", hint="`kvbm serve --profile demo`")
        if len(found) > 1:
            names = ", ".join(f"`{run.facts.name}`" for run in found)
            raise UsageError(f"more than one engine runs: {names}", hint="name one")
        return found[0]

    def _prune(self) -> None:
        ended = [run.path for run in self.all() if not run.is_living]
        nameless = [path for path in self._paths() if not (path / FACTS).exists() and _age_s(path) > ABANDONED_AFTER_S]
        for path in (*ended[: max(0, len(ended) - KEPT_RUNS + 1)], *nameless):
            shutil.rmtree(path, ignore_errors=True)

    def _paths(self) -> list[Path]:
        try:
            return [path for path in self._directory.iterdir() if path.is_dir() and not path.is_symlink()]
        except (FileNotFoundError, NotADirectoryError):
            return []


def _not_found(reference: str, every: Sequence[Run]) -> UsageError:
    import difflib

    names = {run.facts.name for run in every} | {run.facts.profile for run in every}
    nearest = difflib.get_close_matches(reference, sorted(names), n=1)
    hint = f"did you mean `{nearest[0]}`?" if nearest else "`kvbm status --all` lists the runs"
    return UsageError(f"no run is named `{reference}`", hint=hint)


def _number(name: str, stem: str) -> int:
    found = _NUMBERED.fullmatch(name)
    return int(found[2]) if found is not None and found[1] == stem else 0


def _read(path: Path) -> Run | None:
    """None for a directory without a readable run.json, as there is for a moment while a run is made."""
    try:
        with open(_open_plain(path / FACTS), encoding="utf-8") as file:
            facts = Facts.from_json(file.read(MOST_BYTES))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    has_ended = facts.state is State.ENDED
    return Run(
        path, facts, is_living=not has_ended and (facts.launcher.is_alive() or _is_locked_elsewhere(path, facts))
    )


def _is_locked_elsewhere(path: Path, facts: Facts) -> bool:
    """Asked only of a launcher that this process cannot see; one that it could see and does not is dead."""
    if facts.launcher.is_here():
        return False
    try:
        with open(_open_plain(path / LOCK), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _open_plain(path: Path) -> int:
    """Waits for nobody, as opening a FIFO would."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no plain file", str(path))
    return descriptor


def _age_s(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime
    return 0.0


def _write(path: Path, text: str) -> None:
    """Readable by the user alone: it has the engine's environment."""
    write_whole(path, text, mode=0o600)
