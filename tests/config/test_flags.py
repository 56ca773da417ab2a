"""`engine.arguments` of vLLM: both spellings, layers and origins. Mistakes: test_profile_mistakes.py."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from test_load import load_text

from kvbm.config.engine import EmbeddedArguments, VllmArguments
from kvbm.config.schema import Profile
from kvbm.engines.table import examine
from kvbm.engines.vllm.flags import EMBEDDED_ONLY, KVBM_SETS
from kvbm.errors import ProfileError

HEAD = "engine:\n  kind: vllm\n  model: m\n  arguments:\n"
TAIL = "tiers: {host: {blocks: 1}}\n"
BASE = f"{HEAD}    max_model_len: 8192\n{TAIL}"


def arguments(directory: Path, text: str, *overrides: str) -> dict[str, object]:
    resolved = load_text(directory, text, *overrides)
    return dict(resolved.profile.engine.arguments.model_dump(exclude_none=True))


def test_engine_is_the_embedded_one_unless_the_profile_says_otherwise(tmp_path: Path) -> None:
    embedded = load_text(tmp_path, f"engine: {{model: m}}\n{TAIL}").profile.engine
    vllm = load_text(tmp_path, BASE).profile.engine
    assert (embedded.kind, type(embedded.arguments)) == ("embedded", EmbeddedArguments)
    assert (vllm.kind, type(vllm.arguments)) == ("vllm", VllmArguments)


FLAGS = yaml.safe_load(Path(__file__).with_name("vllm_flags.yaml").read_text())


@pytest.mark.parametrize("written", [str, lambda name: name.replace("-", "_")], ids=["hyphens", "underscores"])
def test_every_flag_of_vllm_is_accepted_except_those_that_kvbm_sets(tmp_path: Path, written) -> None:
    given_flags = {written(name): value for name, value in FLAGS.items()}
    text = yaml.safe_dump({"engine": {"kind": "vllm", "model": "m", "arguments": given_flags}}) + TAIL
    (tmp_path / "mine.yaml").write_text(text)
    refused = {mistake.key for mistake in examine(str(tmp_path / "mine.yaml"), directories=[], variables={}).mistakes}
    set_by_kvbm = {name for name in FLAGS if name.replace("-", "_") in KVBM_SETS}
    assert refused == {f"engine.arguments.{name.replace('-', '_')}" for name in set_by_kvbm}
    rest = {name: value for name, value in given_flags.items() if name.replace("_", "-") not in set_by_kvbm}
    made = arguments(tmp_path, yaml.safe_dump({"engine": {"kind": "vllm", "model": "m", "arguments": rest}}) + TAIL)
    assert made == {name.replace("-", "_"): value for name, value in rest.items()}


def test_flags_of_the_embedded_engine_alone_are_none_of_vllm() -> None:
    assert EMBEDDED_ONLY.keys() <= EmbeddedArguments.model_fields.keys()
    of_vllm = {name.replace("-", "_") for name in FLAGS}
    assert EmbeddedArguments.model_fields.keys() - of_vllm == EMBEDDED_ONLY.keys()


def test_hyphens_and_underscores_are_the_same_in_every_layer(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(f"{HEAD}    max-model-len: 1\n    swap-space: 4\n{TAIL}")
    child = "extends: parent\nengine: {arguments: {max_model_len: 2}}\n"
    assert arguments(tmp_path, "extends: parent\n") == {"max_model_len": 1, "swap_space": 4}
    assert arguments(tmp_path, child) == {"max_model_len": 2, "swap_space": 4}
    assert arguments(tmp_path, child, "engine.arguments.max-model-len=3")["max_model_len"] == 3


def test_flags_that_kvbm_does_not_read_have_origins_too(tmp_path: Path) -> None:
    text = f"{HEAD}    enforce-eager: true\n    compilation_config: {{level: 0}}\n{TAIL}"
    resolved = load_text(tmp_path, text, "engine.arguments.seed=7")
    origins = {name.removeprefix("engine.arguments."): origin for name, origin in resolved.origins.items()}
    assert origins["enforce_eager"] == f"{tmp_path}/mine.yaml:5"
    assert origins["compilation_config"] == f"{tmp_path}/mine.yaml:6"
    assert origins["seed"] == "--set"
    assert origins["max_model_len"] == "default"
    assert "num_blocks" not in origins


def test_json_valued_flags_are_merged_by_key(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(f"{HEAD}    compilation_config: {{level: 0, mode: a}}\n{TAIL}")
    child = "extends: parent\nengine: {arguments: {compilation_config: {mode: b}}}\n"
    made = arguments(tmp_path, child, "engine.arguments.compilation_config.cache_dir=/c")
    assert made == {"compilation_config": {"level": 0, "mode": "b", "cache_dir": "/c"}}


def test_a_profile_of_vllm_survives_its_json(tmp_path: Path) -> None:
    text = f"{HEAD}    a_list: [1, x, {{b: 2}}]\n    a-number: 0.5\n    max_model_len: 32k\n{TAIL}"
    profile = load_text(tmp_path, text).profile
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


@pytest.mark.parametrize("value", ["8192", "32k", "32K", "1.5M", "auto", "-1"])
def test_lengths_as_vllm_takes_them(tmp_path: Path, value: str) -> None:
    assert str(arguments(tmp_path, BASE, f"engine.arguments.max_model_len={value}")["max_model_len"]) == value


def test_mistake_in_an_override_is_shown_there(tmp_path: Path) -> None:
    with pytest.raises(ProfileError) as caught:
        load_text(tmp_path, BASE, "engine.arguments.model=x")
    assert caught.value.message == "`model` is set by kvbm\n  --set engine.arguments.model=x\n        " + "^" * 22


def test_unknown_key_of_the_engine_is_an_error_for_vllm_too(tmp_path: Path) -> None:
    with pytest.raises(ProfileError) as caught:
        load_text(tmp_path, BASE, "engine.modle=x")
    assert caught.value.message.startswith("unknown key `engine.modle`")
    assert caught.value.hint == "did you mean `model`?"


def test_flag_of_vllm_under_the_embedded_engine_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ProfileError) as caught:
        load_text(tmp_path, f"engine: {{model: m, arguments: {{gpu_memory_utilization: 0.5}}}}\n{TAIL}")
    assert caught.value.message.startswith("unknown key `engine.arguments.gpu_memory_utilization`")
    assert str(caught.value.hint).endswith("; flags of other engines require their `engine.kind`")


def test_transfer_configuration_may_repeat_what_kvbm_says(tmp_path: Path) -> None:
    ours = "{kv_connector: DynamoConnector, kv_connector_module_path: kvbm.vllm_integration.connector}"
    load_text(tmp_path, f"{HEAD}    kv_transfer_config: {ours}\n{TAIL}")


@pytest.mark.parametrize("name", KVBM_SETS)
def test_every_flag_that_kvbm_sets_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProfileError, match=f"`{name}` is set by kvbm"):
        load_text(tmp_path, BASE, f"engine.arguments.{name}=1")


NAMES = st.one_of(
    st.sampled_from([*VllmArguments.model_fields, *EmbeddedArguments.model_fields, *KVBM_SETS, "foo", "no_foo", "-x"]),
    st.text(st.characters(exclude_characters="\0.=", exclude_categories=["Cs"]), max_size=8),
)
SCALARS = st.one_of(
    st.sampled_from(["", "true", "false", "1", "-1", "1e400", "32k", "1GB", "null", "[", "auto", "a.b", "0.5", "'x'"]),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8),
)


@given(st.lists(st.tuples(NAMES, SCALARS), max_size=4))
def test_any_flags_give_a_plan_or_a_profile_error(
    tmp_path_factory: pytest.TempPathFactory, flags: list[tuple[str, str]]
) -> None:
    from kvbm.engines.vllm.launch import plan

    mistake = ""
    try:
        overrides = [f"engine.arguments.{name}={text}" for name, text in flags]
        profile = load_text(tmp_path_factory.getbasetemp(), BASE, *overrides).profile
    except ProfileError as error:
        mistake = error.message
    else:
        assert Profile.model_validate_json(profile.model_dump_json()) == profile
        assert all(isinstance(word, str) for word in plan(profile, connector=True, port=1).argv)
    assert "is not valid:" not in mistake, "words of pydantic's reached the user"
