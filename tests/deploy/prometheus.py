"""A real Prometheus for tests: Debian's package `prometheus`, or the directory in `KVBM_PROMETHEUS` with its programs.

Without it, tests are skipped. With `KVBM_REQUIRE_PROMETHEUS` they fail instead, see .ci/run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import eventually

from kvbm_cli.engine.process import choose_port

WAIT_S = 60.0


def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`."""
    directory = os.environ.get("KVBM_PROMETHEUS")
    found = shutil.which(name, path=directory) if directory else shutil.which(name)
    if found is None:
        why = f"no `{name}`: install the package `prometheus`, or set KVBM_PROMETHEUS to the directory of its programs"
        pytest.fail(why) if os.environ.get("KVBM_REQUIRE_PROMETHEUS") else pytest.skip(f"NOT TESTED: {why}")
    return found


def promtool(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [program("promtool"), *map(str, arguments)]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=WAIT_S)


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        return httpx.get(f"{self.url}{path}", params=parameters, trust_env=False, timeout=WAIT_S).json()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression now. A wrong expression is an AssertionError with its position."""
        answer = self.get("/api/v1/query", query=expression)
        assert answer["status"] == "success", (expression, answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found


@contextmanager
def prometheus(directory: Path, configuration: str) -> Iterator[Prometheus]:
    """Run Prometheus with this configuration, and its data below `directory`."""
    port = choose_port("127.0.0.1", 0)
    (directory / "prometheus.yml").write_text(configuration)
    command = [
        program("prometheus"),
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (directory / "log").open("wb") as log, subprocess.Popen(command, stderr=log, stdout=log) as child:
        try:
            running = Prometheus(f"http://127.0.0.1:{port}")

            def is_ready() -> bool:
                assert child.poll() is None, (directory / "log").read_text()
                try:
                    return httpx.get(f"{running.url}/-/ready", trust_env=False).status_code == 200
                except httpx.TransportError:
                    return False

            eventually(is_ready, "Prometheus is ready")
            yield running
        finally:
            child.terminate()
            child.wait(WAIT_S)
