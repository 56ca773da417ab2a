"""Layers and origins, and every mistake that a profile, a variable or an override can hold, with its exact words."""

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


# -- mistakes in a file ------------------------------------------------------------------------------------------------

FILE_MISTAKES = {
    "misspelt key": (
        "engine: {model: m}\ntiers:\n  host:\n    capcity: 1GB\n",
        "unknown key `tiers.host.capcity`\n  FILE:4:5\n    |\n  4 |     capcity: 1GB\n    |     ^^^^^^^",
        "did you mean `capacity`?",
    ),
    "key of another section": (
        f"{BASE}num_blocks: 5\n",
        "unknown key `num_blocks`\n  FILE:6:1\n    |\n  6 | num_blocks: 5\n    | ^^^^^^^^^^",
        "did you mean `engine.arguments.num_blocks`?",
    ),
    "key like no other": (
        f"{BASE}    zzz: 5\n",
        "unknown key `tiers.host.zzz`\n  FILE:6:5\n    |\n  6 |     zzz: 5\n    |     ^^^",
        "keys of `tiers.host`: `capacity`, `blocks`, `eviction`, `managed_by`",
    ),
    "engine flag like no other": (
        f"{BASE}qqqq: 5\n",
        "unknown key `qqqq`\n  FILE:6:1\n    |\n  6 | qqqq: 5\n    | ^^^^",
        "keys of a profile: `description`, `engine`, `tiers`, `offload`, `onboard`, `transfer`, `server`, `metrics`, "
        "`events`, `disaggregated`, `bench`",
    ),
    "size without unit": (
        "engine: {model: m}\ntiers: {host: {capacity: 100}}\n",
        "`tiers.host.capacity` requires a unit, such as `100GB` or `100GiB`\n"
        "  FILE:2:26\n    |\n  2 | tiers: {host: {capacity: 100}}\n    |                          ^^^",
        None,
    ),
    "size that is none": (
        "engine: {model: m}\ntiers: {host: {capacity: much}}\n",
        "`tiers.host.capacity` must be a size such as 100GB or 64GiB, not `much`\n"
        "  FILE:2:26\n    |\n  2 | tiers: {host: {capacity: much}}\n    |                          ^^^^",
        None,
    ),
    "size that is a boolean": (
        "engine: {model: m}\ntiers: {host: {capacity: true}}\n",
        "`tiers.host.capacity` must be a size such as 100GB or 64GiB\n"
        "  FILE:2:26\n    |\n  2 | tiers: {host: {capacity: true}}\n    |                          ^^^^",
        None,
    ),
    "second hit without a history": (
        f"{BASE}    eviction: lru\noffload: {{to_host: second_hit}}\n",
        "`offload.to_host` `second_hit` requires `tiers.host.eviction: adaptive`, which knows earlier uses\n"
        "  FILE:7:20\n    |\n  7 | offload: {to_host: second_hit}\n    |                    ^^^^^^^^^^",
        None,
    ),
    "copies before evictions of an engine that shows none": (
        f"{BASE}offload: {{to_host: on_evict}}\n",
        "`offload.to_host` `on_evict` requires `vllm`: `embedded` does not say which blocks it evicts next\n"
        "  FILE:6:20\n    |\n  6 | offload: {to_host: on_evict}\n    |                    ^^^^^^^^",
        None,
    ),
    "copies before evictions without host memory": (
        "engine: {kind: vllm, model: m}\ntiers: {disk: {capacity: 1GB, directory: /d}}\noffload: {to_host: on_evict}\n",
        "`offload.to_host` `on_evict` requires `tiers.host`: without it, host memory is only a buffer\n"
        "  FILE:3:20\n    |\n  3 | offload: {to_host: on_evict}\n    |                    ^^^^^^^^",
        None,
    ),
    "copies before evictions for a store that takes blocks earlier": (
        "engine: {kind: vllm, model: m}\ntiers: {host: {blocks: 1}, shared: {url: s3://b/p, protection: none}}\n"
        "offload: {to_host: on_evict}\n",
        "`offload.to_host` `on_evict` requires `tiers.shared.write: false`: the store takes the blocks of a request at "
        "its end\n"
        "  FILE:3:20\n    |\n  3 | offload: {to_host: on_evict}\n    |                    ^^^^^^^^",
        None,
    ),
    "boolean that is not one": (
        f"{BASE}offload: {{generated: on}}\n",
        "`offload.generated` must be true or false, not the text `on`\n"
        "  FILE:6:22\n    |\n  6 | offload: {generated: on}\n    |                      ^^",
        "write `true`",
    ),
    "number in quotes": (
        f'{BASE}server: {{port: "8000"}}\n',
        "`server.port` must be a whole number or `auto`, not the text `8000`\n"
        '  FILE:6:16\n    |\n  6 | server: {port: "8000"}\n    |                ^^^^^^',
        "remove the quotes",
    ),
    "fraction for a count": (
        f"{BASE}transfer: {{batch_blocks: 1.5}}\n",
        "`transfer.batch_blocks` must be a whole number, not `1.5`\n"
        "  FILE:6:26\n    |\n  6 | transfer: {batch_blocks: 1.5}\n    |                          ^^^",
        None,
    ),
    "boolean for a count": (
        f"{BASE}transfer: {{batch_blocks: true}}\n",
        "`transfer.batch_blocks` must be a whole number, not true\n"
        "  FILE:6:26\n    |\n  6 | transfer: {batch_blocks: true}\n    |                          ^^^^",
        None,
    ),
    "count too small": (
        f"{BASE}transfer: {{batch_blocks: 0}}\n",
        "`transfer.batch_blocks` must be at least 1, not `0`\n"
        "  FILE:6:26\n    |\n  6 | transfer: {batch_blocks: 0}\n    |                          ^",
        None,
    ),
    "port too large": (
        f"{BASE}server: {{port: 65536}}\n",
        "`server.port` must be at most 65535, not `65536`\n"
        "  FILE:6:16\n    |\n  6 | server: {port: 65536}\n    |                ^^^^^",
        None,
    ),
    "time that is zero": (
        f"{BASE}transfer: {{init_timeout_s: 0}}\n",
        "`transfer.init_timeout_s` must be more than 0, not `0`\n"
        "  FILE:6:28\n    |\n  6 | transfer: {init_timeout_s: 0}\n    |                            ^",
        None,
    ),
    "time that is infinite": (
        f"{BASE}transfer: {{init_timeout_s: 1e999}}\n",
        "`transfer.init_timeout_s` must be a number, not `inf`\n"
        "  FILE:6:28\n    |\n  6 | transfer: {init_timeout_s: 1e999}\n    |                            ^^^^^",
        None,
    ),
    "time that is text": (
        f"{BASE}transfer: {{init_timeout_s: soon}}\n",
        "`transfer.init_timeout_s` must be a number, not the text `soon`\n"
        "  FILE:6:28\n    |\n  6 | transfer: {init_timeout_s: soon}\n    |                            ^^^^",
        None,
    ),
    "choice that is none": (
        "engine: {model: m, arguments: {dtype: int8}}\ntiers: {host: {blocks: 1}}\n",
        "`engine.arguments.dtype` must be 'float32', 'bfloat16' or 'float16', not the text `int8`\n"
        "  FILE:1:39\n    |\n  1 | engine: {model: m, arguments: {dtype: int8}}\n"
        "    |                                       ^^^^",
        None,
    ),
    "model that is a number": (
        "engine: {model: 7}\ntiers: {host: {blocks: 1}}\n",
        "`engine.model` must be text, not `7`\n  FILE:1:17\n    |\n  1 | engine: {model: 7}\n    |                 ^",
        None,
    ),
    "model that is empty": (
        "engine: {model: ''}\ntiers: {host: {blocks: 1}}\n",
        "`engine.model` must not be empty\n  FILE:1:17\n    |\n  1 | engine: {model: ''}\n    |                 ^^",
        None,
    ),
    "model without a value": (
        "engine:\n  model:\ntiers: {host: {blocks: 1}}\n",
        "`engine.model` must be text, not empty\n  FILE:2:9\n    |\n  2 |   model:\n    |         ^",
        None,
    ),
    "list for a value": (
        f"{BASE}server: {{host: [a]}}\n",
        "`server.host` must be text, not a list\n"
        "  FILE:6:16\n    |\n  6 | server: {host: [a]}\n    |                ^^^",
        None,
    ),
    "value for a section": (
        f"{BASE}server: 8000\n",
        "`server` must be a section with keys, not `8000`\n  FILE:6:9\n    |\n  6 | server: 8000\n    |         ^^^^",
        None,
    ),
    "section for a value": (
        f"{BASE}server:\n  port:\n    number: 8000\n",
        "`server.port` must be a whole number or `auto`, not a section\n  FILE:7:3\n    |\n  7 |   port:\n    |   ^^^^",
        None,
    ),
    "boolean in the environment": (
        "engine: {model: m, environment: {A: true}}\ntiers: {host: {blocks: 1}}\n",
        "`engine.environment.A` must be text, not a boolean: write `'true'` or `'1'`\n"
        "  FILE:1:37\n    |\n  1 | engine: {model: m, environment: {A: true}}\n"
        "    |                                     ^^^^",
        None,
    ),
    "name in the environment that is none": (
        "engine: {model: m, environment: {A-B: x}}\ntiers: {host: {blocks: 1}}\n",
        "`engine.environment.A-B` must be a name of letters, digits and underscores, not the text `A-B`\n"
        "  FILE:1:34\n    |\n  1 | engine: {model: m, environment: {A-B: x}}\n"
        "    |                                  ^^^",
        None,
    ),
    "engine that is none": (
        "engine: {kind: vlm, model: m}\ntiers: {host: {blocks: 1}}\n",
        "`engine.kind` must be 'embedded' or 'vllm' or 'tensorrt-llm' or 'sglang', not the text `vlm`\n"
        "  FILE:1:16\n    |\n  1 | engine: {kind: vlm, model: m}\n    |                ^^^",
        "did you mean `vllm`?",
    ),
    "SGLang without a tier below its own memory": (
        "engine: {kind: sglang, model: m}\ntiers: {host: {blocks: 1}}\n",
        "`tiers.disk` is required with `sglang`, which has host memory of its own; or set `tiers.shared`\n"
        "  FILE:2:1\n    |\n  2 | tiers: {host: {blocks: 1}}\n    | ^^^^^",
        None,
    ),
    "flag of another engine for SGLang": (
        "engine: {kind: sglang, model: m, arguments: {block_size: 16}}\ntiers: {disk: {blocks: 9}}\n",
        "`block_size` is not a flag of SGLang\n"
        "  FILE:1:46\n    |\n  1 | engine: {kind: sglang, model: m, arguments: {block_size: 16}}\n"
        "    |                                              ^^^^^^^^^^",
        "write `page_size`",
    ),
    "misspelt flag of SGLang": (
        "engine: {kind: sglang, model: m, arguments: {page_sise: 16}}\ntiers: {disk: {blocks: 9}}\n",
        "`page_sise` is not a flag of SGLang\n"
        "  FILE:1:46\n    |\n  1 | engine: {kind: sglang, model: m, arguments: {page_sise: 16}}\n"
        "    |                                              ^^^^^^^^^",
        "did you mean `page_size`?",
    ),
    "flag of SGLang that kvbm sets": (
        "engine: {kind: sglang, model: m, arguments: {enable-metrics: true}}\ntiers: {disk: {blocks: 9}}\n",
        "`enable_metrics` is set by kvbm\n"
        "  FILE:1:46\n    |\n  1 | engine: {kind: sglang, model: m, arguments: {enable-metrics: true}}\n"
        "    |                                              ^^^^^^^^^^^^^^",
        "remove it; kvbm always sets it, to read the server's counters",
    ),
    "name that SGLang refuses": (
        "engine: {kind: sglang, model: m, arguments: {served_model_name: 'a:b'}}\ntiers: {disk: {blocks: 9}}\n",
        "`served_model_name` has a colon, which SGLang refuses\n"
        "  FILE:1:46\n    |\n  1 | engine: {kind: sglang, model: m, arguments: {served_model_name: 'a:b'}}\n"
        "    |                                              ^^^^^^^^^^^^^^^^^",
        "write a name without a colon",
    ),
    "cache beside that of SGLang": (
        "engine: {kind: sglang, model: m, arguments: {enable_lmcache: true}}\ntiers: {disk: {blocks: 9}}\n",
        "`enable_lmcache` cannot be used\n"
        "  FILE:1:46\n    |\n  1 | engine: {kind: sglang, model: m, arguments: {enable_lmcache: true}}\n"
        "    |                                              ^^^^^^^^^^^^^^",
        "remove it: kvbm stores what SGLang's hierarchical cache hands down",
    ),
    "disk without a size": (
        f"{BASE}  disk:\n    io: nixl\n",
        "`tiers.disk` requires `capacity` or `blocks`\n  FILE:6:3\n    |\n  6 |   disk:\n    |   ^^^^",
        None,
    ),
    "disk in a relative directory": (
        f"{BASE}  disk: {{blocks: 1, directory: cache}}\n",
        "`tiers.disk.directory` must be an absolute path or start with `~`, not `cache`\n"
        "  FILE:6:32\n    |\n  6 |   disk: {blocks: 1, directory: cache}\n    |                                ^^^^^",
        None,
    ),
    "empty disk": (
        f"{BASE}  disk:\n",
        "`tiers.disk` requires `capacity` or `blocks`\n  FILE:6:3\n    |\n  6 |   disk:\n    |   ^^^^",
        None,
    ),
    "object tier": (
        f"{BASE}  object: {{bucket: b}}\n",
        "`tiers.object` is not supported in this version\n"
        "  FILE:6:3\n    |\n  6 |   object: {bucket: b}\n    |   ^^^^^^",
        "use `tiers.shared`",
    ),
    "filters": (
        f"{BASE}filters:\n",
        "`filters` is not supported in this version\n  FILE:6:1\n    |\n  6 | filters:\n    | ^^^^^^^",
        "use the section `offload`",
    ),
    "metrics at the engine's port": (
        f"{BASE}server: {{port: 6880}}\nmetrics: {{serve: true}}\n",
        "`metrics.port` must differ from `server.port`\n  FILE:7:1\n    |\n  7 | metrics: {serve: true}\n    | ^^^^^^^",
        None,
    ),
    "nothing": (
        "",
        "2 mistakes\n`engine` is missing\n  FILE\n  (add `engine.model`, such as `synthetic:tiny`)\n"
        "`tiers` is missing\n  FILE\n  (add `tiers.host.capacity`, such as `64GiB`)",
        None,
    ),
    "no model": (
        "engine: {kind: embedded}\ntiers: {host: {blocks: 1}}\n",
        "`engine.model` is missing\n  FILE",
        "add `engine.model`, such as `synthetic:tiny`",
    ),
    "no tier": (
        "engine: {model: m}\n",
        "`tiers` is missing\n  FILE",
        "add `tiers.host.capacity`, such as `64GiB`, or add a profile with tiers: "
        "`kvbm profile check -p DIR/mine.yaml -p storage/large-ssd`",
    ),
    "no host tier": (
        "engine: {model: m}\ntiers:\n",
        "`tiers` requires `host`, `disk` or both\n  FILE:2:1\n    |\n  2 | tiers:\n    | ^^^^^",
        "add `tiers.host.capacity`, such as `64GiB`",
    ),
    "host tier without a size": (
        "engine: {model: m}\ntiers:\n  host: {}\n",
        "`tiers.host` requires `capacity` or `blocks`\n  FILE:3:3\n    |\n  3 |   host: {}\n    |   ^^^^",
        None,
    ),
    "extends nothing": (
        "extends:\n",
        "`extends` must be the name or path of a profile, or a list of them\n"
        "  FILE:1:9\n    |\n  1 | extends:\n    |         ^",
        None,
    ),
    "extends a stranger": (
        "extends: min\n",
        "no profile is named `min`\n  FILE:1:10\n    |\n  1 | extends: min\n    |          ^^^",
        "did you mean `mine`? For a file, give its path: `./min.yaml`",
    ),
    "extends no file": (
        "extends: ./other.yaml\n",
        "`extends`: cannot read `DIR/other.yaml`: no such file or directory\n"
        "  FILE:1:10\n    |\n  1 | extends: ./other.yaml\n    |          ^^^^^^^^^^^^",
        None,
    ),
    "extends itself": (
        "extends: mine\n",
        "`extends` forms a cycle: mine.yaml -> mine.yaml\n  FILE:1:10\n    |\n  1 | extends: mine\n    |          ^^^^",
        None,
    ),
}


