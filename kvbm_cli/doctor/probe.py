"""What a directory can do, found out by doing it, and the settings of a disk tier that follow.

Documented abilities are not believed: a file is written and read back through every way that the tier could take.
Written first, because reads of space that was never written succeed even where the alignment is wrong; compared,
because some filesystems take O_DIRECT and then drop it. Nothing stays behind, whenever the process is killed: files
have no name where the filesystem allows that (O_TMPFILE), and elsewhere lose it before anything is written.

At most a tenth of the free space is taken. A filesystem may hang: callers run this as a program
(`python -m kvbm_cli.doctor.probe`), in a process that they can give up. Lines on stdout are JSON: `{"phase": ...}`
while it works, then `{"report": ...}`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import resource
import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvbm.disk.files import PAGE_BYTES, UNSUPPORTED, Alignment, dio_alignment, fallocate
from kvbm.disk.io.kernel_aio import KernelAio
from kvbm.disk.io.threads import ThreadsIO
from kvbm.host.libc import LIBC, last_error
from kvbm_cli.doctor.quota import Quota, quotas
from kvbm_cli.doctor.speed import Say, Speed, SpeedTrial

PREFIX = ".kvbm-probe-"
TRIED_ALIGNMENTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
AREA_BYTES = 4 * TRIED_ALIGNMENTS[-1]
SHARE_OF_FREE = 10
MAX_FILE_BYTES = 1 << 30
MAX_WRITTEN_BYTES = 8 << 30  # a trial is no reason to wear a drive
BUFFERED_BYTES_PER_S = 256 << 20  # what the page cache takes in a moment, a slow disk may have to write for long
COPY_ON_WRITE = frozenset({"btrfs", "zfs", "bcachefs"})
IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
UNKNOWN_SPACE_BYTES = 16 << 20  # where a filesystem does not say how large it is, such as ramfs
CACHED_SHARE = 0.5

FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE = 1, 2
SYSCALL_IO_URING_SETUP = 425
NO_FILE = -1  # nothing is moved


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether something works; where it does not, `reason` is the name of the error, such as `EINVAL`."""

    works: bool
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Direct:
    """O_DIRECT set in one way. It works if the flag is taken and a write of whole pages comes back equal.

    `alignment` is the smallest at which offsets and lengths came back equal; `is_cached` whether the page cache had
    the bytes all the same.
    """

    works: bool
    reason: str | None = None
    alignment: int | None = None
    is_cached: bool = False


@dataclass(frozen=True, slots=True)
class Mount:
    """The filesystem that a path lies on: its type, what is mounted, and where."""

    kind: str
    source: str
    point: str


@dataclass(frozen=True, slots=True)
class Settings:
    """Keys of `tiers.disk` that a directory needs."""

    allocator: str
    o_direct: bool
    zerofill: bool


@dataclass(frozen=True, slots=True)
class Report:
    """All that was found. What could not be tried is None, and `reason` says why. Some filesystems have no
    `total_bytes`, 0 then."""

    mount: Mount
    total_bytes: int
    free_bytes: int
    file_limit_bytes: int | None
    write: Outcome | None
    has_unnamed_files: bool
    quotas: tuple[Quota, ...] = ()
    fallocate: Outcome | None = None
    punch_hole: Outcome | None = None
    claimed: Alignment | None = None
    by_open: Direct | None = None
    by_fcntl: Direct | None = None
    io_uring: Outcome | None = None
    aio: Outcome | None = None
    settings: Settings | None = None
    transfers: Outcome | None = None
    speed: Speed | None = None
    reason: str | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        """What `asdict` made of a report."""
        kinds: dict[str, Callable[..., object]] = {
            "mount": Mount,
            "claimed": Alignment,
            "settings": Settings,
            "speed": Speed,
            "by_open": Direct,
            "by_fcntl": Direct,
            **dict.fromkeys(("write", "fallocate", "punch_hole", "io_uring", "aio", "transfers"), Outcome),
        }
        values: dict[str, Any] = {
            key: kinds[key](**value) if key in kinds and value else value for key, value in data.items()
        }
        values["quotas"] = tuple(Quota(**quota) for quota in values["quotas"])
        return cls(**values)


