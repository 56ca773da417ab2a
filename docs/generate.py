"""Writes docs/reference/ from the schema, the table of variables and the commands themselves.

    python docs/generate.py            writes the pages
    python docs/generate.py --check    says which page is out of date, and ends with 1

tests/docs/test_docs.py runs the check, so a key, a variable or an option without its line cannot be merged.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from kvbm.config.engine import ENGINE_KINDS
from kvbm.config.flags import KVBM_SETS
from kvbm.config.json_schema import json_schema
from kvbm.config.mistakes import NOT_BUILT, NOT_BUILT_ENGINES
from kvbm.config.schema import INTERPOLATED, Key, keys
from kvbm.config.variables import VARIABLES
from kvbm.metrics import BLOCKS, COUNTERS, DISK_GAUGES, HIT_RATES, NEVER, NEVER_GAUGES
from kvbm.vllm_integration.versions import CONTRACT_TESTED, RUN, shown
from kvbm_cli.app import app
from kvbm_cli.profile.workload import KEYS as WORKLOAD_KEYS

REFERENCE = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/generate.py; edit what it is made from. -->"

PROFILE_HEAD = """\
# Profile keys

A profile is a YAML file. `kvbm profile show PROFILE` prints every key with its value and where that came from;
`kvbm profile check PROFILE` finds all mistakes that can be known without starting an engine. Each layer wins over the
one before:

defaults < the profile named by `extends` < the file < `DYN_KVBM_*` variables (see `variables.md`) < `--set KEY=VALUE`

- `extends: NAME` takes over a shipped profile, `extends: ./file.yaml` a file beside this one, and so on from there.
  Sections are merged key by key, also `engine.environment` and mappings in `engine.arguments`; everything else replaces
  what was there, a list too.
- A key without a value (`null`) is not set, whatever the parent says. An empty section changes nothing; `disk: null`
  takes a tier away.
- Sizes have a unit: `100GB` is 100e9 bytes, `64GiB` is 64 * 2^30.
- Booleans are `true` and `false`; `on` and `yes` are text.
- An unknown key, a key that appears twice, and a value of the wrong type are errors.
- `engine.model` and `tiers` are required; of `tiers.host`, one of `capacity` and `blocks`.
- `tiers.host.blocks` wins over `tiers.host.capacity` within one layer; the `capacity` of a later layer wins over the
  `blocks` of an earlier one.
- `${{NAME}}` is a variable of the environment, `${{NAME:-text}}` has a default. Both are read in {interpolated}. A
  variable that is not set is an error there, and so is `${{` anywhere else; `$$` is one dollar sign, elsewhere `$${{`
  is `${{`.

```yaml
# ./mine.yaml, for `kvbm serve --profile ./mine.yaml`
description: Qwen3 on one GPU with 64 GiB of host memory
engine:
  kind: vllm
  model: ~/models/Qwen3-8B
  arguments:
    max_model_len: 32768
    gpu_memory_utilization: 0.9
tiers:
  host:
    capacity: 64GiB
server:
  port: 8001
```

An editor with YAML's language server completes keys and underlines mistakes when a profile begins with the name of the
JSON Schema, [profile.schema.json](profile.schema.json), which `kvbm profile schema` prints:

```yaml
# yaml-language-server: $schema=/path/to/profile.schema.json
```

## All engines

`engine.kind` chooses the engine: `embedded`, the reference engine that kvbm brings along, or `vllm`.
"""

EMBEDDED_HEAD = """\
## engine.arguments of the embedded engine
"""

VLLM_HEAD = """\
## engine.arguments of vLLM

`engine.model` is a local Hugging Face directory, a name on a hub, or `synthetic:vllm-25m` or `synthetic:vllm-81m`,
which have random weights and are made on the spot. `engine.python` is an interpreter that has vLLM and kvbm. Versions
{run} of vLLM were run, {tested} are tested against their source; `kvbm serve --force` starts others.

Every flag of `vllm serve` is a key, without the hyphens in front. `_` and `-` are the same; both spellings of one flag
are an error.

| in the profile | on the command line |
| --- | --- |
| `max_model_len: 8192` | `--max-model-len 8192` |
| `enforce_eager: true` | `--enforce-eager` |
| `enable_prefix_caching: false` | `--no-enable-prefix-caching` |
| `served_model_name: [a, b]` | `--served-model-name a b` |
| `compilation_config: {{level: 0}}` | `--compilation-config '{{"level":0}}'` |

