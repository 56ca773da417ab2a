"""`kvbm profile import-env`: the `DYN_KVBM_*` variables of this environment as a profile, each value with its variable.

What is written resolves to the very configuration that a connector would make of the variables: that is checked before
anything is written. What has no effect here stands in a comment with the reason.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.errors import InvariantError, UsageError
from kvbm_cli.profile.text import scalar
from kvbm_cli.system.filesystem import no_temporary_file, write_new
from kvbm_cli.terminal.console import print_data, print_note

if TYPE_CHECKING:
    from kvbm.config.document import Entry

MODEL = "Qwen/Qwen3-8B"
SERVER_PORT = 8000  # what `server.port` is where nothing is said
HEAD = """\
# The DYN_KVBM_* variables of an environment, as `kvbm profile import-env` has found them. `unset` them afterwards:
# those that are still set win over this file.
description: what DYN_KVBM_* variables said
"""
METRICS_NOTE = [
    "# Metrics listen on 127.0.0.1 here, NVIDIA's did on every address: `metrics.host: 0.0.0.0` is for a Prometheus",
    "# on another machine.",
    "",
]
WIDTH = 118


def import_env(environment: Mapping[str, str], *, output: Path | None, model: str | None) -> None:
    """Prints the profile, or writes it to `output`. ProfileError for variables that are wrong."""
    from kvbm.config.variables import named

    if not named(environment):
        hint = "it reads the environment that it is started in; `kvbm profile new` writes a profile without one"
        raise UsageError("no DYN_KVBM_* variable is set", hint=hint)
    text = profile_text(environment, model=model)
    if output is None:
        print_data(text.rstrip("\n"))
    else:
        _write(output, text)
        print_note(f"{output}: written; `kvbm doctor --profile {output}` says whether it can be served here")
        print_note(f"the variables win over it as long as they are set: `unset {' '.join(named(environment))}`")


def profile_text(environment: Mapping[str, str], *, model: str | None = None) -> str:
    """The profile of an engine that takes the model for its own, and of all that the variables say."""
    from kvbm.config.connector import resolve_connector
    from kvbm.config.variables import read_variables, settle

    kind = _engine_kind(model or MODEL)
    config = resolve_connector({}, environment, engine=kind, warns=False)
    document, warnings = read_variables(environment)
    warnings += settle(document)
    note = "" if model is not None else "  # yours; no variable names it"
    engine = ["engine:", f"  kind: {kind}", f"  model: {_escaped('engine.model', model or MODEL)}{note}", ""]
    if config.metrics.serve and config.metrics.port == SERVER_PORT:
        engine += ["server:", f"  port: {SERVER_PORT + 1}  # {SERVER_PORT} is the port of the metrics", ""]
    notes = METRICS_NOTE if config.metrics.serve and config.metrics.host is None else []
    lines = [*engine, *_section(document, ""), *notes, *_comments(warnings)]
    text = HEAD + "\n" + "\n".join(lines).rstrip("\n") + "\n"
    _require_meaning(text, config)
    return text


def _engine_kind(model: str) -> str:
    """The engine that has this model, if it is a synthetic one. ProfileError where none has it."""
    from kvbm.embedded.engine.synthetic_models import SYNTHETIC
    from kvbm_cli.engine.model_facts import SYNTHETIC_PREFIX, model_facts

    if model.removeprefix(SYNTHETIC_PREFIX) in SYNTHETIC and model.startswith(SYNTHETIC_PREFIX):
        return "embedded"
    if model.startswith(SYNTHETIC_PREFIX):
        model_facts(model, kind="vllm")
    return "vllm"


def _section(section: Mapping[str, Entry], path: str) -> Iterator[str]:
    indent = "  " * path.count(".")
    for name, entry in section.items():
        here = f"{path}{name}"
        if entry.section is not None:
            yield f"{indent}{name}:"
            yield from _section(entry.section, f"{here}.")
            if not path:
                yield ""
        else:
            yield f"{indent}{name}: {_escaped(here, entry.value)}  # {_shown(entry.source.text)}"


def _escaped(path: str, value: object) -> str:
    """As YAML, and so that no variable is looked for in it."""
    from kvbm.config.interpolation import is_interpolated

    if isinstance(value, str):
        value = value.replace("$", "$$") if is_interpolated(path) else value.replace("${", "$${")
    return scalar(value)


def _shown(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _comments(warnings: tuple[str, ...]) -> Iterator[str]:
    if warnings:
        yield "# Without effect here:"
        for warning in warnings:
            text = _shown(warning.replace("` has no effect: ", "`: ", 1))
            yield from textwrap.wrap(
                text, WIDTH, initial_indent="# - ", subsequent_indent="#   ", break_on_hyphens=False
            )


def _require_meaning(text: str, config: object) -> None:
    """InvariantError unless the text means what the variables do."""
    import tempfile

    from kvbm.config.load import load

    try:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as draft:
            draft.write(text)
            draft.flush()
            profile = load(draft.name, directories=[]).profile
    except OSError as error:
        raise no_temporary_file(error) from None
    sections = ("tiers", "offload", "onboard", "transfer", "metrics")
    if any(getattr(profile, name) != getattr(config, name) for name in sections):
        raise InvariantError("the profile does not mean what the variables do")


def _write(output: Path, text: str) -> None:
    if output.suffix not in (".yaml", ".yml"):
        raise UsageError(f"`{output}` must end in `.yaml`", hint=f"`--output {output}.yaml`")
    write_new(output, text)
