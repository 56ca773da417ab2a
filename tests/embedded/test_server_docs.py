"""The guide's page about the server names everything that the server has."""

from __future__ import annotations

from pathlib import Path

from server_rig import WrittenEngine

from kvbm.engines.embedded.http.endpoints import create_app
from kvbm.engines.embedded.http.metrics import EngineMetrics
from kvbm.engines.embedded.http.service import Service

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "embedded-server.md").read_text()


def test_every_endpoint_is_documented() -> None:
    for route in create_app(Service()).router.routes():
        assert route.resource is not None
        if route.method != "HEAD":
            path = route.resource.canonical
            assert f"`{route.method} {path}`" in PAGE, path


def test_every_metric_is_documented() -> None:
    engine = WrittenEngine()
    text = EngineMetrics("m", stats=engine.stats, cache_config={}).exposition().decode()
    engine.stop()
    names = {line.split()[2].removesuffix("_total") for line in text.splitlines() if line.startswith("# TYPE ")}
    for name in names:
        assert name.endswith("_created") or f"`{name}`" in PAGE, name
