"""`kvbm bench` with the embedded engine: against the baseline, against a profile, and with corrupted transfers."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from bench_rig import PATIENT

from kvbm_cli.bench import command
from kvbm_cli.bench.arms import comparison_of
from kvbm_cli.bench.cells import Cell
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.workload.schema import Conversations, Schedule
from kvbm_cli.profile.resolve import resolve

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="the embedded engine needs torch")

WORKLOAD = Conversations(
    name="real",
    users=3,
    turns=2,
    system_tokens=64,
    history_tokens=700,
    question_tokens=32,
    answer_tokens=12,
    schedule=Schedule(arms="interleaved", interval_s=1.2, pairs=1),
)
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


SMALL_ENGINE = ("engine.arguments.num_blocks=90", "engine.arguments.threads=1")


def run_bench(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *overrides: str,
    profile: str = "demo",
    compare: tuple[str, ...] = (),
) -> tuple[int, dict]:
    comparison = comparison_of((profile,), [*SMALL_ENGINE, *overrides], compare)
    setup = command._setup(comparison, (Cell(WORKLOAD.name, WORKLOAD),))
    code = command.measure(setup, BenchDirectory.create(tmp_path / "run"), as_json=True, limits=PATIENT)
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.soak
@needs_torch
@pytest.mark.slow
def test_blocks_come_back_from_g2_and_every_output_is_the_same(tmp_path, capsys):
    code, summary = run_bench(tmp_path, capsys)
    assert code in (0, 10), summary["explanation"]  # how fast is no question for a test
    assert summary["outputs_equal"] is True
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
    assert computed[0] == pytest.approx(computed[1], abs=WORKLOAD.system_tokens)
    assert arms["kvbm"]["prompt_tokens"]["computed"] < arms["baseline"]["prompt_tokens"]["computed"]
    assert arms["kvbm"]["server"][0]["kvbm_counters"]["kvbm_onboard_blocks_h2d"] > 30


@pytest.mark.soak
@needs_torch
@pytest.mark.slow
def test_two_profiles_run_at_the_same_time_with_tiers_and_ports_of_their_own(tmp_path, capsys):
    """Both write metrics on a port and both have a disk in the same directory."""
    both = ["metrics.serve=true", f"tiers.disk.directory={tmp_path / 'cache'}", "tiers.disk.capacity=64MiB"]
    small = tmp_path / "small.yaml"
    small.write_text(
        "extends: demo\nengine: {arguments: {num_blocks: 90, threads: 1}}\nmetrics: {serve: true}\n"
        f"tiers: {{host: {{capacity: 32MiB}}, disk: {{directory: {tmp_path / 'cache'}, capacity: 64MiB}}}}\n"
    )
    code, summary = run_bench(tmp_path, capsys, *both, compare=(str(small),))
    assert code in (0, 10), summary["explanation"]
    assert summary["outputs_equal"] is True
    assert summary["compared"] == {"measured": "demo", "reference": "small"}
    assert list(summary["arms"]["small"]["differences"]) == ["tiers.host.capacity"]
    arms = summary["cells"][0]["arms"]
    for arm in ("demo", "small"):
        assert arms[arm]["errors"] == 0
        assert arms[arm]["prompt_tokens"]["g2"] > 500
        assert arms[arm]["server"][0]["kvbm_counters"]["kvbm_onboard_blocks_h2d"] > 30
    assert list((tmp_path / "cache").iterdir()) == []


@needs_torch
@pytest.mark.soak
def test_one_wrong_block_per_onboarding_is_found(tmp_path, capsys):
    """The tokens alone would often not show it: their probabilities do."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(BROKEN_ONBOARDING)
    code, summary = run_bench(tmp_path, capsys, f"engine.environment.PYTHONPATH='{tmp_path / 'broken'}'")
    assert (code, summary["verdict"], summary["outputs_equal"]) == (12, "wrong", False)
    outputs = summary["cells"][0]["comparisons"][0]["outputs"]
    assert outputs["different"] or outputs["largest_logprob_difference"] > 0.01


def test_the_shipped_demo_keeps_its_promises():
    """Six users of four turns, long prompts, room for two conversations in G1 and not for all, room for all in G2."""
    from kvbm_cli.bench.workload.files import load_workload
    from kvbm_cli.profile.size import size_of

    resolved = resolve("demo")
    workload = load_workload(resolved.profile.bench.workload or "")
    sizing = size_of(resolved)
    assert workload.users >= 6
    assert workload.turns >= 4
    assert workload.prompt_tokens(1) >= 1500
    assert sizing.device.token_count >= 2 * workload.conversation_tokens
    assert sizing.device.token_count < 0.6 * workload.working_set_tokens
    assert sizing.host.token_count > workload.working_set_tokens
    assert resolved.profile.engine.arguments.prefix_caching
    assert resolved.profile.engine.arguments.dtype == "float32"


@pytest.mark.soak
@needs_torch
@pytest.mark.slow
def test_an_engine_answers_from_what_another_one_has_written(tmp_path, capsys):
    url = f"tiers.shared.url=file://{tmp_path}/store"
    code, summary = run_bench(tmp_path, capsys, url, profile="demo-shared")
    assert code in (0, 10), summary["explanation"]
    assert summary["outputs_equal"] is True
    tokens = summary["cells"][0]["arms"]["kvbm"]["prompt_tokens"]
    assert tokens["g4"] >= WORKLOAD.users * 2 * 256, "two runs of 256 tokens of each conversation"
    assert list((tmp_path / "store").iterdir()) == []
