"""`kvbm profile import`: what it makes of each kind of file, and that no input breaks it or loses a flag silently.

`imported/` has files with the keys and the shape of those that NVIDIA, vLLM's production-stack, llm-d, KServe and
TensorRT-LLM publish. The profiles are entries of `snapshots/imported.txt`.
"""

import contextlib
import json
import os
import re
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from terminal import HANGS_S, PROGRAM, Outcome, assert_entry, assert_said, given_in, kvbm, kvbm_here, stored_entries

from kvbm.errors import KvbmError
from kvbm_cli.profile.import_file import launches_in, recognised
from kvbm_cli.profile.import_launch import value_count
from kvbm_cli.profile.import_profile import imported, kind_of

FILES = Path(__file__).parent / "imported"
ENTRIES = list(stored_entries("imported"))  # a file, and the name of an engine unless it is the first
CASES = [(*entry.split(), None)[:2] for entry in ENTRIES]
SECRETS = ("hf_0123456789abcdefghij", "hunter2", "sk-very-secret", "wJalrXUtnFEMI", "user:password")


def imported_here(file: str, name: str | None, home: Path, *options: str) -> Outcome:
    (home / file).write_text((FILES / file).read_text())
    select = () if name is None else ("--select", name)
    return kvbm_here("profile", "import", file, *select, *options, home=home)


@pytest.mark.parametrize(("file", "name"), CASES, ids=ENTRIES)
def test_profile_passes_the_check_or_says_what_is_missing(tmp_path, file, name):
    outcome = imported_here(file, name, tmp_path)
    entry = " ".join(filter(None, (file, name)))
    assert_entry("imported", entry, outcome.text(f"kvbm profile import {entry}"), names=ENTRIES)
    assert outcome.exit_code == 0
    assert not [secret for secret in SECRETS if secret in outcome.stdout + outcome.stderr]
    (tmp_path / "made.yaml").write_text(outcome.stdout)
    checked = kvbm_here("profile", "check", "made.yaml", home=tmp_path)
    missing = re.findall(r"^`([\w.]+)` is missing", outcome.stderr, re.MULTILINE)
    refused = re.findall(r"^error: `([\w.]+)`", checked.stderr, re.MULTILINE)
    assert (checked.exit_code, refused) == (2 if missing else 0, missing), checked.stderr


def test_entries_are_those_of_the_files():
    assert {path.name for path in FILES.iterdir()} == {file for file, _ in CASES}


def test_program_reads_the_standard_input(tmp_path):
    line = "DYN_KVBM_CPU_CACHE_GB=4 vllm serve Qwen/Qwen3-8B --max-model-len 8k"
    made = kvbm("profile", "import", "-", "--output", "made.yaml", home=tmp_path, stdin=line)
    assert (made.exit_code, made.stdout) == (0, ""), made.stderr
    checked = kvbm_here("profile", "check", "./made.yaml", home=tmp_path)
    assert checked.exit_code == 0, checked.stderr


def test_json_has_the_profile_and_what_is_left(tmp_path):
    outcome = imported_here("disagg_kvbm.sh", None, tmp_path, "--json")
    data = json.loads(outcome.stdout)
    assert outcome.stderr == ""
    assert data["profile"] == imported_here("disagg_kvbm.sh", None, tmp_path).stdout
    assert (data["selected"], data["others"]) == ({"name": "line-16", "line": 16}, [{"name": "line-9", "line": 9}])
    assert {one["what"]: one["line"] for one in data["not_carried_over"]}["--is-prefill-worker"] == 17


def test_options_win_over_the_file(tmp_path):
    outcome = imported_here("vllm_config.yaml", None, tmp_path, "--model", "org/other")
    assert "  model: org/other  # --model\n" in outcome.stdout
    refused = imported_here("kvbm.env", None, tmp_path, "--engine", "trt")
    assert (refused.exit_code, refused.stderr.splitlines()[0]) == (2, "error: `--engine trt` is not a kind of engines")


def profiles_of(text: str) -> list[str]:
    """Return the profile of every engine in the text."""
    launches = launches_in(text, "text")
    return [imported(one, "text", model=None, engine=kind_of(one.kind, None, one.environment)).text for one in launches]


FLAG = st.from_regex(r"--[a-z][a-z-]{0,12}[a-z]", fullmatch=True)
VALUE = st.sampled_from(["", " 8", "=fp8", " a/b", ' \'{"a": [1, {"b": null}]}\'', " $UNSET", ' "${X:-y}"', " 1e5"])


@given(st.lists(st.tuples(FLAG, VALUE), max_size=8, unique_by=lambda one: one[0]))
def test_every_flag_is_in_the_profile_or_listed(flags):
    line = " ".join(f"{flag}{value}" for flag, value in flags)
    (text,) = profiles_of(f"vllm serve a/b {line}")
    for flag, _ in flags:
        assert re.search(rf"{flag}(?![\w-])", text), text


@pytest.mark.parametrize("variable", ["LMCACHE_MAX_LOCAL_CPU_SIZE", "LMCACHE_MAX_LOCAL_DISK_SIZE"])
@pytest.mark.parametrize(("flags", "total"), [("", "60GB"), ("-tp 8", "480GB"), ("-tp 2 -pp 2 -pcp 2", "480GB")])
def test_a_size_of_lmcache_is_counted_for_each_rank(variable, flags, total):
    tier = "disk" if "DISK" in variable else "host"
    (text,) = profiles_of(f"{variable}=60 vllm serve a/b {flags}")
    assert re.search(rf"  {tier}:\n    capacity: {total} ", text), text


