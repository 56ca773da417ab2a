"""`kvbm profile import FILE` and `import-env`: print a profile that does what a file or variables do elsewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvbm.config.connector import resolve_connector
from kvbm.config.document import Source, cannot_read, decoded
from kvbm.config.key_list import OWN
from kvbm.config.relative_paths import absolute_path
from kvbm.config.variables import STORE_VARIABLES, variable_names
from kvbm.errors import ProfileError, UsageError
from kvbm.text.outside import shown
from kvbm.text.reading import read_at_most, read_stdin
from kvbm_cli.profile.import_launch import COMMAND, READS, Launch, Word, table
from kvbm_cli.profile.import_profile import MAX_OTHERS, Imported, imported, kind_of
from kvbm_cli.profile.import_shell import MAX_LAUNCHES, WITHOUT_MARKS, launches_of
from kvbm_cli.profile.import_text import fenced, read_lines, read_text, variables_of
from kvbm_cli.profile.import_yaml import read_yaml
from kvbm_cli.system.filesystem import write_new
from kvbm_cli.terminal.console import print_data, print_json, print_note

MAX_BYTES = 1 << 18
MODEL = "Qwen/Qwen3-8B"  # if no variable and no option names one
_PROFILE = re.compile(rf"^(?:{'|'.join(sorted(OWN))})\s*:", re.MULTILINE)
# The first line that is no comment has a key, or begins a document.
_YAML = re.compile(r"(?:[ \t]*(?:#.*)?\n)*(?:---|%YAML|\{|[\"']?[A-Za-z_][\w./-]*[\"']?:(?:\s|$))")


def import_file(
    file: str, *, output: Path | None, model: str | None, engine: str | None, select: str | None, as_json: bool
) -> None:
    """Print the profile, or write it to `output`. `select` names one of several engines in the file."""
    kind_of(engine, model, {})
    name = "the standard input" if file == "-" else file
    found = recognised(contents_of(file), name, model=model, engine=engine, select=select)
    if as_json:
        print_json(_as_data(found, file))
    if output is not None or not as_json:
        write_profile(found.text, output)
    for line in [] if as_json else [*found.choice(), *found.notes()]:
        print_note(line)


def import_env(
    environment: Mapping[str, str], *, output: Path | None, model: str | None, engine: str | None = None
) -> None:
    """Print the profile, or write it to `output`. ProfileError for invalid variables. `engine` is a kind of engines,
    by default the one to which the variables and the model belong."""
    names = variable_names(environment)
    if not names:
        hint = "run it in the environment of the engine; `kvbm profile new` writes a profile without variables"
        raise UsageError("no DYN_KVBM_* variable is set", hint=hint)
    found = imported_env(environment, model=absolute_model(model), engine=engine)
    write_profile(found.text, output)
    for line in found.notes():
        print_note(line)
    if replaced := [name for name in names if name not in STORE_VARIABLES]:
        print_note(f"the variables override it while they are set: `unset {' '.join(replaced)}`")


def imported_env(environment: Mapping[str, str], *, model: str | None = None, engine: str | None = None) -> Imported:
    """Return a profile with this model and the values of the variables."""
    kind = kind_of(engine, model or MODEL, environment)
    ours = {name: Word(environment[name]) for name in variable_names(environment)}
    resolve_connector({}, environment, engine=kind[0], warns=False)  # refuses what a connector would refuse
    note = "" if model is not None else "set your model here; no variable sets it"
    launch = Launch("environment", None, environment=ours)
    return imported(launch, "DYN_KVBM_* variables", model=(model or MODEL, note), engine=kind)


def recognised(
    given: str | Sequence[str],
    name: str,
    *,
    model: str | None = None,
    engine: str | None = None,
    select: str | None = None,
) -> Imported:
    """Return the engine that a text starts, or the words of a command, which are taken as they are.

    `select` is one of several engines. ProfileError if it starts none, UsageError for an unknown engine or name.
    Nothing else is read, and nothing is run.
    """
    launches = launches_in(given, name)
    taken = _taken(launches, select, name)
    kind = kind_of(engine or taken.kind, model, taken.environment)
    given_model = None if model is None else (str(absolute_model(model)), "--model")
    others = [one for one in launches if one is not taken]
    return imported(taken, name, model=given_model, engine=kind, others=others)


def is_profile(text: str) -> bool:
    return _PROFILE.search(text) is not None and "apiVersion:" not in text


def launches_in(given: str | Sequence[str], name: str) -> list[Launch]:
    """Return the engines that a text or the words of a command start, at least one."""
    text = given.replace("\r\n", "\n").translate(WITHOUT_MARKS) if isinstance(given, str) else ""
    words = [] if isinstance(given, str) else [Word(one.translate(WITHOUT_MARKS), 1) for one in given]
    source = "the command" if name == COMMAND else f"`{shown(name)}`"
    try:
        found = launches_of(words, "", {}) or _launches_of(text)
    except ProfileError as error:
        raise ProfileError(f"cannot read {source}: {error.message}", hint=error.hint) from None
    if not found and is_profile(text):
        raise ProfileError(f"`{shown(name)}` is a profile already", hint="`kvbm profile check` checks it")
    if not found:
        raise ProfileError(f"{source} starts no engine that `kvbm profile import` knows", hint=READS)
    names: dict[str, int] = {}  # with the last number of each
    for at, one in enumerate(found):  # each has a name of its own, for `--select`
        name = one.name
        while name in names:
            names[one.name] += 1
            name = f"{one.name}-{names[one.name]}"
        names[name] = 1
        found[at] = replace(one, name=name)
    return found


def _launches_of(text: str) -> list[Launch]:
    """Return every start of an engine. ProfileError for a text that is not read to its end."""
    found: list[Launch] = []
    problem: ProfileError | None = None
    exported: dict[str, Word] = {}
    try:
        for block, line in fenced(text, exported):
            try:
                found += _of_block(block, line, exported)
            except ProfileError as error:  # another language
                problem = problem or error
    except ProfileError as error:  # the variables are too many, of which the first blocks had few
        problem = problem or error
    if problem is not None and not found:
        raise problem
    variables = {} if found else variables_of(text)
    if variable_names(variables) or table("lmcache").keys() & variables:
        return [Launch("environment", None, environment=variables)]
    return found[:MAX_LAUNCHES]


def _of_block(text: str, line: int, exported: dict[str, Word]) -> list[Launch]:
    if _YAML.match(text):
        try:
            return read_yaml(text, line)
        except ProfileError:
            if found := read_lines(text, line, exported).results():  # a Makefile
                return found
            raise
    script = read_text(text, line, exported)
    found = script.results()
    for one in () if found else script.documents:
        found += read_yaml(one.text, one.text.line) if _YAML.match(one.text) else []
    return found


def _taken(launches: list[Launch], select: str | None, name: str) -> Launch:
    """Return the engine that was chosen, or else the first with kvbm, or else the first."""
    if select is None:
        return next((one for one in launches if one.has_kvbm), launches[0])
    if (found := next((one for one in launches if one.name == select), None)) is None:
        names = ", ".join(f"`{shown(one.name)}`" for one in launches[:MAX_OTHERS])
        raise UsageError(f"`{shown(name)}` starts no engine with the name `{select}`", hint=f"names are {names}")
    return found


def contents_of(file: str) -> str:
    """Return the text of a file, `-` for the standard input. ProfileError if it cannot be read."""
    try:
        contents = read_stdin(MAX_BYTES) if file == "-" else read_at_most(Path(file).expanduser(), MAX_BYTES)
        return decoded(contents)
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        raise cannot_read("the standard input" if file == "-" else f"`{shown(file)}`", error) from None


def _as_data(found: Imported, file: str) -> dict[str, object]:
    selected, *others = [{"name": one.name, "line": one.line} for one in (found.launch, *found.others)]
    return {
        "file": file,
        "selected": selected,
        "others": others,
        "profile": found.text,
        "missing": list(found.missing),
        "not_carried_over": [{"what": one.what, "line": one.line or None, "reason": one.reason} for one in found.left],
        "without_effect": list(found.warnings),
    }


def absolute_model(model: str | None) -> str | None:
    """Return the model of the command line for a file that may be in another directory."""
    return None if model is None else absolute_path("engine.model", model, Source("--model", model))


def write_profile(text: str, output: Path | None) -> None:
    """Print a profile, or write it to a new file."""
    if output is None:
        print_data(text.rstrip("\n"))
        return
    if output.suffix not in (".yaml", ".yml"):
        raise UsageError(f"`{output}` must end in `.yaml`", hint=f"use `--output {shlex.quote(f'{output}.yaml')}`")
    write_new(output, text)
    print_note(f"{output}: written; `kvbm doctor --profile {shlex.quote(str(output))}` checks it on this machine")
