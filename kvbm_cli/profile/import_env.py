"""`kvbm profile import-env`: `kvbm profile import` for the `DYN_KVBM_*` variables of this process.

The profile resolves to the configuration that a connector would make of the variables, except for eviction and
`offload.to_host`, which none of them sets. This is checked before anything is written. A variable without effect
becomes a comment with the reason.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvbm.config.connector import as_upstream, resolve_connector
from kvbm.config.document import parse_document
from kvbm.config.engine import ENGINES
from kvbm.config.values import WrongKey
from kvbm.config.variables import STORE_VARIABLES, variable_names
from kvbm.engines.table import examine_written
from kvbm.errors import InvariantError, ProfileError, UsageError
from kvbm_cli.profile.import_file import absolute_model, write_profile
from kvbm_cli.profile.import_launch import Launch, Word, table
from kvbm_cli.profile.import_profile import WIDTH, body, commented, imported, kind_of
from kvbm_cli.terminal.console import print_note

MODEL = "Qwen/Qwen3-8B"
HEAD = """\
# Written by `kvbm profile import-env` from the DYN_KVBM_* variables. `unset` the variables now: a variable that is
# still set overrides this file.
description: imported from DYN_KVBM_* variables
"""

_VARIABLES = {
    "tiers.host.capacity": "DYN_KVBM_CPU_CACHE_GB",
    "tiers.disk.capacity": "DYN_KVBM_DISK_CACHE_GB",
    "tiers.disk.directory": "DYN_KVBM_DISK_CACHE_DIR",
}


def import_env(
    environment: Mapping[str, str], *, output: Path | None, model: str | None, engine: str | None = None
) -> None:
    """Print the profile, or write it to `output`. ProfileError for invalid variables. `engine` is a kind of engines,
    by default the one to which the variables and the model belong."""
    kind_of(engine, model, environment)
    if not variable_names(environment):
        hint = "run it in the environment of the engine; `kvbm profile new` writes a profile without variables"
        if found := {name: key for name, key in table("lmcache").items() if name in environment}:
            hint = "; ".join(f"set `{_VARIABLES[key]}` instead of `{name}`" for name, key in found.items())
        raise UsageError("no DYN_KVBM_* variable is set", hint=hint)
    text = profile_text(environment, model=absolute_model(model), engine=engine)
    write_profile(text, output)
    replaced = [name for name in variable_names(environment) if name not in STORE_VARIABLES]
    if output is not None and replaced:
        print_note(f"the variables override it while they are set: `unset {' '.join(replaced)}`")


def profile_text(environment: Mapping[str, str], *, model: str | None = None, engine: str | None = None) -> str:
    """Return the text of a profile with this model and the values of the variables."""
    kind, reason = kind_of(engine, model or MODEL, environment)
    config = resolve_connector({}, environment, engine=kind, warns=False)
    try:
        ENGINES[kind].require_tiers(has_host=config.tiers.host is not None, has_lower=config.tiers.has_lower)
    except WrongKey as error:
        message = f"the variables set no `tiers.{error.name}`, which {error}"
        raise ProfileError(message, hint=f"set `{_VARIABLES[f'tiers.{error.name}.capacity']}` too") from None
    ours = {name: Word(environment[name]) for name in variable_names(environment)}
    note = "" if model is not None else "set your model here; no variable sets it"
    found = imported(Launch("", kind, environment=ours), model=(model or MODEL, note), engine=(kind, reason))
    store = _store_note(ours, found.warnings)
    lines = [*body(found.document), *store, *commented("Variables without effect:", found.warnings)]
    text = HEAD + "\n" + "\n".join(lines).rstrip("\n") + "\n"
    _require_equal(text, config)
    return text


def _store_note(environment: Mapping[str, str], warnings: tuple[str, ...]) -> Iterator[str]:
    """Yield a comment with the variables that the client of the store reads."""
    names = [f"`{name}`" for name in sorted(STORE_VARIABLES & environment.keys())]
    used = [name for name in names if not any(text.startswith(f"{name} has no effect") for text in warnings)]
    if used:
        text = f"Do not unset {', '.join(used)}: a profile holds no address and no credentials of a store."
        yield from textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
        yield ""


def _require_equal(text: str, config: object) -> None:
    """InvariantError unless the text resolves to the configuration of the variables, but for what none of them sets."""
    document, mistakes = parse_document(text, label="imported.yaml")
    resolved = examine_written(Path("imported.yaml"), document, directories=[]).resolved
    names = ("tiers", "offload", "onboard", "transfer", "metrics")
    found = None if resolved is None else as_upstream(resolved.profile)
    if mistakes or any(getattr(found, name, None) != getattr(config, name) for name in names):
        raise InvariantError("the profile differs from the configuration of the variables")
