"""Exceptions of kvbm.

KvbmError(message, *, hint=None)
├─ ProfileError          the profile, an override or a variable is wrong             exit 2
│  └─ ProfileMistakes    several of these, found together                            exit 2
├─ UsageError            the command line is wrong                                   exit 2
├─ EnvironmentProblem    this machine lacks a library, a permission, memory, a port  exit 1
│  ├─ EnvironmentProblems several of these, found together                           exit 1
│  └─ TierProblem        the state of a disk; the engine starts without the tier
├─ EngineError           the engine did not start, or died                           its own exit code
├─ TransferError         a copy failed; becomes a failed result, never reaches the engine
└─ InvariantError        a bug of ours; the message carries ids, states and counts

`message` says what failed; `hint`, when there is one, names what to type or which key to set. Values that a message
quotes are shortened, and secrets are hidden.
"""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Sequence

from kvbm.text.outside import fit_for_message


class KvbmError(Exception):
    """Base of all kvbm errors. `exit_code` is what the command `kvbm` ends with."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = fit_for_message(message)
        self.hint = hint if hint is None else fit_for_message(hint)
        super().__init__(self.message)
        if self.hint is not None:
            self.add_note(f"hint: {self.hint}")  # for the log of an engine, which shows a traceback


class ProfileError(KvbmError):
    """A profile, an override or an environment variable is invalid."""

    exit_code = 2


class ProfileMistakes(ProfileError):
    """Several mistakes in one profile, at least two, found before the profile is used."""

    def __init__(self, mistakes: Sequence[ProfileError]) -> None:
        shown = [one.message if one.hint is None else f"{one.message}\n  ({one.hint})" for one in mistakes]
        super().__init__("\n".join([f"{len(mistakes)} mistakes", *shown]))
        self.mistakes = tuple(mistakes)


class UsageError(KvbmError):
    """The command line asks for something that does not exist."""

    exit_code = 2


class EnvironmentProblem(KvbmError):
    """The machine lacks something that the request needs."""


class EnvironmentProblems(EnvironmentProblem):
    """Several problems of one machine, at least two, found before an engine starts."""

    def __init__(self, problems: Sequence[EnvironmentProblem]) -> None:
        super().__init__("\n".join([f"{len(problems)} problems", *(one.message for one in problems)]))
        self.problems = tuple(problems)


class TierProblem(EnvironmentProblem):
    """A directory of a tier cannot be used in its present state: no space, a link, an I/O error. An engine runs without
    the tier until it can be opened."""


class EngineError(KvbmError):
    """The engine did not start, or ended unexpectedly. `exit_code` is the engine's own."""

    def __init__(self, message: str, *, hint: str | None = None, exit_code: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


class TransferError(KvbmError):
    """A copy failed. The transfer path catches it and reports a failed result."""


class InvariantError(KvbmError):
    """A bug in kvbm. In an engine it turns the cache off, see `kvbm.boundary`."""


def reason_of(error: OSError) -> str:
    """Return the reason in lower case, for the end of a message."""
    return (error.strerror or str(error)).lower()


# What to do about an error that a path gives. `{path}` is the path, quoted for a shell.
PATH_HINTS = {
    errno.ENOSPC: "check free space with `df -h {path}` and `df -i {path}`",
    errno.EDQUOT: "check the quota with `quota -s`",
    errno.EROFS: "its file system is mounted read-only: mount it writable",
    errno.ELOOP: "its symbolic links form a loop: check them with `ls -ld {path}`",
    errno.ENAMETOOLONG: "use a shorter path: a name has at most 255 bytes, a path 4095",
    errno.EACCES: "check the permissions with `namei -l {path}`",
    errno.EPERM: "check the permissions with `namei -l {path}`",
    errno.ENOTDIR: "a part of the path is not a directory: check it with `namei -l {path}`",
    errno.ESTALE: "its network file system has lost it: mount it again",
    errno.EIO: "the disk or its connection fails: check the kernel log with `dmesg`",
}


def path_hint(error: OSError, path: os.PathLike[str]) -> str | None:
    """Return what to do about the error that this path gave, None if only another path helps."""
    hint = PATH_HINTS.get(error.errno or 0)
    return None if hint is None else hint.format(path=shlex.quote(os.fspath(path)))
