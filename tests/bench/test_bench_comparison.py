"""Which arms a command compares, their names, and the order of their runs."""

import re

import pytest
from bench_rig import comparison

from kvbm.errors import UsageError
from kvbm_cli.bench.arms import ArmGroup, comparison_of, free_name, groups, profiles_of

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


@pytest.mark.parametrize(
    ("reference", "overrides", "compare", "message"),
    [
        (None, (), (), "without `--profile`, `--compare` takes URLs of running servers"),
        (None, (), ("baseline",), "without `--profile`, `--compare` takes URLs of running servers"),
        (None, ("a=1",), (ONE,), "`--set` requires `--profile`"),
        (None, (), ("http://user:secret@host:1",), "a URL must not contain a password"),
        ("demo", (), ("http://user:secret@host:1",), "a URL must not contain a password"),
        (None, (), ("https://user:secret@host:1",), "a URL must not contain a password"),
        (None, (), ("http://host:1/?api_key=secret",), "a URL must not contain a password or a query"),
        (None, (), ("http://host:1#secret",), "a URL must not contain a password or a query"),
        (None, (), (ONE, f"{ONE}/v1/"), "`url-1` and `url-2` are the same server"),
        ("demo", (), (f"a={ONE}", f"b={ONE}/"), "`a` and `b` are the same server"),
        (None, (), ("http://host:0",), "must be a URL such as"),
        (None, (), ("http://host:70000",), "must be a URL such as"),
        (None, (), ("http://",), "must be a URL such as"),
        (None, (), (f"a={ONE}", f"a={OTHER}"), "`a` is the name of another arm"),
        ("demo", (), ("baseline", "baseline"), "`--compare baseline` is given twice"),
        ("demo", (), (f"baseline={ONE}", "baseline"), "`--compare baseline` is given twice"),
        ("demo", (), (f"kvbm={ONE}",), "`kvbm` is the name of another arm"),
        (None, (), (f"recording={ONE}",), "`recording` is the name of another arm"),
        ("demo", (), (f"floor={ONE}",), "`floor` is the name of another arm"),
        ("demo", (), ("baseline:vllm-cpu-demo",), "cannot be compared: `engine.kind` is `embedded` and `vllm`"),
        ("vllm-pd-cpu-demo", (), (), "`vllm-pd-cpu-demo` starts several engines"),
    ],
)
def test_what_cannot_be_compared_is_refused(reference, overrides, compare, message):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        comparison_of(() if reference is None else (reference,), overrides, compare)
    assert "secret" not in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine: {model: 'synthetic:small'}", "`engine.model` is `synthetic:tiny` and `synthetic:small`"),
        ("engine: {arguments: {served_model_name: mine}}", "`engine.arguments.served_model_name` is `synthetic:tiny`"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "baseline:"])
def test_engines_that_cannot_answer_the_same_requests_are_refused(tmp_path, text, message, prefix):
    with pytest.raises(UsageError, match=message):
        comparison(prefix + profile_file(tmp_path, text))


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
