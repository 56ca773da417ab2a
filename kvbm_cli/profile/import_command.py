"""Reads how an engine is started, as words of a command line or as a script or manifest, into the text of a profile."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvbm.config.document import entry_at, parse_document
from kvbm.config.layers import merge
from kvbm.config.load import Examined
from kvbm.engines.table import examine_written
from kvbm.errors import UsageError
from kvbm.text.outside import shown
from kvbm_cli.profile.import_file import contents_of, is_profile, recognised
from kvbm_cli.profile.import_launch import COMMAND
from kvbm_cli.profile.import_profile import Imported

_IS_LOCAL = "the engine that is installed here is started, not the image or the other machine that is named"


def import_words(words: Sequence[str]) -> Imported:
    """Read a command line. ProfileError if it starts no engine that kvbm knows. Nothing is run."""
    return _recognised(words, COMMAND)


def import_script(file: str) -> Imported | None:
    """Read a script or a manifest, None for a profile. ProfileError as `import_words`, or if it cannot be read."""
    text = contents_of(file)
    return None if is_profile(text) else _recognised(text, file)


def notes_of(start: Imported) -> list[str]:
    """Return what the profile does not carry over."""
    return [*([_IS_LOCAL] if start.launch.is_elsewhere else []), *start.notes()]


def _recognised(given: str | Sequence[str], name: str) -> Imported:
    """Return the engine, with a profile that may lack its tiers."""
    found = recognised(given, name)
    entry = entry_at(found.document, ("engine", "model"))
    model = "" if entry is None else os.path.expanduser(str(entry.value))
    if os.path.isdir(model):  # the profile is in another directory
        found = recognised(given, name, model=os.path.abspath(model))
    return replace(found, missing=())


def examined_command(command: str) -> tuple[Examined, Imported]:
    """Read the command line of an arm, which keeps the connector and the LMCACHE_* variables of another cache.

    Returns its profile with all mistakes, and what was read. No shell has read the command, so it is read as a script:
    a variable that it does not set is not carried over. ProfileError as `import_words`.
    """
    if (len(command) - len(command.rstrip("\\"))) % 2:
        raise UsageError("the command ends with a backslash, and nothing follows")
    start = _recognised(command, COMMAND)
    has_kvbm, connector = start.launch.has_kvbm, start.connector
    document, mistakes = parse_document(start.text, label=COMMAND)
    added: dict[str, object] = {}
    if not has_kvbm:
        if not isinstance(connector, dict | None):
            raise UsageError(f"`--kv-transfer-config` must be a JSON object, not `{shown(str(connector))}`")
        given = {name: word for name, word in start.launch.environment.items() if not word.unknown}
        added["engine"] = {
            "environment": {n: word.replace("$", "$$") for n, word in given.items() if n.startswith("LMCACHE_")},
            "arguments": {"kv_transfer_config": connector} if connector else {},
        }
    if "tiers" not in document:  # without effect: an engine without kvbm has no tiers
        added["tiers"] = {"host": {"capacity": "1GiB"}}
    document = merge(document, parse_document(json.dumps(added), label=COMMAND)[0])
    examined = examine_written(Path("command.yaml"), document, directories=[], variables=os.environ)
    return replace(examined, mistakes=(*mistakes, *examined.mistakes)), start
