"""The command lines of profiles, read by vLLM's own parser: every kind of value arrives as it was meant."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvbm_serve import PROGRAM

pytest.importorskip("vllm")

from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvbm.config.engine import VllmArguments
from kvbm.config.schema import Profile
from kvbm.engines.installation import Installation
from kvbm.engines.python_probe import find
from kvbm.engines.table import load
from kvbm.engines.vllm.flags import KVBM_SETS
from kvbm.engines.vllm.launch import JSON_LISTS, ONLY_ON, REPEATED, SERVER_MODULE, _flag, plan
from kvbm.engines.vllm.versions import PACKAGE, is_known, lacks
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.profile.import_launch import name_of, value_count

WITH_SCRIPT = Installation("0.32.0", "vllm", "/venv/bin/vllm", has_kvbm=True)
ARGUMENTS: dict[str, Any] = {
    "max_model_len": "8K",
    "dtype": "float32",
    "served_model_name": ["a", "b"],
    "compilation_config": {"mode": 0},
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "hf_overrides": {"a": 1},
    "cudagraph_capture_sizes": [1, 2],
    "kv_cache_memory_bytes": "256M",
    "num_gpu_blocks_override": 66,
    "middleware": ["a.B", "c.D"],
    "enforce-eager": True,
    "gpu_memory_utilization": 0.5,
    "allowed_origins": ["*"],
    "scheduling_policy": "fcfs",
    "kv_transfer_config": {"engine_id": "e"},
}


def parser() -> Any:
    names = (f"vllm.entrypoints.{folder}" for folder in ("common", "launchers", "openai"))
    package = next(
        name for name in names if importlib.util.find_spec(name) and importlib.util.find_spec(f"{name}.cli_args")
    )
    return importlib.import_module(f"{package}.cli_args").make_arg_parser(FlexibleArgumentParser())


def actions():
    return parser()._actions  # argparse lists them nowhere else


def parsed(profile: Profile, installation: Installation | None) -> Any:
    """What vLLM makes of the words behind its command, or behind its module."""
    argv = plan(profile, connector=True, port=8001, installation=installation).argv
    start = 2 if installation is not None else argv.index(SERVER_MODULE) + 1
    return parser().parse_args(list(argv[start:]))


@pytest.mark.parametrize("installation", [WITH_SCRIPT, None], ids=["vllm serve", "module"])
def test_every_kind_of_value_arrives_as_it_was_meant(installation: Installation | None) -> None:
    profile = Profile.model_validate(
        {
            "engine": {"kind": "vllm", "model": "m", "arguments": ARGUMENTS},
            "tiers": {"host": {"capacity": "1GiB"}},
        }
    )
    seen = parsed(profile, installation)
    assert (seen.model_tag if installation else seen.model) == "m"
    assert (seen.host, seen.port) == ("127.0.0.1", 8001)
    assert (seen.max_model_len, seen.kv_cache_memory_bytes) == (8192, 256 * 2**20)
    assert (seen.dtype, seen.gpu_memory_utilization) == ("float32", 0.5)
    assert (seen.enable_prefix_caching, seen.enforce_eager, seen.disable_log_stats) == (False, True, False)
    assert (seen.served_model_name, seen.cudagraph_capture_sizes) == (["a", "b"], [1, 2])
    assert (seen.middleware, seen.allowed_origins) == (["a.B", "c.D"], ["*"])
    assert (seen.hf_overrides, int(seen.compilation_config.mode)) == ({"a": 1}, 0)
    assert (seen.shutdown_timeout, seen.enable_prompt_tokens_details) == (10, True)
    transfer = seen.kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_role, transfer.engine_id) == ("DynamoConnector", "kv_both", "e")
    contents = profile.connector_config().model_dump(mode="json")
    assert transfer.kv_connector_extra_config == {"kvbm": contents}


def test_flags_that_kvbm_knows_by_name_exist_and_take_what_it_thinks() -> None:
    options = [(option, action) for action in actions() for option in action.option_strings]
    by_name = {option.removeprefix("--"): action for option, action in options if option.startswith("--")}
    known = {*VllmArguments.model_fields, *ONLY_ON, *REPEATED, *JSON_LISTS}
    assert {name for name in known if name.replace("_", "-") not in by_name} == set()
    without_a_value = {name for name, action in by_name.items() if type(action).__name__ == "_StoreTrueAction"}
    repeated = {name for name, action in by_name.items() if type(action).__name__ == "_AppendAction"}
    assert {name.replace("_", "-") for name in ONLY_ON | KVBM_SETS.keys()} >= without_a_value
    assert {name.replace("_", "-") for name in REPEATED} == repeated


@pytest.mark.filterwarnings("ignore:--log-config-file is deprecated")
def test_every_flag_that_profiles_are_tested_with_is_one_of_this_vllm_and_is_parsed() -> None:
    flags = yaml.safe_load((Path(__file__).parents[1] / "config/vllm_flags.yaml").read_text())
    options = {option for action in actions() for option in action.option_strings if option.startswith("--")}
    assert flags.keys() == {option.removeprefix("--") for option in options if not option.startswith("--no-")}
    parsed_here = flags.keys() - {"help", "config"}  # one ends the program, the other names a file
    words = [word for name in parsed_here for word in _flag(name.replace("-", "_"), flags[name])]
    parser().parse_args(words)


def test_the_importer_knows_names_and_numbers_of_values_of_this_parser() -> None:
    flags = [(word, action) for action in actions() for word in action.option_strings]
    numbers = {word[2:].replace("-", "_"): action.nargs for word, action in flags if word.startswith("--")}
    counts = {name: {0: 0, "*": 2, "+": 2}.get(number, 1) for name, number in numbers.items()}
    assert {name: min(value_count(name, "vllm"), 2) for name in counts} == counts
    short = {
        word: next(one for one in action.option_strings if one.startswith("--"))[2:].replace("-", "_")
        for word, action in flags
        if not word.startswith("--") and word not in ("-h", "-O")
    }
    assert {word: name_of(word) for word in short} == short


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu-demo", "vllm-hybrid-cpu-demo"])
def test_shipped_profile_is_understood(name: str) -> None:
    profile = load(name, directories=[profiles_directory()]).profile
    seen = parsed(profile, None)
    assert seen.max_model_len == profile.engine.arguments.max_model_len


def test_the_command_for_vllms_own_offloading_is_understood(tmp_path: Path) -> None:
    factory = pytest.importorskip(
        "vllm.v1.kv_offload.tiering.factory", reason="this vLLM has no tiers"
    ).SecondaryTierFactory
    options = ("--dry-run", "--json", "--set", f"engine.python={sys.executable}")
    printed = subprocess.run(
        [*PROGRAM, "serve", "--profile", "vllm-native", *options],
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert printed.returncode == 0, printed.stderr
    argv = json.loads(printed.stdout)["argv"]
    start = argv.index(SERVER_MODULE) + 1 if SERVER_MODULE in argv else 2
    transfer = parser().parse_args(argv[start:]).kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_role) == ("OffloadingConnector", "kv_both")
    extra = transfer.kv_connector_extra_config
    assert extra["cpu_bytes_to_use"] > 0
    assert [factory.get_tier_class(tier).__name__ for tier in extra["secondary_tiers"]] == ["KvbmTier"]


def test_flags_read_from_the_source_are_those_of_the_parser() -> None:
    options = {option for action in actions() for option in action.option_strings if option.startswith("--")}
    names = {option.removeprefix("--").replace("-", "_") for option in options if not option.startswith("--no-")}
    found = find(sys.executable, PACKAGE)
    assert found is not None
    assert {*found.flags, "help"} == names
    assert not lacks(found, "max_model_len")
    assert lacks(found, "max_modl_len")


def test_this_interpreter_has_a_vllm_that_kvbm_knows() -> None:
    import vllm

    found = find(sys.executable, PACKAGE)
    assert found is not None
    assert found.version == vllm.__version__ or found.version.partition("+")[0] in vllm.__version__
    assert found.has_kvbm
    assert is_known(found.version)
    assert found.script is None or Path(found.script).is_file()
