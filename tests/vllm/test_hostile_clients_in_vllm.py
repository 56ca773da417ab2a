"""Clients that try to stop the others: how long a stream is silent, with kvbm and without, and what is logged.

Both servers run on one core, and are attacked by turns. Prints a row per attack.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from random import Random

import httpx
import pytest
from hostile_requests import LOGGED_BYTES, LONGER_S, MIB, ROUNDS, attacks, medians, silences_s, write_result
from traffic import tokens
from vllm_server import CONNECTOR, VllmServer, host_blocks

from kvbm.engines.make_model import materialise

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(1800)]
COMMAND = "pytest -m soak -s tests/vllm/test_hostile_clients_in_vllm.py"
ROWS: dict[str, dict[str, float]] = {}
# Without "kv_transfer_params of every type", which ends the engine of vLLM 0.32 alone as well.
REACH_KVBM = ("30 salts of 100 kB", "metrics in a loop", "nested lists")
LONG_ON_ITS_OWN = (
    "escapes, 8 clients",
    "floats that take long to read",
    "a prompt of text",
    "many messages",
    "a million keys",
    "chunks of one byte",
)
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


def sent_by(name: str) -> Attack:
    """An attack of `hostile_requests`, of a size that vLLM itself reads."""

    def attack(server: VllmServer) -> None:
        attacks(server.request(tokens(Random(7), 300), 2), 4 * MIB)[name](server.port)

    return attack


ATTACKS |= {name: sent_by(name) for name in REACH_KVBM + LONG_ON_ITS_OWN}


def words(server: VllmServer, max_tokens: int) -> Generator[str, None, None]:
    with server.stream(tokens(Random(1), 60), max_tokens) as events:
        yield from events


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
    rounds: list[list[dict[str, float]]] = [[], []]
    for _ in range(ROUNDS):
        for found, server in zip(rounds, servers, strict=True):
            streams = {"stream": partial(words, server, 400), "short": partial(words, server, 2)}
            found.append(silences_s(streams, partial(ATTACKS[name], server)))
    logged = [server.log_path.stat().st_size - size for server, size in zip(servers, before, strict=True)]
    ROWS[name] = {
        f"{one}_{whose}": value
        for whose, found in zip(("alone", "with_kvbm"), rounds, strict=True)
        for one, value in medians(found).items()
    }
    ROWS[name] |= {"logged_bytes_alone": logged[0], "logged_bytes_with_kvbm": logged[1]}
    print(f"{name}: {ROWS[name]}")
    write_result("vllm", COMMAND, ROWS)
    for one in ("stream", "short"):
        assert ROWS[name][f"{one}_s_with_kvbm"] - ROWS[name][f"{one}_s_alone"] < LONGER_S
    assert logged[1] - logged[0] < LOGGED_BYTES
