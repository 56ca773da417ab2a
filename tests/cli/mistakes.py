"""Mistakes that users make, one row each: the command, the files, the variables and the machine that it is made with.

`test_mistakes.py` makes every one of them and compares what is said, word for word, with the entry of the row in
`snapshots/mistakes/<area>.txt`; `KVBM_UPDATE_SNAPSHOTS=1` writes that. A row of its own is worth a mistake that is
answered by words of its own.

A row that needs no file is only an entry, in `snapshots/mistakes/commands/`: its first line has the variables and the
command. To add one, write this line below a name, and let `KVBM_UPDATE_SNAPSHOTS=1` write what is said.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from terminal import SNAPSHOTS, stored_entries

COMMANDS = "commands"
WRONG = 2  # the profile, an override, a variable or the command line
MACHINE = 1  # the machine lacks something

MINE = """\
engine:
  model: synthetic:tiny
tiers:
  host:
    capacity: 256MiB
"""
VLLM = """\
engine:
  kind: vllm
  model: synthetic:vllm-25m
tiers:
  host:
    capacity: 256MiB
"""


def no_preparation(home: Path) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Row:
    """`command` is what stands behind `kvbm`; `files` lie in the working directory, which is the home too."""

    command: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    exit_code: int = WRONG
    prepare: Callable[[Path], AbstractContextManager[None]] = no_preparation

    def line(self, area: str) -> str:
        """What a shell gets. Variables are shown where nothing else says them."""
        variables = self.variables.items() if area.startswith(COMMANDS) else ()
        return "".join(f"{name}={shlex.quote(value)} " for name, value in variables) + f"kvbm {self.command}"

    def encoded(self, encoding: str) -> Row:
        """The same with the files in another encoding."""
        files = {name: text.encode(encoding) for name, text in self.files.items() if isinstance(text, str)}
        return replace(self, files=files)


def mine(added: str, *, base: str = MINE, command: str = "profile check mine.yaml", **rest: object) -> Row:
    """A profile with lines that are wrong."""
    return Row(command, {"mine.yaml": base + added}, **rest)  # type: ignore[arg-type]


def whole(
    text: str | bytes, *, name: str = "mine.yaml", others: Mapping[str, str] | None = None, **rest: object
) -> Row:
    """A profile that is this text, next to other files."""
    return Row(f"profile check {name}", {name: text, **(others or {})}, **rest)  # type: ignore[arg-type]


def engine(line: str, *, base: str = MINE) -> Row:
    """A profile whose engine has one more line, that is wrong."""
    return mine("", base=base.replace("tiers:", f"  {line}\ntiers:"))


def linked(*links: tuple[str, str]) -> Callable[[Path], AbstractContextManager[None]]:
    """Symbolic links in the working directory: name and target."""

    @contextmanager
    def prepared(home: Path) -> Iterator[None]:
        for name, target in links:
            (home / name).symlink_to(target)
        try:
            yield
        finally:
            for name, _ in links:
                (home / name).unlink()

    return prepared


LOOP = linked(("loop.yaml", "loop.yaml"), ("loop", "loop"))


@contextmanager
def fifo(home: Path) -> Iterator[None]:
    """A FIFO that no process writes."""
    os.mkfifo(home / "pipe.yaml")
    try:
        yield
    finally:
        (home / "pipe.yaml").unlink()


@contextmanager
def for_everyone(home: Path) -> Iterator[None]:
    (home / "all").mkdir()
    (home / "all").chmod(0o777)
    try:
        yield
    finally:
        (home / "all").rmdir()


@contextmanager
def taken_port(home: Path) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 18734)):
        yield


HERE, ELSEWHERE = True, False


def runs(*named: tuple[str, bool], **changes: object) -> Callable[[Path], AbstractContextManager[None]]:
    """Runs that live, in this process, or in one that only its lock shows: another machine with the same home."""

    @contextmanager
    def prepared(home: Path) -> Iterator[None]:
        from recorded_runs import NOBODY, facts

        from kvbm_cli.runs.run_directory import Runs

        directory = home / ".local/state/kvbm"
        (directory / "runs").mkdir(parents=True, exist_ok=True)
        made = []
        for profile, is_here in named:
            run = Runs(directory).create(profile)
            run.begin(facts(run.name, None if is_here else NOBODY, **changes))
            made.append(run)
        try:
            yield
        finally:
            for run in made:
                run.remove()
            for name in (".local/state/kvbm/runs", ".local/state/kvbm", ".local/state", ".local"):
                (home / name).rmdir()

    return prepared


PROFILE = {
    "profile_empty": whole(""),
    "profile_not_text_in_one_line": mine("", base=MINE + "description: caf\u00e9\n").encoded("latin-1"),
    "profile_utf_16": mine("").encoded("utf-16"),
    "profile_with_a_nul": mine("description: a\0b\n"),
    "profile_too_large": mine("# a comment\n" * 20_000),
    "profile_is_a_loop": Row("profile check loop.yaml", prepare=LOOP),
    "profile_is_a_fifo": Row("profile check pipe.yaml", prepare=fifo),
    "profile_merge_key": mine("server:\n  <<: {port: 9}\n"),
    "profile_model_is_a_loop": mine("", base=MINE.replace("synthetic:tiny", "./loop"), prepare=LOOP),
    "profile_model_is_a_file": mine("", base=MINE.replace("synthetic:tiny", "./mine.yaml")),
    "profile_workload_is_a_loop": mine("bench: {workload: ./loop.yaml}\n", prepare=LOOP),
    "profile_half_without_tiers": Row(
        "serve -p 'my model.yaml'", {"my model.yaml": "engine: {model: synthetic:tiny}\n"}
    ),
    "profile_misspelt_file": Row("profile check mien.yaml", {"mine.yaml": MINE}),
    "profile_file_without_its_path": Row("profile check mine", {"mine.yaml": MINE}),
    "profile_is_several_manifests": whole(
        "---\napiVersion: v1\nkind: Pod\n---\napiVersion: v1\nkind: Service\n", name="pods.yaml"
    ),
    "profile_is_values_of_a_chart": whole("servingEngineSpec:\n  modelSpec: []\n", name="values.yaml"),
    "profile_is_an_old_configuration_of_lmcache": whole("chunk_size: 256\nlocal_device: cpu\n"),
    "profile_is_a_recipe_of_vllm": whole("kv-cache-dtype: fp8\nmax-num-batched-tokens: 8192\n", name="recipe.yaml"),
    "profile_is_a_recipe_with_meta": whole(
        "meta: {title: Qwen3}\nmodel: {model_id: a/b}\nguide: text\n", name="recipe.yaml"
    ),
    "profile_is_a_kv_transfer_config": whole(
        '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}', name="kv.json"
    ),
    "profile_is_a_graph_of_dynamo": whole("Frontend: {port: 8000}\nVllmWorker: {model: a/b}\n", name="graph.yaml"),
    "profile_is_of_tensorrt_llm_without_a_cache": whole(
        "tensor_parallel_size: 8\ncache_transceiver_config: {backend: NIXL}\n"
    ),
    "profile_is_another_file": whole(
        "description: a dashboard\npanels: []\nrefresh: 5s\n$schema: a\nv1.2: b\n", name="config.yaml"
    ),
    "profile_is_a_template_of_helm": whole(
        "{{- if .Values.redis }}\napiVersion: v1\nkind: Pod\n{{- end }}\n", name="pod.yaml"
    ),
    "profile_key_that_is_a_name_with_a_dot": mine("Llama-3.1-8B: 1\n"),
    "flag_with_an_empty_text": whole(
        "engine:\n  kind: vllm\n  model: Qwen/Qwen3-8B\n"
        '  arguments:\n    enable-auto-tool-choice: ""\ntiers: {host: {capacity: 1GiB}}\n'
    ),
    "profile_is_a_manifest": whole("apiVersion: v1\nkind: Pod\nspec: {}\n", name="pod.yaml"),
    "profile_is_a_compose_file": Row("serve -p mine.yaml", {"mine.yaml": "services:\n  vllm: {image: a}\n"}),
    "profile_is_of_lmcache": whole("chunk_size: 256\nlocal_cpu: true\n"),
    "profile_is_of_vllm": whole("model: a/b\ntensor-parallel-size: 2\n"),
    "profile_is_of_tensorrt_llm": whole("kv_cache_config: {}\n"),
    "profile_is_of_a_model": whole('{"architectures": ["A"], "model_type": "llama"}', name="config.json"),
    "profile_is_an_env_file": whole("DYN_KVBM_CPU_CACHE_GB=100\nA=b\n", name="kvbm.env"),
    "profile_file_without_a_suffix": whole(MINE + "server: {prt: 1}\n", name="mine"),
    "profile_in_json": whole('{"engine": {"model": "synthetic:tiny"}}\n', name="mine.json"),
    "profile_is_a_list": whole("- engine\n- tiers\n"),
    "profile_is_json_with_a_trailing_bracket": whole('{"engine": {}}}\n'),
    "profile_tab": mine("\tport: 1\n"),
    "profile_tab_after_a_colon": mine("server:\n  port:\t1\n"),
    "profile_no_break_space_after_a_colon": mine("server:\n  host:\u00a0localhost\n  port: 1\n"),
    "profile_no_break_spaces_in_the_indentation": mine("server:\n\u00a0 port: 1\n\u00a0 host: a\n"),
    "profile_no_break_space_at_the_end": mine("server: {prt: 1}\n", base=MINE.replace("256MiB", "256MiB\u00a0")),
    "profile_zero_width_space_in_a_key": mine("server: {po\u200brt: 1}\n"),
    "profile_byte_order_mark_in_the_middle": mine("\ufeffserver: {port: 1}\n"),
    "profile_line_separator": mine("server: {port: 1}\u2028metrics: {prt: 1}\n"),
    "profile_typographic_quotes": mine("", base=MINE.replace("256MiB", "\u201c256MiB\u201d")),
    "profile_typographic_quotes_around_a_colon": mine("server: {host: \u201ca: b\u201d}\nmetrics: {prt: 1}\n"),
    "profile_open_quote": mine('server: {host: "::1}\n'),
    "profile_colon_without_space": mine("server:\n  port:8000\n"),
    "profile_wrong_indentation": whole("engine:\n  model: m\n tiers:\n  host: {blocks: 1}\n"),
    "profile_anchor": mine("server: &a {port: 1}\nmetrics: *a\n"),
    "profile_tag": mine("server: !port {port: 1}\n"),
    "profile_two_documents": mine("---\nserver: {port: 1}\n"),
    "profile_key_twice": mine("server: {port: 1}\nserver: {port: 2}\n"),
    "profile_misspelt_key": mine("server: {prt: 1}\n"),
    "profile_keys_in_camel_case": mine(
        "onboard: {diskTimeoutS: 2}\noffload: {toDisk: always}\nmetrics: {Serve: true}\n"
    ),
    "profile_key_of_another_section": mine("port: 1\n"),
    "profile_key_with_a_dot": mine("server.port: 1\n"),
    "profile_other_name": mine("  cpu: {capacity: 1GiB}\n"),
    "profile_key_like_no_other": mine("    zzz: 1\n"),
    "profile_flag_of_vllm_for_the_embedded_engine": engine("arguments: {enforce_eager: true}"),
    "profile_flag_of_the_embedded_engine_for_vllm": engine("arguments: {num_blocks: 9}", base=VLLM),
    "profile_flag_that_kvbm_sets": engine("arguments: {port: 9}", base=VLLM),
    "profile_flag_with_hyphens": engine("arguments: {--seed: 9}", base=VLLM),
    "profile_flag_in_camel_case": engine("arguments: {maxModelLen: 64, enableLoRA: true}", base=VLLM),
    "profile_flags_as_a_list": engine("arguments: [--max-model-len=64, --seed=1]", base=VLLM),
    "profile_flags_as_a_text": engine("arguments: --enforce-eager --seed 1", base=VLLM),
    "profile_section_as_a_list": mine("server: [{port: 1}]\n"),
    "profile_flag_in_capitals": engine("arguments: {MAX_MODEL_LEN: 64}", base=VLLM),
    "profile_flag_negated": engine("arguments: {no-enforce-eager: true}", base=VLLM),
    "profile_flag_twice": engine("arguments: {a-b: 1, a_b: 2}", base=VLLM),
    "profile_flag_without_a_value": engine("arguments: {enforce_eager: }", base=VLLM),
    "profile_connector_of_disaggregation": engine(
        "arguments: {kv_transfer_config: {kv_connector: PdConnector, kv_role: kv_both}}", base=VLLM
    ),
    "profile_connector_of_several": engine(
        "arguments: {kv_transfer_config: {kv_connector: MultiConnector, kv_role: kv_both}}", base=VLLM
    ),
    "profile_connector_in_quotes": engine(
        """arguments: {kv-transfer-config: '{"kv_connector": "PdConnector"}'}""", base=VLLM
    ),
    "profile_another_connector": engine("arguments: {kv_transfer_config: {kv_connector: LMCache}}", base=VLLM),
    "profile_no_model": whole("engine: {kind: vllm}\ntiers: {host: {blocks: 9}}\n"),
    "profile_no_tier": mine("", base="engine: {model: synthetic:tiny}\n"),
    "profile_tier_without_a_size": mine("  disk: {threads: 2}\n"),
    "profile_size_without_a_unit": mine("", base=MINE.replace("256MiB", "64")),
    "profile_size_with_an_unknown_unit": mine("", base=MINE.replace("256MiB", "64 Mbit")),
    "profile_size_in_gigs": mine("", base=MINE.replace("256MiB", "1gigs")),
    "profile_size_of_kubernetes": mine("", base=MINE.replace("256MiB", "1Gi")),
    "profile_size_in_gibibytes_in_words": mine("", base=MINE.replace("256MiB", "1.5 gibibytes")),
    "profile_size_with_a_unit_of_two_meanings": mine("", base=MINE.replace("256MiB", "512m")),
    "profile_size_of_zero": mine("", base=MINE.replace("256MiB", "0GB")),
    "profile_size_below_a_block": mine("", base=MINE.replace("256MiB", "1KB")),
    "profile_boolean_in_quotes": mine("offload: {generated: 'true'}\n"),
    "profile_values_in_two_kinds_of_quotes": mine("server: {port: '\"8000\"'}\noffload: {to_disk: \"'always'\"}\n"),
    "profile_boolean_in_words": mine("offload: {generated: yes}\n"),
    "profile_number_in_quotes": mine("server: {port: '8000'}\n"),
    "profile_port_too_large": mine("server: {port: 80000}\n"),
    "profile_negative_time": mine("onboard: {disk_timeout_s: -1}\n"),
    "profile_allocator_of_a_file_system": mine("  disk: {capacity: 1GiB, allocator: ibm-scale}\n"),
    "profile_type_of_other_tools": engine("arguments: {dtype: bf16}"),
    "profile_choice_nearly_right": mine("onboard: {policy: allways}\n"),
    "profile_value_for_a_section": mine("server: 8000\n"),
    "profile_section_for_a_value": mine("server: {port: {number: 8000}}\n"),
    "profile_list_for_a_value": mine("server: {host: [127.0.0.1]}\n"),
    "profile_relative_directory": mine("  disk: {capacity: 1GiB, directory: cache}\n"),
    "profile_name_of_a_variable": engine("environment: {A-B: x}"),
    "profile_boolean_in_the_environment": engine("environment: {A: true}"),
    "profile_engine_nearly_right": mine("", base=VLLM.replace("kind: vllm", "kind: vlm")),
    "profile_sglang_without_disk": mine("", base=VLLM.replace("kind: vllm", "kind: sglang")),
    **{
        f"profile_sglang_{name}": mine(
            "  disk: {capacity: 1GB}\n",
            base=f"engine:\n  kind: sglang\n  model: synthetic:vllm-25m\n  arguments: {{{flag}}}\ntiers:\n",
        )
        for name, flag in (
            ("without_its_host_memory", "enable_hierarchical_cache: false"),
            ("with_a_layout_that_is_not_stored", "hicache_mem_layout: page_first_kv_split"),
            ("with_decode_context_parallelism", "dcp_size: 2"),
            ("with_split_heads", "hicache_storage_backend_extra_config: {tp_lcm_size: 8}"),
        )
    },
    "profile_object_tier": mine("  object: {bucket: b}\n"),
    "profile_filters": mine("filters: {frequency: 2}\n"),
    "profile_priorities": mine("offload: {min_priority: 10}\n"),
    "profile_disaggregated_half": mine("disaggregated: {prefill: 1}\n", base=VLLM),
    "profile_disaggregated_embedded": mine("disaggregated: {prefill: 1, decode: 1}\n"),
    "profile_port_of_metrics": mine("metrics: {serve: true, port: 8000}\n"),
    "profile_unknown_synthetic_model": mine("", base=MINE.replace("tiny", "tinny")),
    "profile_no_such_model": mine("", base=MINE.replace("synthetic:tiny", "./models/qwen")),
    "profile_length_beyond_the_model": engine("arguments: {max_model_len: 1M}", base=VLLM),
    "profile_unknown_workload": mine("bench: {workload: chatt}\n"),
    "profile_several_mistakes": Row(
        "profile check mine.yaml",
        {
            "mine.yaml": "extends: ./parent.yaml\nserver: {prt: 1}\ntiers: {host: {capacity: 64}}\n",
            "parent.yaml": MINE + "offload: {to_disk: sometimes}\n",
        },
        {"DYN_KVBM_CPU_CACHE_GB": "lots"},
    ),
    "profile_several_mistakes_as_json": mine(
        "server: {prt: 1}\noffload: {generated: on}\n", command="profile check mine.yaml --json"
    ),
}

EXTENDS = {
    "extends_nothing": whole("extends:\n"),
    "extends_a_list_of_lists": whole("extends: [[demo]]\n"),
    "extends_a_misspelt_name": whole("extends: vlm\n"),
    "extends_no_file": whole("extends: ../no.yaml\n"),
    "extends_a_misspelt_file": whole("extends: ./parnt.yaml\n", others={"parent.yaml": MINE}),
    "extends_a_file_without_its_path": whole("extends: parent\n", others={"parent.yaml": MINE}),
    "extends_a_directory": whole("extends: ./\n"),
    "extends_a_fifo": whole("extends: ./pipe.yaml\n", prepare=fifo),
    "extends_a_loop": whole("extends: ./loop.yaml\n", prepare=LOOP),
    "extends_a_name_too_long": whole(f"extends: ./{'a' * 300}.yaml\n"),
    "extends_itself": whole("extends: ./mine.yaml\n"),
    "extends_in_a_circle": whole(
        "extends: ./b.yaml\n", others={"b.yaml": "extends: ./c.yaml\n", "c.yaml": "extends: ./a.yaml\n"}, name="a.yaml"
    ),
    "extends_a_file_that_is_wrong": whole(
        "extends: ./parent.yaml\n", others={"parent.yaml": MINE + "server: {hots: a}\n"}
    ),
    "extends_a_file_that_is_no_yaml": whole(
        "extends: ./parent.yaml\nserver: {port: x}\n", others={"parent.yaml": "engine: [\n"}
    ),
    "extends_another_kind_of_engine": whole("extends: vllm\nengine: {kind: embedded}\n"),
}

INTERPOLATION = {
    "interpolation_not_set": mine("", base=MINE.replace("synthetic:tiny", "${MODELS}/tiny")),
    "interpolation_of_a_number": mine("server: {port: '${PORT}'}\n", variables={"PORT": "8000"}),
    "interpolation_without_quotes": mine("server: {host: ${HOST}}\n"),
    "interpolation_without_brackets": mine("", base=MINE.replace("synthetic:tiny", "$HOME/tiny")),
    "interpolation_of_another_form": mine("", base=MINE.replace("synthetic:tiny", '"${MODEL:?none}"')),
    "interpolation_of_a_wrong_value": mine(
        "  disk: {capacity: 1GiB, directory: '${CACHE}'}\n", variables={"CACHE": "relative"}
    ),
}

MANIFEST = """\
apiVersion: v1
kind: Pod
metadata: {name: a}
spec:
  containers:
