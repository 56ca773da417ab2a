"""An embedded engine with host memory and disk in a process of its own, which chaos may stop, starve and kill.

`EngineProcess` is the test's end; `serve` runs in the process. A fork server starts the processes. Every answer of the
engine reaches the test with its log-probabilities. The log of the process is a file.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import logging
import multiprocessing
import os
import resource
import struct
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from bookkeeping import tier_of

from kvbm.types import Tier

START_LIMIT_S = 30.0
STACKS_LIMIT_S = 3.0
CALL_LIMIT_S = 60.0
STOP_LIMIT_S = 45.0
TAIL_BYTES = 6000
HERE = Path(__file__).parent
DISK_FAULTS = HERE.parent / "embedded" / "disk_faults"

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["chaos_preload"])


@dataclass(frozen=True)
class Said:
    """An answer: tokens with log-probabilities, and how many tokens of the prompt came from the cache."""

    answer: list[tuple[int, float]]
    external_tokens: int
    reason: str
    error: str | None


class EngineDied(AssertionError):
    """The engine's process or thread has ended."""


class Refused(AssertionError):
    """The engine did not start, with a message for users."""


class Hung(AssertionError):
    """No answer within the deadline."""


class EngineProcess:
    """`options` as of `serve`. Use as a context manager; the process is killed at the end if it still runs."""

    def __init__(self, log: Path, **options) -> None:
        self.log = log
        self._numbers = itertools.count()
        self._waiting: dict[int, Future] = {}
        self._lock = threading.Lock()
        self._joining = threading.Lock()  # a Process is joined by one thread at a time
        self._pipe, theirs = CONTEXT.Pipe()
        with _python_path():
            self.process = CONTEXT.Process(target=serve, args=(theirs, str(log), options))
            self.process.start()
        theirs.close()
        self.pid = self.process.pid
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def submit(self, prompt: list[int], max_tokens: int) -> Future:
        """Ask; the future brings a Said. Its `request_id` is for `abort`."""
        future = self._send("ask", prompt, max_tokens)
        future.request_id = f"r{future.number}"
        return future

    def call(self, verb: str, *arguments, limit_s: float = CALL_LIMIT_S):
        """What the method `verb` of the process returns."""
        try:
            return self._send(verb, *arguments).result(limit_s)
        except NotYet:
            raise Hung(f"`{verb}` did not end within {limit_s:g} s\n{self.stacks()}") from None

    def counters(self) -> dict[str, int]:
        return self.call("counters")

    def stop(self) -> None:
        """End the engine as a user would. It must end by itself, without an error."""
        with suppress(EngineDied):
            self._send("stop").result(STOP_LIMIT_S)
        if (code := self.exit_code()) != 0:
            raise EngineDied(f"the engine ended with {code}\n{self.tail()}")

    def exit_code(self) -> int | None:
        """Wait for the end of the process."""
        with self._joining:
            self.process.join(STOP_LIMIT_S)
            return self.process.exitcode

    def processes(self) -> list[psutil.Process]:
        """The engine's process, then its children."""
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.pid)
            return [own, *own.children(recursive=True)]
        return []

    def kill(self) -> None:
        """SIGKILL for the engine and its children, and wait for them."""
        processes = self.processes()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.exit_code()
        psutil.wait_procs(processes[1:], STOP_LIMIT_S)

    def stacks(self) -> str:
        """The end of the log, with the stack of the engine's thread if the process can give it."""
        with suppress(NotYet, EngineDied):
            self._send("stacks").result(STACKS_LIMIT_S)
        return self.tail()

    def tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            return f"--- end of the engine's log ---\n{file.read().decode(errors='replace')}"

    def _send(self, verb: str, *arguments) -> Future:
        future: Future = Future()
        with self._lock:
            future.number = next(self._numbers)
            self._waiting[future.number] = future
            try:
                self._pipe.send((future.number, verb, arguments))
            except OSError:
                self._waiting.pop(future.number)
                future.set_exception(EngineDied(f"the engine does not run\n{self.tail()}"))
        return future

    def _wait_until_ready(self) -> None:
        try:
            if not self._pipe.poll(START_LIMIT_S):
                raise Hung(f"the engine did not start within {START_LIMIT_S:g} s\n{self.tail()}")
            _, _, refusal = self._pipe.recv()
            if refusal is not None:
                raise Refused(refusal)
        except EOFError:
            raise EngineDied(f"the start ended with {self.exit_code()}\n{self.tail()}") from None

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, result, error = self._pipe.recv()
                future = self._waiting.pop(number)
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(EngineDied(f"{error}\n{self.tail()}"))
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        code = self.exit_code()
        for future in waiting.values():
            future.set_exception(EngineDied(f"the engine ended with {code}\n{self.tail()}"))


class _python_path:
    """The fork server finds the modules of the tests only through the environment."""

    def __enter__(self) -> None:
        self._before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), *sys.path]))

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = self._before


# -- in the process ----------------------------------------------------------------------------------------------------


def serve(pipe, log: str, options: dict) -> None:
    """Run a KvbmEngine with `options` until the test says `stop`.

    `fault_file`: its disk process obeys it (tests/embedded/disk_faults). `descriptors`: so many are in use before
    it starts. `is_plain_user`: permissions of files hold, also for root. `tokens_per_s`: a limit for computing.
    """
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s", force=True)
    faulthandler.enable()
    faulthandler.dump_traceback_later(START_LIMIT_S - STACKS_LIMIT_S)
    fault_file = options.pop("fault_file", None)
    os.environ.pop("PYTHONPATH", None)
    if fault_file is not None:
        os.environ |= {"KVBM_TEST_DISK_FAULTS": fault_file, "PYTHONPATH": str(DISK_FAULTS)}
    descriptors = options.pop("descriptors", 0)
    if descriptors:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2 * descriptors, most), most))
    for _ in range(descriptors):
        os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    if options.pop("is_plain_user", False):
        _drop_privileges()
    _Served(pipe, options).run()


