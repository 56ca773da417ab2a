"""Where things lie: a directory that may not exist yet, what the command itself keeps, and a machine that refuses."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from kvbm.errors import EnvironmentProblem, UsageError


def nearest_existing(directory: Path) -> Path:
    """The directory, or the nearest above it that exists."""
    return next(path for path in (directory, *directory.parents) if path.exists())


def state_directory() -> Path:
    """Where runs and reports are kept. RuntimeError where the user has no home."""
    given = os.environ.get("XDG_STATE_HOME")
    directory = Path(given) if given and os.path.isabs(given) else Path("~/.local/state").expanduser()
    if not directory.is_absolute():  # HOME is not: another one from each directory
        raise RuntimeError(NO_HOME)
    return directory / "kvbm"


HINTS = {
    errno.ENOSPC: "`df -h` and `df -i` show what is full",
    errno.EDQUOT: "`quota` shows what is used up",
    errno.EFBIG: "`ulimit -f` is how large a file may become",
    errno.EMFILE: "`ulimit -n` is how many files a process may have open",
    errno.ENFILE: "too many files are open on this machine",
    errno.EAGAIN: "`ulimit -u` is how many processes and threads a user may have",
    errno.ENOMEM: "`free -h` shows what memory is left, `ulimit -v` what a process may take",
}
REFUSALS = {
    *HINTS,
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
}
NO_THREAD, NO_HOME = "can't start new thread", "Could not determine home directory"
NO_TEMPORARY = "No usable temporary directory"
NO_MAPPING = "failed to map segment from shared object"


def problem_of(error: BaseException) -> EnvironmentProblem | None:
    """What this machine refused, where that is what has ended a command; None for anything else, which is a bug."""
    is_of_memory = isinstance(error, MemoryError) or (isinstance(error, ImportError) and NO_MAPPING in str(error))
    number = errno.ENOMEM if is_of_memory else getattr(error, "errno", None)
    if isinstance(error, RuntimeError) and NO_HOME in str(error):
        return EnvironmentProblem("you have no home directory, and what is looked for lies in it", hint="set `HOME`")
    if isinstance(error, RuntimeError) and NO_THREAD in str(error):
        number = errno.EAGAIN
    if isinstance(error, OSError) and NO_TEMPORARY in (error.strerror or ""):
        return no_temporary_file(error)
    if number not in REFUSALS:
        return None
    hint = HINTS.get(number, "`kvbm --debug ...` shows where")
    if number == errno.ENOENT and not _has_current_directory():
        return EnvironmentProblem("the current directory has been removed", hint="`cd` to one that is there")
    reason, file = os.strerror(number).lower(), getattr(error, "filename", None)
    if isinstance(file, bytes):
        file = os.fsdecode(file)
    if file and number in (errno.EACCES, errno.EPERM):
        hint = f"`namei -l {file}` shows who may"
    return EnvironmentProblem(f"cannot use `{file}`: {reason}" if file else f"this machine says: {reason}", hint=hint)


def _has_current_directory() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def no_temporary_file(error: OSError) -> EnvironmentProblem:
    reason = (error.strerror or str(error)).lower()
    return EnvironmentProblem(
        f"cannot write a temporary file: {reason}",
        hint="`df -h /tmp` shows whether there is room; `TMPDIR` names another directory",
    )


def write_whole(path: Path, text: str, *, mode: int = 0o666) -> None:
    """All of it, in the place of what was there, or nothing: written beside and renamed. Raises OSError."""
    draft = path.with_name(f".{path.name}")
    try:
        with open(
            os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8", errors="surrogateescape"
        ) as file:
            file.write(text)
        draft.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def write_new(file: Path, text: str) -> None:
    """All of it or nothing. UsageError if there is such a file already, EnvironmentProblem if it cannot be written."""
    try:
        with open(file, "x", encoding="utf-8") as opened:
            try:
                opened.write(text)
                opened.flush()
            except BaseException:
                with contextlib.suppress(OSError):
                    file.unlink()
                raise
    except FileExistsError:
        raise UsageError(f"`{file}` is there already", hint="give another name, or remove it first") from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot write `{file}`: {(error.strerror or str(error)).lower()}") from None