Names are not checked before vLLM itself does. The flags that kvbm reads, because sizes or checks follow from them:
"""

VLLM_SETS = """\
`kv_transfer_config` is for additions: its entries are laid over those that kvbm makes, and another `kv_connector` is an
error. The configuration of the connector travels in `kv_connector_extra_config.kvbm`. What kvbm sets besides, with the
connector and without it, so that two arms of a comparison differ in nothing else:

| set | why |
| --- | --- |
| `--enable-prompt-tokens-details` | an answer says how many tokens of its prompt were cached |
| `--shutdown-timeout 10` | by default vLLM kills its scheduler process at once, and in it the leader |
| `PYTHONHASHSEED=0` | before 0.29, and where the version is unknown: block hashes are equal in all processes |
| `VLLM_CPU_NUM_OF_RESERVED_CPU` | on a CPU, 1 per rank: with any connector vLLM keeps one more core per rank from \
computing, or none at all on a small machine, so that the two arms would compute on unequal cores |

A variable of that table is left alone where `engine.environment` or the caller sets it. With the connector,
`kv_load_failure_policy` is `recompute`: vLLM's default fails a request when one of its blocks cannot be loaded.

Refused, because kvbm sets it or could not work with it:

| key | instead |
| --- | --- |
"""

WORKLOAD_HEAD = """\
# Workload keys