@pytest.mark.parametrize("name", FILE_MISTAKES)
def test_mistake_in_a_file(tmp_path: Path, name: str) -> None:
    text, message, hint = FILE_MISTAKES[name]
    with pytest.raises(ProfileError) as caught:
        load_text(tmp_path, text)
    shown = caught.value.message.replace(f"{tmp_path}/mine.yaml", "FILE").replace("`FILE`", "`DIR/mine.yaml`")
    assert shown.replace(str(tmp_path), "DIR") == message
    assert (caught.value.hint and caught.value.hint.replace(str(tmp_path), "DIR")) == hint


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


UNREADABLE = {
    "unknown name": (
        "dem",
        "no profile is named `dem`",
        "did you mean `demo`? For a file, give its path: `./dem.yaml`",
    ),
    "name like no other": (
        "zz",
        "no profile is named `zz`",
        "shipped profiles: `binary`, `demo`; for a file, give its path",
    ),
    "misspelt file": (
        "DIR/dmo.yaml",
        "cannot read the profile `DIR/dmo.yaml`: no such file or directory",
        "did you mean `DIR/demo.yaml`?",
    ),
    "missing file": ("DIR/no.yaml", "cannot read the profile `DIR/no.yaml`: no such file or directory", None),
    "endless file": ("/dev/zero", "cannot read the profile `/dev/zero`: it is larger than 128 KiB", None),
    "directory": ("DIR/", "cannot read the profile `DIR`: is a directory", None),
    "not text": ("DIR/binary.yaml", "cannot read the profile `DIR/binary.yaml`: it is UTF-16 text, not UTF-8", None),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_profile_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    reference, message, hint = UNREADABLE[name]
    (tmp_path / "demo.yaml").write_text(BASE)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError) as caught:
        load(reference.replace("DIR", str(tmp_path)), directories=[tmp_path])
    said = [text and text.replace(str(tmp_path), "DIR") for text in (caught.value.message, caught.value.hint)]
    assert said == [message, hint]


