"""What processes have open: the files that they write, and the sockets at which they listen.

A file that is open for writing is a mark that files cannot forge, and that a process keeps until it ends. The
environment is no such mark: vLLM overwrites it with the title of its processes.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTEN = "0A"
WORD_DIGITS = 8
_DELETED = " (deleted)"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def written_files(pid: int) -> Iterator[Path]:
    """Yield the files that a process has open for writing, none if it has ended or belongs to another user."""
    return (Path(target.removesuffix(_DELETED)) for mode, target in _opened_by(pid) if mode & stat.S_IWUSR)


def writes(pid: int, path: Path) -> bool:
    """Whether a process has a file open for writing, also if it was removed meanwhile."""
    return path.resolve() in written_files(pid)


def files_by_writer() -> Iterator[tuple[int, Path]]:
    """Yield every process of this user with each file that it has open for writing."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        for path in written_files(pid):
            yield pid, path


def is_served_by(pids: Iterable[int], *, address: str, port: int) -> bool:
    """Whether these processes, and no others, accept connections to `address` and `port`."""
    listening = _listening_sockets(ipaddress.ip_address(address), port)
    return bool(listening) and listening <= set(_sockets_of(pids))


def _listening_sockets(address: Address, port: int) -> set[int]:
    """Return inodes of the sockets bound to exactly this address, else of those bound to all addresses."""
    exact, every = set(), set()
    for bound, inode in _bound_to(port):
        if bound == address:
            exact.add(inode)
        elif bound.is_unspecified and (bound.version == 6 or address.version == 4):
            every.add(inode)
    return exact or every


def _bound_to(port: int) -> Iterator[tuple[Address, int]]:
    """Yield address and inode of every listening socket of a port."""
    for table in TABLES:
        with contextlib.suppress(FileNotFoundError):  # no tcp6 on a machine without IPv6
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                address, _, local_port = fields[1].partition(":")
                if fields[3] == LISTEN and int(local_port, 16) == port:
                    yield _address(address), int(fields[9])


def _address(hexadecimal: str) -> Address:
    """Parse an address of the table: words of four bytes in the machine's byte order."""
    words = (hexadecimal[start : start + WORD_DIGITS] for start in range(0, len(hexadecimal), WORD_DIGITS))
    raw = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    address = ipaddress.ip_address(raw)
    return getattr(address, "ipv4_mapped", None) or address


def _sockets_of(pids: Iterable[int]) -> Iterator[int]:
    for pid in pids:
        for _, target in _opened_by(pid):
            kind, _, inode = target.partition(":")
            if kind == "socket":
                yield int(inode.strip("[]"))


def _opened_by(pid: int) -> Iterator[tuple[int, str]]:
    """Yield for each descriptor of a process in which mode it is open, and what it is."""
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                yield entry.stat(follow_symlinks=False).st_mode, os.readlink(entry.path)
