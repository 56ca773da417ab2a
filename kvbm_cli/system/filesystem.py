"""Files and directories of the command, and errors of the operating system as EnvironmentProblem."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from kvbm.errors import PATH_HINTS, EnvironmentProblem, UsageError, reason_of
from kvbm_cli.system import leftovers


def nearest_existing(directory: Path) -> Path:
    """Return the directory, or its nearest existing parent. A broken symbolic link exists, but is not a directory."""
    return next(path for path in (directory, *directory.parents) if os.path.lexists(path))


FSTAB = Path("/etc/fstab")
_FOR_MOUNTS = tuple(map(Path, ("/", "/mnt", "/media", "/run/media")))


def missing_mount(directory: Path, *, fstab: Path = FSTAB) -> str | None:
    """Return why the drive of the directory does not seem to be mounted, None if it does.

    The directory would then be created on the drive of the system, and fill it.
    """
    known = _mount_points(fstab)
    for path in (directory, *directory.parents):
        if path in known and not os.path.ismount(path):
            return f"{path} is a mount point in {fstab}, but nothing is mounted there"
    holder = nearest_existing(directory)
    if holder != directory and (holder in _FOR_MOUNTS or holder.parent in _FOR_MOUNTS[2:]):
        missing = holder / directory.relative_to(holder).parts[0]
        return f"{missing} does not exist: the drive may not be mounted"
    return None


def _mount_points(fstab: Path) -> set[Path]:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        rows = [line.split() for line in fstab.read_text().splitlines() if not line.lstrip().startswith("#")]
        return {Path(row[1].replace("\\040", " ")) for row in rows if len(row) > 1 and row[1].startswith("/")}
    return set()


def expanded(directory: str) -> Path:
    """Return the path with `~` replaced by a home directory. Raises EnvironmentProblem if there is none."""
    name = directory.partition("/")[0]
    if name == "~" and not os.path.isabs(os.environ.get("HOME", "/")):
        raise no_home()
    path = os.path.expanduser(directory)
    if path == directory and name.startswith("~"):
        raise no_home() if name == "~" else EnvironmentProblem(f"cannot use `{directory}`: no user `{name[1:]}`")
    return Path(path)


def no_home() -> EnvironmentProblem:
    given = os.environ.get("HOME")
    about = "" if given is None else f": `HOME` is `{given}`"
    return EnvironmentProblem(f"no home directory{about}", hint="set `HOME` to an absolute path")


def state_directory() -> Path:
    """Return the directory of runs and crash reports. Raises RuntimeError if the user has no home."""
    given = os.environ.get("XDG_STATE_HOME")
    if given and os.path.isabs(given):
        return Path(given) / "kvbm"
    try:
        return expanded("~/.local/state/kvbm")
    except EnvironmentProblem:
        raise RuntimeError(NO_HOME) from None


HINTS = {
    errno.EFBIG: "check the maximum file size with `ulimit -f`",
    errno.EMFILE: "check the limit of open files with `ulimit -n`",
    errno.ENFILE: "close files of other processes: the machine's limit is reached",
    errno.EAGAIN: "check the limit of processes and threads with `ulimit -u`",
    errno.ENOMEM: "check free memory with `free -h` and the limit of a process with `ulimit -v`",
}
TRANSLATED = {
    *HINTS,
    *PATH_HINTS,
    *(errno.ENOENT, errno.EISDIR),
}
NO_THREAD, NO_HOME = "can't start new thread", "Could not determine home directory"
NO_TEMPORARY = "No usable temporary directory"
NO_MAPPING = "failed to map segment from shared object"


def problem_of(error: BaseException) -> EnvironmentProblem | None:
    """Return an error of the operating system as EnvironmentProblem, None for any other exception, which is a bug."""
    is_of_memory = isinstance(error, MemoryError) or (isinstance(error, ImportError) and NO_MAPPING in str(error))
    number = errno.ENOMEM if is_of_memory else getattr(error, "errno", None)
    if isinstance(error, RuntimeError) and NO_HOME in str(error):
        return no_home()
    if isinstance(error, RuntimeError) and NO_THREAD in str(error):
        number = errno.EAGAIN
    if isinstance(error, OSError) and NO_TEMPORARY in (error.strerror or ""):
        return no_temporary_file(error)
    if number not in TRANSLATED:
        return None
    hint = HINTS.get(number, "see where with `kvbm --debug ...`")
    if number == errno.ENOENT and not _has_current_directory():
        return EnvironmentProblem("the current directory has been removed", hint="`cd` to an existing directory")
    reason, file = os.strerror(number).lower(), getattr(error, "filename", None)
    if isinstance(file, bytes):
        file = os.fsdecode(file)
    if number in PATH_HINTS:
        hint = PATH_HINTS[number].format(path=shlex.quote(str(file))) if file else "check `df -h` and `dmesg`"
    return EnvironmentProblem(
        f"cannot use `{file}`: {reason}" if file else f"the operating system reports: {reason}", hint=hint
    )


def _has_current_directory() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def no_temporary_file(error: OSError) -> EnvironmentProblem:
    reason = reason_of(error)
    return EnvironmentProblem(
        f"cannot write a temporary file: {reason}",
        hint="check free space with `df -h /tmp`, or set `TMPDIR` to another directory",
    )


def write_atomically(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace a file atomically: writes a temporary file and renames it. Raises OSError."""
    draft = path.with_name(f".kvbm-{secrets.token_hex(8)}.new")  # a name that no other file has
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
                file.write(text)
            draft.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
    except OSError as error:
        error.filename = str(path)
        raise


def write_new(file: Path, text: str, *, replaces: bool = False) -> None:
    """Write a file completely or not at all. Raises UsageError if it exists and is not replaced, EnvironmentProblem on
    failure."""
    try:
        if replaces:
            write_atomically(file, text)
            return
        with open(file, "x", encoding="utf-8") as opened:
            try:
                opened.write(text)
                opened.flush()
            except BaseException:
                with contextlib.suppress(OSError):
                    file.unlink()
                raise
    except FileExistsError:
        raise UsageError(f"`{file}` already exists", hint="choose another name, or remove it first") from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot write `{file}`: {reason_of(error)}") from None


def remove_tree(path: Path) -> bool:
    """Remove a directory with all that is in it, unless something is mounted there. Return whether nothing is left.

    Links in it are removed, and not followed. `path` itself must not be a link.
    """
    leftovers.remove_tree(str(path))
    return not os.path.lexists(path)


def unsafe_parents(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yield each existing directory of the path in which another user can replace entries, with the reason.

    Follows symbolic links: the parents of a link and of its target count.
    """
    ends = directory.absolute(), directory.resolve()
    for parent in dict.fromkeys(path for end in ends for path in (end, *end.parents)):
        try:
            found = parent.stat()
        except FileNotFoundError:
            continue
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid not in (0, os.geteuid()):
            yield parent, f"belongs to user {found.st_uid}"
        elif mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield parent, f"is writable by everyone (mode {mode:04o})"
        elif mode & stat.S_IWGRP and not mode & stat.S_ISVTX:
            yield parent, f"is writable by group {found.st_gid} (mode {mode:04o})"