@pytest.mark.parametrize(("flags", "size"), [("-tp $TP", "60"), ("", "6x"), ("--config other.yaml", "60")])
def test_a_size_of_lmcache_is_not_guessed(flags, size):
    (text,) = profiles_of(f"LMCACHE_MAX_LOCAL_CPU_SIZE={size} vllm serve a/b {flags}")
    assert "capacity:" not in text
    reason = "it must be a number above 0" if size == "6x" else "LMCache counts it per rank"
    assert f"`LMCACHE_MAX_LOCAL_CPU_SIZE={size}` (line 1): {reason}" in text


def test_a_size_of_lmcache_that_a_condition_decides_has_its_line():
    name = "LMCACHE_MAX_LOCAL_CPU_SIZE"
    (text,) = profiles_of(f"export {name}=1\nif [ $BIG ]; then\n  export {name}=2\nfi\nvllm serve a/b")
    assert f"`{name} ${name}` (line 3): the file does not show" in text


@pytest.mark.parametrize(("flags", "size"), [("--tp 8", "160GB"), ("--tp-size $TP", None)])
def test_a_size_of_lmcache_is_counted_for_each_rank_of_sglang(flags, size):
    (text,) = profiles_of(f"LMCACHE_MAX_LOCAL_CPU_SIZE=20 python -m sglang.launch_server --model-path a/b {flags}")
    assert re.findall(r"  host:\n    capacity: (\w+)", text) == [size] * bool(size), text


def test_sizes_of_a_chart_are_counted_for_each_rank():
    sizes = {"enabled": True, "cpuOffloadingBufferSize": "128", "diskOffloadingBufferSize": "200"}
    spec = {"modelURL": "a/b", "vllmConfig": {"tensorParallelSize": 8}, "lmcacheConfig": sizes}
    (text,) = profiles_of(json.dumps({"servingEngineSpec": {"modelSpec": [spec]}}))
    assert "capacity: 1024GB  # cpuOffloadingBufferSize=128 for each of 8 ranks" in text
    assert "capacity: 1600GB " in text
    sizes["diskOffloadingBufferSize"] = "10Gi"
    key = {"valueFrom": {"secretKeyRef": {"name": "a"}}}
    (text,) = profiles_of(json.dumps({"servingEngineSpec": {"vllmApiKey": key, "modelSpec": [spec]}}))
    assert "`diskOffloadingBufferSize=10Gi` (line 1): it must be a number above 0" in text
    assert "`vllmApiKey` (line 1): a secret is not copied" in text


OF_TEMPLATES = {
    "a chart": "modelURL: a/b\nvllmConfig: {tensorParallelSize: '{{ .x }}'}\n"
    "lmcacheConfig: {enabled: true, cpuOffloadingBufferSize: 60}",
    "a file of options": "kind: ConfigMap\ndata: {o.yaml: 'tensor_parallel_size: \"{{ .x }}\"'}\n---\n"
    "args: [vllm, serve, a/b, --config, /o.yaml]\nenv: {LMCACHE_MAX_LOCAL_CPU_SIZE: 60}",
}


@pytest.mark.parametrize("name", OF_TEMPLATES)
def test_a_size_of_lmcache_is_not_counted_for_ranks_of_a_template(name):
    (text,) = profiles_of(OF_TEMPLATES[name])
    kept, _, left = text.partition("# Missing:")
    assert "capacity" not in kept
    assert re.search(r"`tensor_parallel_size \{\{ .x \}\}` \(line [24]\): the file does not show its value", left), left
    assert "LMCache counts it per rank, and the file does not show" in left


def test_variables_with_names_of_keys_of_connectors_are_variables():
    (text,) = profiles_of("export root_dir=/a max_bytes=1000\nvllm serve a/b")
    assert '  environment:\n    root_dir: /a  # line 1\n    max_bytes: "1000"  # line 1\n\n# Missing' in text
    with pytest.raises(KvbmError, match="starts no engine"):
        launches_in("root_dir=/a", "text")


def test_a_connector_of_a_dotted_flag_is_replaced():
    (text,) = profiles_of("vllm serve a/b --kv-transfer-config.kv_connector LMCacheConnectorV1")
    assert "kv_transfer_config" not in text
    assert "LMCacheConnectorV1` (line 1): kvbm replaces this connector" in text


def test_dotted_flags_of_a_connector_are_one_connector():
    flags = (
        "kv_connector OffloadingConnector",
        "kv_role kv_both",
        "kv_connector_extra_config.cpu_bytes_to_use 1073741824",
    )
    (text,) = profiles_of("vllm serve a/b " + " ".join(f"--kv-transfer-config.{flag}" for flag in flags))
    assert "kv_transfer_config" not in text
    assert "capacity: 1GiB " in text


def of_offloading(extra: dict[str, object], flags: str = "") -> str:
    """Return the profile of an engine with this configuration of vLLM's offloading."""
    given = json.dumps({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra})
    (text,) = profiles_of(f"vllm serve a/b {flags} --kv-transfer-config '{given}'")
    return text


@pytest.mark.parametrize(
    ("size", "flags", "blocks"),
    [
        ({}, "", "1000"),
        ({"block_size": 64}, "--block-size 16", "4000"),
        ({"block_size": 64}, "", None),
        ({"block_size": 24}, "--block-size 16", None),
    ],
)
def test_a_number_of_blocks_of_vllm_becomes_one_of_host_memory(size, flags, blocks):
    text = of_offloading({**size, "num_cpu_blocks": 1000}, flags)
    assert re.findall(r"^    blocks: (\d+) ", text, re.MULTILINE) == [blocks] * bool(blocks)
    assert ("`num_cpu_blocks: 1000` (line 1): `block_size: " in text) == (blocks is None)


