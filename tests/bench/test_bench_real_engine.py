"""`kvbm bench` with the embedded engine: outputs, tiers, corrupted transfers, and runs that do not pay, with the cause.

Times depend on the machine, so the limits on load are wide, except where the load is the cause.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from bench_rig import PATIENT

from kvbm_cli.bench.command import BenchRequest, bench
from kvbm_cli.bench.judge.verdict import VerdictLimits
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import Results
from kvbm_cli.bench.summary import summarise

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="the embedded engine needs torch"),
    pytest.mark.soak,
]

FAULTS = Path(__file__).parents[1] / "embedded" / "disk_faults"
SMALL_G1 = ("engine.arguments.num_blocks=90",)  # 1440 tokens, of a working set of 2592
SMALL_G2 = (*SMALL_G1, "tiers.host.capacity=8MiB")  # 1024 tokens
# After every onboarding, the fourth block gets the content of the fifth.
BROKEN_ONBOARDING = """
from kvbm.device.copier import DeviceCopier
onboard = DeviceCopier.onboard
def broken(self, slots, block_ids, fence):
    onboard(self, slots, block_ids, fence)
    if len(block_ids) > 4:
        onboard(self, [slots[4]], [block_ids[3]], fence)
DeviceCopier.onboard = broken
"""
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

    def run(
        workload: str,
        *overrides: str,
        profile: str = "demo",
        compare: str = "baseline",
        limits: VerdictLimits = PATIENT,
    ) -> dict[str, Any]:
        (tmp_path / "workload.yaml").write_text(workload)
        request = BenchRequest(
            profiles=(profile,),
            overrides=("engine.arguments.threads=1", *overrides),
            compare=(compare,),
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


def test_blocks_come_back_from_g2_and_every_output_is_the_same(measured):
    summary = measured(TALK, *SMALL_G1)
    assert summary["outputs_equal"] is True, summary["explanation"]  # how fast is no question for this test
    (cell,) = summary["cells"]
    assert cell["comparisons"][0]["has_loads"] is True
    arms = cell["arms"]
    for arm in arms.values():
        assert arm["errors"] == 0
        by_metrics = {tier: count for tier, count in arm["prompt_tokens_by_metrics"].items() if count is not None}
        assert by_metrics.items() <= arm["prompt_tokens"].items()
        assert len(by_metrics) >= 3
    assert arms["baseline"]["prompt_tokens"]["g2"] == 0
    assert arms["kvbm"]["prompt_tokens"]["g2"] > 500
    # A request that starts before the one in front of it has ended finds one block less of the system prompt.
    computed = [arms[name]["prompt_tokens"]["computed"] for name in ("kvbm", "floor")]
    assert computed[0] == pytest.approx(computed[1], abs=64)
    assert arms["kvbm"]["prompt_tokens"]["computed"] < arms["baseline"]["prompt_tokens"]["computed"]
    assert arms["kvbm"]["server"][0]["kvbm_counters"]["kvbm_onboard_blocks_h2d"] > 30


def test_two_profiles_run_at_the_same_time_with_tiers_and_ports_of_their_own(measured, tmp_path):
    """Both write metrics on a port and both have a disk in the same directory."""
    both = ["metrics.serve=true", f"tiers.disk.directory={tmp_path / 'cache'}", "tiers.disk.capacity=64MiB"]
    small = tmp_path / "small.yaml"
    small.write_text(
        "extends: demo\nengine: {arguments: {num_blocks: 90, threads: 1}}\nmetrics: {serve: true}\n"
        f"tiers: {{host: {{capacity: 32MiB}}, disk: {{directory: {tmp_path / 'cache'}, capacity: 64MiB}}}}\n"
    )
    summary = measured(TALK, *SMALL_G1, *both, compare=str(small))
    assert summary["outputs_equal"] is True, summary["explanation"]
    assert summary["compared"] == {"measured": "demo", "reference": "small"}
    assert list(summary["arms"]["small"]["differences"]) == ["tiers.host.capacity"]
    arms = summary["cells"][0]["arms"]
    for arm in ("demo", "small"):
        assert arms[arm]["errors"] == 0
        assert arms[arm]["prompt_tokens"]["g2"] > 500
        assert arms[arm]["server"][0]["kvbm_counters"]["kvbm_onboard_blocks_h2d"] > 30
    assert list((tmp_path / "cache").iterdir()) == []


def test_one_wrong_block_per_onboarding_is_found(measured, tmp_path):
    """The tokens alone would often not show it: their probabilities do."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(BROKEN_ONBOARDING)
    summary = measured(TALK, *SMALL_G1, f"engine.environment.PYTHONPATH='{tmp_path / 'broken'}'")
    assert (summary["verdict"], summary["outputs_equal"]) == ("wrong", False)
    outputs = summary["cells"][0]["comparisons"][0]["outputs"]
    assert outputs["different"] or outputs["largest_logprob_difference"] > 0.01


def test_an_engine_answers_from_what_another_one_has_written(measured, tmp_path):
    summary = measured(TALK, *SMALL_G1, f"tiers.shared.url=file://{tmp_path}/store", profile="demo-shared")
    assert summary["outputs_equal"] is True, summary["explanation"]
    tokens = summary["cells"][0]["arms"]["kvbm"]["prompt_tokens"]
    assert tokens["g4"] >= 4 * 256, "256 tokens of each conversation"
    assert list((tmp_path / "store").iterdir()) == []


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


def test_the_capacity_that_the_reason_names_pays_and_no_reason_is_needed(measured):
    summary = measured(TALK, *SMALL_G1, "tiers.host.capacity=26MiB")
    assert (causes(summary), summary["verdict"]) == ({}, "faster")


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
