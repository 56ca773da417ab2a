"""Which arms a command compares, in which cells: names, order of runs, workloads at pressures, replaced schedules."""

import re

import pytest
from bench_rig import WORKLOAD, comparison

from kvbm.errors import UsageError
from kvbm_cli.bench.arms import ArmGroup, comparison_of, free_name, groups, profiles_of
from kvbm_cli.bench.cells import Cell, Overrides, Pressures, cells_of, parse_pressures
from kvbm_cli.bench.setup import Setup, caveats_of
from kvbm_cli.bench.workload.schema import Lmbenchmark, Unique

ONE, OTHER = "http://127.0.0.1:8000", "http://127.0.0.1:8001"


def profile_file(tmp_path, text, name="other"):
    path = tmp_path / f"{name}.yaml"
    path.write_text("extends: demo\n" + text)
    return str(path)


@pytest.mark.parametrize(
    ("compare", "arms"),
    [
        ((), [("baseline", "baseline"), ("kvbm", "kvbm"), ("floor", "floor")]),
        (("baseline",), [("baseline", "baseline"), ("kvbm", "kvbm"), ("floor", "floor")]),
        (("demo-disk",), [("demo-disk", "profile"), ("demo", "kvbm"), ("floor", "floor")]),
        (("baseline:demo-disk",), [("demo-disk", "baseline"), ("kvbm", "kvbm"), ("floor", "floor")]),
        (
            ("baseline", "demo-disk", ONE),
            [
                ("baseline", "baseline"),
                ("demo", "kvbm"),
                ("demo-disk", "profile"),
                ("url-1", "url"),
                ("floor", "floor"),
            ],
        ),
        ((f"theirs={ONE}",), [("theirs", "url"), ("kvbm", "kvbm"), ("floor", "floor")]),
        ((ONE, OTHER), [("url-1", "url"), ("kvbm", "kvbm"), ("url-2", "url"), ("floor", "floor")]),
        (("demo",), [("demo-2", "profile"), ("demo", "kvbm"), ("floor", "floor")]),
    ],
)
def test_a_profile_is_compared_with_what_is_asked_for(compare, arms):
    assert [(arm.name, arm.kind) for arm in comparison(*compare).arms] == arms


def test_arms_with_kvbm_are_the_measured_one_and_profiles():
    compared = comparison("baseline", "demo-disk", "baseline:demo", ONE)
    assert [arm.name for arm in compared.arms if arm.has_kvbm] == ["demo", "demo-disk"]
    assert not compared.is_of_urls


@pytest.mark.parametrize(
    ("compare", "names"),
    [
        ((ONE,), ["url-1"]),
        ((ONE, OTHER), ["url-2", "url-1"]),
        ((f"new={ONE}", f"old={OTHER}/v1"), ["old", "new"]),
        (("https://example.org/gate/v1",), ["url-1"]),
        (("http://[::1]:80",), ["url-1"]),
    ],
)
def test_without_a_profile_the_first_server_is_measured(compare, names):
    compared = comparison_of((), (), compare)
    assert [arm.name for arm in compared.arms] == names
    assert compared.measured.name == names[-1]
    assert compared.floor is None
    assert compared.is_of_urls


def test_only_keys_of_the_engine_make_it_another_engine(tmp_path):
    file = profile_file(tmp_path, "tiers: {host: {capacity: 64MiB}}\nengine: {arguments: {threads: 3}}")
    (reference,) = comparison(file).references
    assert reference.engine_differences == ("engine.arguments.threads",)
    assert set(reference.differences) == {"engine.arguments.threads", "tiers.host.capacity"}
    assert comparison("baseline").references[0].differences == {}


def test_a_profile_of_several_arms_is_checked_once():
    assert [profile.name for profile in profiles_of(comparison("baseline", "demo-disk"))] == ["demo", "demo-disk"]


@pytest.mark.parametrize(
    ("wanted", "taken", "name"),
    [
        ("demo", (), "demo"),
        ("demo", ("demo", "demo-2"), "demo-3"),
        ("floor", ("floor",), "floor-2"),
        ("a b\n", (), "a-b"),
        ("..", (), "arm"),
        ("/", ("arm",), "arm-2"),
        ("x" * 60, (), "x" * 40),
    ],
)
def test_a_name_is_safe_as_a_directory_and_never_equal(wanted, taken, name):
    assert free_name(wanted, taken) == name


def names_of(order):
    return [(group.pair, "+".join(group.arms)) for group in order]


def test_arms_in_turn_alternate_and_the_floor_runs_once():
    compared = comparison("baseline")
    order = {seed: names_of(groups(compared, interleaved=False, pairs=3, seed=seed)) for seed in range(20)}
    forward = ["baseline", "kvbm"], ["kvbm", "baseline"], ["baseline", "kvbm"]
    for found in order.values():
        by_pair = [[name for pair, name in found if pair == number and name != "floor"] for number in (1, 2, 3)]
        assert by_pair in (list(forward), [one[::-1] for one in forward])
        assert [pair for pair, name in found if name == "floor"] == [1]
        assert found[2] == (1, "floor")
    firsts = [found[0][1] for found in order.values()]
    assert {"baseline", "kvbm"} == set(firsts)
    assert names_of(groups(compared, interleaved=False, pairs=3, seed=7)) == order[7]


