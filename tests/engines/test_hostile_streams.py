"""How long a stream is silent while a hostile client attacks the embedded engine's server, or the proxy before it.

    KVBM_WRITE_RESULTS=1 pytest -m soak -s tests/engines/test_hostile_streams.py

The engine behind the server answers every 50 ms by itself, so all silence is that of the server. Prints a row per
attack.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import pytest
from hostile_requests import LOGGED_BYTES, LONGER_S, MIB, attacks, silence_s, write_result
from test_hostile_clients import started

from kvbm_cli.engine.process import choose_port

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]
COMMAND = "pytest -m soak -s tests/engines/test_hostile_streams.py"
BODY = {"prompt": [1], "max_tokens": 2, "n": 2}  # two answers: the proxy asks only the engine for decode
STREAM = json.dumps({"prompt": [1], "max_tokens": 400, "n": 2, "stream": True})


def stream(port: int) -> Iterator[bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", STREAM, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    yield from (line for line in answer if line.strip())
    connection.close()


@pytest.mark.parametrize("kind", ["engine", "proxy"])
def test_no_client_stops_the_streams_of_others(kind: str, tmp_path: Path) -> None:
    rig, log, rows = str(Path(__file__).parent / "server_rig.py"), tmp_path / "log", {}
    port = engine = choose_port("127.0.0.1", 0)
    with ExitStack() as servers:
        url = servers.enter_context(started(tmp_path / f"{kind}.log", rig, str(engine), "0", "1", port=engine))
        if kind == "proxy":
            port = choose_port("127.0.0.1", 0)
            command = ["-m", "kvbm_cli.disaggregated.proxy", "--host", "127.0.0.1", "--port", str(port)]
            servers.enter_context(started(log, *command, "--prefill", url, "--decode", url, port=port))
        else:
            log = tmp_path / "engine.log"
        for name, attack in attacks(BODY, (32 if kind == "proxy" else 8) * MIB).items():
            logged = log.stat().st_size
            silence = median(silence_s(lambda: stream(port), lambda attack=attack: attack(port)) for _ in range(3))
            rows[name] = {"silence_s": round(silence, 3), "logged_bytes": log.stat().st_size - logged}
            print(f"{kind}: {name}: {rows[name]}", flush=True)
    write_result(kind, COMMAND, rows)
    usual_s = rows["nothing"]["silence_s"]
    assert {name: row for name, row in rows.items() if row["silence_s"] - usual_s > LONGER_S} == {}
    assert {name: row for name, row in rows.items() if row["logged_bytes"] > LOGGED_BYTES} == {}
