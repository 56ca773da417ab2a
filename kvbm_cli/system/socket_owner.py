"""Who accepts connections at an address: the kernel's table of sockets, and the files that processes hold open."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTEN = "0A"
WORD_DIGITS = 8

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_served_by(pids: Iterable[int], *, address: str, port: int) -> bool:
    """Whether these processes, and nobody else, accept what connects to `address` and `port`."""
    listening = _listening_sockets(ipaddress.ip_address(address), port)
    return bool(listening) and listening <= set(_sockets_of(pids))


def _listening_sockets(address: Address, port: int) -> set[int]:
    """Inodes of the sockets that are bound to this very address, else of those bound to every address."""
    exact, every = set(), set()
    for bound, inode in _bound_to(port):
        if bound == address:
            exact.add(inode)
        elif bound.is_unspecified and (bound.version == 6 or address.version == 4):
            every.add(inode)
    return exact or every


def _bound_to(port: int) -> Iterator[tuple[Address, int]]:
    """Address and inode of every listening socket of a port."""
    for table in TABLES:
        with contextlib.suppress(FileNotFoundError):  # tcp6 of a machine without IPv6
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                address, _, local_port = fields[1].partition(":")
                if fields[3] == LISTEN and int(local_port, 16) == port:
                    yield _address(address), int(fields[9])


def _address(hexadecimal: str) -> Address:
    """The table has words of four bytes, each as the machine stores it."""
    words = (hexadecimal[start : start + WORD_DIGITS] for start in range(0, len(hexadecimal), WORD_DIGITS))
    raw = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    address = ipaddress.ip_address(raw)
    return getattr(address, "ipv4_mapped", None) or address


def _sockets_of(pids: Iterable[int]) -> Iterator[int]:
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for entry in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    kind, _, inode = os.readlink(f"/proc/{pid}/fd/{entry}").partition(":")
                    if kind == "socket":
                        yield int(inode.strip("[]"))