def test_with_several_references_all_arms_are_in_every_pair():
    order = groups(comparison("baseline", "demo-disk"), interleaved=False, pairs=2, seed=0)
    for pair in (1, 2):
        assert sorted(group.arms for group in order if group.pair == pair and group.arms != ("floor",)) == [
            ("baseline",),
            ("demo",),
            ("demo-disk",),
        ]
    runs = [group.arms[0] for group in order if group.arms != ("floor",)]
    assert runs[:3] == runs[:2:-1]


def test_interleaved_arms_run_at_the_same_time_in_every_pair():
    order = groups(comparison("baseline"), interleaved=True, pairs=2, seed=0)
    assert order == [ArmGroup(pair, ("baseline", "kvbm", "floor")) for pair in (1, 2)]


def test_servers_have_no_floor():
    order = groups(comparison_of((), (), (ONE, OTHER)), interleaved=True, pairs=1, seed=0)
    assert order == [ArmGroup(1, ("url-2", "url-1"))]


UNIQUE = Unique(name="alone", kind="unique", requests=3, prompt_tokens=8, answer_tokens=2)


@pytest.mark.parametrize(
    ("text", "values"),
    [(None, ()), ("none", ()), ("auto", (2.0,)), ("auto:1.5", (1.5,)), ("2", (2.0,)), ("0.8, 1.2,4", (0.8, 1.2, 4.0))],
)
def test_pressures_are_numbers_with_commas(text, values):
    assert parse_pressures(text) == Pressures(values, is_auto=(text or "").startswith("auto"))


def test_on_a_gpu_the_pressure_is_automatic_unless_it_is_given():
    assert parse_pressures(None, is_on_gpu=True) == parse_pressures("auto")
    assert parse_pressures("none", is_on_gpu=True) == Pressures()


def test_an_automatic_pressure_leaves_what_it_cannot_scale():
    auto = parse_pressures("auto")
    names = [(cell.name, cell.pressure) for cell in cells_of([WORKLOAD, UNIQUE], auto, 960)]
    assert names == [("small-x2", 2.0), ("alone", None)]
    assert [cell.pressure for cell in cells_of([WORKLOAD], auto, None)] == [None]
    assert (auto.scales([UNIQUE]), auto.scales([WORKLOAD, UNIQUE])) == (False, True)
    with pytest.raises(UsageError, match="the engine does not report it"):
        cells_of([WORKLOAD], Pressures((2.0,)), None)


def test_without_pressures_there_is_a_cell_per_workload():
    cells = cells_of([WORKLOAD, UNIQUE], Pressures(), 960)
    assert cells == (Cell("small", WORKLOAD, None, 960), Cell("alone", UNIQUE, None, 960))


def test_a_pressure_below_one_still_fits_with_few_large_sessions():
    large = WORKLOAD.model_copy(update={"system_tokens": 128, "history_tokens": 1472, "question_tokens": 48})
    cell = cells_of([large], Pressures((0.8,)), 4352)[0]
    step = large.conversation_tokens - large.system_tokens
    assert abs(cell.workload.working_set_tokens - 0.8 * 4352) <= step / 2
    assert cell.workload.working_set_tokens < 4352


@pytest.mark.parametrize(("concurrency", "expected"), [(None, []), (30, []), (2, ["0.96"])])
def test_sessions_that_wait_for_others_are_not_part_of_the_pressure(concurrency, expected):
    schedule = WORKLOAD.schedule.model_copy(update={"interval_s": None, "concurrency": concurrency})
    (cell,) = cells_of([WORKLOAD.model_copy(update={"schedule": schedule})], Pressures((2.0,)), 960)
    setup = Setup(comparison_of(("demo",), (), ()), (cell,))
    found = [one for one in caveats_of(setup) if "active at a time" in one]
    assert [re.search(r"so the pressure is ([0-9.]+)", one)[1] for one in found] == expected


def test_options_replace_the_schedule():
    changed = Overrides(rate=4.0, duration_s=9.0, pairs=5).applied(WORKLOAD).schedule
    assert (changed.interval_s, changed.concurrency, changed.duration_s, changed.pairs) == (0.25, None, 9.0, 5)
    closed = Overrides(concurrency=3).applied(WORKLOAD).schedule
    assert (closed.interval_s, closed.concurrency) == (None, 3)
    assert Overrides().applied(WORKLOAD) == WORKLOAD


def test_a_rate_and_a_duration_also_replace_those_of_a_scenario_of_lmbenchmark():
    scenario = Lmbenchmark(name="l", kind="lmbenchmark", scenario="sharegpt", file="run.json", qps=1.0)
    changed = Overrides(rate=4.0, duration_s=9.0).applied(scenario)
    assert (changed.qps, changed.time_s) == (4.0, 9.0)
    assert Overrides().applied(scenario).qps == 1.0
