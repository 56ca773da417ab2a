"""BodyProcesses convert large bodies, because no other thread of a process runs while Python parses JSON in it.

    proxy ── body ──▶ `python -m kvbm_cli.disaggregated.body_process`
    proxy ◀── EngineRequests or WrongRequest ──

There is one for bodies of up to SHORT_BODY_BYTES and one for longer ones, so that a usual prompt does not wait for
one of 32 MiB. Each starts with its first body and converts one at a time. It ends with the proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess

from kvbm.child.channel import ChannelClosed
from kvbm.child.child import end_of_channel, send_all
from kvbm.child.parent import end
from kvbm.child.stream import MessageStream, start_with_stream
from kvbm.errors import EnvironmentProblem
from kvbm_cli.disaggregated.client_request import EngineRequests, WrongRequest, engine_requests

SHORT_BODY_BYTES = 2**20
TIMEOUT_S = 20.0  # for one body; a body of 32 MiB takes 1 to 8 s (2 cores)


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
        self._process: tuple[subprocess.Popen[bytes], MessageStream] | None = None
        self._turn = asyncio.Lock()

    async def convert(self, content: bytes) -> EngineRequests:
        async with self._turn:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    stream = await self._running()
                    stream.send(content)
                    answer: EngineRequests | WrongRequest = await stream.receive()
            except (ChannelClosed, EnvironmentProblem) as error:
                self.close()
                raise ConnectionError(str(error) or "the process that reads large bodies has ended") from error
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
            child, stream = process
            stream.close()
            end(child, 0)

    async def _running(self) -> MessageStream:
        if self._process is not None and self._process[0].poll() is not None:
            self.close()
        if self._process is None:
            self._process = await start_with_stream(__spec__.name, "the process for large bodies")
        return self._process[1]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = end_of_channel()
    with contextlib.suppress(ChannelClosed):
        while True:
            content = channel.receive_one(bytes)
            try:
                answer: EngineRequests | WrongRequest = engine_requests(content)
            except WrongRequest as wrong:
                answer = wrong
            channel.send(answer)
            send_all(channel)


if __name__ == "__main__":
    main()