def probe(
    directory: Path, *, block_bytes: int | None = None, seconds: float = 0.0, say: Say = lambda text: None
) -> Report:
    """Everything about an existing directory; speeds at `block_bytes`, each phase `seconds` long, if that is given.

    Raises OSError only if the directory cannot be looked at.
    """
    directory = directory.resolve(strict=True)
    return _Probe(directory, say).report(block_bytes, seconds)


def recommend(fallocate: Outcome, by_open: Direct, by_fcntl: Direct) -> Settings:
    """Settings for a directory. O_DIRECT is relied on only where open takes it: fcntl never asks a FUSE filesystem.

    A direct write that the page cache has all the same is no better than a buffered one, and is preferred to none:
    the filesystem chose it.
    """
    takes_open = by_open.works
    takes_fcntl = takes_open and by_fcntl.works and (by_open.is_cached or not by_fcntl.is_cached)
    return Settings(
        allocator="default" if takes_fcntl or not takes_open else "open-direct",
        o_direct=takes_open,
        zerofill=fallocate.reason in map(errno.errorcode.get, UNSUPPORTED),
    )


class _Probe:
    """One run over one directory."""

    def __init__(self, directory: Path, say: Say) -> None:
        self._directory = directory
        self._say = say
        self._mount = mount_of(directory)
        space = os.statvfs(directory)
        self._total_bytes = space.f_blocks * space.f_frsize
        self._free_bytes = space.f_bavail * space.f_frsize
        self._quotas = quotas(directory, self._mount.kind)
        soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        self._limit = None if soft == resource.RLIM_INFINITY else soft

    def report(self, block_bytes: int | None, seconds: float) -> Report:
        self._say("what the filesystem can do")
        try:
            with ProbeFile.create(self._directory) as file:
                found = self._abilities(file)
                if found.settings is None or block_bytes is None:
                    return found
                return self._with_speed(file, found, block_bytes, seconds)
        except OSError as error:
            return self._base(Outcome(False, name_of(error)), has_unnamed_files=False)

    def _base(self, write: Outcome | None, *, has_unnamed_files: bool) -> Report:
        return Report(
            self._mount,
            self._total_bytes,
            self._free_bytes,
            self._limit,
            write,
            has_unnamed_files,
            self._quotas,
            io_uring=io_uring(),
            aio=aio(),
        )

    def _abilities(self, file: ProbeFile) -> Report:
        room = self._room()
        if room < AREA_BYTES:
            found = self._base(None, has_unnamed_files=file.is_unnamed)
            return _with(found, reason=f"the trial takes {AREA_BYTES >> 10} KiB, and {room >> 10} KiB may be taken")
        allocated = attempt(lambda: fallocate(file.fd, 0, 0, AREA_BYTES))
        write = _write_and_compare(file.fd)
        found = self._base(write, has_unnamed_files=file.is_unnamed)
        if not write.works:
            return _with(found, fallocate=allocated)
        by_open, by_fcntl = _direct_by_open(file), _direct_by_fcntl(file)
        claimed = dio_alignment(file.fd)
        return _with(
            found,
            fallocate=allocated,
            punch_hole=_punch(file.fd),
            claimed=claimed,
            by_open=by_open,
            by_fcntl=by_fcntl,
            settings=recommend(allocated, by_open, by_fcntl),
        )

    def _room(self) -> int:
        """Bytes that the trial may take."""
        limits = [quota.left_bytes // SHARE_OF_FREE for quota in self._quotas]
        limits += [self._limit] if self._limit is not None else []
        free = self._free_bytes // SHARE_OF_FREE if self._total_bytes else UNKNOWN_SPACE_BYTES
        return min(free, *limits, MAX_FILE_BYTES)

    def _with_speed(self, file: ProbeFile, found: Report, block_bytes: int, seconds: float) -> Report:
        """What is measured is what remains of the tenth after the trial of abilities, whose area is given back."""
        assert found.settings is not None
        room = self._room() * 9 // 10  # the filesystem's own records come on top
        stride = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
        written = MAX_WRITTEN_BYTES
        if self._mount.kind in COPY_ON_WRITE:  # an overwritten block is given back some time later
            room, written = room // 4, room
        assert found.by_open is not None
        is_cached = not found.settings.o_direct or found.by_open.is_cached
        if is_cached:
            room = min(room, int(BUFFERED_BYTES_PER_S * seconds))
        blocks = min(room, MAX_FILE_BYTES) // stride
        if blocks < 4:
            return _with(found, reason=f"a tenth of the free space holds {blocks} blocks of {stride} bytes")
        try:
            with _prepared(file, found.settings, blocks * stride) as fd:
                io = ThreadsIO(fd, is_direct=found.settings.o_direct)
                trial = SpeedTrial(fd, io, stride, seconds, self._say, is_cached=is_cached)
                speed = trial.measure(blocks, may_write_bytes=written)
        except OSError as error:
            return _with(found, transfers=Outcome(False, name_of(error)))
        return _with(found, transfers=Outcome(True), speed=speed)


@contextlib.contextmanager
def _prepared(file: ProbeFile, settings: Settings, byte_count: int) -> Iterator[int]:
    """The file as an arena of that size would be, and its descriptor. Raises OSError."""
    fd = file.fd
    if settings.o_direct and settings.allocator == "open-direct":
        assert file.direct_fd is not None
        fd = file.direct_fd
    os.ftruncate(fd, 0)
    if not settings.zerofill:
        fallocate(fd, 0, 0, byte_count)
    with _direct_flag(fd) if settings.o_direct and settings.allocator == "default" else contextlib.nullcontext():
        yield fd


def _with(report: Report, **changes: object) -> Report:
    values = {name: getattr(report, name) for name in Report.__slots__}
    return Report(**{**values, **changes})


@dataclass(frozen=True, slots=True)
class ProbeFile:
    """A file that nobody can find: it never had a name, or has lost it already. `open` opens it anew."""

    fd: int
    direct_fd: int | None
    direct_error: str | None
    is_unnamed: bool

    @classmethod
    def create(cls, directory: Path) -> ProbeFile:
        """Raises OSError if the directory takes no file."""
        try:
            fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.ENOSYS):
                raise
            return cls._create_named(directory / f"{PREFIX}{secrets.token_hex(8)}")
        return cls(fd, *_open_direct(f"/proc/self/fd/{fd}"), is_unnamed=True)

    @classmethod
    def _create_named(cls, path: Path) -> ProbeFile:
        """Opens it both ways while it has a name. No signal that ends the process comes in between, except SIGKILL."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                direct = _open_direct(str(path))
            finally:
                os.unlink(path)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return cls(fd, *direct, is_unnamed=False)

    def __enter__(self) -> ProbeFile:
        return self

    def __exit__(self, *ignored: object) -> None:
        for fd in (self.fd, self.direct_fd):
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)


def _open_direct(path: str) -> tuple[int | None, str | None]:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC), None
    except OSError as error:
        return None, name_of(error)


@contextlib.contextmanager
def _direct_flag(fd: int) -> Iterator[bool]:
    """Sets O_DIRECT by fcntl, and says whether the file carries it then. Raises OSError."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    try:
        yield bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _direct_by_open(file: ProbeFile) -> Direct:
    if file.direct_fd is None:
        return Direct(False, file.direct_error)
    return _try_direct(file.direct_fd)


