"""Real runs of the embedded engine that do not pay, each for one known cause, and one that pays.

Times depend on the machine, so the limits on load are wide, except where the load is the cause.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvbm_cli.bench.command import BenchRequest, bench
from kvbm_cli.bench.judge.verdict import VerdictLimits
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import Results
from kvbm_cli.bench.summary import summarise

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="the embedded engine needs torch"),
    pytest.mark.soak,
]

PATIENT = VerdictLimits(lateness_ms=2000.0, client_cpu_share=2.0, collapse_utilisation=1.1, collapse_queue_share=1.1)
FAULTS = Path(__file__).parents[1] / "embedded" / "disk_faults"
SMALL_G1 = ("engine.arguments.num_blocks=90",)  # 1440 tokens, of a working set of 2592
SMALL_G2 = (*SMALL_G1, "tiers.host.capacity=8MiB")  # 1024 tokens
DISK_BYTES_PER_S = 2e6  # a prompt of 4 MB takes two seconds, computing it less

TALK = """
name: talk
users: 4
turns: 3
system_tokens: 64
history_tokens: 512
question_tokens: 32
answer_tokens: 8
history: canned
schedule: {arms: interleaved, pairs: 1, interval_s: 1.5}
"""
ONCE = """
name: once
kind: unique
requests: 10
prompt_tokens: 512
answer_tokens: 8
schedule: {arms: interleaved, pairs: 1, interval_s: 1.5}
"""


@pytest.fixture
def measured(tmp_path, capsys):
    """Runs a workload with changed keys of the profile, and returns its summary with the given limits."""

    def run(workload: str, *overrides: str, limits: VerdictLimits = PATIENT) -> dict[str, Any]:
        (tmp_path / "workload.yaml").write_text(workload)
        request = BenchRequest(
            profiles=("demo",),
            overrides=("engine.arguments.threads=1", *overrides),
            compare=("baseline",),
            workloads=(str(tmp_path / "workload.yaml"),),
            output=tmp_path / "run",
            as_json=True,
        )
        bench(request)
        profile = json.loads(capsys.readouterr().out)["profile"]
        results = Results.read(BenchDirectory.open(tmp_path / "run"))
        return summarise(results, surroundings={"profile": profile}, limits=limits)

    return run


@pytest.fixture
def slow_disk(tmp_path):
    """The keys of a disk tier that stores everything, and whose reads are slow."""
    (tmp_path / "faults").write_text(json.dumps({"bytes_per_s": DISK_BYTES_PER_S, "for": "read"}))
    return (
        *SMALL_G2,
        f"engine.environment.PYTHONPATH={FAULTS}",
        f"engine.environment.KVBM_TEST_DISK_FAULTS={tmp_path / 'faults'}",
        f"tiers.disk.directory={tmp_path / 'cache'}",
        "tiers.disk.capacity=256MiB",
        "offload.to_disk=always",
    )


def causes(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (comparison,) = summary["cells"][0]["comparisons"]
    print(summary["explanation"], *(why["text"] for why in comparison["why_not"]), sep="\n  ")
    return {why["cause"]: why for why in comparison["why_not"]}


def test_a_run_that_pays_gets_no_reasons(measured):
    summary = measured(TALK, *SMALL_G1)
    assert causes(summary) == {}
    assert summary["verdict"] == "faster"


def test_the_working_set_fits_into_g1(measured):
    found = causes(measured(TALK))
    assert next(iter(found)) == "fits-g1"
    assert "the working set of 2,592 tokens fits into G1 (8,960 tokens)" in found["fits-g1"]["text"]


def test_nothing_repeats(measured):
    assert next(iter(causes(measured(ONCE)))) == "no-reuse"


def test_g2_is_too_small(measured):
    found = causes(measured(TALK, *SMALL_G2))
    assert next(iter(found)) == "g2-too-small"
    assert "`tiers.host.capacity: 26MiB` would hold them" in found["g2-too-small"]["text"]


def test_the_capacity_that_the_reason_names_pays(measured):
    assert measured(TALK, *SMALL_G1, "tiers.host.capacity=26MiB")["verdict"] == "faster"


def test_the_frequency_filter_keeps_blocks_from_disk(measured, tmp_path):
    disk = (f"tiers.disk.directory={tmp_path / 'cache'}", "tiers.disk.capacity=256MiB")
    assert next(iter(causes(measured(TALK, *SMALL_G2, *disk)))) == "filtered"


def test_loading_from_a_slow_disk_takes_longer_than_computing(measured, slow_disk):
    summary = measured(TALK.replace("interval_s: 1.5", "interval_s: 3"), *slow_disk, "onboard.policy=always")
    assert summary["verdict"] == "slower"
    assert causes(summary)["disk-slower"]["key"] == "onboard.policy"


def test_kvbm_leaves_blocks_on_a_slow_disk(measured, slow_disk):
    assert "disk-slower" in causes(measured(TALK, *slow_disk))


def test_more_requests_than_the_engine_can_answer(measured):
    summary = measured(TALK.replace("interval_s: 1.5", "interval_s: 0.05"), *SMALL_G1, limits=VerdictLimits())
    assert summary["verdict"] == "invalid"
    assert causes(summary)["overloaded"]["key"] == "--rate"
