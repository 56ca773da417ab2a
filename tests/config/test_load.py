"""Layers and origins of what a profile, a variable or an override says. Mistakes: test_profile_mistakes.py."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvbm.config.key_list import keys
from kvbm.config.load import ResolvedProfile
from kvbm.config.schema import Profile
from kvbm.config.variables import VARIABLES
from kvbm.engines.table import examine, load
from kvbm.errors import ProfileError

BASE = """\
engine:
  model: synthetic:tiny
tiers:
  host:
    capacity: 1GiB
"""


def load_text(
    directory: Path,
    text: str,
    *overrides: str,
    variables: dict[str, str] | None = None,
    options: dict[str, tuple[str, str]] | None = None,
) -> ResolvedProfile:
    path = directory / "mine.yaml"
    path.write_text(text)
    return load(str(path), directories=[directory], variables=variables, overrides=overrides, options=options)


# -- layers ------------------------------------------------------------------------------------------------------------


def test_each_layer_wins_over_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(f"{BASE}transfer: {{batch_blocks: 1, max_concurrent: 1}}\n")
    child = "extends: parent\ntransfer: {batch_blocks: 2}\n"
    variables = {"DYN_KVBM_MAX_TRANSFER_BATCH_SIZE": "3"}
    batch = "transfer.batch_blocks"

    def blocks(resolved: ResolvedProfile) -> tuple[int, str]:
        return resolved.profile.transfer.batch_blocks, resolved.origins[batch]

    assert blocks(load_text(tmp_path, BASE)) == (16, "default")
    assert blocks(load_text(tmp_path, "extends: parent\n")) == (1, f"{tmp_path}/parent.yaml:6")
    assert blocks(load_text(tmp_path, child)) == (2, f"{tmp_path}/mine.yaml:2")
    assert blocks(load_text(tmp_path, child, variables=variables)) == (3, "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE")
    assert blocks(load_text(tmp_path, child, f"{batch}=4", variables=variables)) == (4, "--set")
    assert blocks(load_text(tmp_path, child, f"{batch}=4", f"{batch}=5")) == (5, "--set")
    assert load_text(tmp_path, child).profile.transfer.max_concurrent == 1


def test_an_option_wins_over_everything(tmp_path: Path) -> None:
    resolved = load_text(tmp_path, BASE, "server.port=1", options={"server.port": ("--port", "auto")})
    assert (resolved.profile.server.port, resolved.origins["server.port"]) == (0, "--port")


def test_origins_name_every_key(tmp_path: Path) -> None:
    origins = load_text(tmp_path, BASE).origins
    absent = [key.path for key in keys() if key.path.startswith(("tiers.disk.", "tiers.shared."))]
    present = [key.path for key in keys() if key.path in ("tiers.disk", "tiers.shared") or not key.is_section]
    assert list(origins) == [path for path in present if path not in absent]
    assert origins["engine.model"] == f"{tmp_path}/mine.yaml:2"
    assert origins["tiers.host.blocks"] == "default"


def test_environment_is_merged_by_name_and_each_has_an_origin(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text("engine: {model: m, environment: {A: x, B: 1}}\ntiers: {host: {blocks: 1}}\n")
    resolved = load_text(tmp_path, "extends: parent\nengine: {environment: {B: 2.5}}\n", "engine.environment.C=z")
    assert resolved.profile.engine.environment == {"A": "x", "B": "2.5", "C": "z"}
    assert resolved.origins["engine.environment.A"] == f"{tmp_path}/parent.yaml:1"
    assert resolved.origins["engine.environment.C"] == "--set"


def test_variables_keep_their_text(tmp_path: Path) -> None:
    text = BASE.replace("tiers:", "  environment: {A: 12.10, B: 1e3, C: 010, D: +5, E: 7}\ntiers:", 1)
    overrides = ("engine.environment.F=0.10", "engine.environment={G: 2.50}")
    environment = load_text(tmp_path, text, *overrides).profile.engine.environment
    assert " ".join(environment[name] for name in sorted(environment)) == "12.10 1e3 010 +5 7 0.10 2.50"


def test_home_is_expanded_in_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "parent.yaml").write_text(BASE)
    (tmp_path / "mine.yaml").write_text("extends: ~/parent.yaml\n")
    assert load("~/mine.yaml", directories=[]).profile == load(str(tmp_path / "parent.yaml"), directories=[]).profile


def test_an_empty_section_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(BASE)
    resolved = load_text(tmp_path, "extends: parent\ntiers:\ntransfer:\nengine:\n  environment:\n")
    assert resolved.profile.tiers.host.capacity == 2**30


def test_a_tier_that_is_null_takes_away_what_the_parent_has(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(f"{BASE}  disk: {{blocks: 5, threads: 2}}\n")
    assert load_text(tmp_path, "extends: parent\ntiers:\n  disk:\n").profile.tiers.disk is not None
    resolved = load_text(tmp_path, "extends: parent\ntiers:\n  disk: null\n")
    assert resolved.profile.tiers.disk is None
    assert resolved.origins["tiers.disk"] == f"{tmp_path}/mine.yaml:3"
    assert load_text(tmp_path, "extends: parent\n", "tiers.disk=null").values["tiers.disk"] is None
    again = load_text(tmp_path, "extends: parent\ntiers: {disk: ~}\n", "tiers.disk.blocks=7").profile.tiers.disk
    assert again is not None
    assert (again.blocks, again.threads) == (7, 4)


def test_a_key_that_is_null_is_not_set_whatever_the_parent_says(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(f"{BASE}bench: {{workload: chat}}\n")
    resolved = load_text(tmp_path, "extends: parent\nbench: {workload: null}\n")
    assert (resolved.profile.bench.workload, resolved.origins["bench.workload"]) == (None, f"{tmp_path}/mine.yaml:2")


def test_a_list_replaces_a_list_and_a_mapping_is_merged(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(
        "engine: {kind: vllm, model: m, arguments: {served_model_name: [a, b], hf_overrides: {x: 1, y: {z: 2}}}}\n"
        "tiers: {host: {blocks: 1}}\n"
    )
    child = "extends: parent\nengine: {arguments: {served_model_name: [c], hf_overrides: {y: {w: 3}}}}\n"
    arguments = load_text(tmp_path, child).profile.engine.arguments
    assert arguments.served_model_name == ["c"]
    assert arguments.hf_overrides == {"x": 1, "y": {"z": 2, "w": 3}}


def test_the_chain_of_parents_is_known(tmp_path: Path) -> None:
    (tmp_path / "grand.yaml").write_text(BASE)
    (tmp_path / "parent.yaml").write_text("extends: ./grand.yaml\n")
    extends = load_text(tmp_path, "extends: parent\n").extends
    assert [(source.written, source.line) for source in extends] == [("parent", 1), ("./grand.yaml", 1)]


def test_blocks_win_over_capacity_in_one_layer_and_a_later_capacity_wins_over_blocks(tmp_path: Path) -> None:
    both = f"{BASE}    blocks: 7\n"
    assert load_text(tmp_path, both).profile.tiers.host.blocks == 7
    variables = {"DYN_KVBM_CPU_CACHE_GB": "2"}
    assert load_text(tmp_path, both, variables=variables).profile.tiers.host.blocks is None
    variables["DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS"] = "9"
    assert load_text(tmp_path, both, variables=variables).profile.tiers.host.blocks == 9
    assert load_text(tmp_path, both, "tiers.host.capacity=3GB", variables=variables).profile.tiers.host.blocks is None


def test_a_chain_of_many_parents_is_read(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number}.yaml").write_text(f"extends: ./{number + 1}.yaml\n")
    (tmp_path / "300.yaml").write_text("engine: {model: m}\ntiers: {host: {blocks: 7}}\n")
    resolved = load(str(tmp_path / "0.yaml"), directories=[])
    assert (resolved.values["tiers.host.blocks"], len(resolved.extends)) == (7, 300)


def test_extends_takes_a_path_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "parent.yaml").write_text("extends: ../grand.yaml\nserver: {port: 1}\n")
    (tmp_path / "grand.yaml").write_text(f"{BASE}server: {{port: 2, host: '::1'}}\n")
    server = load_text(tmp_path, "extends: ./sub/parent.yaml\n").profile.server
    assert (server.host, server.port) == ("::1", 1)


def test_a_profile_survives_its_json(tmp_path: Path) -> None:
    profile = load_text(tmp_path, f"{BASE}    blocks: 5\n", "tiers.host.capacity=1.5GB", "server.port=auto").profile
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


def test_quotes_make_text_in_an_override(tmp_path: Path) -> None:
    assert load_text(tmp_path, BASE, "engine.model='123'").profile.engine.model == "123"
    assert load_text(tmp_path, BASE, "engine.model=a=b").profile.engine.model == "a=b"


def test_brackets_make_lists_and_mappings_in_an_override(tmp_path: Path) -> None:
    text = BASE.replace("engine:\n", "engine:\n  kind: vllm\n")
    names, environment = "engine.arguments.served_model_name=[a, 'b: c']", "engine.environment={A: 1, B: x}"
    resolved = load_text(tmp_path, text, names, environment, "engine.arguments.hf_overrides={x: [1, {y: true}]}")
    engine = resolved.profile.engine
    assert engine.arguments.served_model_name == ["a", "b: c"]
    assert engine.arguments.hf_overrides == {"x": [1, {"y": True}]}
    assert (engine.environment, resolved.origins["engine.environment.A"]) == ({"A": "1", "B": "x"}, "--set")


# -- several parents and files -----------------------------------------------------------------------------------------


def test_mistake_in_a_parent_is_shown_in_the_parent(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(f"{BASE}server: {{prt: 1}}\n")
    with pytest.raises(ProfileError) as caught:
        load_text(tmp_path, "extends: parent\n")
    assert caught.value.message.splitlines()[1] == f"  {tmp_path}/parent.yaml:6:10"


def test_of_several_parents_the_last_one_wins(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(f"{BASE}server: {{port: 1, host: 127.0.0.9}}\n")
    (tmp_path / "first.yaml").write_text("extends: base\nserver: {port: 2, host: 127.0.0.2}\n")
    (tmp_path / "last.yaml").write_text("extends: base\nserver: {port: 3}\n")
    for written in ("extends: [first, ./last.yaml]\n", "extends:\n- first\n- ./last.yaml\n"):
        found = load_text(tmp_path, written)
        assert (found.profile.server.port, found.profile.server.host) == (3, "127.0.0.2")
        assert found.origins["server.port"] == f"{tmp_path}/last.yaml:2"
        assert found.origins["server.host"] == f"{tmp_path}/first.yaml:2"
        assert [source.written for source in found.extends] == ["first", "base", "./last.yaml", "base"]


def test_of_several_files_the_last_one_wins_like_in_a_list_of_parents(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(f"{BASE}server: {{port: 1, host: 127.0.0.9}}\n")
    (tmp_path / "first.yaml").write_text("extends: base\nserver: {port: 2, host: 127.0.0.2}\n")
    (tmp_path / "last.yaml").write_text("extends: base\nserver: {port: 3}\n")
    files = [str(tmp_path / "first.yaml"), "last"]
    found = load(*files, directories=[tmp_path], variables={"DYN_KVBM_DISK_CACHE_GB": "1"})
    assert (found.profile.server.port, found.profile.server.host) == (3, "127.0.0.2")
    assert found.origins["server.host"] == f"{tmp_path}/first.yaml:2"
    assert found.values["tiers.disk.capacity"] == "1GB"
    assert (found.name, found.place) == ("first-last", f"{tmp_path}/first.yaml, {tmp_path}/last.yaml")
    assert found.profile == load_text(tmp_path, "extends: [first, last]\ntiers: {disk: {capacity: 1GB}}\n").profile
    assert load(*files, "base", directories=[tmp_path]).profile.server.port == 3, "base counts once, below both"


def test_mistake_of_one_of_several_files_has_its_place(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text("engine: {model: m}\n")
    (tmp_path / "storage.yaml").write_text("tiers: {disk: {capacity: 1}}\n")
    found = examine("model", "storage", directories=[tmp_path])
    assert [mistake.message.splitlines()[1] for mistake in found.mistakes] == [f"  {tmp_path}/storage.yaml:1:26"]


@pytest.mark.parametrize("extends", ["[]", "[[first]]", "[{a: b}]", "[first, '']"])
def test_list_of_something_else_than_names_is_an_error(tmp_path: Path, extends: str) -> None:
    (tmp_path / "first.yaml").write_text(BASE)
    with pytest.raises(ProfileError, match="must be the name or path of a profile, or a list of them"):
        load_text(tmp_path, f"extends: {extends}\n")


def test_circle_of_parents_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("extends: mine\n")
    with pytest.raises(ProfileError, match="`extends` forms a cycle"):
        load_text(tmp_path, "extends: other\n")


# -- variables ---------------------------------------------------------------------------------------------------------

HONOURED = {
    "DYN_KVBM_CPU_CACHE_GB": ("2.5", "tiers.host.capacity", 2_500_000_000),
    "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": (" 12 ", "tiers.host.blocks", 12),
    "DYN_KVBM_MAX_CONCURRENT_TRANSFERS": ("8", "transfer.max_concurrent", 8),
    "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE": ("32", "transfer.batch_blocks", 32),
    "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS": ("90", "transfer.init_timeout_s", 90),
    "DYN_KVBM_DISK_CACHE_GB": ("0.5", "tiers.disk.capacity", 500_000_000),
    "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": ("7", "tiers.disk.blocks", 7),
    "DYN_KVBM_DISK_CACHE_DIR": ("/mnt/kv", "tiers.disk.directory", "/mnt/kv"),
    "DYN_KVBM_DISK_ALLOCATOR_TYPE": ("open-direct", "tiers.disk.allocator", "open-direct"),
    "DYN_KVBM_DISK_ZEROFILL_FALLBACK": ("true", "tiers.disk.zerofill", True),
    "DYN_KVBM_DISK_DISABLE_O_DIRECT": ("1", "tiers.disk.o_direct", False),
    "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": ("yes", "offload.to_disk", "always"),
    "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY": ("0", "offload.min_priority", 0),
    "DYN_KVBM_METRICS": ("On", "metrics.serve", True),
    "DYN_KVBM_METRICS_PORT": ("7000", "metrics.port", 7000),
    "DYN_KVBM_METRICS_HOST": ("0.0.0.0", "metrics.host", "0.0.0.0"),
    "DYN_KVBM_CACHE_STATS_MAX_REQUESTS": ("50", "metrics.window_requests", 50),
    "DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS": ("0", "metrics.log_interval_s", 0.0),
    "DYN_KVBM_ENABLE_RECORD": ("1", "metrics.record", True),
    "ENABLE_KVBM_RECORD": ("yes", "metrics.record", True),
    "DYN_KVBM_ENABLE_NUMA": ("no", "transfer.numa", False),
    "DYN_MEMORY_DISABLE_NUMA": ("1", "transfer.numa", False),
    "DYN_KVBM_OBJECT_BUCKET": ("kv-cache", "tiers.shared.url", "s3://kv-cache"),
}


@pytest.mark.parametrize("name", HONOURED)
def test_variable_sets_its_key(tmp_path: Path, name: str) -> None:
    text, key, value = HONOURED[name]
    base = f"{BASE}  disk: {{blocks: 1}}\n" if ".disk." in key else f"{BASE}metrics: {{serve: true}}\n"
    resolved = load_text(tmp_path, base, variables={name: text, "UNRELATED": "x"})
    section, _, leaf = key.rpartition(".")
    holder = resolved.profile
    for part in section.split("."):
        holder = getattr(holder, part)
    assert getattr(holder, leaf) == value
    assert resolved.origins[key] == name
    assert resolved.warnings == ()


def test_table_of_honoured_variables_is_complete() -> None:
    switch = "DYN_KVBM_OBJECT_ENABLED"  # of a whole tier
    assert {variable.name for variable in VARIABLES if variable.key} == {*HONOURED, switch}


@given(st.decimals(min_value="0.001", max_value=10**6, places=3))
def test_cache_size_variable_takes_fractions_of_1e9_bytes(gigabytes: object) -> None:
    from kvbm.config.document import plain_values
    from kvbm.config.sizes import parse_size
    from kvbm.config.variables import read_variables

    document, _ = read_variables({"DYN_KVBM_CPU_CACHE_GB": str(gigabytes)})
    assert parse_size(plain_values(document)["tiers"]["host"]["capacity"]) == int(gigabytes * 10**9)  # type: ignore


@pytest.mark.parametrize("assignment", ["DISK_CACHE_GB=0", "ENABLE_RECORD=false", "METRICS=off"])
def test_variable_that_asks_for_nothing_is_not_refused(tmp_path: Path, assignment: str) -> None:
    name, _, value = assignment.partition("=")
    assert load_text(tmp_path, BASE, variables={f"DYN_KVBM_{name}": value}).warnings == ()


def test_override_of_zero_blocks_is_no_override(tmp_path: Path) -> None:
    resolved = load_text(tmp_path, BASE, variables={"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "0"})
    assert (resolved.profile.tiers.host.blocks, resolved.profile.tiers.host.capacity) == (None, 2**30)


def test_variable_that_nothing_reads_is_a_warning_with_the_reason(tmp_path: Path) -> None:
    variables = {"DYN_KVBM_ENABLE": "0", "DYN_KVBM_NIXL_BACKEND_UCX": "true", "DYN_KVBM_DISK_CACHE_DIR": "/mnt"}
    assert load_text(tmp_path, BASE, variables=variables).warnings == (
        "`DYN_KVBM_ENABLE` has no effect: no version reads it: `DYN_KVBM_ENABLE=0` disables nothing",
        "`DYN_KVBM_NIXL_BACKEND_UCX` has no effect: no released version reads it; set `tiers.disk.io` instead",
        "`DYN_KVBM_DISK_CACHE_DIR` has no effect: there is no disk tier without `DYN_KVBM_DISK_CACHE_GB` or "
        "`tiers.disk.capacity`",
    )


def test_secret_in_a_variable_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ProfileError) as caught:
        load_text(tmp_path, BASE, variables={"DYN_KVBM_OBJECTS_SECRET_KEY": "hunter2"})
    assert "DYN_KVBM_OBJECTS_SECRET_KEY=***" in caught.value.message


# -- any input ---------------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.sampled_from(["", "true", "1", "-1", "1e400", "1GB", "null", "[", "on", "embedded", "synthetic:tiny", "0.5"]),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12),
)
PATHS = st.sampled_from([key.path for key in keys()] + ["engine.environment.A", "tiers.disk", "a.b", ""])
NAMES = st.sampled_from([variable.name for variable in VARIABLES] + ["DYN_KVBM_", "DYN_KVBM_X", "PATH"])


@given(st.lists(st.tuples(PATHS, SCALARS), max_size=3), st.dictionaries(NAMES, SCALARS, max_size=3))
@example([("engine", "true"), ("engine.kind", "")], {})
def test_any_overrides_and_variables_give_a_profile_or_a_profile_error(
    tmp_path_factory: pytest.TempPathFactory, overrides: list[tuple[str, str]], variables: dict[str, str]
) -> None:
    directory = tmp_path_factory.getbasetemp()
    texts = [f"{path}={text}" for path, text in overrides]
    mistake = ""
    try:
        profile = load_text(directory, BASE, *texts, variables=variables).profile
        assert Profile.model_validate_json(profile.model_dump_json()) == profile
    except ProfileError as error:
        mistake = error.message
    assert "is not valid:" not in mistake, "words of pydantic's reached the user"
