"""docs/guide/migrate-from-nvidia.md: its commands print what it says, its series exist, its readings are so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_first_serve import END, steps

from kvbm.config.connector import resolve_connector
from kvbm.errors import ProfileError
from kvbm.metrics import Counters, KvbmCollector
from kvbm.types import Tier

PAGE = (Path(__file__).resolve().parents[2] / "docs/guide/migrate-from-nvidia.md").read_text()
DASHBOARD = (  # what NVIDIA's metrics_kvbm.rs registers
    "kvbm_offload_blocks_d2h",
    "kvbm_offload_blocks_h2d",
    "kvbm_offload_blocks_d2d",
    "kvbm_offload_blocks_d2o",
    "kvbm_onboard_blocks_h2d",
    "kvbm_onboard_blocks_d2d",
    "kvbm_onboard_blocks_o2d",
    "kvbm_matched_tokens",
    "kvbm_object_read_failures",
    "kvbm_object_write_failures",
    "kvbm_host_cache_hit_rate",
    "kvbm_disk_cache_hit_rate",
    "kvbm_object_cache_hit_rate",
)


def test_the_commands_print_what_the_page_says(tmp_path: Path) -> None:
    commands = steps(PAGE)
    assert len(commands) >= 7
    script = "".join(f"{command}\necho '{END}'\n" for command, _ in commands)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
    environment |= {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash"],
        input=script,
        env=environment | {"COLUMNS": "120"},
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    printed = done.stdout.split(f"{END}\n")
    assert len(printed) == len(commands) + 1, done.stderr
    for (command, lines), output in zip(commands, printed, strict=False):
        assert output.splitlines() == lines, command


def served() -> set[str]:
    registry = CollectorRegistry()
    registry.register(KvbmCollector(Counters(), lambda: {Tier.HOST: {"free": 1}}))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {sample.name for family in families for sample in family.samples}


def test_every_series_of_the_dashboard_is_served_and_explained() -> None:
    table = PAGE.partition("## Dashboards")[2]
    explained = set(re.findall(r"`(kvbm_[a-z0-9_]+)`", table))
    assert set(DASHBOARD) == explained
    assert set(DASHBOARD) <= served()


ERRORS = [
    {"DYN_KVBM_CPU_CACHE_GB": "100GB"},
    {"DYN_KVBM_CPU_CACHE_GB": "-1"},
    {"DYN_KVBM_CPU_CACHE_GB": "nan"},
    {"DYN_KVBM_CPU_CACHE_GB": "1", "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY": "50"},
    {"DYN_KVBM_CPU_CACHE_GB": "1", "DYN_KVBM_NO_SUCH_NAME": "1"},
]


@pytest.mark.parametrize("variables", ERRORS)
def test_what_the_page_calls_an_error_is_one(variables: dict[str, str]) -> None:
    with pytest.raises(ProfileError):
        resolve_connector({}, variables, engine="vllm")


def test_what_the_page_says_of_readings_is_so() -> None:
    said = {
        "DYN_KVBM_CPU_CACHE_GB": "0.5",
        "DYN_KVBM_DISK_CACHE_GB": "1",
        "DYN_KVBM_DISK_ZEROFILL_FALLBACK": "false",
        "DYN_KVBM_DISK_DISABLE_O_DIRECT": "0",
        "DYN_KVBM_ENABLE_NUMA": "0",
        "DYN_KVBM_ENABLE": "0",
    }
    config = resolve_connector({}, said, engine="vllm")
    assert config.tiers.host is not None
    assert config.tiers.disk is not None
    assert config.tiers.host.capacity == 500_000_000
    assert (config.tiers.disk.zerofill, config.tiers.disk.o_direct, config.transfer.numa) == (False, True, False)
    assert (config.tiers.disk.directory, config.metrics.record_directory) == ("~/.cache/kvbm", "~/.local/state/kvbm")
    assert (config.metrics.port, config.metrics.window_requests, config.transfer.init_timeout_s) == (6880, 1000, 600)