class _Served:
    """Executes the test's calls: requests in the engine, everything else in threads of its own."""

    def __init__(self, pipe, options: dict) -> None:
        from kvbm_engine import KvbmEngine

        from kvbm.errors import KvbmError

        self._pipe = pipe
        self._lock = threading.Lock()
        tokens_per_s = options.pop("tokens_per_s", None)
        try:
            self._engine = KvbmEngine(**options)
        except KvbmError as error:
            self._send(-1, None, str(error))
            raise
        if tokens_per_s is not None:
            runner = self._engine.engine.core._runner
            runner.run = _slowed(runner.run, tokens_per_s)
        faulthandler.cancel_dump_traceback_later()
        self._send(-1, None)

    def run(self) -> None:
        while True:
            try:
                number, verb, arguments = self._pipe.recv()
            except EOFError:
                os._exit(1)  # the test has ended
            if verb == "ask":
                self._ask(number, *arguments)
            elif verb == "stop":
                self._engine.engine.stop()
                self._send(number, None)
                return
            else:
                threading.Thread(target=self._call, args=(number, verb, arguments), daemon=True).start()

    def _ask(self, number: int, prompt: list[int], max_tokens: int) -> None:
        from kvbm.engines.embedded.engine.request import SamplingParams

        tokens, logprobs = [], []

        def deliver(output) -> None:
            tokens.extend(output.new_token_ids)
            logprobs.extend(details.logprob for details in output.logprobs or ())
            if output.finish_reason is not None:
                answer = list(zip(tokens, logprobs, strict=True))
                said = Said(answer, output.num_external_tokens, output.finish_reason.value, output.error)
                self._send(number, said)

        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=0)
        try:
            self._engine.engine.submit(f"r{number}", prompt, sampling, deliver)
        except Exception as error:
            self._send(number, None, f"{type(error).__name__}: {error}")

    def _call(self, number: int, verb: str, arguments: tuple) -> None:
        try:
            result, error = getattr(self, f"_do_{verb}")(*arguments), None
        except Exception as problem:
            logging.exception("`%s` failed", verb)
            result, error = None, f"`{verb}` failed: {type(problem).__name__}: {problem}"
        self._send(number, result, error)

    def _send(self, number: int, result: object, error: str | None = None) -> None:
        with self._lock:
            self._pipe.send((number, result, error))

    def _do_stacks(self) -> None:
        frames = sys._current_frames()
        for thread in threading.enumerate():
            if thread.name == "kvbm-engine":
                logging.warning("stack of %s:\n%s", thread.name, "".join(traceback.format_stack(frames[thread.ident])))

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _do_counters(self) -> dict[str, int]:
        leader = self._engine.leader
        found = {name: value for name, value in leader.counters.totals().items() if isinstance(value, int)}
        if (disk := tier_of(leader, Tier.DISK)) is not None:
            own = disk.disk.counters
            found |= {name: getattr(own, name) for name in ("damaged_superblocks", "damaged_indexes", "dropped_rows")}
        return found

    def _do_pids(self) -> dict[str, int]:
        leader, worker = self._engine.leader, self._engine.connector[1]._home
        found = {}
        if (disk := tier_of(leader, Tier.DISK)) is not None:
            found["disk"] = disk.disk.process.pid
        if hasattr(worker, "_process"):
            found["worker"] = worker._process.pid
        return found

    def _do_abort(self, request_id: str) -> None:
        self._engine.engine.abort(request_id)

    def _do_reset(self) -> bool:
        return self._engine.engine.begin_reset().result()

    def _do_settle(self) -> None:
        self._engine.settle()

    def _do_forget_g1(self) -> None:
        self._engine.forget_g1()

    def _do_forget_memory(self) -> None:
        """What is on disk stays."""
        self._engine.forget_g1()
        self._engine.between_steps(lambda: self._engine.leader.host.store.reset() or True)

    def _do_check(self) -> None:
        """The bookkeeping is consistent, and no exception of kvbm was stopped on its way to the engine."""
        from bookkeeping import check_leader

        assert self._engine.leader.counters.faults == 0
        self._engine.between_steps(lambda: check_leader(self._engine.leader) or True)

    def _do_channel(self) -> int:
        """The descriptor of the channel to the disk process."""
        return tier_of(self._engine.leader, Tier.DISK).disk.process._channel.fileno()


def _slowed(run, tokens_per_s: float):
    """Computing takes as long as with a larger model, so that loading from disk is faster."""

    def slowed(step):
        time.sleep(sum(step.scheduled.values()) / tokens_per_s)
        return run(step)

    return slowed


PERMISSION_CAPABILITIES = (1, 2, 3)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
CAPABILITY_VERSION_3 = 0x20080522
PR_CAPBSET_DROP = 24


def _drop_privileges() -> None:
    """Without these capabilities, the permissions of files hold for root and its children too."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("Ii", CAPABILITY_VERSION_3, 0))
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their upper halves
    if libc.capget(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    for capability in PERMISSION_CAPABILITIES:
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # refused to a user who has none
        for which in range(3):
            sets[which] &= ~(1 << capability)
    if libc.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")
