"""The summary from records that were made up, so that every number is known exactly."""

from __future__ import annotations

import io
import json
import re

import pytest
from bench_rig import WORKLOAD
from kvbm_cli.bench.schedule import Plan, RecordedAnswer, Script
from rich.console import Console

from kvbm_cli.bench.comparison import AGAINST_BASELINE
from kvbm_cli.bench.control import MetricsDelta, ScrapedMetrics
from kvbm_cli.bench.experiment import ArmResult, Experiment, Recording
from kvbm_cli.bench.records.request_record import RequestRecord
from kvbm_cli.bench.report import show
from kvbm_cli.bench.summary import summarise

ANSWER = RecordedAnswer((1, 2, 3, 4, 5, 6), (-0.5,) * 6)
SCRIPT = Script.write(WORKLOAD, lambda text: list(text.encode()))
PLAN = Plan.make(WORKLOAD, SCRIPT, model="m", answers=[[ANSWER, ANSWER]] * 3, interval_s=1.0)
# arm -> time to first token of turn 1, of turn 2, and the tokens of turn 2 (of 470) from G1 and G2
FASTER = {"baseline": (500.0, 400.0, (32, 0)), "kvbm": (520.0, 20.0, (32, 400)), "floor": (500.0, 16.0, (432, 0))}


def metrics(g1: int, g2: int, computed: int, queue_s: float, count: int) -> ScrapedMetrics:
    return ScrapedMetrics.parse(
        f'vllm:prompt_tokens_by_source_total{{source="local_cache_hit"}} {g1}\n'
        f'vllm:prompt_tokens_by_source_total{{source="external_kv_transfer"}} {g2}\n'
        f'vllm:prompt_tokens_by_source_total{{source="local_compute"}} {computed}\n'
        f"vllm:request_queue_time_seconds_sum {queue_s}\nvllm:request_queue_time_seconds_count {count}\n"
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="120"} 1.0\n'
        f"kvbm_onboard_blocks_h2d {g2 // 16}\n"
    )


def arm(name: str, first_ms: float, later_ms: float, sources: tuple[int, int], lateness_ms: float = 1.0) -> ArmResult:
    records = []
    for request in PLAN.requests:
        intended_ms = request.intended_s * 1e3
        first_token_ms = intended_ms + (first_ms if request.turn == 1 else later_ms)
        g1, g2 = sources if request.turn == 2 else (0, 0)
        record = RequestRecord(
            arm=name, index=request.index, user=request.user, turn=request.turn, intended_ms=intended_ms
        )
        record.launched_ms, record.http_status = intended_ms + lateness_ms, 200
        record.first_token_ms, record.last_token_ms, record.end_ms = (
            first_token_ms,
            first_token_ms + 50,
            first_token_ms + 51,
        )
        record.token_ids, record.token_gaps_ms = list(request.answer.token_ids), [10.0] * 5
        record.logprobs = list(request.answer.logprobs)
        record.prompt_tokens, record.cached_tokens, record.g1_tokens, record.g2_tokens = (
            request.prompt_tokens,
            g1 + g2,
            g1,
            g2,
        )
        records.append(record)
    g1, g2 = 3 * sources[0], 3 * sources[1]
    total = sum(request.prompt_tokens for request in PLAN.requests)
    delta = MetricsDelta(metrics(5, 7, 11, 1.0, 10), metrics(5 + g1, 7 + g2, 11 + total - g1 - g2, 1.006, 16))
    return ArmResult(
        name=name,
        records=tuple(records),
        client_cpu_share=0.05,
        started_unix_s=0.0,
        duration_s=6.0,
        metrics=delta,
        startup_s=2.0,
        engine_ended=False,
    )


def experiment(**changes: ArmResult) -> Experiment:
    recording = Recording(SCRIPT, ((ANSWER, ANSWER),) * 3, (500.0, 500.0, 500.0), 2.0)
    return Experiment(
        AGAINST_BASELINE, PLAN, recording, {**{name: arm(name, *times) for name, times in FASTER.items()}, **changes}
    )


