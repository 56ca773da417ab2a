"""Process that digests the files of a model for one engine.

    python -m kvbm.identity.digester FD        FD is one end of a socket pair

It has its own interpreter, so that it never takes the GIL of an engine, and the lowest priority, so that it uses the
time that cores have left. It exits with its engine.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvbm.child.channel import ChannelClosed
from kvbm.child.child import Problem, begin, end_of_channel, send_all
from kvbm.identity.content import DigestOrder, Digests, Signature, digest_files

THREADS = 4  # two reach 10 GB/s of a warm page cache (bench/micro/model_identity.py)
NICE = 19
AUTOGROUP = Path("/proc/self/autogroup")  # where sessions share cores evenly, whatever the priority of a process is


def main() -> int:
    """Return 0 when the digests were sent. If the engine exits, the process exits at once."""
    begin()
    channel = end_of_channel()
    try:
        order = channel.receive_one(DigestOrder)
        _lower_priority()
        os.sched_setaffinity(0, order.cores)
        try:
            files = [(path, Signature(*signature)) for path, signature in order.files]
            answer: NamedTuple = Digests(digest_files(files, min(THREADS, len(order.cores))))
        except OSError as error:
            answer = Problem(str(error), None)
        channel.send(answer)
        send_all(channel)
    except ChannelClosed:
        os._exit(0)
    return 0


def _lower_priority() -> None:
    os.nice(NICE)
    with suppress(OSError):
        AUTOGROUP.write_text(str(NICE))


if __name__ == "__main__":
    sys.exit(main())
