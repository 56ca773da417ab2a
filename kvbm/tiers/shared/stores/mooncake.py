"""MooncakeStore: objects in a pool of host memory across machines, through Mooncake Store.

A master knows which owner (`mooncake_client`) has which object. kvbm contributes no memory: it is a client only.
One call moves many objects, and one thread calls, because parallel calls of one client are slower.

What the store does, and what follows from it:

    reports altered bytes as success             the header and the checksums decide, not its answer
    calls to a stopped peer last 30 s            LIMITS shortens them; a transfer that stops drops its connection, so
                                                 that nothing is written to host memory after the call
    keeps the first object of a name             a write of an existing one is GOOD and changes nothing
    reports unreadable objects as present        presence is a hint; an object whose owner has ended is a miss
    cannot list                                  presence comes from own writes and from probes
    lets its peers access registered memory      over TCP, which does not require it, nothing is registered
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

import numpy as np
from numpy.typing import NDArray

from kvbm.errors import EnvironmentProblem
from kvbm.tiers.shared.object_store import Incoming, Outgoing, StoreAnswer
from kvbm.tiers.shared.orders import Outcome
from kvbm.tiers.shared.protection import Buffer

DEFAULT_PORT = 50051
LIMITS = {  # variables of the library, which reads them when a client is set up; those of the user win
    "MC_RPC_TIMEOUT_MS": "1000",  # 30000 by default
    "MC_RPC_CONNECT_TIMEOUT_MS": "500",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",  # 30 by default
    "MC_STORE_CLIENT_SETUP_RETRIES": "2",  # 20 by default, 4.3 s each
}
LIMIT_S = 2.5  # a question to the master and a transfer; 4.3 s if the master has just ended
MISSING = frozenset((-703, -704))  # being written, not found
REASONS = {
    -200: "no owner in the pool has room for the object",
    -600: "it has another length, or the client is closed",
    -707: "it was evicted while it was read",
    -800: "the owner of the object does not answer",
    -900: "the master does not answer",
    -901: "the master does not answer in time",
}

log = logging.getLogger(__name__)


class MooncakeStore:
    """See the module's text. One thread at a time may call it. `pool` is a MooncakeDistributedStore that is set up;
    with `registers`, it requires that all memory is registered."""

    name = "mooncake"
    threads = write_threads = 1
    can_list = False

    def __init__(self, pool: Any, *, prefix: str, batch_objects: int, registers: bool) -> None:
        self.batch_objects = batch_objects
        self._pool = pool
        self._prefix = f"{prefix}/" if prefix else ""
        self._memory: list[tuple[int, int]] = []  # start and end of what needs no copy
        self._scratch = _Scratch(pool if registers else None)
        self._calling = threading.Lock()  # held until the end of the process by `close`

    @classmethod
    def open(cls, url: str, *, batch_objects: int, facts_key: str, facts: bytes, writes: bool) -> MooncakeStore:
        """Connect to the master. Raises EnvironmentProblem if it does not answer."""
        parts = urlsplit(url)
        protocol = os.environ.get("MOONCAKE_PROTOCOL", "tcp")
        pool = _connected(url, parts, protocol)
        store = cls(pool, prefix=parts.path.strip("/"), batch_objects=batch_objects, registers=protocol != "tcp")
        if writes and (answer := store.put([Outgoing(facts_key, [facts])])[0]).error:
            log.warning("kvbm: %s accepts no objects yet, nothing is written to it: %s", url, answer.error)
        return store

    @property
    def limit_s(self) -> float:
        return LIMIT_S

    def use_memory(self, memory: Sequence[NDArray[np.uint8]]) -> None:
        for array in memory:
            start, length = _address(array), _extent(array)
            self._scratch.register(start, length)
            self._memory.append((start, start + length))

    def get(self, objects: Sequence[Incoming]) -> list[StoreAnswer]:
        with self._calling:
            all_parts = self._in_reach([one.buffers for one in objects])
            sizes = self._pool.batch_get_into_multi_buffers(
                [self._prefix + one.key for one in objects],
                [parts.addresses for parts in all_parts],
                [parts.sizes for parts in all_parts],
            )
            answers = []
            for one, parts, size in zip(objects, all_parts, sizes, strict=True):
                if size == one.length:
                    for buffer, copy in parts.copies:
                        buffer[:] = copy
                answers.append(StoreAnswer(Outcome.GOOD) if size == one.length else self._without(one, size))
            return answers

    def put(self, objects: Sequence[Outgoing]) -> list[StoreAnswer]:
        with self._calling:
            all_parts = self._in_reach([one.buffers for one in objects], is_write=True)
            for one in objects:
                if one.replaces:
                    self._pool.remove(self._prefix + one.key, True)
            codes = self._pool.batch_put_from_multi_buffers(
                [self._prefix + one.key for one in objects],
                [parts.addresses for parts in all_parts],
                [parts.sizes for parts in all_parts],
            )
        return [StoreAnswer(Outcome.GOOD) if code == 0 else _failed(code) for code in codes]

    def are_present(self, keys: Sequence[str]) -> list[bool | None]:
        with self._calling:
            codes = self._pool.batch_is_exist([self._prefix + key for key in keys])
        return [None if code < 0 else code > 0 for code in codes]

    def keys(self, prefix: str) -> Iterator[list[str]]:
        raise OSError("Mooncake cannot list objects")

    def check(self, key: str | None) -> str | None:
        """`health_check` of the library reports success without asking the master. No object is read: its bytes could
        only go to memory that is registered."""
        with self._calling:
            code = self._pool.batch_is_exist(["kvbm-check"])[0]
        return _failed(code).error if code < 0 else None

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects, also while they are read. One that is missing is ignored."""
        with self._calling:
            for key in keys:
                self._pool.remove(self._prefix + key, True)

    def close(self) -> None:
        if self._calling.acquire(blocking=False):  # else a call hangs: the process ends with it
            self._pool.close()

    def _without(self, one: Incoming, code: int) -> StoreAnswer:
        """Return why an object was not read. The library has one code for a short object and for a dead owner."""
        if code in MISSING:
            return StoreAnswer(Outcome.ABSENT)
        size = code if code >= 0 else self._pool.get_size(self._prefix + one.key)
        if size >= 0 and size != one.length:
            return StoreAnswer(Outcome.BAD, f"{size} bytes, not {one.length}")
        return _failed(code)

    def _in_reach(self, objects: Sequence[Sequence[Buffer | int]], *, is_write: bool = False) -> list[_Parts]:
        """Return where the library finds the bytes of each object: host memory itself, and scratch memory for all
        else. Bytes that are skipped share one place."""
        skipped = max((buffer for buffers in objects for buffer in buffers if isinstance(buffer, int)), default=0)
        copied = [
            buffer
            for buffers in objects
            for buffer in buffers
            if not isinstance(buffer, int) and not self._has(_address(buffer), len(buffer))
        ]
        skip_address = self._scratch.begin(skipped, sum(map(len, copied)))
        all_parts = []
        for buffers in objects:
            parts = _Parts()
            for buffer in buffers:
                if isinstance(buffer, int):
                    parts.add(skip_address, buffer)
                    continue
                address = _address(buffer)
                if not self._has(address, len(buffer)):
                    address, copy = self._scratch.take(len(buffer))
                    if is_write:
                        copy[:] = buffer
                    elif isinstance(buffer, memoryview):
                        parts.copies.append((buffer, copy))
                parts.add(address, len(buffer))
            all_parts.append(parts)
        return all_parts

    def _has(self, address: int, length: int) -> bool:
        return any(start <= address and address + length <= end for start, end in self._memory)


