"""`kvbm profile import-env`: converts the `DYN_KVBM_*` variables into a profile that names the variable of each value.

The profile resolves to exactly the configuration that a connector would make of the variables, which is checked before
anything is written. A variable without effect becomes a comment with the reason.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.config.connector import resolve_connector
from kvbm.config.document import Source
from kvbm.config.engine import ENGINE_KINDS
from kvbm.config.interpolation import is_interpolated
from kvbm.config.load import load
from kvbm.config.relative_paths import absolute_path
from kvbm.config.variables import STORE_VARIABLES, drop_unused, read_variables, variable_names
from kvbm.embedded.engine.synthetic_models import SYNTHETIC
from kvbm.errors import InvariantError, ProfileError, UsageError
from kvbm_cli.engine.model_facts import SYNTHETIC_PREFIX, model_facts
from kvbm_cli.profile.text import scalar
from kvbm_cli.system.filesystem import no_temporary_file, write_new
from kvbm_cli.terminal.console import print_data, print_note
from kvbm_cli.terminal.printable import commentable

if TYPE_CHECKING:
    from kvbm.config.document import Entry

MODEL = "Qwen/Qwen3-8B"
SERVER_PORT = 8000  # the default of `server.port`
OF_TRTLLM = ("DYN_KVBM_TRTLLM_ZMQ_PORT", "DYN_KVBM_NCCL_MLA_MODE", "DYN_KVBM_NCCL_MAX_CTAS")
OF_LMCACHE = {
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "DYN_KVBM_CPU_CACHE_GB",
    "LMCACHE_MAX_LOCAL_DISK_SIZE": "DYN_KVBM_DISK_CACHE_GB",
    "LMCACHE_LOCAL_DISK": "DYN_KVBM_DISK_CACHE_DIR",
}
HEAD = """\
# Written by `kvbm profile import-env` from the DYN_KVBM_* variables. `unset` the variables now: a variable that is
# still set overrides this file.
description: imported from DYN_KVBM_* variables
"""
METRICS_NOTE = [
    "# Metrics are served on 127.0.0.1; NVIDIA's block manager served them on every address. If Prometheus runs on",
    "# another machine, set `metrics.host: 0.0.0.0`.",
    "",
]
WIDTH = 118


def import_env(
    environment: Mapping[str, str], *, output: Path | None, model: str | None, engine: str | None = None
) -> None:
    """Print the profile, or write it to `output`. ProfileError for invalid variables. `engine` is a kind of engines,
    by default the one to which the variables and the model belong."""
    if engine is not None and engine not in ENGINE_KINDS:
        kinds = ", ".join(f"`{kind}`" for kind in ENGINE_KINDS)
        raise UsageError(f"`--engine {engine}` is not a kind of engines", hint=f"kinds are {kinds}")
    if not variable_names(environment):
        hint = "run it in the environment of the engine; `kvbm profile new` writes a profile without variables"
        if found := [name for name in OF_LMCACHE if name in environment]:
            hint = "; ".join(f"set `{OF_LMCACHE[name]}` instead of `{name}`" for name in found)
        raise UsageError("no DYN_KVBM_* variable is set", hint=hint)
    if model is not None:  # the file may be in another directory
        model = absolute_path("engine.model", model, Source("--model", model))
    text = profile_text(environment, model=model, engine=engine)
    if output is None:
        print_data(text.rstrip("\n"))
    else:
        if output.suffix not in (".yaml", ".yml"):
            raise UsageError(f"`{output}` must end in `.yaml`", hint=f"use `--output {shlex.quote(f'{output}.yaml')}`")
        write_new(output, text)
        print_note(f"{output}: written; `kvbm doctor --profile {shlex.quote(str(output))}` checks it on this machine")
        replaced = [name for name in variable_names(environment) if name not in STORE_VARIABLES]
        if replaced:
            print_note(f"the variables override it while they are set: `unset {' '.join(replaced)}`")


def profile_text(environment: Mapping[str, str], *, model: str | None = None, engine: str | None = None) -> str:
    """Return the text of a profile with this model and the values of the variables."""
    kind, reason = (engine, "") if engine is not None else _engine_kind(model or MODEL, environment)
    config = resolve_connector({}, environment, engine=kind, warns=False)
    if kind == "tensorrt-llm" and config.tiers.host is None:
        message = "TensorRT-LLM loads blocks only from host memory, but the variables set only a disk tier"
        raise ProfileError(message, hint="set `DYN_KVBM_CPU_CACHE_GB` too")
    document, warnings = read_variables(environment)
    warnings += drop_unused(document, environment)
    note = "" if model is not None else "  # set your model here; no variable sets it"
    head = ["engine:", f"  kind: {kind}{reason}", f"  model: {_escaped('engine.model', model or MODEL)}{note}", ""]
    if config.metrics.serve and config.metrics.port == SERVER_PORT:
        head += ["server:", f"  port: {SERVER_PORT + 1}  # {SERVER_PORT} is used for metrics", ""]
    notes = METRICS_NOTE if config.metrics.serve and config.metrics.host is None else []
    lines = [*head, *_section(document, ""), *notes, *_store_note(environment, warnings), *_comments(warnings)]
    text = HEAD + "\n" + "\n".join(lines).rstrip("\n") + "\n"
    _require_equal(text, config)
    return text


def _engine_kind(model: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the engine kind for this model and these variables, and a comment if a variable decided. ProfileError for
    an unknown synthetic model."""
    if model.removeprefix(SYNTHETIC_PREFIX) in SYNTHETIC and model.startswith(SYNTHETIC_PREFIX):
        return "embedded", ""
    if model.startswith(SYNTHETIC_PREFIX):
        model_facts(model, kind="vllm")
        return "vllm", ""
    found = [name for name in OF_TRTLLM if name in environment]
    return ("tensorrt-llm", f"  # {found[0]} is a variable for TensorRT-LLM") if found else ("vllm", "")


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
            yield f"{indent}{name}: {_escaped(here, entry.value)}  # {commentable(entry.source.text)}"


def _escaped(path: str, value: object) -> str:
    """Format a value as YAML in which no variable is replaced."""
    if isinstance(value, str):
        value = value.replace("$", "$$") if is_interpolated(path) else value.replace("${", "$${")
    return scalar(value)


def _store_note(environment: Mapping[str, str], warnings: tuple[str, ...]) -> Iterator[str]:
    """Yield a comment with the variables that the client of the store reads."""
    names = [f"`{name}`" for name in sorted(STORE_VARIABLES & environment.keys())]
    used = [name for name in names if not any(text.startswith(f"{name} has no effect") for text in warnings)]
    if used:
        text = f"Do not unset {', '.join(used)}: a profile holds no address and no credentials of a store."
        yield from textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
        yield ""


def _comments(warnings: tuple[str, ...]) -> Iterator[str]:
    if warnings:
        yield "# Variables without effect:"
        for warning in warnings:
            text = commentable(warning.replace("` has no effect: ", "`: ", 1))
            yield from textwrap.wrap(
                text, WIDTH, initial_indent="# - ", subsequent_indent="#   ", break_on_hyphens=False
            )


def _require_equal(text: str, config: object) -> None:
    """InvariantError unless the text resolves to the configuration of the variables."""
    import tempfile

    try:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as draft:
            draft.write(text)
            draft.flush()
            profile = load(draft.name, directories=[]).profile
    except OSError as error:
        raise no_temporary_file(error) from None
    sections = ("tiers", "offload", "onboard", "transfer", "metrics")
    if any(getattr(profile, name) != getattr(config, name) for name in sections):
        raise InvariantError("the profile differs from the configuration of the variables")