@pytest.mark.parametrize("size", [1 << 30, "1073741824", 1073741824.0, "1G", 0.5, True, 0, [1]])
def test_a_size_of_a_connector_is_carried_over_or_listed(size):
    text = of_offloading({"cpu_bytes_to_use": size})
    is_listed = f"`cpu_bytes_to_use: {size}` (line 1): it must be a whole number" in text
    assert ("    capacity: 1GiB " in text, is_listed) == ((True, False) if "107" in str(1 * size) else (False, True))


def test_two_sizes_of_a_connector_are_not_mixed():
    text = of_offloading({"cpu_bytes_to_use": 1 << 30, "cpu_capacity_bytes": 1 << 31, "root_dir": 7})
    assert "    capacity: 1GiB " in text
    assert "`cpu_capacity_bytes: 2147483648` (line 1): `tiers.host.capacity` is set already" in text
    assert "`root_dir: 7` (line 1): it must be a text" in text


def test_the_command_of_the_guide_is_read():
    page = (FILES.parents[2] / "docs" / "guide" / "vllm-offloading.md").read_text()
    (text,) = profiles_of(page.replace('"spec_name"', '"eviction_policy": "arc", "spec_name"'))
    tiers = yaml.safe_load(text)["tiers"]
    assert tiers["host"] == {"capacity": "64GB", "managed_by": "engine"}
    assert tiers["disk"] == {"directory": "/data/kvbm", "capacity": "500GiB"}
    (left,) = re.findall(r"^# - (.*)", text.partition("# Not carried over:")[2], re.MULTILINE)
    assert re.match(r"`eviction_policy: arc` \(line \d+\): `kvbm serve` configures", left)


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--port", "--model", "--kv-offloading-size"])
def test_an_unknown_value_replaces_the_one_in_front_of_it(flag):
    (text,) = profiles_of(f"vllm serve {flag} 2 {flag} $X")
    assert not re.search(r": 2(?:GiB)? |^tiers:", text.partition("# Missing")[0], re.MULTILINE)
    assert f"`{flag} $X` (line 1): the file does not show its value" in text


@pytest.mark.parametrize("front", ["env", "sudo env C=1", "export C=1; nohup env"])
def test_variables_of_env_reach_the_shell_behind_it(front):
    (text,) = profiles_of(f"{front} A=2 B=3 bash -c 'exec vllm serve $A'")
    assert '  model: "2"' in text
    assert re.findall(r'^    ([AB]): "(\d)" ', text, re.MULTILINE) == [("A", "2"), ("B", "3")]


def test_a_block_of_a_page_has_the_variables_of_those_before_it():
    page = "```sh\nexport A=1 B=2\n```\n\n```yaml\na: 1\n```\n\n```sh\nexport A=3\nvllm serve a/b\n```\n"
    for text in (page, json.dumps({"cells": [{"source": page.splitlines(keepends=True)}]})):
        (made,) = profiles_of(text)
        assert re.findall(r'^    (\w): "(\d)"', made, re.MULTILINE) == [("A", "3"), ("B", "2")]


