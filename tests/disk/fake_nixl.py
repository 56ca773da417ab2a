"""A NIXL in Python: moves bytes at the n-th poll, fails on request, and notes where it is used as it must not be."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np


class nixlBackendError(Exception):
    pass


class FakeNixl:
    """Stands for the package. `refused` says what fails: `create`, `start`, or `end`; `lies` reports all as done."""

    def __init__(self, *, polls: int = 3) -> None:
        self.polls = polls
        self.refused: set[str] = set()
        self.lies = False
        self.agents: list[FakeAgent] = []
        self.released: list[FakeHandle] = []
        self.misuse: list[str] = []
        self.started: Callable[[], object] = lambda: None
        self.api = SimpleNamespace(
            nixl_agent=self._agent,
            nixl_agent_config=SimpleNamespace,
            nixl_thread_sync_t=SimpleNamespace(NIXL_THREAD_SYNC_STRICT="strict"),
        )
        self.bindings = SimpleNamespace(nixlBackendError=nixlBackendError)

    def _agent(self, name: str, configuration: Any) -> FakeAgent:
        if configuration.backends != [] or configuration.sync_mode != "strict":
            self.misuse.append("an agent with UCX, or without its lock")
        self.agents.append(FakeAgent(self, name))
        return self.agents[-1]


class FakeHandle:
    def __init__(self, move: Callable[[], bool], polls: int) -> None:
        self.move, self.polls_left, self.state = move, polls, "NEW"


class FakeAgent:
    def __init__(self, nixl: FakeNixl, name: str) -> None:
        self._nixl, self.name = nixl, name
        self.backend: tuple[str, dict[str, str]] | None = None
        self._spans: list[tuple[int, int]] = []
        self._user = threading.Lock()

    def create_backend(self, plugin: str, parameters: dict[str, str]) -> None:
        if "create" in self._nixl.refused:
            raise nixlBackendError("NIXL_ERR_BACKEND")
        self.backend = plugin, parameters

    def register_memory(self, spans: list[tuple[int, int, int, str]], kind: str) -> None:
        self._spans += [span[:2] for span in spans if kind == "DRAM"]

    def get_xfer_descs(self, rows: np.ndarray, kind: str) -> np.ndarray:
        return rows

    def initialize_xfer(self, operation: str, memory: np.ndarray, file: np.ndarray, name: str) -> FakeHandle:
        for address, length, _ in memory.tolist():
            if not any(start <= address and address + length <= start + size for start, size in self._spans):
                raise nixlBackendError("NIXL_ERR_NOT_FOUND")
        return FakeHandle(lambda: _moved(operation, memory, file), self._nixl.polls)

    def transfer(self, handle: FakeHandle) -> str:
        if not self._user.acquire(blocking=False):
            self._nixl.misuse.append("two calls on one agent")
        self._nixl.started()
        handle.state = "PROC"
        if "start" in self._nixl.refused:
            self._user.release()
            raise nixlBackendError("NIXL_ERR_BACKEND")
        return handle.state

    def check_xfer_state(self, handle: FakeHandle) -> str:
        handle.polls_left -= 1
        if handle.polls_left > 0:
            return handle.state
        self._user.release()
        is_moved = "end" not in self._nixl.refused and handle.move()
        handle.state = "DONE" if is_moved or self._nixl.lies else "ERR"
        if handle.state == "ERR":
            raise nixlBackendError("NIXL_ERR_BACKEND")
        return handle.state

    def release_xfer_handle(self, handle: FakeHandle) -> None:
        if handle.state not in ("DONE", "ERR"):
            self._nixl.misuse.append(f"a handle released while {handle.state}")
        self._nixl.released.append(handle)


def _moved(operation: str, memory: np.ndarray, file: np.ndarray) -> bool:
    moved = 0
    for (address, length, _), (offset, _, fd) in zip(memory.tolist(), file.tolist(), strict=True):
        buffer = (ctypes.c_char * length).from_address(address)
        moved += (os.preadv if operation == "READ" else os.pwritev)(fd, [buffer], offset)
    return moved == int(memory[:, 1].sum())
