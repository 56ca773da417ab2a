"""`kvbm profile import FILE`: reads how an engine is started elsewhere, and prints a profile that does the same."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvbm.config.document import Source, cannot_read, decoded
from kvbm.config.key_list import OWN
from kvbm.config.relative_paths import absolute_path
from kvbm.config.variables import variable_names
from kvbm.errors import ProfileError, UsageError
from kvbm.text.outside import shown
from kvbm.text.reading import read_at_most, read_stdin
from kvbm_cli.profile.import_launch import READS, Launch, Word, table
from kvbm_cli.profile.import_profile import Imported, body, commented, imported, kind_of
from kvbm_cli.profile.import_shell import MARKS, MAX_LAUNCHES, CommandText
from kvbm_cli.profile.import_text import fenced, read_lines, read_text, variables_of
from kvbm_cli.profile.import_yaml import read_yaml
from kvbm_cli.profile.text import scalar
from kvbm_cli.system.filesystem import write_new
from kvbm_cli.terminal.console import print_data, print_json, print_note
from kvbm_cli.terminal.printable import commentable

MAX_BYTES = 1 << 18
MAX_SHOWN = 10
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
    left = [f"not carried over: {one}" for one in found.unresolved]
    for line in [] if as_json else [*_others(found.launch, found.others), *found.imported.missing, *left]:
        print_note(line)


@dataclass(frozen=True, slots=True)
class Recognised:
    """An engine that a command, a script or a manifest starts. `text` is its profile, without secrets. `others` are
    started by the same file."""

    launch: Launch
    others: list[Launch]
    imported: Imported
    text: str

    @property
    def unresolved(self) -> list[str]:
        """What the profile does not have, each with the reason. It is listed on the terminal."""
        return [one.text() for one in self.imported.left]


def recognised(
    given: str | Sequence[str],
    name: str,
    *,
    model: str | None = None,
    engine: str | None = None,
    select: str | None = None,
) -> Recognised:
    """Return the engine that a text starts, or the words of a command, which are taken as they are.

    `name` is what messages call it, and `select` one of several engines. ProfileError if it starts none, UsageError for
    an unknown engine or name. Nothing else is read, and nothing is run.
    """
    launches = launches_in(given, name)
    taken = _taken(launches, select, name)
    kind, reason = kind_of(engine or taken.kind, model, taken.environment)
    chosen = absolute_model(model)
    found = imported(taken, model=None if chosen is None else (chosen, "--model"), engine=(kind, reason))
    others = [one for one in launches if one is not taken]
    return Recognised(taken, others, found, profile_text(found, taken, others, name))


def launches_in(given: str | Sequence[str], name: str) -> list[Launch]:
    """Return the engines that a text or the words of a command start, at least one."""
    text = given.replace("\r\n", "\n").translate(MARKS) if isinstance(given, str) else ""
    script = CommandText()
    try:
        script.find([] if isinstance(given, str) else [Word(one.translate(MARKS), 1) for one in given])
        found = script.results() or _launches_of(text)
    except ProfileError as error:
        raise ProfileError(f"cannot read `{shown(name)}`: {error.message}", hint=error.hint) from None
    keys = set(re.findall(r"^([A-Za-z_]+):", text, re.MULTILINE)) if not found else set()
    if OWN & keys and "apiVersion" not in keys:
        raise ProfileError(f"`{shown(name)}` is a profile already", hint="`kvbm profile check` checks it")
    if not found:
        raise ProfileError(f"`{shown(name)}` starts no engine that `kvbm profile import` knows", hint=READS)
    named: dict[str, Launch] = {}
    for one in found:  # each has a name of its own, for `--select`
        names = (one.name, *(f"{one.name}-{count}" for count in range(2, len(found) + 2)))
        name = next(name for name in names if name not in named)
        named[name] = replace(one, name=name)
    return list(named.values())


def _launches_of(text: str) -> list[Launch]:
    """Return every start of an engine. ProfileError for a text that is not read to its end."""
    found: list[Launch] = []
    problem: ProfileError | None = None
    exported: dict[str, Word] = {}
    for block, line in fenced(text):
        try:
            found += _of_block(block, line, exported)
        except ProfileError as error:  # another language
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
            if found := read_lines(text, line).results():  # a Makefile
                return found
            raise
    script = read_text(text, line, exported)
    found = script.results()
    for _, document in () if found else script.documents:
        found += read_yaml(document, document.line) if _YAML.match(document) else []
    return found


def profile_text(found: Imported, taken: Launch, others: list[Launch], name: str) -> str:
    source = shown(commentable(name))
    lines = [
        f"# Written by `kvbm profile import` from {source}.",
        *(f"# {commentable(line)}" for line in _others(taken, others)),
        f"description: {scalar(f'imported from {source}'.replace('${', '$${'))}",
        "",
        *body(found.document),
        *commented("Missing:", found.missing),
        *commented("Not carried over:", [one.text() for one in found.left]),
        *commented("Variables without effect:", found.warnings),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _others(taken: Launch, others: list[Launch]) -> list[str]:
    """Return which engine of the file was taken, and how to choose another one; nothing if it has one."""
    if not others:
        return []
    names = ", ".join(f"`{shown(one.name)}` (line {one.line})" for one in others[:MAX_SHOWN])
    more = f" and {len(others) - MAX_SHOWN} more" if len(others) > MAX_SHOWN else ""
    first = f"The file starts {len(others) + 1} engines. This is `{shown(taken.name)}` (line {taken.line})."
    return [first, f"The others: {names}{more}. `--select NAME` chooses one."]


def _taken(launches: list[Launch], select: str | None, name: str) -> Launch:
    """Return the engine that was chosen, or else the first with kvbm, or else the first."""
    if select is None:
        return next((one for one in launches if one.has_kvbm), launches[0])
    if (found := next((one for one in launches if one.name == select), None)) is None:
        names = ", ".join(f"`{shown(one.name)}`" for one in launches[:MAX_SHOWN])
        raise UsageError(f"`{shown(name)}` starts no engine with the name `{select}`", hint=f"names are {names}")
    return found


def contents_of(file: str) -> str:
    """Return the text of a file, `-` for the standard input. ProfileError if it cannot be read."""
    try:
        contents = read_stdin(MAX_BYTES) if file == "-" else read_at_most(Path(file).expanduser(), MAX_BYTES)
        return decoded(contents)
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        raise cannot_read("the standard input" if file == "-" else f"`{shown(file)}`", error) from None


def _as_data(found: Recognised, file: str) -> dict[str, object]:
    left = found.imported.left
    return {
        "file": file,
        "selected": {"name": found.launch.name, "line": found.launch.line},
        "others": [{"name": one.name, "line": one.line} for one in found.others],
        "profile": found.text,
        "missing": list(found.imported.missing),
        "not_carried_over": [{"what": one.what, "line": one.line or None, "reason": one.reason} for one in left],
        "without_effect": list(found.imported.warnings),
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