NEXT = " \\\n        --"
STARTED = "vllm serve org/m --seed 7"
POD = """\
apiVersion: v1
kind: Pod
metadata: {{name: p}}
spec:
  containers:
  - {{name: main, {}}}
"""
COMMANDS = {
    "an image and its arguments": "docker run --rm --gpus all -p8000:8000 vllm/vllm-openai:v1 org/m --seed 7",
    "an image and a flag": "nerdctl run -dit -v /a:/b vllm/vllm-openai --model org/m --seed 7",
    "an image and a command": f"sudo podman run --pull always my.registry/any:1 {STARTED}",
    "an entry point": "docker run --entrypoint vllm any/image serve org/m --seed 7",
    "a shell as entry point": f"docker run --entrypoint bash any/image -c '{STARTED}'",
    "a container that is created": "docker create --name vllm -p 8000:8000 vllm/vllm-openai org/m --seed 7",
    "options of a variable": "docker run $OPTIONS vllm/vllm-openai org/m --seed 7",
    "docker exec": f"docker exec -it c bash -c 'cd /x && {STARTED}'",
    "srun": f"srun --ntasks 1 bash -c '{STARTED}' &",
    "sudo": f'sudo -u u bash -lc "{STARTED}"',
    "singularity": f"singularity exec --nv --bind /a:/b x.sif {STARTED}",
    "tmux": f"tmux new-session -d '{STARTED}'",
    "ssh": f"ssh -t h 'source a; nohup {STARTED} > log 2>&1 &'",
    "ssh behind a program": f"timeout 9 ssh -t h '{STARTED}'",
    "a variable": f"CMD='{STARTED}'\nbash -c \"exec $CMD\"",
    "a list of words": 'CMD=(vllm serve org/m)\nCMD+=(--seed 7)\nexec numactl -N 0 "${CMD[@]}"',
    "quotes with escapes": r"bash -lc $'cd /x\nvllm serve org/m \\\n  --seed 7\necho \'ok\''",
    "a here document": f"ssh h bash <<EOF\n{STARTED}\nEOF",
    "a script in a here document": f"cat > run.sh <<'EOF'\n#!/bin/sh\n{STARTED}\nEOF\nsbatch run.sh",
    "a manifest in a here document": "kubectl apply -f - <<EOF\n"
    + POD.format("image: vllm/vllm-openai, args: [org/m, --seed, '7']")
    + "EOF",
    "the main module": "python3 -m vllm.entrypoints.cli.main serve org/m --seed 7",
    "the file of the server": "python /src/vllm/entrypoints/openai/api_server.py --model org/m --seed 7",
    "words of Python": 'run([\n  "vllm", "serve",\n  "org/m",  # large\n  "--seed", "7"])',
    "a pod with arguments": POD.format("image: vllm/vllm-openai, args: [org/m, --seed, '7']"),
    "a pod with a shell": POD.format(f"image: any, command: [bash, -lc, --], args: ['{STARTED}']"),
    "a pod of Dynamo": POD.format("image: x, command: [python3, -m, dynamo.vllm], args: [--model, org/m, --seed, '7']"),
    "a service of Compose": "services:\n  a: {image: vllm/vllm-openai, command: org/m --seed 7}",
    "a script in a map": POD.format(f"data: {{run.sh: 'exec {STARTED}'}}").replace("containers", "maps"),
    "values of a chart": "image: {repository: vllm/vllm-openai}\nargs: [org/m, --seed, '7']",
    "a Dockerfile": 'FROM vllm/vllm-openai\nCMD ["org/m", \\\n  "--seed", "7"]',
    "a Dockerfile with an entry point": "FROM a\nCMD vllm serve no/m\nFROM any\n"
    'ENTRYPOINT ["vllm", "serve"]\n# It\'s a model\nEXPOSE 1\nCMD ["org/m", "--seed", "7"]',
    "a Dockerfile with a shell": f"FROM any\nCMD exec {STARTED}",
    "a unit of systemd": "[Unit]\nDescription=don't\n[Service]\nExecStart=/opt/vllm serve org/m \\\n  --seed 7",
    "prose": f"Don't start it yet::\n\n    $ {STARTED.replace(' --', NEXT)}\n\nYou can.\n",
    "a Makefile": f"run:\n\t@{STARTED.replace(' --', NEXT)}\n",
    "a notebook": json.dumps({"cells": [{"source": ["%%bash\n", "vllm serve org/m \\\n", "  --seed 7"]}]}),
    "a notebook with a page": json.dumps({"cells": [{"source": ["It's:\n", "```bash\n", f"{STARTED}\n", "```"]}]}),
    "a page in YAML": f"guide: |\n  It's easy, see `vllm serve`:\n\n  ```bash\n  {STARTED}\n  ```\n",
    "a page": f"Don't run `vllm serve` yet.\n\n```sh\n$ {STARTED}\n```\n\n```python\nprint(\"don't\")\n```\n",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_engine_is_found_wherever_its_start_stands(name):
    (text,) = profiles_of(COMMANDS[name])
    assert "  model: org/m" in text
    assert "    seed: 7 " in text
    assert text.count("Not carried over") == 0 or "`source a`" in text, text


RUN = "RUN echo 'exec vllm serve no/m --seed 1' > /start.sh"
COPY = "COPY <<EOF /start.sh\nvllm serve no/m --port 1\nEOF"


@pytest.mark.parametrize(
    "text",
    [
        'ENTRYPOINT ["/bin/bash", "-c", "vllm serve org/m --seed 7"]',
        'CMD ["sh","-c","vllm serve org/m --seed 7"]',
        f'{RUN}\nCMD ["vllm", "serve", "org/m", "--seed", "7"]',
        f"{COPY}\nCMD vllm serve org/m --seed 7",
        'LABEL note=Bob\'s\nENTRYPOINT ["vllm", "serve"]\nHEALTHCHECK --retries=3 \\\n  CMD curl x\n'
        'CMD ["org/m", "--seed", "7"]\nHEALTHCHECK --retries=3 \\\n  CMD curl x',
        'COPY <<EOF /start.sh\nvllm serve org/m --seed 7\nEOF\nCMD ["/start.sh"]',
        "CMD vllm serve no/m\nENTRYPOINT exec vllm serve org/m --seed 7",
    ],
)
def test_a_dockerfile_starts_what_its_entry_point_and_command_say(text):
    variables = 'ENV A=1 \\\n  # it\'s\n\n  B="2 2"\nENV C "3" \\\n  $A\nENV DYN_KVBM_CPU_CACHE_GB=5 D=a&b'
    for instructions in (f"{variables}\n{text}", f"{text}\n{variables}"):
        (found,) = launches_in(f"FROM any\n{instructions}", "text")
        assert (found.words, found.is_elsewhere) == (("org/m", "--seed", "7"), True)
    given = {"A": "1", "B": "2 2", "C": "3   1", "DYN_KVBM_CPU_CACHE_GB": "5", "D": "a&b"}
    assert {name: str(word) for name, word in found.environment.items()} == given


STAGES = """\
FROM any AS Base
ENV A=1 B=1
CMD vllm serve org/m --seed 7
FROM any AS other
ENV A=no C=no
FROM base AS middle
ENV B=2
FROM middle
ENV D=${A}3
"""


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("", ("org/m", "--seed", "7")),
        ('ENTRYPOINT ["vllm", "serve", "org/other"]', ("org/other",)),  # Docker forgets the CMD of a stage below
    ],
)
def test_the_last_stage_of_a_dockerfile_has_what_its_own_stages_set(more, words):
    (found,) = launches_in(STAGES + more, "text")
    assert found.words == words
    assert {name: str(word) for name, word in found.environment.items()} == {"A": "1", "B": "2", "D": "13"}


