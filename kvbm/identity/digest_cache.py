"""DigestCache: digests of files that were read before, so that an unchanged file is not read again at each start.

One small JSON file in the user's state directory. An entry counts only if device, inode, size, mtime and ctime of the
file are the same, and if its file system shows each change there (`content.shows_changes`): not on tmpfs, in images,
and on read-only mounts, also if the entry was made while the mount was writable. No entry is made for a file that
changed within the last minute before it was read: a later change within the same tick of the file system's clock would
not show, and a machine whose clock differs may have written it. A damaged, foreign or too large file is ignored, and
replaced.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import stat
from pathlib import Path

from kvbm.host.directories import make_private_directories
from kvbm.identity.content import METHOD, QUIET_NS, Signature, shows_changes

NAME = "file-digests.json"
MAX_BYTES = 16 << 20
MAX_ENTRIES = 20_000
DIGEST = re.compile(r"[0-9a-f]{32}")

log = logging.getLogger(__name__)

Entry = tuple[Signature, str]


def default_path() -> Path | None:
    """Return the path in $XDG_STATE_HOME or ~/.local/state; None if the user has no home."""
    given = os.environ.get("XDG_STATE_HOME", "")
    base = Path(given if os.path.isabs(given) else os.path.expanduser("~/.local/state"))
    return base / "kvbm" / NAME if base.is_absolute() else None


class DigestCache:
    """Entries by absolute path. One thread uses it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._entries = {} if path is None else _read(path)
        self._used: dict[str, Entry] = {}
        self._is_changed = False

    def get(self, path: Path, signature: Signature) -> str | None:
        """Return the digest of an unchanged file. Raises OSError."""
        entry = self._entries.get(str(path))
        if entry is None or entry[0] != signature or not shows_changes(path, signature.ctime_ns):
            return None
        self._used[str(path)] = entry
        return entry[1]

    def put(self, path: Path, signature: Signature, digest: str, began_ns: int) -> None:
        """Keep the digest of a file that was read from `began_ns` on, unless it had not been quiet for a minute."""
        is_quiet = began_ns - max(signature.mtime_ns, signature.ctime_ns) > QUIET_NS
        if is_quiet and shows_changes(path, signature.ctime_ns):
            self._used[str(path)] = signature, digest
            self._is_changed = True

    def save(self) -> None:
        """Write the entries, those of this run first. Failures cost only time at the next start."""
        if self._path is None or not self._is_changed:
            return
        merged = self._used | {path: entry for path, entry in _read(self._path).items() if path not in self._used}
        kept = dict(list(merged.items())[:MAX_ENTRIES])
        try:
            _write(self._path, json.dumps({"method": METHOD, "files": kept}).encode())
        except OSError as error:
            log.debug("cannot write %s: %s", self._path, error)


def _read(path: Path) -> dict[str, Entry]:
    """Return the valid content of a file that only this user can write, else nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
                return {}
            content = file.read(MAX_BYTES + 1)
        return {} if len(content) > MAX_BYTES else _decode(json.loads(content))
    except (OSError, ValueError, RecursionError):
        return {}


def _decode(document: object) -> dict[str, Entry]:
    """Raise ValueError for any entry that is not valid."""
    match document:
        case {"method": str(method), "files": dict(files)} if method == METHOD and len(files) <= MAX_ENTRIES:
            return {path: _entry(value) for path, value in files.items()}
    raise ValueError("another format")


def _entry(value: object) -> Entry:
    match value:
        case [[int(), int(), int(), int(), int()] as numbers, str(digest)] if DIGEST.fullmatch(digest):
            if not any(isinstance(number, bool) for number in numbers):
                return Signature(*numbers), digest
    raise ValueError("invalid entry")


def _write(path: Path, content: bytes) -> None:
    """Replace the file atomically, readable by this user only. Raises OSError."""
    make_private_directories(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
