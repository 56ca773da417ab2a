"""The presets equal the arguments of LMBenchmark's scripts (commit 26d02bd)."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvbm.errors import UsageError
from kvbm_cli.bench.lmbenchmark.presets import PRESETS, AgenticParameters, ShareGptParameters, preset


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("lmbenchmark-long", "documented", (15, 20, 1000, 20000, 100, 0.1, 100.0, 20, 1)),
        ("lmbenchmark-long", "as-shipped", (15, 20, 1000, 20000, 100, 0.1, 100.0, 20, 1)),
        ("lmbenchmark-short", "documented", (320, 20, 0, 256, 20, 15.0, 100.0, 400, 1)),
        ("lmbenchmark-short", "as-shipped", (320, 20, 1, 1, 20, 15.0, 100.0, 400, 1)),
        ("lmbenchmark-long-long", "documented", (320, 20, 0, 2000, 1000, 0.7, 100.0, 750, 1)),
        ("lmbenchmark-long-long", "as-shipped", (320, 20, 1, 1, 1000, 0.7, 100.0, 750, 1)),
    ],
)
def test_preset_has_the_arguments_of_its_script(name, sizes, expected):
    one = preset(name, sizes=sizes)
    assert (
        *(one.users, one.rounds, one.system_words, one.history_words, one.answer_tokens),
        *(one.qps, one.duration_s, one.warm_up_users, one.first_user_id),
    ) == expected
    assert (one.name, one.sizes) == (name, sizes)


def test_times_of_the_example_of_the_long_script():
    one = replace(preset("lmbenchmark-long"), qps=1.0)
    assert (one.gap_s, one.session_s, one.gap_between_users_s, one.ramp_up_s) == (15.0, 285.0, 19.0, 285.0)


def test_warm_up_has_one_user_and_two_rounds_of_the_same_size():
    warm_up = preset("lmbenchmark-long-long", sizes="as-shipped").warm_up()
    assert (warm_up.users, warm_up.rounds, warm_up.qps, warm_up.duration_s) == (1, 2, 2.0, 375.0)
    assert (warm_up.system_words, warm_up.history_words, warm_up.answer_tokens) == (1, 1, 1000)
    assert warm_up.first_user_id == 1
    assert warm_up.gap_between_users_s == 0.5
    assert warm_up.warm_up() is None


def test_odd_number_of_warm_up_users_is_halved_as_the_shell_does():
    assert replace(preset("lmbenchmark-long"), warm_up_users=21).warm_up().duration_s == 10.0


def test_each_rate_has_its_own_file():
    runs = [replace(preset("lmbenchmark-short"), qps=qps) for qps in (15, 20.0, 0.25)]
    assert [run.output_file("key") for run in runs] == ["key_qps15.csv", "key_qps20.csv", "key_qps0.25.csv"]
    assert preset("lmbenchmark-long").output_file("a/key") == "a/key_output_0.1.csv"
    assert ShareGptParameters("run.json").output_file("key") == "key_output_1.34.csv"


def test_scaled_words_are_labelled():
    one = preset("lmbenchmark-long").scaled(0.01)
    assert (one.sizes, one.system_words, one.history_words, one.answer_tokens) == ("custom", 10, 200, 100)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: preset("lmbenchmark-medium"), "no preset lmbenchmark-medium"),
        (lambda: preset("lmbenchmark-long", sizes="big"), "lmbenchmark-short \\(as-shipped\\)"),
        (lambda: replace(preset("lmbenchmark-long"), users=0), "users is 0; it must be at least 1"),
        (lambda: replace(preset("lmbenchmark-long"), history_words=-1), "history_words is -1; it must be 0 or more"),
        (lambda: replace(preset("lmbenchmark-long"), qps=0), "qps is 0; it must be a finite number above 0"),
        (lambda: replace(preset("lmbenchmark-long"), duration_s=float("inf")), "duration_s is inf"),
        (lambda: preset("lmbenchmark-long").scaled(0), "factor of words is 0"),
        (lambda: ShareGptParameters("run.json", qps=-1), "qps is -1"),
        (lambda: AgenticParameters(()), "at least one trace file"),
        (lambda: AgenticParameters(("a",), new_user_interval_s=-1), "new_user_interval_s is -1"),
    ],
)
def test_impossible_parameters_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_page_lists_all_presets():
    page = Path(__file__).parents[2] / "docs" / "reference" / "lmbenchmark.md"
    rows = re.findall(r"^\| `(\S+)` \| ((?:documented|as-shipped).*) \|$", page.read_text(), re.MULTILINE)
    listed = {}
    for scenario, cells in rows:
        sizes, *numbers, file = cells.split(" | ")
        for one in sizes.split(", "):
            listed[f"lmbenchmark-{scenario}", one] = (*map(float, numbers), file)
    assert listed == {
        key: (
            *(one.users, one.rounds, one.system_words, one.history_words, one.answer_tokens),
            *(one.qps, one.duration_s, one.warm_up_users),
            f"`{one.output_name.format(key='KEY', qps='QPS')}`",
        )
        for key, one in PRESETS.items()
    }