@pytest.mark.parametrize(
    ("head", "written", "listed"),
    [
        ("#SBATCH --export=ALL,A=1,MODE", {"A": "1"}, "`MODE` (line 2): its value is not in this file"),
        ("#SBATCH -n 2 --export A=1,B='x y' # C=3", {"A": "1", "B": "x y"}, None),
        ("#SBATCH --export=A=$HOME/a", {}, "`A $HOME/a` (line 2): the file does not show the value of `$HOME`"),
        ("##SBATCH --export=A=1\necho\n#SBATCH --export=B=1", {}, None),
    ],
)
def test_what_slurm_exports_to_a_script_is_of_the_engine(head, written, listed):
    text = f"#!/bin/bash\n{head}\nsrun vllm serve org/m --seed 7\n"
    (found,) = launches_in(text, "text")
    (made,) = profiles_of(text)
    assert {name: str(word) for name, word in found.environment.items() if not word.unknown} == written
    assert (listed is None) == ("Not carried over" not in made), made
    assert listed is None or listed in made, made


@pytest.mark.parametrize(
    ("command", "end", "port", "listed"),
    [
        ("ssh host bash -s", "EOF", "port: 9001 ", None),
        ("ssh -t host", "'EOF'", None, "`--port $PORT` (line 4): the file does not show its value"),
        ("kubectl exec -i pod -- bash", "EOF", "port: 9001 ", None),
        ("docker exec -i box sh", "EOF", "port: 9001 ", None),
    ],
)
def test_a_here_document_of_another_machine_has_none_of_the_variables_of_this_one(command, end, port, listed):
    lines = r"""vllm serve org/m --port $PORT --seed \$SEED --kv-transfer-config "{\"kv_role\": \"kv_both\"}" """
    lines = lines if end == "EOF" else lines.replace("\\$", "$")
    text = f"export A=1 PORT=9001 SEED=5\nA=2\n{command} <<{end}\n{lines}\nEOF\n"
    (found,) = launches_in(text, "text")
    (made,) = profiles_of(text)
    assert (found.is_elsewhere, dict(found.environment)) == (True, {})
    assert "`--seed $SEED` (line 4): the file does not show its value" in made
    assert port is None or port in made, made
    assert listed is None or listed in made, made
    assert found.words[-1] == '{"kv_role": "kv_both"}'


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ('/opt/vllm serve org/m --served-model-name "Bob\'s own" --seed 7', "Bob's own"),
        ("/bin/sh -c 'exec vllm serve org/m --seed 7 --served-model-name x'", "x"),
    ],
)
def test_quotes_of_a_unit_are_read_as_a_shell_reads_them(command, name):
    text = f"[Unit]\nDescription=don't\n[Service]\nExecStart={command}\nExecStop=/bin/sh -c 'kill 1'\n"
    (found,) = launches_in(text, "text")
    assert set(found.words) == {"org/m", "--seed", "7", "--served-model-name", name}


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("trtllm-serve org/m --max_batch_size 7", "max_batch_size: 7"),
        ("docker run nvcr.io/x trtllm-llmapi-launch trtllm-serve serve org/m --max_batch_size 7", "max_batch_size: 7"),
        ("docker run lmsysorg/sglang python3 -m sglang.launch_server --model org/m --page-size 7", "page_size: 7"),
        ("python3 -m dynamo.sglang --model-path org/m --page-size 7", "page_size: 7"),
        ("python3 -m dynamo.trtllm --model-path org/m --max-num-tokens 7", "max_num_tokens: 7"),
    ],
)
def test_other_engines_are_found_too(command, flag):
    (text,) = profiles_of(command)
    assert "  model: org/m" in text
    assert flag in text


@pytest.mark.parametrize(
    "text",
    [
        "echo 'vllm serve a/b'",
        'log "Starting vllm serve on port 1"',
        "Run vllm serve to start it.",
        "docker run vllm/vllm-openai bash",
        "FROM vllm/vllm-openai\nRUN pip install x",
        "docker run -e A=b vllm/vllm-openai /bin/sh -c true",
        "pkill -f 'vllm serve'",
        "vllm serve --help",
        "services: {a: {image: vllm/vllm-openai, entrypoint: /app/start, command: org/m}}",
        POD.format("image: vllm/vllm-openai, command: [/app/start]"),
    ],
)
def test_what_starts_no_engine_is_not_read(text):
    with pytest.raises(KvbmError, match="starts no engine"):
        launches_in(text, "text")


@pytest.mark.parametrize("use", ['"${A[@]}"', "$A"])
def test_one_unknown_value_does_not_hide_the_others(use):
    given = 'A=(--max-model-len 4096 --port "${PORT}")' if "@" in use else 'A="--max-model-len 4096 --port ${PORT}"'
    (text,) = profiles_of(f"{given}\nvllm serve X {use}")
    assert "max_model_len: 4096" in text
    assert "# - `--port ${PORT}` (line 2): the file does not show its value" in text


@pytest.mark.parametrize(
    "condition",
    [
        "if [ $BIG ]; then\n  TP=16\nfi",
        "[ $BIG ] && TP=16",
        "for TP in 2 4; do",
        "while true; do TP=$((TP * 2))",
        "case $1 in a) TP=2;; esac",
    ],
)
def test_one_of_two_values_is_not_chosen(condition):
    (text,) = profiles_of(f"TP=1\n{condition}\nvllm serve a/b -tp $TP")
    assert "tensor_parallel_size" not in text
    assert re.search(r"`-tp \$TP` \(line \d\): the file does not show its value", text), text


@pytest.mark.parametrize("command", ["vllm serve <your model>", "docker run -d $IMAGE --model <your model>"])
def test_a_placeholder_is_no_redirection(command):
    (text,) = profiles_of(f"{command} --max-model-len 8192 --port 9 > log")
    assert "max_model_len: 8192" in text
    assert "  port: 9 " in text
    assert "# - `--model <your model>` (line 1): the file does not show its value" in text


