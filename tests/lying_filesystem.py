"""A FUSE filesystem over a directory that does not keep what it says of O_DIRECT, or breaks on request. As a program:

    python lying_filesystem.py LIE MOUNT_POINT DIRECTORY

`refuses`: open does not take O_DIRECT, and so nobody may use it; fcntl never comes here and seems to work.
`fails`: open takes it, and every write through such a file is EINVAL.
`drops`: open takes it, and what is written through such a file is never seen again.
`obeys`: it does what the file `orders` beside DIRECTORY says: an errno's name, which reads, writes and fsync fail with;
`short`, where the arena of a cache is read and written in part; `stall`, where no read, write, sync or stat ends until
it says otherwise; `hang`, the same for every call, and `hang-KIND` for those of one kind, see HANGING.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from functools import wraps

import mfusepy

HAS_LIMIT = (mfusepy.fuse_version_major, mfusepy.fuse_version_minor) >= (3, 12)
MANY = {"max_threads": 200} if HAS_LIMIT else {}  # a call that hangs takes a thread

HANGING = {
    "stat": ("getattr", "statfs"),
    "list": ("opendir", "readdir"),
    "open": ("open", "create"),
    "reads": ("read",),
    "writes": ("write", "truncate"),
    "fsync": ("fsync",),
    "close": ("flush", "release"),
    "changes": ("mkdir", "rmdir", "unlink", "rename", "link", "chmod", "utimens"),
}


class LyingFilesystem(mfusepy.Operations):
    use_ns = True

    def __init__(self, lie: str, directory: str) -> None:
        self._lie = lie
        self._root = directory
        self._direct: set[int] = set()

    def _at(self, path: str) -> str:
        return os.path.join(self._root, path.lstrip("/"))

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found):
            return found

        @wraps(found)  # also the mark of what is not implemented
        def when_it_answers(*args, **keys):
            while (order := self._order()) == "hang" or name in HANGING.get(order.removeprefix("hang-"), ()):
                time.sleep(0.05)
            return found(*args, **keys)

        return when_it_answers

    def _obey(self, *, may_fail=True):
        while (order := self._order()) == "stall":
            time.sleep(0.05)
        if order.startswith("E") and may_fail:
            raise mfusepy.FuseOSError(getattr(errno, order))

    def _order(self):
        if self._lie != "obeys":
            return ""
        try:
            with open(os.path.join(os.path.dirname(self._root), "orders")) as file:
                return file.read().strip()
        except FileNotFoundError:
            return ""

    def _part(self, path, size):
        """What is read or written of so many bytes."""
        return -(-size // 2) if path.endswith("/arena") and self._order() == "short" else size

    def getattr(self, path, fh=None):
        self._obey(may_fail=False)
        found = os.lstat(self._at(path))
        names = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks")
        times = {f"st_{kind}time": getattr(found, f"st_{kind}time_ns") for kind in "acm"}
        return {**{name: getattr(found, name) for name in names}, **times}

    def readdir(self, path, fh):
        return [".", "..", *os.listdir(self._at(path))]

    def mkdir(self, path, mode):
        os.mkdir(self._at(path), mode)

    def rmdir(self, path):
        os.rmdir(self._at(path))

    def unlink(self, path):
        self._obey()
        os.unlink(self._at(path))

    def rename(self, old, new):
        os.rename(self._at(old), self._at(new))

    def link(self, target, source):
        os.link(self._at(source), self._at(target))

    def chmod(self, path, mode):
        os.chmod(self._at(path), mode)

    def utimens(self, path, times=None):
        os.utime(self._at(path))

    def statfs(self, path):
        found = os.statvfs(self._root)
        names = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_namemax")
        return {name: getattr(found, name) for name in names}

    def create(self, path, mode, fi=None):
        self._obey()
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)

    def open(self, path, flags):
        if flags & os.O_DIRECT and self._lie == "refuses":
            raise mfusepy.FuseOSError(errno.EINVAL)
        fd = os.open(self._at(path), flags & ~os.O_DIRECT)
        if flags & os.O_DIRECT:
            self._direct.add(fd)
        return fd

    def read(self, path, size, offset, fh):
        self._obey()
        return os.pread(fh, self._part(path, size), offset)

    def write(self, path, data, offset, fh):
        self._obey()
        if fh in self._direct and self._lie == "fails":
            raise mfusepy.FuseOSError(errno.EINVAL)
        if fh in self._direct and self._lie == "drops":
            return len(data)
        return os.pwrite(fh, data[: self._part(path, len(data))], offset)

    def truncate(self, path, length, fh=None):
        os.truncate(self._at(path), length)

    def fsync(self, path, datasync, fh):
        self._obey()
        os.fdatasync(fh)

    def flush(self, path, fh):
        pass

    def release(self, path, fh):
        self._direct.discard(fh)
        os.close(fh)


if __name__ == "__main__":
    lie, point, directory = sys.argv[1:]
    mfusepy.FUSE(
        LyingFilesystem(lie, directory), point, foreground=True, nothreads=False, fsname=f"lying-{lie}", **MANY
    )
