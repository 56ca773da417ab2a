"""Sends a message to the engines of a run, over the Unix sockets in its run directory."""

from __future__ import annotations

import json
import os
import shlex
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm.errors import EnvironmentProblem, reason_of
from kvbm.text.outside import shown
from kvbm.text.reading import parse_json
from kvbm_cli.runs.run_client import living, require_own
from kvbm_cli.runs.run_directory import CONTROL_SOCKETS, EngineRun

TIMEOUT_S = 5.0  # the engine answers within a second, or says why not
MOST_BYTES = 1 << 20  # of an answer


@dataclass(frozen=True, slots=True)
class Reply:
    """What one engine said: the answer, or why it refused."""

    engine: int
    answer: dict[str, Any]
    refused: str = ""


def ask(run: EngineRun, message: Mapping[str, str]) -> list[Reply]:
    """Return the reply of each engine of a run. Raises EnvironmentProblem if none can be asked."""
    run, name = living(run), run.name
    problems, replies = [], []
    for path in sorted(run.path.glob(CONTROL_SOCKETS)):
        try:
            replies.append(_exchange(run, path, message))
        except ConnectionRefusedError:  # left by an engine that was killed
            continue
        except (BrokenPipeError, ConnectionResetError):
            problems.append("it closed the connection")
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(reason_of(error) if isinstance(error, OSError) else f"unknown answer: {shown(str(error))}")
    if replies and not problems:
        return replies
    why = "; ".join(problems) or "it has no control socket"
    raise EnvironmentProblem(
        f"cannot ask the engine of `{name}`: {why}", hint=f"`kvbm logs {shlex.quote(name)}` shows its log"
    )


def _exchange(run: EngineRun, path: Path, message: Mapping[str, str]) -> Reply:
    """Raise OSError, or ValueError, KeyError or TypeError for an answer of another form."""
    end_s = time.monotonic() + TIMEOUT_S
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(f"/proc/self/fd/{directory}/{path.name}")  # a socket's path has at most 107 bytes
            require_own(run, connection)
            connection.sendall(json.dumps(dict(message)).encode() + b"\n")
            text = b""
            while not text.endswith(b"\n"):
                connection.settimeout(max(0.001, end_s - time.monotonic()))
                received = connection.recv(1 << 16)
                text += received
                if not received:
                    raise ConnectionResetError
                if len(text) > MOST_BYTES:
                    raise ValueError("it is too long")
    finally:
        os.close(directory)
    reply = parse_json(text)
    return Reply(int(reply["engine"]), dict(reply.get("answer", {})), str(reply.get("refused", "")))
