"""EngineProcess: one engine as a child process that cannot outlive its parent.

- The engine leads its own process group, so a terminal's Ctrl-C reaches it only through the parent.
- The kernel kills the engine when the thread that called `start` ends: call it from the main thread.
- The engine has its own temporary directory. A guard process (system/guard_process.py) removes the engine's processes,
  shared memory and temporary directory, however the engine or its parent ends.
- The engine writes to a log file. If a start fails, its last lines are part of the error.
- The engine never inherits a DYN_KVBM_* variable: only the resolved profile configures it.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import random
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from kvbm.child.start import command_line
from kvbm.config.variables import PREFIX, STORE_VARIABLES
from kvbm.engines.launch_plan import ADMIN_VARIABLE, LaunchPlan
from kvbm.engines.python_probe import SAFE_PATH
from kvbm.errors import EngineError, EnvironmentProblem, reason_of
from kvbm_cli.engine.engine_log import EngineLog
from kvbm_cli.engine.failure_reason import failure_reason_of, oom_kills
from kvbm_cli.engine.readiness import Readiness
from kvbm_cli.system.guard_process import GuardProcess
from kvbm_cli.system.leftovers import Leftovers, shared_files
from kvbm_cli.system.open_files import is_served_by

POLL_S = 0.05
STOP_TIMEOUT_S = 30.0
GUARD_TIMEOUT_S = 30.0
LONGEST_TMPDIR = 50  # a UNIX socket's path has at most 107 characters; engines append 36 and more

NO_TIME = "raise `transfer.init_timeout_s`, the time limit of a start"


class EngineProcess:
    """A started engine. As a context manager, it stops the engine at the end."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        plan: LaunchPlan,
        leftovers: Leftovers,
        log: BinaryIO,
        log_start: int,
    ) -> None:
        """Consumes `leftovers`, borrows `log`."""
        self._child = child
        self._guard = GuardProcess(leftovers, log=log)
        self._leftovers = leftovers
        self._log = EngineLog(Path(log.name), log_start)
        self._stop_log: EngineLog | None = None
        self._started = time.monotonic()
        self._oom_kills_before = oom_kills()
        self._is_removed = False
        self.plan = plan
        self.admin_token: str | None = None  # for requests that change the engine, None if it takes none

    @classmethod
    def start(cls, plan: LaunchPlan, *, log_path: Path) -> EngineProcess:
        """Start the engine and return immediately. Raises EnvironmentProblem if its program or a library is missing,
        or if its log or a file of the plan cannot be written."""
        _check_program(plan)
        _write_files(plan)
        with open_log(log_path) as log:
            log_start = log.tell()  # before the start: the engine shares the file position
            existing_files = set(shared_files())
            tmpdir = _make_tmpdir(plan)
            environment = {**engine_environment(plan, os.environ), "TMPDIR": tmpdir}
            if plan.has_admin_token and not environment.get(ADMIN_VARIABLE):
                environment[ADMIN_VARIABLE] = secrets.token_urlsafe()
            try:
                child = subprocess.Popen(
                    command_line(plan.argv),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    process_group=0,
                )
            except BaseException:
                os.rmdir(tmpdir)
                raise
            leftovers = Leftovers(tmpdir, process_group=child.pid, existing_files=existing_files)
            try:
                process = cls(child, plan, leftovers, log, log_start)
                process.admin_token = environment[ADMIN_VARIABLE] if plan.has_admin_token else None
                return process
            except BaseException:  # no guard could be started
                leftovers.remove()
                child.wait()
                raise

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *ended: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._child.pid

    def pids(self) -> dict[str, int]:
        return {"engine": self.pid, "guard": self._guard.pid}

    def phase(self) -> str:
        """Return the last message in the engine's log since it was signalled to stop."""
        return (self._stop_log.phase() if self._stop_log is not None else None) or ""

    @property
    def log_path(self) -> Path:
        return self._log.path

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def poll(self) -> int | None:
        """Return the exit code once the engine has ended (128 + n for signal n) and its leftovers are removed.

        Removes the leftovers before it reaps the engine: until then no other process can get its process id.
        """
        if self._child.returncode is None:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                self._keep_guard()
                return None
            self._remove_leftovers()
            self._child.wait()
        code = self._child.returncode
        return code if code >= 0 else 128 - code

    def wait_healthy(self, timeout_s: float, on_progress: Callable[[str], None] = lambda phase: None) -> None:
        """Return when the engine answers 200 at its health address. Raises EngineError as soon as it has ended, or
        `timeout_s` after its start; then it is killed.

        Calls `on_progress` with the phase of the start a few times per second. It may stop the engine.
        """
        readiness = Readiness(self.plan, self._log, self._listens_at)
        while self.poll() is None:
            if readiness.probe():
                self._guard.scan()
                return
            if self.elapsed_s > timeout_s:
                raise self.late_error(f"the engine was not healthy after {timeout_s:g} s\n  {readiness.delay()}")
            on_progress(readiness.phase())
            time.sleep(POLL_S)
        raise self.ended_error("the engine exited before it was healthy")

    def ended_error(self, message: str) -> EngineError:
        """Return the error for an engine that exited unexpectedly."""
        code = self.poll()
        assert code is not None, "the engine is still running"
        reason = failure_reason_of(self._log.lines(), code, oom_kill_count=oom_kills() - self._oom_kills_before)
        reason_line = f"\n  {reason.text}" if reason is not None else ""
        reported = () if reason is None else (f"error: {reason.text}", f"hint: {reason.hint}")
        tail = self._log.tail(without=reported)
        return EngineError(
            f"{message}, with exit code {code} after {self.elapsed_s:.1f} s{reason_line}\n{tail}",
            hint=(reason and reason.hint) or f"see the whole log with `less {shlex.quote(str(self.log_path))}`",
            exit_code=code or 1,
        )

    def late_error(self, message: str, *, hint: str = NO_TIME) -> EngineError:
        """Kills an engine that does not become ready and returns the error."""
        self.kill()
        return EngineError(f"{message}\n{self._log.tail()}", hint=hint)

    def signal(self, signal_number: int) -> None:
        """Send a signal to the engine process, which notifies its own processes."""
        if self.poll() is None:
            self._stop_log = self._stop_log or self._log.from_here()
            os.kill(self.pid, signal_number)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGCONT)  # a stopped process handles no signal

    def kill(self) -> int:
        """Kills the engine and all processes that it started. Returns its exit code."""
        return self.stop(timeout_s=0)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Send SIGTERM, wait up to `timeout_s`, then kill all its processes. Returns the exit code."""
        deadline = time.monotonic() + timeout_s
        if timeout_s > 0:
            self.signal(signal.SIGTERM)
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                self._remove_leftovers()  # kills the engine too
            time.sleep(POLL_S / 5)
        return code

    def _keep_guard(self) -> None:
        """Start another guard if the guard was killed. If this process dies before that, the kernel still kills the
        engine itself."""
        if self._guard.has_ended() and not self._is_removed:
            self._guard.close()
            with _log_or_nothing(self.log_path) as log:
                with contextlib.suppress(OSError):  # a full disk
                    log.write(f"kvbm: the guard process {self._guard.pid} was killed; starting another one\n".encode())
                self._guard = GuardProcess(self._leftovers, log=log)

    def _remove_leftovers(self) -> None:
        """Use the guard, which has recorded the engine's files and processes."""
        if self._is_removed:
            return
        self._is_removed = True
        if not self._guard.remove(GUARD_TIMEOUT_S):
            self._guard.kill_and_remove()

    def _listens_at(self, address: str) -> bool:
        port = urlsplit(self.plan.health_url).port
        assert port is not None, self.plan.health_url
        return is_served_by(self._leftovers.members(), address=address, port=port)