# -- mistakes in overrides and variables -------------------------------------------------------------------------------

OVERRIDE_MISTAKES = {
    "tiers.host.capcity=1GB": (
        "unknown key `tiers.host.capcity`\n  --set tiers.host.capcity=1GB\n        ^^^^^^^^^^^^^^^^^^",
        "did you mean `capacity`?",
    ),
    "server.port=70000": (
        "`server.port` must be at most 65535, not `70000`\n  --set server.port=70000\n                    ^^^^^",
        None,
    ),
    "server.port=": (
        "`server.port` must be a whole number or `auto`, not empty\n  --set server.port=\n                    ^",
        None,
    ),
    "server=x": (
        "`server` must be a section with keys, not the text `x`\n  --set server=x\n               ^",
        None,
    ),
    "server.port.x=1": (
        "`server.port` must be a whole number or `auto`, not a section\n  --set server.port.x=1\n        ^^^^^^^^^^^^^",
        None,
    ),
    "server.port": (
        "`--set` requires KEY=VALUE, not `server.port`\n  --set server.port\n        ^^^^^^^^^^^",
        "for example `--set tiers.host.capacity=2GB`",
    ),
    "server..port=1": (
        "`--set` requires KEY=VALUE, not `server..port=1`\n  --set server..port=1\n        ^^^^^^^^^^^^^^",
        "for example `--set tiers.host.capacity=2GB`",
    ),
    "extends=demo": (
        "`--set` cannot set `extends`\n  --set extends=demo\n        ^^^^^^^",
        "write `extends` into a profile file",
    ),
    "server={prt: 1}": (
        "unknown key `server.prt`\n  --set server={prt: 1}\n                ^^^",
        "did you mean `port`?",
    ),
    "server.host=[a": (
        "not valid YAML: a bracket is not closed\n  --set server.host=[a\n                      ^",
        None,
    ),
    "tiers.disk.io=thread": (
        "`tiers.disk.io` must be 'threads', 'nixl', 'gds' or 'auto', not the text `thread`\n"
        "  --set tiers.disk.io=thread\n                      ^^^^^^",
        "did you mean `threads`?",
    ),
    "engine.interpreter=python3": (
        "unknown key `engine.interpreter`\n  --set engine.interpreter=python3\n        ^^^^^^^^^^^^^^^^^^",
        "did you mean `engine.python`?",
    ),
    "tiers.disk.io=uring": (
        "`tiers.disk.io` must be 'threads', 'nixl', 'gds' or 'auto', not the text `uring`\n"
        "  --set tiers.disk.io=uring\n                      ^^^^^",
        None,
    ),
}