def _direct_by_fcntl(file: ProbeFile) -> Direct:
    try:
        with _direct_flag(file.fd) as carries:
            return _try_direct(file.fd) if carries else Direct(False, "the flag is not kept")
    except OSError as error:
        return Direct(False, name_of(error))


def _try_direct(fd: int) -> Direct:
    """Writes the whole area by pages, then smaller and larger pieces in what was written."""
    whole = attempt(lambda: _round_trip(fd, 0, AREA_BYTES))
    if not whole.works:
        return Direct(False, whole.reason)
    is_cached = _cached_share(fd) > CACHED_SHARE
    alignment = next((size for size in TRIED_ALIGNMENTS if attempt(partial(_round_trip, fd, size, size)).works), None)
    if alignment is None or alignment > PAGE_BYTES:
        return Direct(False, f"needs an alignment of {alignment or f'more than {TRIED_ALIGNMENTS[-1]}'}", alignment)
    return Direct(True, None, alignment, is_cached)


def _round_trip(fd: int, offset: int, length: int) -> None:
    """Writes fresh bytes and reads them back. OSError, EIO where they differ or are short."""
    with mmap.mmap(-1, length) as out, mmap.mmap(-1, length) as back:
        out[:] = os.urandom(length)
        done = os.pwritev(fd, [out], offset)
        if done != length:
            raise OSError(errno.EIO, f"{done} of {length} bytes written")
        os.fdatasync(fd)
        done = os.preadv(fd, [back], offset)
        if done != length:
            raise OSError(errno.EIO, f"{done} of {length} bytes read")
        if out[:] != back[:]:
            raise OSError(errno.EBADMSG, "other bytes were read than had been written")


