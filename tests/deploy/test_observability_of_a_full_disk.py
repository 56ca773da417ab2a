"""A disk that becomes full below a serving engine: metrics, alerts, `kvbm top`, `kvbm status` and the log say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import yaml
from filesystems import Unavailable, mounted
from prometheus import Prometheus, prometheus
from waiting import eventually

from kvbm_cli.engine.process import choose_port

RULES = Path(__file__).resolve().parents[2] / "deploy/observability/prometheus/kvbm-alerts.yaml"
PROGRAM = (sys.executable, "-c", "from kvbm_cli.app import main; main()")
FAILED = 'kvbm_transfer_failures_total{source="host",target="disk",reason="io"} > 0'
EXPECTED = {"KvbmTransfersFail", "KvbmTierOff"}


class Served:
    """An engine of `kvbm serve` on a small file system, and a Prometheus that scrapes it."""

    def __init__(self, home: Path, url: str, scraped: Prometheus) -> None:
        self._home, self._url, self._scraped, self._number = home, url, scraped, 0

    def work(self) -> None:
        """Two prompts that nobody has sent before, whose blocks are written to disk."""
        for _ in range(2):
            self._number += 1
            prompt = [(7 * position + 37 * self._number) % 250 for position in range(400)]
            body = {"model": "synthetic:tiny", "prompt": [self._number % 250, *prompt], "max_tokens": 2}
            httpx.post(f"{self._url}/v1/completions", json=body, trust_env=False, timeout=60).raise_for_status()

    def has(self, expression: str) -> bool:
        return bool(self._scraped.query(expression))

    def firing(self) -> set[str]:
        alerts = self._scraped.get("/api/v1/alerts")["data"]["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}

    def kvbm(self, *command: str) -> str:
        """What a command prints, on both streams."""
        done = subprocess.run(
            [*PROGRAM, *command], cwd=self._home, env=environment(self._home), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "OMP_NUM_THREADS": "1"}


def profile(disk: Path) -> dict[str, object]:
    return {
        "extends": "demo",
        "server": {"port": choose_port("127.0.0.1", 0)},
        "engine": {"arguments": {"num_blocks": 48}},
        "tiers": {"host": {"capacity": None, "blocks": 64}, "disk": {"directory": str(disk), "blocks": 400}},
        "offload": {"to_disk": "always"},
        "onboard": {"policy": "always"},
    }


def configuration(home: Path, address: str) -> str:
    """Of a Prometheus with our alerts, which fire at once instead of after minutes."""
    rules = yaml.safe_load(RULES.read_text())
    for rule in rules["groups"][0]["rules"]:
        if rule["alert"] in EXPECTED:
            rule.pop("for", None)
    (home / "rules.yaml").write_text(yaml.safe_dump(rules))
    return yaml.safe_dump(
        {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(home / "rules.yaml")],
            "scrape_configs": [{"job_name": "kvbm", "static_configs": [{"targets": [address]}]}],
        }
    )


@pytest.fixture
def point(tmp_path) -> Iterator[Path]:
    with ExitStack() as stack:
        try:
            yield stack.enter_context(mounted("ext4", tmp_path))
        except Unavailable as reason:
            pytest.skip(str(reason))


@pytest.fixture
def served(tmp_path, point) -> Iterator[Served]:
    (home := tmp_path / "home").mkdir()
    (home / "mine.yaml").write_text(yaml.safe_dump(profile(point / "disk")))
    with (home / "stderr").open("w") as errors, subprocess.Popen(
        [*PROGRAM, "serve", "--profile", "./mine.yaml"],
        cwd=home, env=environment(home), stdout=subprocess.PIPE, stderr=errors, text=True,
    ) as program:  # fmt: skip
        try:
            assert program.stdout is not None
            url = program.stdout.readline().strip()
            assert url, (home / "stderr").read_text()
            with prometheus(home, configuration(home, url.removeprefix("http://"))) as scraped:
                yield Served(home, url, scraped)
        finally:
            program.terminate()
            program.wait()


def test_a_disk_that_becomes_full_is_seen_and_its_end_too(served, point):
    served.work()
    eventually(lambda: served.has("kvbm_disk_off == 0"))
    assert not served.has(FAILED)
    filler = fill(point)
    eventually(lambda: served.work() or served.has(f"{FAILED} and on(instance) kvbm_disk_off == 1"))
    eventually(lambda: served.firing() >= EXPECTED)
    (engine,) = json.loads(served.kvbm("top", "--json", "--interval", "0.5"))["engines"]
    assert engine["off"] == ["disk tier"]
    assert "disk tier" in served.kvbm("top", "--once", "--interval", "0.5")
    shown = served.kvbm("status")
    assert "G3 off" in shown
    assert "the disk tier (G3) of mine-1 is off; the reason is in `kvbm logs mine-1`" in shown
    assert "or disk is full" in served.kvbm("logs", "mine-1")
    filler.unlink()
    eventually(lambda: served.has("kvbm_disk_off == 0"))
    eventually(lambda: "KvbmTierOff" not in served.firing())
    assert "G3 off" not in served.kvbm("status")


def fill(point: Path) -> Path:
    """Write a file that takes all space, also what is kept for root."""
    filler = point / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 512):
            while has_written(file, size):
                pass
    return filler


def has_written(file, size: int) -> bool:
    try:
        file.write(bytes(size))
        os.fdatasync(file.fileno())
    except OSError:
        return False
    return True