def test_every_number_of_a_known_run():
    summary = summarise(experiment(), surroundings={"machine": {"cpu_count": 2}})
    assert summary["verdict"] == "faster"
    assert summary["complete"] is True
    assert summary["ttft_speedup"] == 20.0
    assert summary["ttft_speedup_paired"] == {
        "geometric_mean": 20.0,
        "interval_95": [20.0, 20.0],
        "pairs": 3,
        "users": 3,
    }
    assert summary["outputs_equal"] is True
    assert summary["kvbm_over_floor"] == 1.25
    assert summary["share_of_possible_gain"] == pytest.approx(380 / 384, abs=1e-3)
    assert summary["transfers"]["proven"] is True
    assert summary["transfers"]["g2_tokens"] == 1200
    assert summary["transfers"]["counters"] == {"kvbm_onboard_blocks_h2d": 75.0}
    assert summary["machine"] == {"cpu_count": 2}
    kvbm, baseline = summary["arms"]["kvbm"], summary["arms"]["baseline"]
    assert kvbm["ttft_ms"] == {"p50": 20.0, "p90": 20.0, "p99": 20.0, "mean": 20.0}
    assert kvbm["ttft_ms_all_turns"]["p50"] == 270.0
    assert kvbm["ttft_ms_from_launch"]["p50"] == 19.0
    assert kvbm["itl_ms"]["p50"] == 10.0
    assert kvbm["end_to_end_ms"]["p50"] == 71.0
    assert kvbm["prompt_tokens"] == {"g1": 96, "g2": 1200, "computed": 3 * 448 + 3 * 470 - 1296}
    assert kvbm["prompt_tokens"] == kvbm["prompt_tokens_by_metrics"]
    assert kvbm["engine"] == {"block_size": 16, "g1_blocks": 120, "startup_s": 2.0, "ended_early": False}
    assert [turn["ttft_ms"]["p50"] for turn in kvbm["turns"]] == [520.0, 20.0]
    assert kvbm["turns"][1]["prompt_tokens"] == {"g1": 96, "g2": 1200, "computed": 114}
    assert kvbm["turns"][0]["errors"] == 0
    assert baseline["utilisation"] == pytest.approx((3 * 550 + 3 * 450) / 5450, abs=1e-3)
    assert baseline["queue_wait_ms"] == 1.0
    assert baseline["queue_share_of_ttft"] == pytest.approx(1 / 450, abs=1e-3)
    assert baseline["client"]["lateness_ms"]["p99"] == 1.0
    assert baseline["throughput"]["requests_per_s"] == pytest.approx(6 / 5.45, abs=1e-3)
    json.dumps(summary)


@pytest.mark.parametrize(
    ("later_ms", "share", "is_noise", "text"),
    [
        (20.0, 380 / 384, False, "TTFT of kvbm is 1.25 times that of the floor (…); 99% of the possible gain"),
        (14.0, 386 / 384, True, "TTFT of kvbm equals that of the floor (…) within the noise of this run: all of the …"),
        (415.0, -15 / 384, False, "TTFT of kvbm is 25.94 times that of the floor (…); 0% of the possible gain"),
    ],
)
def test_more_than_the_possible_gain_is_noise(later_ms, share, is_noise, text, tmp_path):
    summary = summarise(experiment(kvbm=arm("kvbm", 520.0, later_ms, (32, 400))), surroundings={})
    assert summary["share_of_possible_gain"] == pytest.approx(share, abs=1e-3)
    assert summary["share_of_possible_gain_is_noise"] is is_noise
    console = Console(file=io.StringIO(), width=200)
    show(summary, console, directory=tmp_path)
    shown = console.file.getvalue()
    assert all(part in shown for part in text.split("…")), shown
    assert not any(int(percent) > 100 for percent in re.findall(r"(\d+)% of the possible", shown))


def test_equal_times_are_the_same():
    summary = summarise(experiment(kvbm=arm("kvbm", 500.0, 400.0, (32, 400))), surroundings={})
    assert (summary["verdict"], summary["ttft_speedup"]) == ("same", 1.0)


def test_longer_times_are_slower():
    summary = summarise(experiment(kvbm=arm("kvbm", 500.0, 800.0, (32, 400))), surroundings={})
    assert (summary["verdict"], summary["ttft_speedup"]) == ("slower", 0.5)


def test_no_token_from_g2_is_invalid():
    summary = summarise(experiment(kvbm=arm("kvbm", 500.0, 20.0, (432, 0))), surroundings={})
    assert summary["verdict"] == "invalid"
    assert "no prompt token came from G2" in summary["explanation"]
    assert summary["share_of_possible_gain"] is None


def test_one_other_token_is_wrong_and_named():
    changed = experiment()
    changed.arms["kvbm"].records[4].token_ids[5] += 1
    summary = summarise(changed, surroundings={})
    assert (summary["verdict"], summary["outputs_equal"]) == ("wrong", False)
    assert summary["different_answers"] == {"baseline": [], "kvbm": [[1, 2]], "floor": []}


def test_the_same_tokens_with_other_probabilities_are_wrong():
    changed = experiment()
    changed.arms["kvbm"].records[4].logprobs[3] += 0.02
    changed.arms["floor"].records[4].logprobs[3] -= 1e-5
    summary = summarise(changed, surroundings={})
    assert (summary["verdict"], summary["outputs_equal"]) == ("wrong", False)
    assert summary["largest_logprob_difference"] == {"baseline": 0.0, "kvbm": 0.02, "floor": 1e-5}
    assert "differ from the recording by up to 0.02, without kvbm by 1e-05" in summary["explanation"]


def test_probabilities_that_also_differ_without_kvbm_are_no_error_of_kvbm():
    changed = experiment()
    changed.arms["kvbm"].records[4].logprobs[3] += 0.02
    changed.arms["baseline"].records[2].logprobs[0] += 0.01
    assert summarise(changed, surroundings={})["verdict"] == "faster"


