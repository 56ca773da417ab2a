"""`kvbm profile new`: writes a commented profile from options.

What `kvbm profile check` would refuse is not written. An existing file is overwritten only with --force.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvbm.config.document import plain_values, together
from kvbm.config.files import real_path
from kvbm.config.findings import Findings
from kvbm.config.layers import files_with_parents, find, shipped_name
from kvbm.config.load import written_by
from kvbm.engines.table import examine_written
from kvbm.errors import InvariantError, UsageError
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.profile.check import workload_mistakes
from kvbm_cli.profile.machine_check import warn_of
from kvbm_cli.profile.machine_problems import problems_here
from kvbm_cli.profile.preflight import all_mistakes
from kvbm_cli.profile.text import profile_text
from kvbm_cli.system.filesystem import write_new
from kvbm_cli.terminal.console import print_data, print_note

KEYS = {
    "--engine": "engine.kind",
    "--model": "engine.model",
    "--host": "tiers.host.capacity",
    "--disk": "tiers.disk.capacity",
    "--dir": "tiers.disk.directory",
    "--port": "server.port",
}


def new_profile(
    file: Path, given: Mapping[str, str], overrides: Sequence[str], *, extends: Sequence[str], is_forced: bool
) -> None:
    """Write `file`. `given` are the texts of options of KEYS. KvbmError for a mistake; then nothing is written."""
    _require_place(file, is_forced=is_forced)
    parents = [find(reference, directories=[profiles_directory()]) for reference in extends]
    if not parents and (missing := _missing(given, overrides)):
        hint = "add the options, or extend a profile with `--extends demo`"
        raise UsageError(f"missing: {', and '.join(missing)}", hint=hint)
    values, engine = _checked(file, given, overrides, parents)
    _require_no_cycle(file, parents)
    references = [_reference(parent, file) for parent in parents]
    write_new(file, profile_text(values, engine=engine, extends=references), replaces=is_forced)
    print_data(str(file))
    print_note(f"`kvbm serve --profile {shlex.quote(str(file))}` starts the engine")


def _require_place(file: Path, *, is_forced: bool) -> None:
    if file.suffix not in (".yaml", ".yml"):
        name = f"{file}.yaml" if file.name not in (".yaml", ".yml") else file.with_name("mine.yaml")
        raise UsageError(
            f"`{file}` must be a name that ends in `.yaml`", hint=f"run `kvbm profile new {shlex.quote(str(name))}`"
        )
    if os.path.isdir(file):
        raise UsageError(f"`{file}` is a directory")
    if os.path.lexists(file) and not is_forced:
        raise UsageError(f"`{file}` exists", hint="choose another name, or overwrite it with `--force`")


def _missing(given: Mapping[str, str], overrides: Sequence[str]) -> list[str]:
    """Options that a profile without a parent requires and that were not given."""
    keys = [*(KEYS[option] for option in given), *(text.partition("=")[0].strip() for text in overrides)]
    options = [f"`{option}`" for option in ("--engine", "--model") if KEYS[option] not in keys]
    missing = [" and ".join(options)] if options else []
    has_tier = any(key.startswith(("tiers.host.", "tiers.disk.")) for key in keys)
    return missing if has_tier else [*missing, "one of `--host` and `--disk`"]


def _checked(
    file: Path, given: Mapping[str, str], overrides: Sequence[str], parents: Sequence[Path]
) -> tuple[dict[str, object], str]:
    """Return the values to write and the kind of engine. ProfileError for anything `kvbm profile check` refuses."""
    written, wrong = written_by(overrides, {KEYS[option]: (option, text) for option, text in given.items()})
    if wrong:
        raise together(wrong)
    places = [profiles_directory()]
    examined = examine_written(file, written, directories=places, parents=parents, variables=os.environ)
    sizing, mistakes = all_mistakes(examined)
    mistakes += [] if examined.resolved is None else workload_mistakes(examined.resolved)
    if mistakes:
        raise together(mistakes)
    assert examined.resolved is not None, "no mistakes means a profile"
    assert sizing is not None, "no mistakes means sizes, or a reason why not"
    warn_of(examined.resolved, problems_here(examined.resolved, sizing))
    return plain_values(written), examined.resolved.profile.engine.kind


def _require_no_cycle(file: Path, parents: Sequence[Path]) -> None:
    findings = Findings()
    files_with_parents(parents, [profiles_directory()], findings)
    if real_path(file) in [real_path(Path(label)) for label in findings.labels]:
        raise UsageError(f"`{file}` would extend itself", hint="choose another name for the new profile")


def _reference(parent: Path, file: Path) -> str:
    """Return the value of `extends`: a path is relative to the new file."""
    if (name := shipped_name(parent, [profiles_directory()])) is not None:
        return name
    if parent.is_absolute():
        return str(parent)
    place = real_path(file.parent)
    relative = os.path.relpath(real_path(parent.parent) / parent.name, place)
    if real_path(place / relative) != real_path(parent):
        raise InvariantError(f"`{relative}` in `{place}` is not `{parent}`")
    return relative if relative.startswith("../") else f"./{relative}"