@dataclass(slots=True)
class _Parts:
    """Where the bytes of an object are. `copies`: buffers that are filled from scratch memory after a read."""

    addresses: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    copies: list[tuple[memoryview, memoryview]] = field(default_factory=list)

    def add(self, address: int, size: int) -> None:
        self.addresses.append(address)
        self.sizes.append(size)


class _Scratch:
    """Memory for headers and for bytes that are skipped. It grows as calls need it. `pool` registers it, if any."""

    def __init__(self, pool: Any | None) -> None:
        self._pool = pool
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0

    def register(self, address: int, length: int) -> None:
        """May raise OSError."""
        if self._pool is not None and (code := self._pool.register_buffer(address, length)) != 0:
            raise OSError(f"Mooncake cannot register {length} bytes of host memory (code {code})")

    def begin(self, skipped_bytes: int, copied_bytes: int) -> int:
        """Prepare for one call; return the address of what is skipped."""
        if len(self._memory) < skipped_bytes + copied_bytes:
            if self._pool is not None and len(self._memory):
                self._pool.unregister_buffer(_address(self._memory))
            length = -(-(skipped_bytes + copied_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
            self._memory = np.frombuffer(mmap.mmap(-1, length), np.uint8)
            self.register(_address(self._memory), length)
        self._used = skipped_bytes
        return _address(self._memory)

    def take(self, length: int) -> tuple[int, memoryview]:
        taken = self._memory[self._used : self._used + length]
        self._used += length
        return _address(taken), taken.data


def _connected(url: str, parts: SplitResult, protocol: str) -> Any:
    """Return a client of the pool that is set up. Raises EnvironmentProblem."""
    host, port = parts.hostname, parts.port or DEFAULT_PORT
    if host is None:
        raise EnvironmentProblem(
            f"`tiers.shared.url` {url} has no host", hint="set it to `mooncake://HOST:PORT` of the master"
        )
    for name, value in LIMITS.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        has_package = "mooncake" not in str(error)
        raise EnvironmentProblem(
            f"cannot load the library of Mooncake: {error}",
            hint="run `apt install libibverbs1`" if has_package else "run `pip install 'kvbm-cli[mooncake]'`",
        ) from error
    pool = MooncakeDistributedStore()
    device = os.environ.get("MOONCAKE_DEVICE", "")
    code = pool.setup(_own_name(url, host, port), "P2PHANDSHAKE", 0, 0, protocol, device, f"{host}:{port}")
    if code != 0:
        raise EnvironmentProblem(
            f"cannot use `tiers.shared.url` {url}: the master does not answer (code {code}, protocol {protocol})",
            hint=f"start the master on {host} with `mooncake_master --rpc_address={host} --rpc_port={port}`",
        )
    return pool


def _own_name(url: str, host: str, port: int) -> str:
    """Return the name of this machine for its peers: the address from which it reaches the master."""
    if name := os.environ.get("MOONCAKE_LOCAL_HOSTNAME"):
        return name
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EnvironmentProblem(f"cannot use `tiers.shared.url` {url}: {error.strerror or error}") from error


def _address(buffer: Buffer | NDArray[np.uint8]) -> int:
    array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    address: int = array.__array_interface__["data"][0]
    return address


def _extent(array: NDArray[np.uint8]) -> int:
    """Return the bytes from the first to the last element of an array of slots."""
    slots, slot_bytes = array.shape
    extent: int = (slots - 1) * array.strides[0] + slot_bytes
    return extent


def _failed(code: int) -> StoreAnswer:
    return StoreAnswer(Outcome.FAILED, REASONS.get(code, f"code {code} of Mooncake"))