def test_an_empty_value_is_listed():
    (text,) = profiles_of('MAX="${MAX:-}"\nC=(vllm serve a/b)\n[[ -n $MAX ]] && C+=(--max-num-seqs "$MAX")\n"${C[@]}"')
    assert "max_num_seqs" not in text
    assert "`--max-num-seqs` (line 4): its value is empty" in text


def test_short_flags_have_their_long_names():
    for level in ("-O=3", "-O 3"):
        (text,) = profiles_of(f"vllm serve a/b {level} -cc.mode 2")
        assert "optimization_level: 3 " in text
    assert "      mode: 2 " in text
    assert "`-O.mode` (line 1): it is neither a long flag" in profiles_of("vllm serve a/b -O.mode 3 -O 2")[0]
    assert "`-O3` (line 1): it is neither a long flag" in profiles_of("vllm serve a/b -O3")[0]


def test_a_default_remains_where_a_condition_sets_an_unknown_value():
    (text,) = profiles_of('M=a/b\nwhile [ $# -gt 0 ]; do\n case $1 in --model) M="$2";;\n esac\ndone\nvllm serve $M')
    assert "  model: a/b" in text
    assert "`while` (line 2): conditions and loops are not evaluated" in text


def test_variables_of_a_container_are_those_that_it_is_given():
    (text,) = profiles_of("export A=1\ndocker run -e B=2 --env=C=3 -e D --env-file $X/f vllm/vllm-openai org/m")
    assert re.findall(r'^    (\w): "(\d)" ', text, re.MULTILINE) == [("B", "2"), ("C", "3")]
    assert "`D` (line 2): its value is not in this file" in text
    assert "`--env-file $X/f` (line 2): other files are not read" in text


def test_what_a_container_of_singularity_lacks_is_listed():
    (text,) = profiles_of(
        "export DYN_KVBM_CPU_CACHE_GB=10\n"
        "singularity run --containall --env-file vars.env --env MODE,A=1 docker://vllm/vllm-openai --model a/b"
    )
    assert '  model: a/b  # --model a/b, line 2\n  environment:\n    A: "1"  # line 2\n' in text
    assert "capacity" not in text.partition("# Missing")[0]
    assert "`--env-file vars.env` (line 2): other files are not read" in text
    assert "`MODE` (line 2): its value is not in this file" in text


@pytest.mark.parametrize(
    "text",
    [
        "srun --export=ALL,A=1,B=2 vllm serve a/b",
        "srun --export A=1,B=2 -n 1 bash -c 'vllm serve a/b'",
        "A=1 singularity exec --env B=2,C=3 --nv x.sif vllm serve a/b",
        "export SINGULARITYENV_A=1 C=3; apptainer exec --cleanenv --env B=2 x.sif vllm serve a/b",
        "export A=0 SINGULARITYENV_A=1; srun --export=ALL,B=2 singularity exec -B /a x.sif bash -c 'vllm serve a/b'",
        "export APPTAINERENV_A=1 C=3; B=2 singularity -q exec --env B=2 --userns -ec x.sif vllm serve a/b",
        "export SINGULARITYENV_C=1; docker run -e A=1 --env B=2 any vllm serve a/b",
        "set -a\nA=1\nset +a\nC=3\nB=2 vllm serve a/b",
        "set -o allexport; A=1; B=2; vllm serve a/b",
    ],
)
def test_variables_of_a_tool_reach_the_engine(text):
    (made,) = profiles_of(text)
    expected = [("A", "1"), ("B", "2"), *([("C", "3")] if "C=3 --nv" in text else [])]
    assert sorted(re.findall(r'^    (\w+): "(\d)" ', made, re.MULTILINE)) == expected


@pytest.mark.parametrize(
    "text",
    ['run(\n  ["vllm", "serve", "a/b"], env={"A": "1"})', 'os.environ["A"] = "1"\n\nrun(\n["vllm", "serve", "a/b"])'],
)
def test_variables_beside_a_list_of_python_are_listed(text):
    (made,) = profiles_of(text)
    assert re.search(
        r"`(?:os\.environ` \(line 1|env` \(line 2)\): variables next to a list of words are not read", made
    ), made


@pytest.mark.parametrize("name", COMMANDS)
def test_an_engine_of_a_container_or_another_machine_is_known_as_such(name):
    (found,) = launches_in(COMMANDS[name], "text")
    tools = r"docker |podman |nerdctl |singularity |ssh |containers:|services:|image: \{|FROM "
    assert found.is_elsewhere == (re.search(tools, COMMANDS[name]) is not None)


NAMES = ("a", "a", "a-2", "a")


def test_engines_of_one_line_have_names_of_their_own():
    text = "vllm serve a/b --seed 1; vllm serve a/b --seed 2 & vllm serve a/b --seed 3"
    assert [one.name for one in launches_in(text, "text")] == ["line-1", "line-1-2", "line-1-3"]
    assert "seed: 2 " in recognised(text, "text", select="line-1-2").text
    pods = "".join(POD.format("image: vllm, args: [a/b]").replace("name: p", f"name: {one}") + "---\n" for one in NAMES)
    assert [one.name for one in launches_in(pods, "text")] == ["a", "a-2", "a-2-2", "a-3"]


TEMPLATE = """\
kind: Deployment
spec:
  {{- if .Values.on }}
  containers:
  {{- end }}
  - name: {{ .Chart.Name }}
    image: "{{ .Values.image | default "vllm/vllm-openai" }}"
    command: [vllm, serve, {{ .Values.model | quote }}, --seed, "7", "--port={{ .Values.port }}"]
"""


