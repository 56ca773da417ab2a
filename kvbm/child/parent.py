"""The leader's side of a process pair: starts a child of kvbm with a channel, and ends it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import weakref

from kvbm.child.channel import Channel
from kvbm.child.start import our_environment, start
from kvbm.errors import EnvironmentProblem


def start_child(
    module: str, what: str, *, stderr: int | None = None, dies_with_parent: bool = False
) -> tuple[subprocess.Popen[bytes], Channel]:
    """Run `python -m module FD`. Raises EnvironmentProblem, which calls the child `what`.

    The kernel kills a child that `dies_with_parent` when the thread that called this ends. Others look for their
    parent themselves, see child.begin.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            child = start(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                environment=our_environment(),
                stderr=stderr,
                pass_fds=[theirs.fileno()],
                dies_with_parent=dies_with_parent,
            )
        except (OSError, MemoryError) as error:
            ours.close()
            why = error.strerror if isinstance(error, OSError) else "no memory"
            raise EnvironmentProblem(f"cannot start {what}: {why}") from error
    channel = Channel(ours)
    _OPEN.add(channel)
    return child, channel


def is_gone(pid: int) -> bool:
    """Whether a child and all its threads have ended. It is not reaped here."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def has_ended(child: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def end(child: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for a child whose channel was closed, and kill it after `timeout_s`. Return whether it ended by itself."""
    ended = has_ended(child, timeout_s)
    if not ended:
        child.kill()
        child.wait()
    return ended


def how_it_ended(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"exited with {code}"


_OPEN: weakref.WeakSet[Channel] = weakref.WeakSet()


def _close_in_forked_child() -> None:
    """Close the channels in a forked child: it would keep them open after the leader's exit."""
    for channel in _OPEN:
        channel.close()


os.register_at_fork(after_in_child=_close_in_forked_child)
