"""A FUSE filesystem over a directory that does not keep what it says of O_DIRECT. Run as a program:

    python lying_filesystem.py LIE MOUNT_POINT DIRECTORY

`refuses`: open does not take O_DIRECT, and so nobody may use it; fcntl never comes here and seems to work.
`fails`: open takes it, and every write through such a file is EINVAL.
`drops`: open takes it, and what is written through such a file is never seen again.
"""

from __future__ import annotations

import errno
import os
import sys

import mfusepy


class LyingFilesystem(mfusepy.Operations):
    use_ns = True

    def __init__(self, lie: str, directory: str) -> None:
        self._lie = lie
        self._root = directory
        self._direct: set[int] = set()

    def _at(self, path: str) -> str:
        return os.path.join(self._root, path.lstrip("/"))

    def getattr(self, path, fh=None):
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
        os.unlink(self._at(path))

    def rename(self, old, new):
        os.rename(self._at(old), self._at(new))

    def chmod(self, path, mode):
        os.chmod(self._at(path), mode)

    def utimens(self, path, times=None):
        os.utime(self._at(path))

    def statfs(self, path):
        found = os.statvfs(self._root)
        names = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_namemax")
        return {name: getattr(found, name) for name in names}

    def create(self, path, mode, fi=None):
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)

    def open(self, path, flags):
        if flags & os.O_DIRECT and self._lie == "refuses":
            raise mfusepy.FuseOSError(errno.EINVAL)
        fd = os.open(self._at(path), flags & ~os.O_DIRECT)
        if flags & os.O_DIRECT:
            self._direct.add(fd)
        return fd

    def read(self, path, size, offset, fh):
        return os.pread(fh, size, offset)

    def write(self, path, data, offset, fh):
        if fh in self._direct and self._lie == "fails":
            raise mfusepy.FuseOSError(errno.EINVAL)
        if fh in self._direct and self._lie == "drops":
            return len(data)
        return os.pwrite(fh, data, offset)

    def truncate(self, path, length, fh=None):
        os.truncate(self._at(path), length)

    def fsync(self, path, datasync, fh):
        os.fdatasync(fh)

    def flush(self, path, fh):
        pass

    def release(self, path, fh):
        self._direct.discard(fh)
        os.close(fh)


if __name__ == "__main__":
    lie, point, directory = sys.argv[1:]
    mfusepy.FUSE(LyingFilesystem(lie, directory), point, foreground=True, nothreads=False, fsname=f"lying-{lie}")