def test_templates_stay_unresolved():
    (text,) = profiles_of(TEMPLATE)
    assert "seed: 7" in text
    left = text.partition("# Not carried over:")[2]
    assert "`--port {{ .Values.port }}` (line 8): the file does not show its value" in left
    assert "`{{ .Values.model | quote }}`" in left or "`--model {{ .Values.model | quote }}`" in left
    assert "templates are not filled in" in left


def test_words_of_a_command_are_taken_as_they_are():
    words = ["docker", "run", "-e", "A=$B", "vllm/vllm-openai", "org/m", "--seed", "7", "--api-key", "sk-secret"]
    found = recognised(words, "the command")
    assert found.launch.kind == "vllm"
    assert 'A: "$$B"' in found.text
    assert "sk-secret" not in found.text
    assert [one.what for one in found.left] == ["--api-key"]


def test_secondary_tiers_of_vllm_become_a_disk_tier():
    tiers = [{"type": "fs", "root_dir": "/nvme", "max_bytes": 1 << 40}]
    extra = {"cpu_capacity_bytes": 1 << 36, "secondary_tiers": tiers}
    given = json.dumps({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra})
    (text,) = profiles_of(f"vllm serve a/b --kv-transfer-config '{given}'")
    assert "capacity: 64GiB " in text
    assert "directory: /nvme " in text
    assert "capacity: 1TiB " in text


def test_flags_without_a_value_are_those_of_vllm():
    flags = yaml.safe_load((FILES.parents[1] / "config" / "vllm_flags.yaml").read_text())
    counted = {name: value_count(name.replace("-", "_"), "vllm") == 0 for name in flags}
    assert counted == {name: isinstance(value, bool) for name, value in flags.items()}


def test_a_flag_without_a_value_does_not_take_the_model():
    (text,) = profiles_of("vllm serve --kv-cache-metrics Qwen/Qwen3-8B")
    assert "  model: Qwen/Qwen3-8B" in text
    assert "    kv_cache_metrics: true" in text


@pytest.mark.parametrize(
    "command",
    ["-Z 3 org/model", "--port 80 -n 2 -r 0 org/model", "--model_tag org/model -Z 3", "--model-id org/model 3"],
)
def test_the_value_of_a_short_flag_is_not_the_model(command):
    (text,) = profiles_of(f"vllm serve {command}")
    assert re.findall(r"^  model: (\S+)", text, re.MULTILINE) == ["org/model"]


PARTS = [
    *("vllm serve a/b", "python -m dynamo.vllm", "--x", "--x=1", "A=1", "export B=2", "C=(", ")", "$A", "${A:-b}"),
    *("'", '"', "${}", "\\\n", "\n", "$(", "`", "{{", "}}", "<<E", "E", "&", "|", ";", "#"),
    *("sh -c 'vllm serve $1' x y", "eval", "\0", "kind: Pod\napiVersion: v1\n", "spec:\n", "  containers:\n"),
    *("  - args: [--model, a]\n", "    image: vllm/vllm-openai\n", "services:\n"),
    *("  a: {image: vllm/vllm-openai, command: x}\n", "&a", "*a", "<<: *a", "!!python/object:a", "\t", "\u2028"),
    *("kv_cache_config:\n", "  dtype: fp8\n", "servingEngineSpec: {modelSpec: [{modelURL: a}]}\n", "- ", "? "),
    *("---\n", "é"),
]


@given(st.lists(st.sampled_from(PARTS), max_size=12), st.sampled_from(["", " "]))
def test_any_text_gives_a_profile_or_an_error(parts, between):
    with contextlib.suppress(KvbmError):
        assert profiles_of(between.join(parts))


KEYS = st.sampled_from(
    [
        *("apiVersion", "kind", "metadata", "name", "spec", "template", "containers", "mainContainer", "command"),
        *("args", "env", "envs", "envFrom", "envFromSecret", "value", "image", "services", "podTemplate"),
        *("components", "model", "uri", "modelFormat", "storageUri", "modelArtifacts", "parallelism", "tensor"),
        *("workload", "kvCacheOffloading", "cpu", "secondary", "fileSystem", "emptyDir", "size", "decode"),
        *("modelCommand", "servingEngineSpec", "modelSpec", "modelURL", "vllmConfig", "lmcacheConfig", "enabled"),
        *("cpuOffloadingBufferSize", "extraArgs", "enableLoRA", "kv_cache_config", "host_cache_size"),
        *("kv_transfer_config", "speculative_config", "data", "environment", "v0"),
    ]
)
LEAVES = st.sampled_from(
    [
        *("vllm", "serve", "vllmServe", "huggingface", "ConfigMap", "sh", "-c", "vllm serve a", "--model=a"),
        *("hf://a/b", "8Gi", "true", "1", "", "{{ .a }}", "$(A)", "VLLM_ADDITIONAL_ARGS", "vllm/vllm-openai:1"),
        *("LMCACHE_LOCAL_DISK",),
    ]
)
TREES = st.recursive(
    LEAVES, lambda inside: st.lists(inside, max_size=4) | st.dictionaries(KEYS, inside, max_size=5), max_leaves=40
)


@given(st.dictionaries(KEYS, TREES, max_size=5))
def test_any_tree_of_known_keys_gives_a_profile_or_an_error(tree):
    with contextlib.suppress(KvbmError):
        assert profiles_of(json.dumps(tree))


