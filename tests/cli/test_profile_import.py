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


@pytest.mark.parametrize("name", given_in("launches"))
def test_launch_becomes_this_profile(name):
    """The first lines of a profile, which say where it comes from, are left out."""
    text, said = given_in("launches")[name], ""
    for launch, profile in zip(launches_in(text, "text"), profiles_of(text), strict=True):
        said += "on another machine or in a container\n" if launch.is_elsewhere else "here\n"
        said += profile.split("\n\n", 1)[1]
    assert_said("launches", name, said.rstrip("\n"))


FLAG = st.from_regex(r"--[a-z][a-z-]{0,12}[a-z]", fullmatch=True)
VALUE = st.sampled_from(["", " 8", "=fp8", " a/b", ' \'{"a": [1, {"b": null}]}\'', " $UNSET", ' "${X:-y}"', " 1e5"])


@given(st.lists(st.tuples(FLAG, VALUE), max_size=8, unique_by=lambda one: one[0]))
def test_every_flag_is_in_the_profile_or_listed(flags):
    line = " ".join(f"{flag}{value}" for flag, value in flags)
    (text,) = profiles_of(f"vllm serve a/b {line}")
    for flag, _ in flags:
        assert re.search(rf"{flag}(?![\w-])", text), text


def test_the_command_of_the_guide_is_read():
    page = (FILES.parents[2] / "docs" / "guide" / "vllm-offloading.md").read_text()
    (text,) = profiles_of(page.replace('"spec_name"', '"eviction_policy": "arc", "spec_name"'))
    tiers = yaml.safe_load(text)["tiers"]
    assert tiers["host"] == {"capacity": "64GB", "managed_by": "engine"}
    assert tiers["disk"] == {"directory": "/data/kvbm", "capacity": "500GiB"}
    (left,) = re.findall(r"^# - (.*)", text.partition("# Not carried over:")[2], re.MULTILINE)
    assert re.match(r"`eviction_policy: arc` \(line \d+\): `kvbm serve` configures", left)


POD = """\
apiVersion: v1
kind: Pod
metadata: {{name: p}}
spec:
  containers:
  - {{name: main, {}}}
"""
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
        "root_dir=/a",
    ],
)
def test_what_starts_no_engine_is_not_read(text):
    with pytest.raises(KvbmError, match="starts no engine"):
        launches_in(text, "text")


NAMES = ("a", "a", "a-2", "a")


def test_engines_of_one_line_have_names_of_their_own():
    text = "vllm serve a/b --seed 1; vllm serve a/b --seed 2 & vllm serve a/b --seed 3"
    assert [one.name for one in launches_in(text, "text")] == ["line-1", "line-1-2", "line-1-3"]
    assert "seed: 2 " in recognised(text, "text", select="line-1-2").text
    pods = "".join(POD.format("image: vllm, args: [a/b]").replace("name: p", f"name: {one}") + "---\n" for one in NAMES)
    assert [one.name for one in launches_in(pods, "text")] == ["a", "a-2", "a-2-2", "a-3"]


def test_words_of_a_command_are_taken_as_they_are():
    words = ["docker", "run", "-e", "A=$B", "vllm/vllm-openai", "org/m", "--seed", "7", "--api-key", "sk-secret"]
    found = recognised(words, "the command")
    assert found.launch.kind == "vllm"
    assert 'A: "$$B"' in found.text
    assert "sk-secret" not in found.text
    assert [one.what for one in found.left] == ["--api-key"]


def test_flags_without_a_value_are_those_of_vllm():
    flags = yaml.safe_load((FILES.parents[1] / "config" / "vllm_flags.yaml").read_text())
    counted = {name: value_count(name.replace("-", "_"), "vllm") == 0 for name in flags}
    assert counted == {name: isinstance(value, bool) for name, value in flags.items()}


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


def test_engines_above_too_many_variables_are_read():
    fence = "```"
    blocks = ["vllm serve M", f"export BIG={'x' * 6_000}", *["echo"] * 200]
    (launch,) = launches_in("\n".join(f"{fence}\n{block}\n{fence}" for block in blocks), "README.md")
    assert launch.name == "line-2"


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
