"""`kvbm profile import-env`: for any environment a profile that means the same, or the mistakes of the variables."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from terminal import PROGRAM, assert_snapshot, environment, kvbm_here, ways

from kvbm.config.connector import resolve_connector
from kvbm.config.load import load
from kvbm.config.schema import ConnectorConfig
from kvbm.errors import ProfileError
from kvbm_cli.profile.import_env import profile_text

SECTIONS = ("tiers", "offload", "onboard", "transfer", "metrics")
BOOLEANS = st.sampled_from(["1", "true", "Yes", " on", "0", "false", "NO", "off "])
WHOLE = st.integers(1, 64).map(str)
SIZES = st.one_of(st.decimals("0.001", 10**5, places=3).map(str), st.sampled_from(["0", "1e2", ".5", "00100"]))
DIRECTORIES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
VALUES = {
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
ENVIRONMENTS = st.fixed_dictionaries({}, optional=VALUES)


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


@given(ENVIRONMENTS, st.dictionaries(st.sampled_from(list(VALUES)), st.text("0123456789.GBx- $", max_size=6)))
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
