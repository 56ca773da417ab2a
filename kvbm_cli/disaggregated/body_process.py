"""BodyProcesses convert large bodies, because no other thread of a process runs while Python parses JSON in it.

    proxy ── length, body ──▶ stdin of `python -m kvbm_cli.disaggregated.body_process`
    proxy ◀── length, pickled EngineRequests or WrongRequest ── stdout

There is one for bodies of up to SHORT_BODY_BYTES and one for longer ones, so that a usual prompt does not wait for
one of 32 MiB. Each starts with its first body and converts one at a time. It ends when the proxy closes its stdin, also
by dying.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import IO

from kvbm_cli.disaggregated.client_request import EngineRequests, WrongRequest, engine_requests

SHORT_BODY_BYTES = 2**20
TIMEOUT_S = 20.0  # for one body; a body of 32 MiB takes 1 to 8 s (2 cores)
LENGTH = struct.Struct("!Q")
HOME = str(Path(__file__).parents[2])


class BodyProcesses:
    """Only the event loop uses them."""

    def __init__(self) -> None:
        self._short, self._long = BodyProcess(), BodyProcess()

    async def convert(self, content: bytes) -> EngineRequests:
        """Return what the engines get for this body. Raises WrongRequest, and OSError if the process failed."""
        process = self._short if len(content) <= SHORT_BODY_BYTES else self._long
        return await process.convert(content)

    def close(self) -> None:
        self._short.close()
        self._long.close()


class BodyProcess:
    """Owns one process. Only the event loop uses it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = asyncio.Lock()

    async def convert(self, content: bytes) -> EngineRequests:
        async with self._turn:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    answer = await asyncio.to_thread(_ask, self._running(), content)
            except TimeoutError:
                self.close()
                raise WrongRequest(413, f"the body could not be read within {TIMEOUT_S:g} s") from None
            except BaseException:  # a client that left: what is under way must not be taken for the next answer
                self.close()
                raise
        if isinstance(answer, WrongRequest):
            raise answer
        return answer

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with process:  # closes the pipes, once the thread that uses them has noticed the end
                process.kill()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            paths = os.pathsep.join(filter(None, [HOME, os.environ.get("PYTHONPATH", "")]))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __spec__.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,
            )
        return self._process


def _ask(process: subprocess.Popen[bytes], content: bytes) -> EngineRequests | WrongRequest:
    """Send a body to the process. Runs in a thread. Raises OSError if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    _send(process.stdin, content)
    answer = _receive(process.stdout)
    if answer is None:
        raise ConnectionError("the process that reads large bodies has ended")
    found: EngineRequests | WrongRequest = pickle.loads(answer)
    return found


def _send(stream: IO[bytes], content: bytes) -> None:
    stream.write(LENGTH.pack(len(content)))
    stream.write(content)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    content = stream.read(length)
    return content if len(content) == length else None


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(BrokenPipeError):
        while (content := _receive(stdin)) is not None:
            try:
                answer: EngineRequests | WrongRequest = engine_requests(content)
            except WrongRequest as wrong:
                answer = wrong
            _send(stdout, pickle.dumps(answer))


if __name__ == "__main__":
    main()