@pytest.mark.parametrize("override", OVERRIDE_MISTAKES)
def test_mistake_in_an_override(tmp_path: Path, override: str) -> None:
    message, hint = OVERRIDE_MISTAKES[override]
    with pytest.raises(ProfileError) as caught:
        load_text(tmp_path, BASE, override)
    assert (caught.value.message, caught.value.hint) == (message, hint)


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


VARIABLE_MISTAKES = {
    "DYN_KVBM_CPU_CACHE_GB=lots": (
        "`DYN_KVBM_CPU_CACHE_GB` must be a number of GB (1e9 bytes), fractions allowed, not `lots`\nVALUE",
        None,
    ),
    "DYN_KVBM_CPU_CACHE_GB=-1": (
        "`DYN_KVBM_CPU_CACHE_GB` must be a number of GB (1e9 bytes), fractions allowed, not `-1`\nVALUE",
        None,
    ),
    "DYN_KVBM_CPU_CACHE_GB=nan": (
        "`DYN_KVBM_CPU_CACHE_GB` must be a number of GB (1e9 bytes), fractions allowed, not `nan`\nVALUE",
        None,
    ),
    "DYN_KVBM_CPU_CACHE_GB=100GB": (
        "`DYN_KVBM_CPU_CACHE_GB` must be a number of GB (1e9 bytes), fractions allowed, not `100GB`\nVALUE",
        None,
    ),
    "DYN_KVBM_CPU_CACHE_GB=0": (
        "`tiers` requires `host`, `disk` or both\nVALUE",
        "add `tiers.host.capacity`, such as `64GiB`",
    ),
    "DYN_KVBM_CPU_CACHE_GB=": (
        "`DYN_KVBM_CPU_CACHE_GB` is empty\nVALUE",
        "`unset DYN_KVBM_CPU_CACHE_GB`, or set a value",
    ),
    "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS=1.5": (
        "`DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS` must be a whole number, not `1.5`\nVALUE",
        None,
    ),
    "DYN_KVBM_MAX_CONCURRENT_TRANSFERS=0": (
        "`transfer.max_concurrent` must be at least 1, not `0`\nVALUE",
        None,
    ),
    "DYN_KVBM_CPU_CACHE_GIB=1": (
        "unknown variable `DYN_KVBM_CPU_CACHE_GIB`\nNAME",
        "did you mean `DYN_KVBM_CPU_CACHE_GB`?",
    ),
    "DYN_KVBM_WHATEVER=1": ("unknown variable `DYN_KVBM_WHATEVER`\nNAME", "`unset DYN_KVBM_WHATEVER`"),
    "DYN_KVBM_DISK_CACHE_GB=0.5TB": (
        "`DYN_KVBM_DISK_CACHE_GB` must be a number of GB (1e9 bytes), fractions allowed, not `0.5TB`\nVALUE",
        None,
    ),
    "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY=30": (
        "`offload.min_priority` requires an engine that sends priorities, but `embedded` sends none; remove it\nVALUE",
        None,
    ),
    "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY=101": (
        "`offload.min_priority` must be at most 100, not `101`\nVALUE",
        None,
    ),
    "DYN_KVBM_ENABLE_RECORD=maybe": (
        "`DYN_KVBM_ENABLE_RECORD` must be one of 1, true, yes, on, 0, false, no, off, not `maybe`\nVALUE",
        None,
    ),
}


@pytest.mark.parametrize("assignment", VARIABLE_MISTAKES)
def test_mistake_in_a_variable(tmp_path: Path, assignment: str) -> None:
    name, _, value = assignment.partition("=")
    message, hint = VARIABLE_MISTAKES[assignment]
    under_value = f"  {assignment}\n  {' ' * (len(name) + 1)}{'^' * max(1, len(value))}"
    under_name = f"  {assignment}\n  {'^' * len(name)}"
    with pytest.raises(ProfileError) as caught:
        load_text(tmp_path, BASE, variables={name: value})
    assert caught.value.message == message.replace("VALUE", under_value).replace("NAME", under_name)
    assert caught.value.hint == hint


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
