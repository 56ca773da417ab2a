"""Clients that try to stop the others: how long a stream is silent, with kvbm and without, and what is logged.

Both servers run on one core, and are attacked by turns. Prints a row per attack.
"""

from __future__ import annotations

import itertools
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random

import httpx
import pytest
from traffic import tokens
from vllm_server import CONNECTOR, VllmServer, host_blocks

from kvbm_cli.make_model import materialise

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(1800)]
LONGER_S = 0.2
LOGGED_BYTES = 100_000
REPEATS = 3
HUGE = "\n" * 30_000_000
Attack = Callable[[VllmServer], None]


def asks(**fields: object) -> Attack:
    def attack(server: VllmServer) -> None:
        body = json.dumps(server.request(tokens(Random(7), 300), 2, **fields)).encode()
        with suppress(httpx.HTTPError):
            httpx.post(f"{server.url}/v1/completions", content=body, timeout=120.0, trust_env=False)

    return attack


def sends(content: bytes, times: int = 1) -> Attack:
    def attack(server: VllmServer) -> None:
        for _ in range(times):
            with suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
                client.sendall(content)
                client.recv(1000)

    return attack


ATTACKS: dict[str, Attack] = {
    "nothing": lambda server: None,
    "limit of 30 MB": asks(kv_transfer_params={"max_load_tokens": HUGE, "max_offload_tokens": HUGE}),
    "limit of 30 MB through xargs": asks(vllm_xargs={"kv_transfer_params": {"max_load_tokens": HUGE}}),
    "400,000 parameters": asks(kv_transfer_params=dict.fromkeys(map(str, range(400_000)), 1)),
    "limit of 100,000 lists": asks(kv_transfer_params={"max_load_tokens": [[]] * 100_000}),
    "salt of 10 MB": asks(cache_salt="x" * 10_000_000),
    "unknown model of 1 MB": asks(model="x" * 1_000_000),
    "200 odd expectations": sends(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\nExpect: \xff\r\n\r\n", 200),
    "200 times no HTTP": sends(b"\x16\x03\x01\x00\x01\r\n\r\n", 200),
}


def silence_s(server: VllmServer, attack: Attack) -> float:
    """The longest time between two events of a stream while the attack runs, and two seconds after it."""
    stamps: list[float] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            with server.stream(tokens(Random(1), 60), 400) as events:
                for _ in events:
                    stamps.append(time.monotonic())
                    if is_over.is_set():
                        return

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(1.0)
    del stamps[:]
    attack(server)
    time.sleep(2.0)
    is_over.set()
    reader.join()
    return max(late - early for early, late in itertools.pairwise(stamps))


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[VllmServer, VllmServer]]:
    model = materialise("vllm-25m")
    with (
        VllmServer(model, blocks=60) as alone,
        VllmServer(model, blocks=60, connector=CONNECTOR, environment=host_blocks(60)) as ours,
    ):
        yield alone, ours


@pytest.mark.parametrize("name", ATTACKS)
def test_no_client_delays_a_stream_longer_than_with_vllm_alone(
    servers: tuple[VllmServer, VllmServer], name: str
) -> None:
    before = [server.log_path.stat().st_size for server in servers]
    silences = [[silence_s(server, ATTACKS[name]) for server in servers] for _ in range(REPEATS)]
    logged = [server.log_path.stat().st_size - size for server, size in zip(servers, before, strict=True)]
    alone_s, ours_s = (statistics.median(column) for column in zip(*silences, strict=True))
    print(f"{name}: silence {alone_s:.3f} s alone, {ours_s:.3f} s with kvbm; log {logged[0]:,} and {logged[1]:,} bytes")
    assert ours_s - alone_s < LONGER_S
    assert logged[1] - logged[0] < LOGGED_BYTES
