"""Reads how an engine is started, as words of a command line or as a script or manifest, into the text of a profile."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvbm.config.document import entry_at, parse_document
from kvbm.config.layers import merge
from kvbm.config.load import Examined
from kvbm.engines.table import examine_written
from kvbm.errors import UsageError
from kvbm.text.outside import shown
from kvbm_cli.profile.import_file import Recognised, contents_of, profile_text, recognised

COMMAND = "command line"
_IS_LOCAL = "the engine that is installed here is started, not the image or the other machine that is named"
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
    return _as_start(_recognised(words, COMMAND), COMMAND)


def import_script(file: str) -> ImportedStart | None:
    """Read a script or a manifest, None for a profile. ProfileError as `import_words`, or if it cannot be read."""
    text = contents_of(file)
    return None if _PROFILE.search(text) and "apiVersion:" not in text else _as_start(_recognised(text, file), file)


def _recognised(given: str | Sequence[str], name: str) -> Recognised:
    found = recognised(given, name)
    entry = entry_at(found.imported.document, ("engine", "model"))
    model = "" if entry is None else os.path.expanduser(str(entry.value))
    if os.path.isdir(model):  # the profile is in another directory
        return recognised(given, name, model=os.path.abspath(model))
    return found


def _as_start(found: Recognised, name: str) -> ImportedStart:
    text = profile_text(replace(found.imported, missing=()), found.launch, [], name)
    notes = [_IS_LOCAL] if found.launch.is_elsewhere else []
    notes += [f"not carried over: {one}" for one in found.unresolved]
    return ImportedStart(text, tuple(notes), found.launch.has_kvbm)


def examined_command(command: str) -> tuple[Examined, bool]:
    """Read the command line of an arm, which keeps the connector and the LMCACHE_* variables of another cache.

    Returns its profile with all mistakes, and whether its cache is kvbm's. UsageError if its words cannot be split,
    ProfileError as `import_words`.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"cannot read the words of `{shown(command)}`: {error}") from None
    found = _recognised(words, COMMAND)
    start, connector = _as_start(found, COMMAND), found.imported.connector
    document, mistakes = parse_document(start.text, label=COMMAND)
    added: dict[str, object] = {}
    if not start.has_kvbm:
        if not isinstance(connector, dict | None):
            raise UsageError(f"`--kv-transfer-config` must be a JSON object, not `{shown(str(connector))}`")
        given = found.launch.environment.items()
        variables = {name: word.replace("$", "$$") for name, word in given if name.startswith("LMCACHE_")}
        added["engine"] = {
            "environment": variables,
            "arguments": {"kv_transfer_config": connector} if connector else {},
        }
    if "tiers" not in document:  # without effect: an engine without kvbm has no tiers
        added["tiers"] = {"host": {"capacity": "1GiB"}}
    document = merge(document, parse_document(json.dumps(added), label=COMMAND)[0])
    examined = examine_written(Path("command.yaml"), document, directories=[], variables=os.environ)
    return replace(examined, mistakes=(*mistakes, *examined.mistakes)), start.has_kvbm
