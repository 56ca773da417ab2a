"""Writes docs/reference/ from the schema, the table of variables and the commands themselves.

    python docs/generate.py            writes the pages
    python docs/generate.py --check    says which page is out of date, and ends with 1

tests/docs/test_docs.py runs the check, so a key, a variable or an option without its line cannot be merged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from kvbm.config.mistakes import NOT_BUILT, NOT_BUILT_ENGINES
from kvbm.config.schema import Key, keys
from kvbm.config.variables import VARIABLES, Effect
from kvbm.metrics import COUNTERS, HIT_RATE, HOST_BLOCKS
from kvbm_cli.app import app
from kvbm_cli.bench.workload import KEYS as WORKLOAD_KEYS

REFERENCE = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/generate.py; edit what it is made from. -->"

PROFILE_HEAD = """\
# Profile keys

A profile is a YAML file. `kvbm profile show PROFILE` prints every key with its value and where that came from;
`kvbm profile check PROFILE` finds the first mistake that can be known without starting an engine. Each layer wins over
the one before:

defaults < the profile named by `extends` < the file < `DYN_KVBM_*` variables (see `variables.md`) < `--set KEY=VALUE`

- `extends: NAME` takes over a shipped profile, `extends: ./file.yaml` a file beside this one.
- Sizes have a unit: `100GB` is 100e9 bytes, `64GiB` is 64 * 2^30.
- Booleans are `true` and `false`; `on` and `yes` are text.
- An unknown key, a key that appears twice, and a value of the wrong type are errors.
- `engine.model` and `tiers` are required; of `tiers.host`, one of `capacity` and `blocks`.
- `tiers.host.blocks` wins over `tiers.host.capacity` within one layer; the `capacity` of a later layer wins over the
  `blocks` of an earlier one.

```yaml
# ./mine.yaml, for `kvbm serve --profile ./mine.yaml`
description: Qwen3 on one GPU with 64 GiB of host memory
engine:
  model: ~/models/Qwen3-8B
  arguments:
    dtype: bfloat16
    num_blocks: 4096
tiers:
  host:
    capacity: 64GiB
server:
  port: 8001
```
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

The names of NVIDIA's block manager. A name that is not in this table is an error, and so is a value that the variable
cannot mean. An engine that `kvbm` starts never sees them: it gets the resolved profile.
"""

METRICS_HEAD = """\
# Metrics of the block manager

At `/metrics` of the engine, beside the engine's own under vLLM's names. A counter moves when the thing has happened.
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
| 1 | the machine lacks something, or kvbm has a bug |
| 2 | the profile, an override, a variable or the command line is wrong |
| 10 | `kvbm bench`: `slower` |
| 11 | `kvbm bench`: `invalid`, the run says nothing |
| 12 | `kvbm bench`: `wrong`, outputs differ |
| 130 | interrupted |
| any other | `kvbm serve`: the engine's own; 128 + n when signal n ended it |
"""


def profile_page() -> str:
    lines = [NOTE, "", PROFILE_HEAD, *_key_table(keys())]
    absent = [f"| `{name}` | {hint} |" for name, hint in NOT_BUILT.items()]
    absent += [f"| `engine.kind: {kind}` | there are `embedded` and `vllm` |" for kind in NOT_BUILT_ENGINES]
    lines += ["", "Refused by name, because they are not in this version:", "", "| key | instead |", "| --- | --- |"]
    return "\n".join([*lines, *absent, ""])


def workload_page() -> str:
    return "\n".join([NOTE, "", WORKLOAD_HEAD, *_key_table(WORKLOAD_KEYS), ""])


def _key_table(of: Iterable[Key]) -> list[str]:
    rows = [f"| `{key.path}` | {key.kind} | {_default(key)} | {key.description} |" for key in of]
    return ["| key | value | default | meaning |", "| --- | --- | --- | --- |", *rows]


def _default(key: Key) -> str:
    if key.is_required:
        return "required"
    if key.is_section:
        return ""
    if key.default in (None, "", {}):
        return "none"
    return f"`{str(key.default).lower() if isinstance(key.default, bool) else key.default}`"


def variables_page() -> str:
    lines = [NOTE, "", VARIABLES_HEAD, "| variable | effect | value | about |", "| --- | --- | --- | --- |"]
    for variable in VARIABLES:
        effect = f"sets `{variable.key}`" if variable.effect is Effect.HONOURED else variable.effect.value
        lines.append(f"| `{variable.name}` | {effect} | {variable.form.value} | {variable.about} |")
    return "\n".join([*lines, ""])


def metrics_page() -> str:
    lines = [NOTE, "", METRICS_HEAD, "| metric | type | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | counter | {about} |" for name, (_, about) in COUNTERS.items()]
    lines += [f"| `{name}` | gauge | {about} |" for name, about in (HIT_RATE, HOST_BLOCKS)]
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


PAGES = {
    "profile.md": profile_page,
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