A workload is a YAML file that says what `kvbm bench` sends. `--workload` takes a file, or a shipped one by name;
without it the profile's `bench.workload` counts, and without that `conversations`. An example is in
[the guide](../guide/bench.md#workloads).

- Lengths are in tokens of the engine's own tokenizer, and exact.
- The rules of a profile's values count here too; an unknown key, or one that appears twice, is an error.
"""

VARIABLES_HEAD = """\
# DYN_KVBM_* variables

The names of NVIDIA's block manager, whichever way the engine is started. A name that begins with `DYN_KVBM_` and is not
here is an error with the nearest one, and so is a value that the variable cannot mean. An engine that `kvbm` starts
never sees them: it gets the resolved profile. In a vLLM that is started with `DynamoConnector` by its own command line
the connector reads them itself, by the same tables. `kvbm profile import-env` writes those that are set as a profile,
and [the page about moving](../guide/migrate-from-nvidia.md) says how to go over.

## Honoured

| variable | key of a profile | value | about | NVIDIA's read it otherwise |
| --- | --- | --- | --- | --- |
"""

NO_EFFECT_HEAD = """\
## Without effect here

Each that is set is a warning, whatever its value, and never an error.

| variable | why |
| --- | --- |
"""

METRICS_HEAD = """\
# Metrics of the block manager

At `/metrics` of the engine, beside the engine's own under vLLM's names. With `metrics.serve` (`DYN_KVBM_METRICS=1`)
also by themselves, at `/metrics` of `metrics.port`, from the process of the leader; engine n of a data-parallel server
is at that port + n. A counter moves when the thing has happened. What the panels of NVIDIA's dashboard show is in
[the page about moving](../guide/migrate-from-nvidia.md#dashboards).

The counters are exported without a type, because the names of NVIDIA's block manager, which are kept, have no `_total`;
`rate()` works on them.
"""

COMMANDS_HEAD = """\
# Commands

Data goes to stdout, everything else to stderr.
"""

EXIT_CODES = """\
## Exit codes

| code | meaning |
| --- | --- |
| 0 | it worked; for `kvbm bench`, the verdict is `faster` or `same` |
| 1 | the machine lacks something, or kvbm has a bug; for `kvbm profile diff`, the profiles differ |
| 2 | the profile, an override, a variable or the command line is wrong |
| 3 | `kvbm stop`: an engine had to be killed at its deadline |
| 10 | `kvbm bench`: `slower` |
| 11 | `kvbm bench`: `invalid`, the run says nothing |
| 12 | `kvbm bench`: `wrong`, outputs differ |
| 70 | kvbm has a bug; the message names the file that has the traceback |
| 130 | interrupted |
| any other | `kvbm serve`: the engine's own; 128 + n when signal n ended it, or came before it was ready |
"""


def profile_page() -> str:
    prefix = "engine.arguments."
    common = [key for key in keys() if not key.path.startswith(prefix)]
    of_embedded, of_vllm = ([key for key in keys(engine=kind) if key.path.startswith(prefix)] for kind in ENGINE_KINDS)
    head = PROFILE_HEAD.format(interpolated=", ".join(f"`{key}`" for key in INTERPOLATED))
    lines = [NOTE, "", head, *_key_table(common), "", EMBEDDED_HEAD, *_key_table(of_embedded)]
    lines += [
        "",
        VLLM_HEAD.format(run=shown(RUN), tested=shown(CONTRACT_TESTED)),
        *_key_table(of_vllm),
        "",
        VLLM_SETS.rstrip(),
    ]
    lines += [f"| `{prefix}{name}` | {hint} |" for name, hint in KVBM_SETS.items()]
    absent = [f"| `{name}` | {hint} |" for name, hint in NOT_BUILT.items()]
    absent += [f"| `engine.kind: {kind}` | there are `embedded` and `vllm` |" for kind in NOT_BUILT_ENGINES]
    lines += ["", "## Not in this version", "", "Refused by name:", "", "| key | instead |", "| --- | --- |"]
    return "\n".join([*lines, *absent, ""])


def workload_page() -> str:
    return "\n".join([NOTE, "", WORKLOAD_HEAD, *_key_table(WORKLOAD_KEYS), ""])


def _key_table(of: Iterable[Key]) -> list[str]:
    rows = [f"| `{key.path}` | {_kind(key)} | {_default(key)} | {key.description} |" for key in of]
    return ["| key | value | default | meaning |", "| --- | --- | --- | --- |", *rows]


def _kind(key: Key) -> str:
    return " or ".join(f"`{kind}`" for kind in ENGINE_KINDS) if key.path == "engine.kind" else key.kind


def _default(key: Key) -> str:
    if key.is_required:
        return "required"
    if key.is_section:
        return ""
    if key.default in (None, "", {}):
        return "none"
    return f"`{str(key.default).lower() if isinstance(key.default, bool) else key.default}`"


def variables_page() -> str:
    honoured = [
        f"| `{one.name}` | `{one.key}` | {one.form.value} | {one.about} | {one.upstream} |"
        for one in VARIABLES
        if one.is_supported
    ]
    others = [f"| `{one.name}` | {one.about} |" for one in VARIABLES if not one.is_supported]
    return "\n".join([NOTE, "", VARIABLES_HEAD.rstrip(), *honoured, "", NO_EFFECT_HEAD.rstrip(), *others, ""])


GAUGES = (*HIT_RATES.values(), *NEVER_GAUGES.items(), *BLOCKS.values(), *DISK_GAUGES.items())


def metrics_page() -> str:
    lines = [NOTE, "", METRICS_HEAD, "| metric | type | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | counter | {about} |" for name, (_, about) in COUNTERS.items()]
    lines += [f"| `{name}` | counter | {about} |" for name, about in NEVER.items()]
    lines += [f"| `{name}` | gauge | {about} |" for name, about in GAUGES]
    return "\n".join([*lines, ""])


def commands_page() -> str:
    lines = [NOTE, "", COMMANDS_HEAD]
    for name, command in commands():
        lines += [f"## {name}", "", command.help or "", ""]
        lines += ["| option | meaning |", "| --- | --- |"]
        lines += [f"| {_spelled(parameter)} | {_meaning(parameter)} |" for parameter in command.params]
        lines += ["| `--help` | Show this message and exit. |", ""]
    return "\n".join([*lines, EXIT_CODES])


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its full name, groups before what they hold."""
    yield from _commands("kvbm", typer.main.get_command(app))


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for below, subcommand in getattr(command, "commands", {}).items():
        yield from _commands(f"{name} {below}", subcommand)


def _spelled(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{_metavar(parameter)}`"
    value = "" if parameter.is_flag else f" {_metavar(parameter)}"
    return ", ".join(f"`{option}{value}`" for option in parameter.opts)


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar).replace("|", "\\|")  # a bar ends the cell, even in code


def _meaning(parameter: Any) -> str:
    return f"{parameter.help}{' Required.' if parameter.required else ''}"


def schema_page() -> str:
    return json.dumps(json_schema(), indent=2) + "\n"


PAGES = {
    "profile.md": profile_page,
    "profile.schema.json": schema_page,
    "workload.md": workload_page,
    "variables.md": variables_page,
    "commands.md": commands_page,
    "metrics.md": metrics_page,
}


def outdated() -> list[str]:
    """Names of the pages whose file is not what would be written."""
    return [name for name, page in PAGES.items() if not _is_current(REFERENCE / name, page())]


def _is_current(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


def main() -> int:
    if "--check" in sys.argv[1:]:
        names = outdated()
        for name in names:
            print(f"docs/reference/{name} is out of date: run `python docs/generate.py`")
        return 1 if names else 0
    REFERENCE.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
