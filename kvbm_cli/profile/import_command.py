"""Reads how an engine is started, as words of a command line or as a script or manifest, into the text of a profile."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvbm.config.document import cannot_read, decoded, entry_at, parse_document
from kvbm.config.layers import merge
from kvbm.config.load import Examined
from kvbm.engines.table import examine_written
from kvbm.errors import UsageError
from kvbm.text.outside import shown
from kvbm.text.reading import read_at_most
from kvbm_cli.profile.import_file import MAX_BYTES, profile_text, recognised

CONTAINERS = ("docker", "podman", "nerdctl")
COMMAND = "command line"
CONNECTOR_FLAG = "--kv-transfer-config"
_PROFILE = re.compile(r"^(?:engine|extends|tiers)\s*:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ImportedStart:
    """`text` is a profile, which lacks its tiers if the command has no sizes. `notes` name what it does not carry
    over."""

    text: str
    notes: tuple[str, ...]
    has_kvbm: bool


def import_words(words: Sequence[str]) -> ImportedStart:
    """Read a command line. ProfileError if it starts no engine that kvbm knows. Nothing is run."""
    found = _imported(words, COMMAND)
    if os.path.basename(words[0]) in CONTAINERS:
        note = "the engine that is installed here is started, not the image of the container"
        return replace(found, notes=(note, *found.notes))
    return found


def import_script(file: str) -> ImportedStart | None:
    """Read a script or a manifest, None for a profile. ProfileError as `import_words`, or if it cannot be read."""
    try:
        text = decoded(read_at_most(Path(file).expanduser(), MAX_BYTES))
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        raise cannot_read(f"`{shown(file)}`", error) from None
    return None if _PROFILE.search(text) and "apiVersion:" not in text else _imported(text, file)


def _imported(given: str | Sequence[str], name: str) -> ImportedStart:
    found = recognised(given, name)
    entry = entry_at(found.imported.document, ("engine", "model"))
    model = "" if entry is None else os.path.expanduser(str(entry.value))
    if os.path.isdir(model):  # the profile is in another directory
        found = recognised(given, name, model=os.path.abspath(model))
    text = profile_text(replace(found.imported, missing=()), found.launch, [], name)
    return ImportedStart(text, tuple(f"not carried over: {one}" for one in found.unresolved), found.launch.has_kvbm)


def examined_command(command: str) -> tuple[Examined, bool]:
    """Read the command line of an arm, which keeps the connector and the LMCACHE_* variables of another cache.

    Returns its profile with all mistakes, and whether its cache is kvbm's. UsageError if its words cannot be split,
    ProfileError as `import_words`.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"cannot read the words of `{shown(command)}`: {error}") from None
    start = import_words(words)
    document, mistakes = parse_document(start.text, label=COMMAND)
    added = {"engine": {} if start.has_kvbm else _of_another_cache(words)}
    if "tiers" not in document:  # without effect: an engine without kvbm has no tiers
        added["tiers"] = {"host": {"capacity": "1GiB"}}
    document = merge(document, parse_document(json.dumps(added), label=COMMAND)[0])
    found = examine_written(Path("command.yaml"), document, directories=[], variables=os.environ)
    return replace(found, mistakes=(*mistakes, *found.mistakes)), start.has_kvbm


def _of_another_cache(words: Sequence[str]) -> Mapping[str, Mapping[str, object]]:
    """Return the keys of `engine` for the connector and the variables of another cache."""
    variables: dict[str, str] = {}
    config: dict[str, object] = {}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        flag, _, key = name.replace("_", "-").partition(".")
        if name.startswith("LMCACHE_") and equals:
            variables[name] = value.replace("$", "$$")
        elif flag == CONNECTOR_FLAG:
            value = value if equals else (*words, "")[index + 1]
            try:
                if key:
                    _set(config, name.partition(".")[2].split("."), value)
                else:
                    config |= json.loads(value)
            except (ValueError, TypeError):
                raise UsageError(f"`{CONNECTOR_FLAG}` must be a JSON object, not `{shown(value)}`") from None
    arguments: dict[str, object] = {"kv_transfer_config": config} if config else {}
    return {"environment": variables, "arguments": arguments}


def _set(config: dict[str, object], path: Sequence[str], text: str) -> None:
    """Set a value as vLLM does for `--kv-transfer-config.a.b`. TypeError if `a` is no object."""
    *outer, last = path
    for name in outer:
        inside = config.setdefault(name, {})
        if not isinstance(inside, dict):
            raise TypeError(f"`{name}` is no object")
        config = inside
    try:
        config[last] = json.loads(text)
    except ValueError:
        config[last] = text
