"""Server: life cycle of the embedded engine's process, from the listening socket to the exit code.

    listen ─▶ loading ─▶ serving ─▶ stopping ─▶ exit 0        a signal, at any time
                 │          └─────▶ dead ────▶ exit 1        the engine thread has failed
                 └─ cannot be loaded ─────────▶ exit 1 or 2

The socket opens first; a separate thread then loads the engine. So a used port fails immediately, and /health
distinguishes loading (503 with a `phase`) from dead (the process has ended). After the first signal the server accepts
no more requests, and open requests get `drain_timeout_s` to finish. A second signal ends the process immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from kvbm.engines.embedded.http.completion import Served
from kvbm.engines.embedded.http.connections import front, listen
from kvbm.engines.embedded.http.endpoints import create_app
from kvbm.engines.embedded.http.service import Service
from kvbm.engines.launch_plan import ADMIN_VARIABLE
from kvbm.errors import EngineError, EnvironmentProblem

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WATCH_S = 0.1
FAREWELL_S = 2.0  # for responses that were just ended with an error

Report = Callable[[str], None]
Load = Callable[[Report], Served]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    host: str
    port: int
    drain_timeout_s: float


class Server:
    """One engine behind one socket. `load` runs in a separate thread and returns a started engine."""

    def __init__(self, settings: ServerSettings, load: Load) -> None:
        self._settings = settings
        self._load = load
        self._service = Service(admin_token=os.environ.get(ADMIN_VARIABLE) or None)
        self._stop = asyncio.Event()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._started = time.monotonic()

    def run(self) -> int:
        """Serve until a signal and return the exit code. Raises KvbmError if it cannot start, or if the engine dies."""
        return asyncio.run(self._run())

    async def _run(self) -> int:
        self._take_signals()
        runner = front(create_app(self._service), shutdown_timeout_s=FAREWELL_S)
        await runner.setup()
        try:
            await self._listen(runner)
            await self._serve()
            await self._drain(runner)
        finally:
            await runner.cleanup()
            if self._service.served is not None:
                await asyncio.to_thread(self._service.served.engine.stop)
            self._loader.shutdown(wait=False)
        if self._service.failure is not None:
            raise EngineError(f"the engine failed: {self._service.failure}")
        return 0

    async def _listen(self, runner: web.AppRunner) -> None:
        host, port = self._settings.host, self._settings.port
        try:
            await listen(runner, host, port)
        except OSError as error:
            reason = (os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)).lower()
            raise EnvironmentProblem(
                f"cannot listen on {host} port {port}: {reason}", hint="choose a free port with `--port 0`"
            ) from None
        address, bound, *_ = runner.addresses[0]
        self._say(f"listening on http://{f'[{address}]' if ':' in address else address}:{bound}")

    async def _serve(self) -> None:
        """Return when a signal has arrived or the engine has failed."""
        await self._load_engine()
        if self._service.served is None:
            return
        engine = self._service.served.engine
        self._say(f"serving {engine.model_name} after {time.monotonic() - self._started:.1f} s")
        while not self._stop.is_set():
            if not engine.is_healthy:
                self._service.failure = str(engine.failure or "the engine thread ended")
                self._service.fail_running(f"the engine failed: {self._service.failure}")
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), WATCH_S)

    async def _load_engine(self) -> None:
        """Load the engine in a thread. Leaves `service.served` None if a signal came first. Raises what loading raised.

        The thread lives until the server has ended. A connector's worker process sets PR_SET_PDEATHSIG, so the kernel
        kills it when the thread that started it ends.
        """
        report = partial(setattr, self._service, "phase")
        loaded = asyncio.get_running_loop().run_in_executor(self._loader, self._load, report)
        stopped = asyncio.ensure_future(self._stop.wait())
        waited: set[asyncio.Future[Any]] = {loaded, stopped}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not loaded.cancel():
            self._service.served = loaded.result()

    async def _drain(self, runner: web.AppRunner) -> None:
        """Stop accepting, wait for open requests up to the deadline, and fail the rest."""
        self._service.is_stopping = True
        for site in list(runner.sites):
            await site.stop()
        deadline = time.monotonic() + self._settings.drain_timeout_s
        if self._service.running and self._service.failure is None:
            self._say(f"stopping; open requests: {len(self._service.running)}; a second signal ends them immediately")
        while self._service.running and time.monotonic() < deadline and self._service.failure is None:
            await asyncio.sleep(WATCH_S / 5)
        self._service.fail_running("the server is shutting down")
        deadline = time.monotonic() + FAREWELL_S
        while self._service.running and time.monotonic() < deadline:
            await asyncio.sleep(WATCH_S / 5)

    def _take_signals(self) -> None:
        """Install handlers. A signal that the parent ignores, such as SIGHUP under `nohup`, stays ignored."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            os._exit(128 + number)
        self._stop.set()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # keep serving if the log cannot be written, for example on a full disk
            print(text, file=sys.stderr, flush=True)