"""


def imported(name: str, contents: str | bytes) -> Row:
    return Row(f"profile import {name}", {name: contents})


IMPORT = {
    "import_of_text_in_another_encoding": imported("a.sh", b"vllm serve caf\xe9\n"),
    "import_of_a_large_file": imported("a.sh", "# a line\n" * 40_000),
    "import_of_a_file_without_an_engine": imported("web.yaml", "services:\n  web: {image: nginx}\n"),
    "import_of_a_profile": imported("mine.yaml", MINE),
    "import_of_a_template": imported("a.yaml", f"{{{{- if .Values.a }}}}\n{MANIFEST}{{{{- end }}}}\n"),
    "import_of_broken_yaml": imported("a.yaml", f"{MANIFEST}  - name: [a\n"),
    "import_of_an_open_quote": imported("a.sh", "A=1\nvllm serve 'a/b\n"),
    "import_of_aliases_that_grow": imported(
        "a.yaml", "a: &a0 [x, x]\n" + "".join(f"b{at}: &a{at} [*a{at - 1}, *a{at - 1}]\n" for at in range(1, 30))
    ),
    "import_of_an_engine_that_is_not_there": Row(
        "profile import a.sh --select chat", {"a.sh": "vllm serve a/b\nvllm serve c/d\n"}
    ),
    "import_into_a_file_without_a_suffix": Row("profile import a.sh --output mine", {"a.sh": "vllm serve a/b\n"}),
}

COMMAND_LINE = {
    "override_with_a_zero_width_space": Row("profile check demo --set tiers.host.capacity=1GiB\u200b"),
    "variable_with_export": Row("profile check demo", variables={"export DYN_KVBM_CPU_CACHE_GB": "4"}),
    "import_env_into_a_file_that_is_there": Row(
        "profile import-env --output mine.yaml", {"mine.yaml": MINE}, {"DYN_KVBM_CPU_CACHE_GB": "1"}
    ),
    "variable_port_of_metrics_taken": Row(
        "serve --profile demo --port 0",
        variables={"DYN_KVBM_METRICS": "1", "DYN_KVBM_METRICS_PORT": "18734"},
        exit_code=MACHINE,
        prepare=taken_port,
    ),
    "command_arm_with_a_wrong_key": Row(
        "bench --profile demo --compare ./mine.yaml", {"mine.yaml": MINE + "server: {prt: 1}\n"}
    ),
    "new_of_a_file_that_is_there": Row(
        "profile new mine.yaml --engine vllm --model org/model --host 1GiB", {"mine.yaml": MINE}
    ),
}

LONG_PATH = f"/{'d' * 200}" * 17
MACHINE_STATE = {
    "machine_no_interpreter": engine("python: /opt/none/bin/python"),
    "machine_directory_is_a_file": mine("  disk: {capacity: 1GiB, directory: ~/mine.yaml}\n"),
    "machine_directory_of_recordings_is_a_file": mine("metrics: {record: true, record_directory: ~/mine.yaml}\n"),
    "machine_directory_with_a_name_too_long": mine(f"  disk: {{capacity: 1GiB, directory: ~/{'a' * 300}}}\n"),
    "machine_directory_below_a_loop": mine("  disk: {capacity: 1GiB, directory: ~/loop/a}\n", prepare=LOOP),
    "machine_directory_with_a_long_path": mine(f"  disk: {{capacity: 1GiB, directory: {LONG_PATH}}}\n"),
    "machine_directory_for_everyone": mine("  disk: {capacity: 1GiB, directory: ~/all}\n", prepare=for_everyone),
    "machine_address_of_another": mine("server: {host: 192.0.2.1}\n"),
    "machine_port_taken": mine(
        "", command="serve --profile mine.yaml --port 18734", exit_code=MACHINE, prepare=taken_port
    ),
    "machine_port_of_the_profile_taken": mine(
        "server:\n  port: 18734\n", command="serve --profile mine.yaml", exit_code=MACHINE, prepare=taken_port
    ),
    "machine_disk_that_is_too_small": mine(
        "  disk:\n    capacity: 9000TB\n", command="serve --profile mine.yaml", exit_code=MACHINE
    ),
    "machine_disk_that_is_too_small_for_blocks": mine(
        "  disk:\n    capacity: 1GB\n",
        command="serve --profile mine.yaml --set tiers.disk.blocks=1000000000000",
        exit_code=MACHINE,
    ),
}

DEMO = "serve --profile demo --port 0"
FIVE = {
    "mine.yaml": MINE.replace("synthetic:tiny", "./models/qwen")
    + "  disk: {capacity: 1Gi}\nserver: {host: 192.0.2.1, prt: 1}\nbench: {workload: chatt}\n"
}
SERVING = {
    "serve_with_mistakes_of_the_file_and_of_the_machine": Row("serve --profile mine.yaml", FIVE),
    "check_of_the_same": Row("profile check mine.yaml", FIVE),
    "bench_of_the_same": Row("bench --profile mine.yaml", FIVE),
    "serve_port_of_a_starting_engine": Row(
        "serve --profile demo", exit_code=MACHINE, prepare=runs(("other", HERE), state="starting")
    ),
    "serve_without_memory_beside_others": Row(
        DEMO, exit_code=MACHINE, prepare=runs(("other", HERE), state="starting", memory_bytes=1 << 50)
    ),
    "serve_log_below_a_file": Row(f"{DEMO} --log mine.yaml/log", {"mine.yaml": MINE}, exit_code=MACHINE),
    "serve_log_is_a_loop": Row(f"{DEMO} --log loop", exit_code=MACHINE, prepare=LOOP),
    "serve_log_is_a_fifo": Row(f"{DEMO} --log pipe.yaml", exit_code=MACHINE, prepare=fifo),
    "stop_a_misspelt_run": Row("stop dmo-1", prepare=runs(("demo", HERE))),
    "stop_one_of_two": Row("stop demo", prepare=runs(("demo", HERE), ("demo", HERE))),
    "stop_on_another_machine": Row("stop", exit_code=MACHINE, prepare=runs(("demo", ELSEWHERE))),
    "logs_of_two": Row("logs --follow", prepare=runs(("demo", HERE), ("other", HERE))),
    "logs_that_are_gone": Row("logs demo", exit_code=MACHINE, prepare=runs(("demo", HERE), state="ended")),
}

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
BURST_GPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
)
LFS_POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123\n"
FAILED = '{"timestamp": 0, "input_length": 9, "output_length": 0}\n'


def workload(name: str, contents: str) -> Row:
    return Row(f"bench --profile demo --workload {name}", {name: contents})


def trace(contents: str | bytes, name: str = "t.jsonl") -> Row:
    """A trace that is none."""
    return Row(f"bench trace {name}", {name: contents})


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def config(**changes: object) -> Row:
    """A configuration of a model with other facts."""
    return Row("size ./config.json", {"config.json": json.dumps({**QWEN3, **changes})})


def scheme(**given: object) -> Row:
    """A checkpoint of compressed-tensors whose KV cache is quantized."""
    quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": given}
    return replace(config(quantization_config=quantization), exit_code=MACHINE)


VLLM_BENCH = '{"backend": "vllm", "num_prompts": 9, "request_throughput": 1.5, "mean_ttft_ms": 30.1}'
AIPERF = '{"time_to_first_token": {"unit": "ms", "avg": 30.1}, "request_count": {"avg": 9}}'
GUIDELLM = '{"metadata": {}, "benchmarks": [{"metrics": {}}]}'
LMBENCHMARK = "prompt_tokens,generation_tokens,ttft,generation_time,user_id\n1,2,3,4,5\n"


def result(name: str, contents: str) -> Row:
    """A result of another tool."""
    return Row(f"bench report ./{name}", {name: contents})


RESULTS = {
    "result_of_vllm_bench": result("vllm.json", VLLM_BENCH),
    "result_of_a_client_made_from_vllm_bench": result(
        "x.json", '{"request_throughput": 0.5, "total_output_tokens": 9, "median_ttft": 4.4}'
    ),
    "result_of_aiperf": Row("bench diff ./a.json ./b.json", {"a.json": AIPERF, "b.json": AIPERF}),
    "result_of_guidellm": result("g.json", GUIDELLM),
    "result_of_lmbenchmark": result("summary.csv", LMBENCHMARK),
    "result_in_a_directory": Row("bench report .", {"profile_export_aiperf.json": AIPERF}),
    "result_of_nobody_known": result("x.json", "{}"),
    "result_file_of_a_run": Row("bench report ./summary.json", {"summary.json": "{}", "plan.json": "{}"}),
}

SIZE = {
    "size_layers_without_end": config(num_hidden_layers=10**12),
    "size_heads_in_quotes": config(num_key_value_heads="8"),
    "size_number_of_many_digits": config(head_dim=10**400),
    "size_scheme_of_integers": scheme(type="int", num_bits=8, strategy="tensor", symmetric=True),
    "size_scheme_of_channels": scheme(type="float", num_bits=8, strategy="channel", symmetric=True),
    "size_scheme_not_symmetric": scheme(type="float", num_bits=8, strategy="tensor", symmetric=False),
    "size_config_without_a_model_type": replace(config(model_type=None), exit_code=MACHINE),
    "size_cache_type_that_only_vllm_knows": replace(
        config(quantization_config={"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}), exit_code=MACHINE
    ),
    "size_config_is_an_lfs_pointer": Row("size ./config.json", {"config.json": LFS_POINTER}),
}

TRACE = {
    "trace_azure": trace(AZURE.replace("374", "-"), "azure.csv"),
    "trace_burst_gpt": trace(BURST_GPT.replace("\n5,", "\nnow,"), "burst.csv"),
    "trace_other_csv": trace("a,b\n1,2\n"),
    "trace_lfs_pointer": trace(LFS_POINTER, "t.jsonl.gz"),
    "trace_parquet": trace(b"PAR1\x15\x04", "t.parquet"),
    "trace_web_page": trace("<!DOCTYPE html>\n<html>\n"),
    "trace_one_list": trace('[{"instruction": "x"}]', "alpaca.json"),
    "trace_of_sessions": trace('{"id": "a", "hash_id_scope": "local", "requests": [{"t": 0.0, "in": 64, "out": 3}]}\n'),
    "trace_share_gpt": trace('{"id": "a", "conversations": [{"from": "human", "text": "x"}]}\n'),
    "trace_of_a_batch": trace('{"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n'),
    "trace_prompts": trace('{"prompt": "What is the capital of India?"}\n'),
    "trace_other_names": trace('{"prompt_tokens": 5, "at": 3}\n'),
    "trace_with_other_names_for_lengths": trace('{"timestamp": 5, "num_prompt_tokens": 5, "num_decode_tokens": 3}\n'),
    "trace_only_failed_requests": trace(2 * FAILED),
    "trace_as_a_workload": workload("t.jsonl", 2 * FAILED),
    "trace_of_csv_with_comments": trace("# Format\n# one, two\nfield,type\na,gauge\n", "metrics.csv"),
    "trace_of_lmbenchmarks_agents": trace('{"round_id":0,"agent_id":[0],"output_tokens":[9],"input_from":[[]]}\n'),
    "trace_of_lmbenchmarks_agents_as_a_workload": workload(
        "demo.jsonl", '{"round_id":0,"agent_id":[0],"output_tokens":[9],"input_from":[[]]}\n'
    ),
    "trace_of_one_long_list_as_a_workload": workload("chats.json", '[{"conversations": []}' + " " * (1 << 17) + "]"),
    "values_of_a_chart_as_a_workload": workload("values.yaml", "replicaCount: 2\nimage: {repository: a}\n"),
    "profile_as_a_workload": workload("mine.yaml", MINE),
    "other_file_as_a_workload": workload("mine.yaml", "pages: 2\n"),
    "workload_with_commas_in_its_first_comment": workload("mine.yaml", "# users, turns, tokens\nkind: nothing\n"),
    "trace_of_azure_as_a_workload": workload("azure.csv", AZURE),
    "price_list_is_missing": Row("bench --profile demo --price none.yaml"),
    "price_list_without_the_engine": Row(
        "bench --profile demo --price p.yaml", {"p.yaml": "memory_price: 3\nengine_prise: 2\n"}
    ),
    "price_list_with_a_unit": Row("bench --profile demo --price p.yaml", {"p.yaml": "engine_price: 2 EUR\n"}),
    "trace_of_a_workload_is_wrong": Row(
        "bench --profile demo --dry-run --workload w.yaml",
        {"w.yaml": "name: w\nkind: trace\nfile: t.jsonl\n", "t.jsonl": '{"input_length": -1}\n'},
    ),
}

AREAS: dict[str, dict[str, Row]] = {
    "serve": SERVING,
    "profile": PROFILE,
    "extends": EXTENDS,
    "interpolation": INTERPOLATION,
    "import": IMPORT,
    "command": COMMAND_LINE,
    "machine": MACHINE_STATE,
    "trace": TRACE,
    "size": SIZE,
    "result": RESULTS,
}


def commands_in(file: str) -> dict[str, Row]:
    """The rows of a file of commands: the first line of an entry is such as `$ PORT=1 kvbm serve --profile demo`."""
    rows = {}
    for name, text in stored_entries(file).items():
        line, _, result = text.removeprefix("$ ").partition("\n")
        variables, _, command = line.partition("kvbm ")
        exit_code = int(result.partition("\n")[0].removeprefix("exit code: ") or WRONG)
        rows[name] = Row(command, {}, dict(word.split("=", 1) for word in shlex.split(variables)), exit_code)
    return rows


for file in sorted((SNAPSHOTS / "mistakes" / COMMANDS).iterdir()):
    AREAS[f"{COMMANDS}/{file.stem}"] = commands_in(f"mistakes/{COMMANDS}/{file.stem}")
ROWS = {name: row for rows in AREAS.values() for name, row in rows.items()}
AREA_OF = {name: area for area, rows in AREAS.items() for name in rows}


def make_files(row: Row, home: Path) -> None:
    for name, contents in row.files.items():
        (home / name).write_bytes(contents if isinstance(contents, bytes) else contents.encode())


LOCK = (".local", "state", "kvbm", "runs", "lock")  # is empty, and lies there from the first start on


def what_lies_in(home: Path) -> dict[str, bytes | None]:
    """Every file with its contents, and every directory, but for the lock of the run directories."""
    expected = {str(home.joinpath(*LOCK[:depth])) for depth in range(1, len(LOCK) + 1)}
    found: dict[str, bytes | None] = {}
    for directory, directories, files in os.walk(home):
        found |= {os.path.join(directory, name): None for name in directories}
        found |= {os.path.join(directory, name): Path(directory, name).read_bytes() for name in files}
    return {path: contents for path, contents in found.items() if path not in expected or contents}
