"""Requests of clients that try to stop the streams of others, as bytes; the longest silence of streams meanwhile."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import platform
import socket
import statistics
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path

LONGER_S = 0.2
ROUNDS = int(os.environ.get("KVBM_HOSTILE_ROUNDS", "3"))
LOGGED_BYTES = 100_000
BEFORE_S, AFTER_S = 0.5, 1.0
MIB = 2**20
RESULTS = Path(__file__).parents[1] / "bench/results"
Attack = Callable[[int], None]  # the port

NESTED = b"[" * 900 + b"]" * 900


def posts(body: bytes, *, clients: int = 1, path: str = "/v1/completions") -> Attack:
    """Each client sends the body once, all at the same time."""

    def post(port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        with suppress(OSError, http.client.HTTPException):
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            connection.getresponse().read()
        connection.close()

    return lambda port: in_parallel(lambda: post(port), clients)


def sends(content: bytes) -> Attack:
    def attack(port: int) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(content)
            while connection.recv(65536):
                pass

    return attack


def gets(path: str, *, times: int, clients: int) -> Attack:
    """Each client asks so often on one connection."""

    def ask(port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with suppress(OSError, http.client.HTTPException):
            for _ in range(times):
                connection.request("GET", path)
                connection.getresponse().read()
        connection.close()

    return lambda port: in_parallel(lambda: ask(port), clients)


def in_parallel(work: Callable[[], None], times: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def filled(start: bytes, piece: bytes, end: bytes, size: int, separator: bytes = b"") -> bytes:
    """A body of about `size` bytes."""
    return start + separator.join([piece] * ((size - 1000) // (len(piece) + len(separator)))) + end


def head(*lines: str, method: str = "POST /v1/completions") -> bytes:
    return "\r\n".join([f"{method} HTTP/1.1", "Host: a", "Connection: close", *lines, "", ""]).encode("latin-1")


def attacks(body: Mapping[str, object], size: int) -> dict[str, Attack]:
    """`body` is a right request, `size` the largest body that the server accepts."""
    start = json.dumps(body).encode()[:-1]
    of_text, of_list = start + b', "user": "', start + b', "metadata": ['
    keys = b",".join(b'"%d":1' % number for number in range(1_000_000))
    chunked = head("Content-Type: application/json", "Transfer-Encoding: chunked")
    return {
        "escapes, 8 clients": posts(filled(of_text, b"x\\n", b'"}', size), clients=8),
        "nested lists": posts(filled(of_list, NESTED, b"]}", size, b",")),
        "floats that take long to read": posts(filled(of_list, b"2.2250738585072011e-308", b"]}", size, b",")),
        "a prompt of text": posts(filled(start + b', "prompt": "', b"x y", b'"}', size)),
        "many messages": posts(
            filled(start + b', "messages": [', b'{"role":"user","content":"a"}', b"]}", size, b","),
            path="/v1/chat/completions",
        ),
        "a million keys": posts(start + b', "metadata": {' + keys[: size - 1000] + b"}}"),
        "30 salts of 100 kB": lambda port: in_each(
            (b'%b, "cache_salt": "%b"}' % (start, b"%d" % number + b"s" * 100_000) for number in range(30)), port
        ),
        "chunks of one byte": sends(chunked + b"1\r\nx\r\n" * 300_000 + b"0\r\nA: b\r\n\r\n"),
        "metrics in a loop": gets("/metrics", times=60, clients=4),
    }


def in_each(bodies: Iterable[bytes], port: int) -> None:
    for body in bodies:
        posts(body)(port)


def silences_s(
    streams: Mapping[str, Callable[[], Generator[object, None, None]]], attack: Callable[[], None]
) -> dict[str, float]:
    """Return for each stream its longest time between two events while the attack runs, and `AFTER_S` after it.

    A stream that has ended begins again, so the time to its first event counts as well.
    """
    stamps: dict[str, list[float]] = {name: [] for name in streams}
    is_over = threading.Event()

    def read(name: str) -> None:
        while not is_over.is_set():
            with closing(streams[name]()) as events:
                for _ in events:
                    stamps[name].append(time.monotonic())
                    if is_over.is_set():
                        break

    readers = [threading.Thread(target=read, args=[name]) for name in streams]
    for reader in readers:
        reader.start()
    time.sleep(BEFORE_S)
    began_s = time.monotonic()
    attack()
    time.sleep(AFTER_S)
    is_over.set()
    for reader in readers:
        reader.join()
    return {name: longest_s(found, began_s) for name, found in stamps.items()}


def longest_s(stamps: list[float], began_s: float) -> float:
    before = [stamp for stamp in stamps if stamp < began_s][-1:]
    return max(late - early for early, late in itertools.pairwise(before + [one for one in stamps if one >= began_s]))


def medians(rounds: Iterable[Mapping[str, float]]) -> dict[str, float]:
    columns = [*rounds]
    return {f"{name}_s": round(statistics.median(column[name] for column in columns), 3) for name in columns[0]}


def write_result(name: str, command: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    """Adds the rows under `name` to the result file of this machine if KVBM_WRITE_RESULTS is set."""
    if not os.environ.get("KVBM_WRITE_RESULTS"):
        return
    machine = f"{os.cpu_count()}cpu-{platform.machine().replace('_', '-')}-no-gpu"
    path = RESULTS / f"{machine}-hostile-clients.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in facts if line.startswith("model name")), "unknown")
    found |= {"machine": machine, "limits": {"longer_s": LONGER_S, "logged_bytes": LOGGED_BYTES}}
    command = f"KVBM_WRITE_RESULTS=1 KVBM_HOSTILE_ROUNDS={ROUNDS} {command}"
    load = [round(one, 1) for one in os.getloadavg()]
    found[name] = {"command": command, "cpu": cpu, "time_unix_s": int(time.time()), "load": load, "attacks": rows}
    path.write_text(json.dumps(found, indent=1) + "\n")
