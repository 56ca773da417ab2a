"""How long a stream is silent while a hostile client attacks the embedded engine's server, or the proxy before it.

    KVBM_WRITE_RESULTS=1 pytest -m soak -s tests/embedded/test_hostile_streams.py

The engine behind the server answers every 50 ms by itself, so all silence is that of the server. It claims the context
of a large model, for which the server reads the longest bodies. Prints a row per attack, with the longest silence of a
stream, and the longest wait of short requests, also of one whose body is not parsed on the event loop.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest
from hostile_requests import LOGGED_BYTES, LONGER_S, MIB, ROUNDS, attacks, medians, silences_s, write_result
from test_hostile_clients import started

from kvbm_cli.engine.process import choose_port

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]
COMMAND = "pytest -m soak -s tests/embedded/test_hostile_streams.py"
MAX_MODEL_LEN = 1_000_000
BODY = {"prompt": [1], "max_tokens": 2, "n": 2}  # two answers: the proxy asks only the engine for decode
STREAMS = {
    "stream": {**BODY, "max_tokens": 400, "stream": True},
    "short": {**BODY, "stream": True},
    "short_of_100_kb": {**BODY, "stream": True, "user": "x" * 100_000},
}


def events(port: int, body: bytes) -> Generator[bytes, None, None]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            assert answer.status == 200, answer.read()
            yield from (line for line in answer if line.strip())


@pytest.mark.parametrize("kind", ["engine", "proxy"])
def test_no_client_stops_the_streams_of_others(kind: str, tmp_path: Path) -> None:
    rig, log, rows = str(Path(__file__).parent / "server_rig.py"), tmp_path / f"{kind}.log", {}
    port = engine = choose_port("127.0.0.1", 0)
    with ExitStack() as servers:
        command = [rig, str(engine), "0", "1", str(MAX_MODEL_LEN)]
        url = servers.enter_context(started(tmp_path / "engine.log", *command, port=engine))
        if kind == "proxy":
            port = choose_port("127.0.0.1", 0)
            command = ["-m", "kvbm_cli.disaggregated.proxy", "--host", "127.0.0.1", "--port", str(port)]
            servers.enter_context(started(log, *command, "--prefill", url, "--decode", url, port=port))
        streams = {name: partial(events, port, json.dumps(body).encode()) for name, body in STREAMS.items()}
        for name, attack in attacks(BODY, (32 if kind == "proxy" else 8) * MIB).items():
            logged = log.stat().st_size
            rows[name] = medians(silences_s(streams, partial(attack, port)) for _ in range(ROUNDS))
            rows[name]["logged_bytes"] = log.stat().st_size - logged
            print(f"{kind}: {name}: {rows[name]}", flush=True)
    write_result(kind, COMMAND, rows)
    limits = {name: LONGER_S + seconds for name, seconds in rows["nothing"].items()} | {"logged_bytes": LOGGED_BYTES}
    assert {name: row for name, row in rows.items() if any(row[one] > limits[one] for one in row)} == {}