def _write_and_compare(fd: int) -> Outcome:
    return attempt(lambda: _round_trip(fd, 0, AREA_BYTES))


def _cached_share(fd: int) -> float:
    """Part of the area that the page cache has. What was in it from buffered writes, a direct write has dropped."""
    pages = AREA_BYTES // mmap.PAGESIZE
    states = (ctypes.c_ubyte * pages)()
    try:
        with mmap.mmap(fd, AREA_BYTES, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
            start = ctypes.c_char.from_buffer(mapping)
            failed = LIBC.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(AREA_BYTES), states)
            del start
    except (OSError, ValueError):
        return 0.0
    return 0.0 if failed else sum(state & 1 for state in states) / pages


def _punch(fd: int) -> Outcome:
    """Gives a part of the file back, which then reads as zeros."""

    def punch() -> None:
        half = AREA_BYTES // 2
        fallocate(fd, FALLOC_KEEP_SIZE | FALLOC_PUNCH_HOLE, 0, half)
        if os.pread(fd, half, 0) != bytes(half):
            raise OSError(errno.EBADMSG, "a punched hole does not read as zeros")

    return attempt(punch)


def io_uring() -> Outcome:
    """Whether this process may have an io_uring; containers often forbid it."""

    def create() -> None:
        parameters = ctypes.create_string_buffer(120)
        fd = LIBC.syscall(SYSCALL_IO_URING_SETUP, 4, parameters)
        if fd < 0:
            raise last_error()
        os.close(fd)

    return attempt(create)


def aio() -> Outcome:
    """Whether this process may have a context of Linux's asynchronous I/O."""
    return attempt(lambda: KernelAio(NO_FILE).close())


def attempt(action: Callable[[], object]) -> Outcome:
    try:
        action()
    except OSError as error:
        return Outcome(False, name_of(error))
    return Outcome(True)


def name_of(error: OSError) -> str:
    """`EINVAL`, or what we say ourselves where bytes differ or are short."""
    number = error.errno or 0
    if number in (errno.EIO, errno.EBADMSG) and error.strerror and error.strerror != os.strerror(number):
        return error.strerror
    return errno.errorcode.get(number, str(error))


def mount_of(path: Path, table: Path = Path("/proc/self/mountinfo")) -> Mount:
    """The mount with the longest path that `path` lies below; of several at one place, the last, which covers them."""
    found = Mount("unknown", "unknown", "/")
    try:
        lines = table.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return found
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, (kind, source, *_) = before.split(), after.split()
        point = Path(_unescaped(fields[4]))
        if (point == path or point in path.parents) and len(str(point)) >= len(found.point):
            found = Mount(kind, _unescaped(source), str(point))
    return found


def _unescaped(text: str) -> str:
    """Blanks and backslashes of the table are octal."""
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Finds out what a directory can do.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--block-bytes", type=int)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of each phase that measures a speed")
    given = parser.parse_args(arguments)

    def say(text: str) -> None:
        print(json.dumps({"phase": text}), flush=True)

    found = probe(given.directory, block_bytes=given.block_bytes, seconds=given.seconds, say=say)
    print(json.dumps({"report": asdict(found)}), flush=True)


if __name__ == "__main__":
    main()