HUGE = {
    "aliases": "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "an alias of itself": "a: &a [*a]\n",
    "nesting": "a: " + "[" * 2000 + "]" * 2000,
    "variables": "A=0123456789\n" + "A=$A$A$A$A\n" * 40 + "vllm serve $A",
    "scripts": "".join(f"export A{at}='bash -c \"$A{at + 1}\"'\n" for at in range(20)) + 'bash -c "$A0"',
    "engines": "vllm serve a/b\n" * 300,
    "scripts that variables start": "".join(
        f"export A{at}='" + f'bash -c "$A{at + 1}";' * 100 + "'\n" for at in range(6)
    )
    + 'export A6=:\nbash -c "$A0"',
    "one long text": f"a: &a {'x' * 100_000}\nb: [{'*a, ' * 30_000}*a]",
    "a tree": f"max_model_len: 8\na: {'{a: ' * 300}{'}' * 300}",
}


@pytest.mark.parametrize("name", HUGE)
def test_input_that_grows_is_refused(name):
    with pytest.raises(KvbmError, match=r"more than|nested too deeply"):
        launches_in(HUGE[name], name)


def test_variables_of_a_container_do_not_grow():
    growing = [{"name": "A0", "value": "0123456789"}]
    growing += [{"name": f"A{at + 1}", "value": f"$(A{at})" * 10} for at in range(6)]
    container = {"image": "vllm/vllm-openai", "args": ["--model=a", "--seed=$(A6)"], "env": growing}
    (text,) = profiles_of(json.dumps({"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [container]}}))
    assert len(text) < 100_000
    assert "`--seed $(A6)` (line 1)" in text.partition("# Not carried over:")[2]


def test_a_key_that_is_no_text_is_refused():
    aliases = "".join(f"? &{new} [*{old} , *{old} ]\n: 1\n" for old, new in pairwise("abcdefghijklmnopqrstuvwxyz"))
    with pytest.raises(KvbmError, match="line 2: a key must be text"):
        launches_in(f"x: &a 1\n{aliases}", "text")


def test_many_variables_and_many_commands_are_read_in_seconds():
    commands = [*(f"export A{at}=" for at in range(9000)), *([":"] * 60_000), "vllm serve a/b"]
    started_s = time.process_time()
    launches_in("\n".join(commands), "text")
    assert time.process_time() - started_s < 10


@pytest.mark.parametrize("text", ["x#;A=(\n" * 8000, "cat <<EOF tee" + "/-tee" * 12_000 + "\nEOF\n"])
def test_what_is_not_closed_is_read_in_seconds(text):
    started_s = time.process_time()
    with contextlib.suppress(KvbmError):
        launches_in(text, "text")
    assert time.process_time() - started_s < 2


def test_values_with_many_levels_are_listed_or_stay_text():
    (text,) = profiles_of(f"vllm serve a/b --{'a.' * 5000}b 1 --hf-overrides '{'[' * 900}{']' * 900}'")
    assert "(line 1): more than 60" in text
    assert f'hf_overrides: "{"[" * 900}' in text
    (text,) = profiles_of(f"max_model_len: 8\nhf_overrides:\n  ? {'k' * 2000}\n  : 1")
    assert "more than 500" in text.partition("# Not carried over:")[2]
    assert "max_model_len: 8" in text
    (text,) = profiles_of(f"vllm serve a/b --max-num-seqs 8 --x '[{{\"{'k' * 1030}\":1}}]'")
    assert "max_num_seqs: 8 " in text
    assert "more than 500" in text.partition("# Not carried over:")[2]


SECRET = "Zq9hunterZq9"
TOKEN = "hf_ABCDEFGHIJKLMNOPQRST"


@pytest.mark.parametrize("name", given_in("secrets"))
def test_no_secret_is_shown(tmp_path, name):
    (tmp_path / "file").write_text(given_in("secrets")[name])
    shown = kvbm_here("profile", "import", "file", home=tmp_path)
    assert SECRET not in shown.stdout + shown.stderr
    assert TOKEN not in shown.stdout + shown.stderr
    assert re.search(r"a secret is not copied|neither|kvbm replaces|a number|an alias|\*\*\*`", shown.stderr)
    assert_said("secrets", name, shown.stderr.rstrip("\n"))


@pytest.mark.parametrize("name", ["LMCACHE_LOCAL_DISK", "DYN_KVBM_DISK_CACHE_DIR", "root_dir"])
@pytest.mark.parametrize("value", [f"s3://user:{SECRET}@host/x", f"/x?token={SECRET}", f"x?token={SECRET}"])
def test_no_secret_of_a_directory_is_shown(name, value):
    (text,) = profiles_of(f"{name}={value!r} DYN_KVBM_DISK_CACHE_GB=5 vllm serve a/b")
    assert SECRET not in text
    assert re.search(rf"^# - `{name}[`=]", text, re.MULTILINE), text


@pytest.mark.parametrize("flag", ["--long-prefill-token-threshold", "--pad-token-id", "--max-num-batched-tokens"])
def test_tokens_of_a_text_are_no_secrets(flag):
    (text,) = profiles_of(f"vllm serve a/b {flag} 64")
    assert f"{flag.removeprefix('--').replace('-', '_')}: 64" in text


def test_standard_input_may_be_non_blocking(tmp_path):
    """As a terminal or a pipe is after another program has made it so."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    command = [*PROGRAM, "profile", "import", "-"]
    with os.fdopen(reader) as source, subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE) as process:
        time.sleep(1)  # until it reads, most likely
        os.write(writer, b"vllm serve ")
        time.sleep(0.1)
        os.write(writer, b"a/b")
        os.close(writer)
        output, _ = process.communicate(timeout=HANGS_S)
    assert b"model: a/b" in output


def test_nothing_is_run(tmp_path):
    mark = tmp_path / "mark"
    (text,) = profiles_of(f"A=$(touch {mark})\nB=`touch {mark}`\ntouch {mark}\nvllm serve a/b --seed $A --revision $B")
    assert not mark.exists()
    assert "seed" not in text.partition("# Not carried over:")[0]
