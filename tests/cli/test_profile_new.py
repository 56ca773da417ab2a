"""`kvbm profile new`: what it writes is right whatever was asked for, and it never writes anything else."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from terminal import PROGRAM, Kvbm, assert_snapshot, environment, kvbm_here, typed, ways

from kvbm.config.connector import resolve_connector
from kvbm.config.document import parse_document, plain_values
from kvbm.config.load import load
from kvbm.config.schema import ConnectorConfig
from kvbm.errors import ProfileError
from kvbm_cli.profile.import_env import profile_text
from kvbm_cli.profile.text import scalar

NEEDED = ("--engine", "embedded", "--model", "synthetic:tiny", "--host", "1GiB")
WRITTEN = {
    "whole": (*NEEDED, "--port", "auto"),
    "vllm": (
        *("--engine", "vllm", "--model", "org/model", "--disk", "1TB", "--dir", "~/kv"),
        *("--set", "engine.arguments.max-model-len=32k", "--set", "engine.arguments.enforce_eager=true"),
        *("--set", "engine.environment.A=1", "--set", "engine.environment.B='yes: no'"),
    ),
    "extending": ("--extends", "demo", "--host", "64MiB", "--set", "bench.workload=null"),
}


@pytest.mark.parametrize(("name", "way"), ways(WRITTEN))
def test_profile_is_written_and_right(tmp_path: Path, name: str, way: Kvbm) -> None:
    outcome = way("profile", "new", "mine.yaml", *WRITTEN[name], home=tmp_path)
    assert (outcome.exit_code, outcome.stdout) == (0, "mine.yaml\n"), outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]
    assert_snapshot(f"profile_new_{name}", (tmp_path / "mine.yaml").read_text())
    checked = way("profile", "check", "mine.yaml", home=tmp_path)
    assert checked.exit_code == 0, checked.stderr


@pytest.mark.parametrize(
    "command", ["profile new below/mine.yaml --host 1GiB", "profile import-env --output below/mine.yaml"]
)
def test_model_given_on_the_command_line_is_relative_to_the_working_directory(tmp_path: Path, command: str) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2, '
        '"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}'
    )
    options = ("--model", "./model", *(("--engine", "vllm") if "new" in command else ()))
    outcome = kvbm_here(*command.split(), *options, home=tmp_path, DYN_KVBM_CPU_CACHE_GB="1")
    assert outcome.exit_code == 0, outcome.stderr
    assert load(str(tmp_path / "below" / "mine.yaml"), directories=[]).profile.engine.model == f"{tmp_path}/model"


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


def test_a_path_that_is_extended_is_named_from_the_new_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "parent.yaml").write_text("extends: demo\n")
    outcome = kvbm_here("profile", "new", "b/child.yaml", "--extends", "a/parent.yaml", home=tmp_path)
    assert outcome.exit_code == 0, outcome.stderr
    assert "extends: ../a/parent.yaml\n" in (tmp_path / "b" / "child.yaml").read_text()


def test_new_profile_extends_several(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("engine: {model: synthetic:tiny}\ntiers: {disk: {capacity: 1GiB}}\n")
    kvbm_here("profile", "new", "both.yaml", "--extends", "storage/s3", "--extends", "./own.yaml", home=tmp_path)
    assert "extends: [storage/s3, ./own.yaml]\n" in (tmp_path / "both.yaml").read_text()


def test_variable_stays_a_variable(tmp_path: Path) -> None:
    arguments = ("--engine", "vllm", "--model", "org/${WHICH}", "--host", "1GiB")
    outcome = kvbm_here("profile", "new", "mine.yaml", *arguments, home=tmp_path, WHICH="small")
    assert outcome.exit_code == 0, outcome.stderr
    assert '  model: "org/${WHICH}"\n' in (tmp_path / "mine.yaml").read_text()


def test_variables_of_kvbm_are_not_written(tmp_path: Path) -> None:
    outcome = kvbm_here("profile", "new", "mine.yaml", *NEEDED, home=tmp_path, DYN_KVBM_CPU_CACHE_GB="7")
    assert outcome.exit_code == 0, outcome.stderr
    assert "capacity: 1GiB" in (tmp_path / "mine.yaml").read_text()


def test_nothing_is_overwritten_without_being_asked_to(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("mine\n")
    outcome = kvbm_here("profile", "new", "mine.yaml", *NEEDED, home=tmp_path)
    assert (outcome.exit_code, (tmp_path / "mine.yaml").read_text()) == (2, "mine\n")
    outcome = kvbm_here("profile", "new", "mine.yaml", *NEEDED, "--force", home=tmp_path)
    assert (outcome.exit_code, (tmp_path / "mine.yaml").read_text().count("synthetic:tiny")) == (0, 2)


ANSWERS = "embedded\nsynthetic:tinny\nsynthetic:tiny\n\n\n\n12\n1GiB\nrelative\n\n99999\n\n"


def test_questions_are_asked_on_a_terminal(tmp_path: Path) -> None:
    outcome, shown = typed(
        ANSWERS, "profile", "new", "mine.yaml", "--set", "server.host=::1", home=tmp_path, NO_COLOR="1"
    )
    assert outcome == 0, shown
    assert_snapshot("profile_new_questions", shown)
    values = load(str(tmp_path / "mine.yaml"), directories=[]).values
    wanted = {"engine.model": "synthetic:tiny", "tiers.host": None, "tiers.disk.capacity": "1GiB", "server.host": "::1"}
    assert {key: values[key] for key in wanted} == wanted


def test_end_of_the_answers_writes_nothing(tmp_path: Path) -> None:
    exit_code, _ = typed("embedded\n\x04", "profile", "new", "mine.yaml", home=tmp_path)
    assert (exit_code, list(tmp_path.iterdir())) == (130, [])


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
            profile_text(variables)
        assert caught.value.message == expected.message
        return
    text = profile_text(variables, model="a/b")
    path = tmp_path_factory.getbasetemp() / "imported" / "imported.yaml"  # not where `../` of another test is
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    profile = load(str(path), directories=[]).profile
    assert {name: getattr(profile, name) for name in SECTIONS} == {name: getattr(expected, name) for name in SECTIONS}
    assert profile.engine.model == "a/b"
    assert "hunter2" not in text


@given(ENVIRONMENTS, st.dictionaries(st.sampled_from(list(SETTINGS)), st.text("0123456789.GBx- $", max_size=6)))
def test_any_environment_gives_a_profile_or_its_mistakes(variables, wrong):
    said = ""
    try:
        assert profile_text({**variables, **wrong})
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


@pytest.mark.parametrize(("command", "way"), ways(["profile import-env"]))
def test_output(tmp_path, command, way):
    outcome = way(*command.split(), home=tmp_path, **ENVIRONMENT)
    assert_snapshot("import_env", outcome.text(f"kvbm {command}"))
    assert outcome.exit_code == 0


def test_file_is_new_and_can_be_checked(tmp_path):
    outcome = kvbm_here("profile", "import-env", "--output", "mine.yaml", home=tmp_path, **ENVIRONMENT)
    assert (outcome.exit_code, outcome.stdout) == (0, "")
    written = (tmp_path / "mine.yaml").read_text()
    assert written == kvbm_here("profile", "import-env", home=tmp_path, **ENVIRONMENT).stdout
    assert not (tmp_path / "mine.yaml").stat().st_mode & stat.S_IXUSR
    shown = kvbm_here("profile", "show", "./mine.yaml", home=tmp_path)
    assert shown.exit_code == 0
    assert "/mnt/my cache/$USER" in shown.stdout
    again = kvbm_here("profile", "import-env", "--output", "mine.yaml", home=tmp_path, **ENVIRONMENT)
    assert (again.exit_code, (tmp_path / "mine.yaml").read_text()) == (2, written)


def test_file_says_which_variables_would_win_over_it(tmp_path):
    variables = {"DYN_KVBM_CPU_CACHE_GB": "1", "DYN_KVBM_DISK_CACHE_GB": "2"}
    outcome = kvbm_here("profile", "import-env", "--output", "mine.yaml", home=tmp_path, **variables)
    assert "`unset DYN_KVBM_CPU_CACHE_GB DYN_KVBM_DISK_CACHE_GB`" in outcome.stderr
    checked = kvbm_here(
        "serve", "--dry-run", "-p", "mine.yaml", home=tmp_path, **variables | {"DYN_KVBM_CPU_CACHE_GB": "3"}
    )
    (line, *_) = checked.stderr.splitlines()
    assert line == (
        "warning: `DYN_KVBM_CPU_CACHE_GB=3` overrides `tiers.host.capacity: 1GB` (mine.yaml:11); "
        "`unset DYN_KVBM_CPU_CACHE_GB` to use the value of the file"
    )


@pytest.mark.parametrize(("model", "kind"), [("synthetic:tiny", "embedded"), ("synthetic:vllm-25m", "vllm")])
def test_synthetic_model_is_given_to_the_engine_that_has_it(model, kind):
    assert f"kind: {kind}\n" in profile_text({"DYN_KVBM_CPU_CACHE_GB": "1"}, model=model)


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
    assert on_a_full_disk(*PROGRAM, "profile", "import-env", directory=tmp_path) == (0, "")


def test_file_that_cannot_be_written_whole_is_not_there(tmp_path):
    script = (
        "from pathlib import Path; from kvbm_cli.system.filesystem import write_new; "
        "write_new(Path('mine.yaml'), 'a: 1')"
    )
    exit_code, _ = on_a_full_disk(sys.executable, "-c", script, directory=tmp_path)
    assert exit_code == 1
    assert list(tmp_path.iterdir()) == []


TRTLLM = {"DYN_KVBM_CPU_CACHE_GB": "4", "DYN_KVBM_TRTLLM_ZMQ_PORT": "20081"}


def test_variables_of_tensorrt_llm_give_a_profile_for_it(tmp_path):
    """NVIDIA documents them for TensorRT-LLM. The port has no effect, which the profile says."""
    text = profile_text(TRTLLM)
    assert "  kind: tensorrt-llm  # DYN_KVBM_TRTLLM_ZMQ_PORT is a variable for TensorRT-LLM\n" in text
    assert "`DYN_KVBM_TRTLLM_ZMQ_PORT`: there is no consolidator: TensorRT-LLM's own events are not" in text
    (tmp_path / "made.yaml").write_text(text)
    assert load(str(tmp_path / "made.yaml"), directories=[]).profile.engine.kind == "tensorrt-llm"


def test_priorities_require_the_engine_that_sends_them(tmp_path):
    variables = {"DYN_KVBM_CPU_CACHE_GB": "4", "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY": "35"}
    refused = kvbm_here("profile", "import-env", home=tmp_path, **variables)
    assert (refused.exit_code, "but `vllm` sends none" in refused.stderr) == (2, True)
    made = kvbm_here("profile", "import-env", "--engine", "tensorrt-llm", home=tmp_path, **variables)
    assert "  min_priority: 35  # DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY=35\n" in made.stdout


def test_disk_without_host_memory_is_refused_for_tensorrt_llm(tmp_path):
    variables = {"DYN_KVBM_DISK_CACHE_GB": "4"}
    assert kvbm_here("profile", "import-env", home=tmp_path, **variables).exit_code == 0
    refused = kvbm_here("profile", "import-env", "--engine", "tensorrt-llm", home=tmp_path, **variables)
    assert refused.exit_code == 2
    assert "only from host memory, but the variables set only a disk tier" in refused.stderr
