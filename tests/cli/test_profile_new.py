"""`kvbm profile new`: what it writes is right whatever was asked for, and it never writes anything else."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from terminal import PROGRAM, Outcome, environment, kvbm_here

from kvbm.config.connector import as_upstream, resolve_connector
from kvbm.config.document import parse_document, plain_values
from kvbm.config.schema import ConnectorConfig
from kvbm.engines.table import load
from kvbm.errors import ProfileError
from kvbm_cli.profile.import_file import imported_env
from kvbm_cli.profile.text import scalar

NEEDED = ("--engine", "embedded", "--model", "synthetic:tiny", "--host", "1GiB")


def test_what_a_comment_offers_is_the_default(tmp_path: Path) -> None:
    """Every `#key: value` can be taken as it stands and changes nothing."""
    kvbm_here("profile", "new", "mine.yaml", *NEEDED, "--disk", "1GiB", home=tmp_path)
    head, _, tail = (tmp_path / "mine.yaml").read_text().partition("  #shared:\n")
    text = head + tail[tail.index("\n\n") :]  # this section has no default: its `url` must be given
    (tmp_path / "all.yaml").write_text("".join(_uncommented(line) for line in text.splitlines(keepends=True)))
    before, after = (load(str(tmp_path / name), directories=[]) for name in ("mine.yaml", "all.yaml"))
    assert before.profile == after.profile


def _uncommented(line: str) -> str:
    stripped = line.lstrip(" ")
    offers = stripped.startswith("#") and not stripped.startswith("# ") and "  #" not in stripped
    return line.replace("#", "", 1) if offers else line


@pytest.mark.parametrize(
    ("file", "parent"), [("d/mine.yaml", "up.yaml"), ("mine.yaml", "d/up.yaml"), ("d/mine.yaml", "d/up.yaml")]
)
def test_extends_names_the_parent_also_through_links_of_directories(tmp_path: Path, file: str, parent: str) -> None:
    (tmp_path / "far/away").mkdir(parents=True)
    (tmp_path / "d").symlink_to("far/away")
    assert kvbm_here("profile", "new", parent, *NEEDED, home=tmp_path).exit_code == 0
    assert kvbm_here("profile", "new", file, "--extends", f"./{parent}", home=tmp_path).exit_code == 0
    assert kvbm_here("profile", "check", file, home=tmp_path).exit_code == 0


@pytest.mark.parametrize("parent", ["mine.yaml", "child.yaml", "link.yaml"])
def test_a_profile_never_extends_itself(tmp_path: Path, parent: str) -> None:
    assert kvbm_here("profile", "new", "mine.yaml", *NEEDED, home=tmp_path).exit_code == 0
    (tmp_path / "child.yaml").write_text("extends: ./mine.yaml\n")
    (tmp_path / "link.yaml").symlink_to("mine.yaml")
    before = (tmp_path / "mine.yaml").read_text()
    outcome = kvbm_here("profile", "new", "mine.yaml", "--force", "--extends", parent, home=tmp_path)
    hint = "choose another name for the new profile"
    assert outcome == Outcome(2, "", f"error: `mine.yaml` would extend itself\n\nhint: {hint}\n")
    assert (tmp_path / "mine.yaml").read_text() == before


def test_an_overwritten_profile_is_the_only_file_that_changes(tmp_path: Path) -> None:
    for name in ("mine.yaml", ".mine.yaml"):
        (tmp_path / name).write_text("my notes")
    assert kvbm_here("profile", "new", "mine.yaml", *NEEDED, "--force", home=tmp_path).exit_code == 0
    assert (tmp_path / ".mine.yaml").read_text() == "my notes"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.yaml", "mine.yaml"]


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)

NUMBERS = st.integers(-(10**29), 10**29) | st.floats(allow_nan=False, allow_infinity=False)


PLAIN = st.one_of(TEXT, st.booleans(), NUMBERS, st.none())
VALUES = st.recursive(PLAIN, lambda inside: st.lists(inside) | st.dictionaries(TEXT, inside), max_leaves=4)


@settings(deadline=None)
@given(VALUES)
def test_every_value_is_read_as_it_was_written(value: object) -> None:
    document, mistakes = parse_document(f"a: {scalar(value)}\nb: [{scalar(value)}]\n", label="f")
    assert mistakes == []
    assert plain_values(document) == {"a": value, "b": [value]}


QUOTED = ["true", "1", "1e5", "null", "~", "", "a: b", "#a", "- a", "a #b", "'", '"', "é", "${A}", "a:"]


@pytest.mark.parametrize("text", QUOTED)
def test_text_that_could_be_something_else_is_quoted(text: str) -> None:
    assert scalar(text).startswith('"')
    assert plain_values(parse_document(f"a: {scalar(text)}\n", label="f")[0]) == {"a": text}


@pytest.mark.parametrize("text", ["synthetic:tiny", "~/models/Qwen3-8B", "Qwen/Qwen3-8B", "32k", "./a.yaml", "64GiB"])
def test_plain_text_is_not_quoted(text: str) -> None:
    assert scalar(text) == text


SECTIONS = ("tiers", "offload", "onboard", "transfer", "metrics")
BOOLEANS = st.sampled_from(["1", "true", "Yes", " on", "0", "false", "NO", "off "])
WHOLE = st.integers(1, 64).map(str)
SIZES = st.one_of(st.decimals("0.001", 10**5, places=3).map(str), st.sampled_from(["0", "1e2", ".5", "00100"]))
DIRECTORIES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
SETTINGS = {
    "DYN_KVBM_CPU_CACHE_GB": SIZES,
    "DYN_KVBM_DISK_CACHE_GB": SIZES,
    "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": st.integers(0, 10**6).map(str),
    "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": st.integers(0, 10**6).map(str),
    "DYN_KVBM_DISK_CACHE_DIR": DIRECTORIES.map(lambda text: f"/mnt/{text}"),
    "DYN_KVBM_DISK_ALLOCATOR_TYPE": st.sampled_from(["default", "open-direct"]),
    "DYN_KVBM_DISK_ZEROFILL_FALLBACK": BOOLEANS,
    "DYN_KVBM_DISK_DISABLE_O_DIRECT": BOOLEANS,
    "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": BOOLEANS,
    "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY": st.just("0"),
    "DYN_KVBM_MAX_CONCURRENT_TRANSFERS": WHOLE,
    "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE": WHOLE,
    "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS": WHOLE,
    "DYN_KVBM_METRICS": BOOLEANS,
    "DYN_KVBM_METRICS_PORT": st.one_of(st.sampled_from(["0", "8000", "6880"]), st.integers(0, 65535).map(str)),
    "DYN_KVBM_METRICS_HOST": st.sampled_from(["0.0.0.0", "::1", "localhost", "a: b", "#x"]),
    "DYN_KVBM_CACHE_STATS_MAX_REQUESTS": WHOLE,
    "DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS": st.integers(0, 86400).map(str),
    "DYN_KVBM_ENABLE_RECORD": BOOLEANS,
    "DYN_KVBM_ENABLE_NUMA": BOOLEANS,
    "DYN_KVBM_LEADER_ZMQ_HOST": DIRECTORIES,
    "DYN_KVBM_OBJECT_SECRET_KEY": st.just("hunter2"),
    "DYN_KVBM_OBJECT_BUCKET": st.sampled_from(["kv-cache", "KV.cache_2", "s3://b", "a/b"]),
    "DYN_KVBM_OBJECT_ENABLED": BOOLEANS,
    "DYN_FATBIN_PATH": DIRECTORIES,
    "PATH": st.just("/bin"),
}
ENVIRONMENTS = st.fixed_dictionaries({}, optional=SETTINGS)


@given(ENVIRONMENTS)
def test_the_profile_means_what_the_variables_do(tmp_path_factory, variables):
    expected: ConnectorConfig | ProfileError
    try:
        expected = resolve_connector({}, variables, engine="vllm", warns=False)
    except ProfileError as mistake:
        expected = mistake
    if isinstance(expected, ProfileError):
        with pytest.raises(ProfileError) as caught:
            imported_env(variables)
        assert caught.value.message == expected.message
        return
    text = imported_env(variables, model="a/b").text
    path = tmp_path_factory.getbasetemp() / "imported" / "imported.yaml"  # not where `../` of another test is
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    profile = load(str(path), directories=[]).profile
    same = as_upstream(profile)  # a profile has the evictions of kvbm where the variables do not choose
    assert {name: getattr(same, name) for name in SECTIONS} == {name: getattr(expected, name) for name in SECTIONS}
    assert profile.engine.model == "a/b"
    assert "hunter2" not in text


@given(ENVIRONMENTS, st.dictionaries(st.sampled_from(list(SETTINGS)), st.text("0123456789.GBx- $", max_size=6)))
def test_any_environment_gives_a_profile_or_its_mistakes(variables, wrong):
    said = ""
    try:
        assert imported_env({**variables, **wrong})
    except ProfileError as mistake:
        said = mistake.message
    assert "is not valid:" not in said


ENVIRONMENT = {
    "DYN_KVBM_CPU_CACHE_GB": "0",
    "DYN_KVBM_DISK_CACHE_GB": "0.5",
    "DYN_KVBM_DISK_CACHE_DIR": "/mnt/my cache/$USER",
    "DYN_KVBM_DISK_DISABLE_O_DIRECT": "1",
    "DYN_KVBM_METRICS": "1",
    "DYN_KVBM_METRICS_PORT": "8000",
    "DYN_KVBM_OBJECT_BUCKET": "kv-cache",
    "DYN_KVBM_OBJECT_SECRET_KEY": "hunter2",
    "DYN_KVBM_OBJECT_NUM_BLOCKS": "1000",
    "ENABLE_KVBM_RECORD": "1",
}


@pytest.mark.parametrize(("model", "kind"), [("synthetic:tiny", "embedded"), ("synthetic:vllm-25m", "vllm")])
def test_synthetic_model_is_given_to_the_engine_that_has_it(model, kind):
    assert f"kind: {kind}\n" in imported_env({"DYN_KVBM_CPU_CACHE_GB": "1"}, model=model).text


def on_a_full_disk(*command: str, directory: Path) -> tuple[int, str]:
    """Exit code and first line of stderr, where there is room for names alone."""
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *command],
        cwd=directory,
        env=environment(directory, **ENVIRONMENT),
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr.partition("\n")[0]


def test_profile_is_printed_on_a_full_disk(tmp_path):
    exit_code, said = on_a_full_disk(*PROGRAM, "profile", "import-env", directory=tmp_path)
    assert (exit_code, said.partition(":")[0]) == (0, "not carried over")


def test_file_that_cannot_be_written_whole_is_not_there(tmp_path):
    script = (
        "from pathlib import Path; from kvbm_cli.system.filesystem import write_new; "
        "write_new(Path('mine.yaml'), 'a: 1')"
    )
    exit_code, _ = on_a_full_disk(sys.executable, "-c", script, directory=tmp_path)
    assert exit_code == 1
    assert list(tmp_path.iterdir()) == []