def test_probabilities_after_the_first_other_token_are_not_compared():
    changed = experiment()
    record = changed.arms["kvbm"].records[4]
    record.token_ids[2], record.logprobs[2:] = 9, [-4.0] * 4
    assert summarise(changed, surroundings={})["largest_logprob_difference"]["kvbm"] == 0.0


def test_an_engine_without_logprobs_is_pointed_out():
    changed = experiment()
    for record in changed.arms["kvbm"].records:
        record.logprobs = []
    summary = summarise(changed, surroundings={})
    assert summary["verdict"] == "faster"
    assert any("sends no logprobs" in caveat for caveat in summary["caveats"])


def test_an_error_is_counted_in_its_turn_and_leaves_its_pair_out():
    changed = experiment()
    changed.arms["baseline"].records[3].error = "HTTP 503"
    summary = summarise(changed, surroundings={})
    assert summary["verdict"] == "invalid"
    assert summary["arms"]["baseline"]["errors"] == 1
    assert [turn["errors"] for turn in summary["arms"]["baseline"]["turns"]] == [0, 1]
    assert summary["ttft_speedup_paired"]["pairs"] == 2
    assert summary["outputs_equal"] is True


def test_a_late_client_is_invalid():
    summary = summarise(experiment(floor=arm("floor", 500.0, 90.0, (432, 0), lateness_ms=60.0)), surroundings={})
    assert summary["verdict"] == "invalid"
    assert "launched requests late in arm floor" in summary["explanation"]


def test_without_usage_the_counters_tell_the_sources():
    changed = experiment()
    for record in changed.arms["kvbm"].records:
        record.g1_tokens = record.g2_tokens = None
    summary = summarise(changed, surroundings={})
    assert summary["arms"]["kvbm"]["prompt_tokens"]["g2"] == 1200
    assert summary["verdict"] == "faster"


def test_sources_that_contradict_each_other_are_pointed_out():
    changed = experiment()
    changed.arms["kvbm"].records[4].g2_tokens -= 16
    caveats = summarise(changed, surroundings={})["caveats"]
    assert "arm kvbm: usage and /metrics disagree on where prompt tokens came from" in caveats


def test_a_working_set_that_fits_into_g1_is_pointed_out():
    changed = experiment()
    after = changed.arms["baseline"].metrics.after
    after.samples["vllm:cache_config_info", (("block_size", "16"), ("num_gpu_blocks", "1000"))] = 1.0
    del after.samples["vllm:cache_config_info", (("block_size", "16"), ("num_gpu_blocks", "120"))]
    assert any("fits into G1" in caveat for caveat in summarise(changed, surroundings={})["caveats"])


def test_a_summary_of_an_arm_without_answers_is_still_whole():
    changed = experiment()
    for record in changed.arms["kvbm"].records:
        record.error, record.token_ids, record.first_token_ms = "the engine ended", [], None
    summary = summarise(changed, surroundings={})
    assert (summary["verdict"], summary["outputs_equal"]) == ("invalid", False)
    assert summary["ttft_speedup"] is None
    assert summary["arms"]["kvbm"]["ttft_ms"]["p50"] is None


def without_tiers(result: ArmResult) -> ArmResult:
    """As an engine answers that says only how many tokens of a prompt were cached."""
    for record in result.records:
        record.g1_tokens = record.g2_tokens = None
    return result


def test_tiers_of_an_engine_that_tells_them_only_in_its_counters_are_known_for_the_whole_arm():
    arms = {name: without_tiers(arm(name, *times)) for name, times in FASTER.items()}
    summary = summarise(experiment(**arms), surroundings={})
    kvbm = summary["arms"]["kvbm"]
    assert kvbm["prompt_tokens"] == kvbm["prompt_tokens_by_metrics"]
    assert kvbm["prompt_tokens"]["g2"] == 3 * 400
    assert kvbm["prompt_tokens_by_usage"] == {"g1": None, "g2": None, "computed": kvbm["prompt_tokens"]["computed"]}
    assert kvbm["turns"][1]["prompt_tokens"]["g2"] is None
    assert kvbm["turns"][1]["prompt_tokens"]["computed"] == 3 * (PLAN.requests[3].prompt_tokens - 432)
    assert [caveat for caveat in summary["caveats"] if "not per turn" in caveat]
    assert not [caveat for caveat in summary["caveats"] if "disagree" in caveat]


def test_computed_tokens_that_usage_and_counters_count_differently_are_pointed_out():
    result = without_tiers(arm("kvbm", *FASTER["kvbm"]))
    result.records[0].cached_tokens += 16
    summary = summarise(experiment(kvbm=result), surroundings={})
    assert "arm kvbm: usage and /metrics disagree on where prompt tokens came from" in summary["caveats"]