OWN_ADDRESS = "set `server.host` to an address of this machine: `127.0.0.1`, or `0.0.0.0` for all of them"
FREE_PORT = "choose a free port with `--port 0`"
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_CHOICE = 20_000  # lower ports are often well known
CHOICES = 64  # attempts before the kernel chooses
_PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)


def engine_environment(plan: LaunchPlan, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the engine's environment: the caller's without DYN_KVBM_*, what kvbm adds, and the profile's.

    The variables for the client of the store stay: they are in no profile.
    """
    kept = {
        name: value for name, value in environment.items() if not name.startswith(PREFIX) or name in STORE_VARIABLES
    }
    return {**kept, **additions(plan)}


def additions(plan: LaunchPlan) -> dict[str, str]:
    """Return the variables that kvbm and the profile add to the caller's, without TMPDIR."""
    return {"PYTHONUNBUFFERED": "1", **SAFE_PATH, **plan.environment}


def choose_port(host: str, port: int) -> int:
    """Return `port`, or a free port for 0. Raises EnvironmentProblem if the port is in use or `host` is not local.

    A free port is outside of the kernel's ephemeral range: it must still be free when the engine listens, possibly a
    minute later.
    """
    bound = _bound_port(host, port)
    for candidate in random.sample(_stable_ports(), k=CHOICES) if port == 0 else ():
        with contextlib.suppress(EnvironmentProblem):
            return _bound_port(host, candidate)
    return bound


def _stable_ports() -> Sequence[int]:
    """Return ports outside of the kernel's ephemeral range."""
    first, last = map(int, EPHEMERAL_PORTS.read_text().split())
    ports = [port for port in range(FIRST_CHOICE, 1 << 16) if not first <= port <= last]
    return ports if len(ports) >= CHOICES else range(FIRST_CHOICE, 1 << 16)


def _bound_port(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except UnicodeError:  # too long or invalid for a name lookup
            raise EnvironmentProblem(f"cannot listen on `{host}`: not a valid host name", hint=OWN_ADDRESS) from None
        except OSError as error:
            where = f"{host} port {port}" if port else host
            hint = FREE_PORT if error.errno in _PORT_ERRORS else OWN_ADDRESS
            reason = reason_of(error)
            raise EnvironmentProblem(f"cannot listen on {where}: {reason}", hint=hint) from None
        return int(probe.getsockname()[1])


def _make_tmpdir(plan: LaunchPlan) -> str:
    """Create the engine's TMPDIR below the profile's or the caller's, or below /tmp if their name is too long."""
    preferred = plan.environment.get("TMPDIR") or tempfile.gettempdir()
    parent = preferred if len(preferred) <= LONGEST_TMPDIR else "/tmp"
    try:
        return tempfile.mkdtemp(prefix="kvbm-tmp-", dir=parent)
    except OSError as error:
        reason = reason_of(error)
        raise EnvironmentProblem(f"cannot create a temporary directory in `{parent}`: {reason}") from None


def _check_program(plan: LaunchPlan) -> None:
    """Check libraries only in this interpreter. Another one reports missing libraries in its log."""
    if shutil.which(plan.argv[0]) is None:
        raise EnvironmentProblem(f"`{plan.argv[0]}` is not a program", hint="check `engine.python`")
    if plan.argv[0] == sys.executable:
        missing = [name for name in plan.libraries if importlib.util.find_spec(name) is None]
        if missing:
            raise EnvironmentProblem(f"the engine needs {' and '.join(missing)}", hint=f"`{plan.install}`")


def _write_files(plan: LaunchPlan) -> None:
    for path, text in plan.files.items():
        assert os.path.isabs(path), f"the plan does not say where `{path}` is"
        try:
            with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(text)
        except OSError as error:
            raise EnvironmentProblem(f"cannot write `{path}`: {reason_of(error)}") from None


def _log_or_nothing(path: Path) -> BinaryIO:
    """Open the log unbuffered, or /dev/null if it cannot be opened: a running engine does not need it."""
    try:
        return path.open("ab", buffering=0)
    except OSError:
        return open(os.devnull, "ab", buffering=0)


def open_log(path: Path) -> BinaryIO:
    """Open the log to append, and create it if it is missing. Raises EnvironmentProblem."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not (path.is_file() or path.is_dir()) and path.resolve() != Path(os.devnull):
            raise OSError(errno.EINVAL, "not a regular file")
        return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))  # it may hold prompts
    except OSError as error:
        reason = f"{path.parent} is not a directory" if isinstance(error, FileExistsError) else reason_of(error)
        message = f"cannot write the engine's log `{path}`: {reason}"
        raise EnvironmentProblem(message, hint="name another file with `--log FILE`, or remove `--log`") from None
