"""`python -m kvbm.engines.embedded`: the embedded engine with its HTTP server.

`kvbm serve` and `kvbm bench` start it with the flags of a profile; it also runs by hand. It imports nothing heavy until
the flags are parsed and the socket is open.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from pydantic import Field, ValidationError

from kvbm.engines.embedded.engine.config import EngineConfig
from kvbm.engines.launch_plan import flag_of
from kvbm.errors import EnvironmentProblem, KvbmError, ProfileError, UsageError
from kvbm.host.log_queue import use_queued_stderr
from kvbm.text.log_limit import LogLimit
from kvbm.types import MAX_SECONDS

if TYPE_CHECKING:
    from kvbm.engines.embedded.driver import KvbmScheduler, KvbmWorker
    from kvbm.engines.embedded.http.completion import Served

PROGRAM = "python -m kvbm.engines.embedded"
MEBIBYTE = 2**20


class Flags(EngineConfig):
    """The flags of the engine and those of its server."""

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 selects a free one.")
    connector: str | None = Field(
        default=None, description="A resolved profile in JSON, with which the block manager runs."
    )
    drain_timeout: float = Field(
        default=20.0, ge=0, le=MAX_SECONDS, description="Seconds for open requests at shutdown."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the engine until a signal stops it. Returns the exit code."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogLimit())
    logging.getLogger("kvbm").setLevel(logging.INFO)
    try:
        return _serve(_read_flags(arguments))
    except KvbmError as error:
        with suppress(OSError):  # a full disk; the exit code remains
            print(_error_text(error), file=sys.stderr)
        return error.exit_code


def _serve(flags: Flags) -> int:
    try:
        from kvbm.engines.embedded.http.server import Server, ServerSettings
    except ImportError as error:
        raise _missing(error) from error
    settings = ServerSettings(host=flags.host, port=flags.port, drain_timeout_s=flags.drain_timeout)
    return Server(settings, lambda report: _load(flags, report)).run()


def _load(config: Flags, report: Callable[[str], None]) -> Served:
    """Return a started engine. Runs in a separate thread; `report` shows the start-up step."""
    report("importing torch and transformers")
    try:
        from kvbm.engines.embedded.engine.engine import Engine
        from kvbm.engines.embedded.http.completion import Served
        from kvbm.engines.embedded.http.metrics import EngineMetrics
        from kvbm.engines.embedded.http.text_codec import TextCodec

        connector = _connector(config, report)
        report(f"loading {config.model}")
        engine = Engine(config, connector=connector)
    except ImportError as error:
        raise _missing(error) from error
    engine.start()
    metrics = EngineMetrics(
        engine.model_name,
        stats=engine.stats,
        cache_config={
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(config.num_blocks),
            "cache_dtype": config.dtype,
            "enable_prefix_caching": str(config.prefix_caching),
        },
        connector=() if connector is None else connector[0].metrics(),
    )
    return Served(engine, engine.model.vocabulary_size, TextCodec(engine.model.tokenizer), metrics)


def _connector(flags: Flags, report: Callable[[str], None]) -> tuple[KvbmScheduler, KvbmWorker] | None:
    if flags.connector is None:
        return None
    from kvbm.engines.embedded.driver import create_connector

    def allocating(what: str) -> Callable[[int, int], None]:
        return lambda done_bytes, total_bytes: report(
            f"allocating {what}, {done_bytes // MEBIBYTE} of {total_bytes // MEBIBYTE} MiB"
        )

    try:
        connector = create_connector(
            flags.connector,
            worker_process=flags.worker_process,
            memory_progress=allocating("host memory"),
            disk_progress=allocating("disk space"),
        )
    except ValueError as error:
        raise ProfileError(f"`--connector` is not a resolved profile: {error}") from None
    return connector


def _missing(error: ImportError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"a required library is missing: {error}",
        hint="run `pip install 'kvbm-cli[embedded]'`",
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see `{PROGRAM} --help` for all flags")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def _read_flags(arguments: Sequence[str] | None) -> Flags:
    parser = _Parser(
        prog=PROGRAM,
        description="Run the embedded reference engine with an OpenAI-compatible server.",
        allow_abbrev=False,
        formatter_class=_Formatter,
    )
    for name, field in Flags.model_fields.items():
        kinds = get_args(field.annotation) or (field.annotation,)
        form: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if bool in kinds else {}
        if isinstance(kinds[0], str):
            form["choices"] = kinds
        default = None if field.is_required() else field.default
        parser.add_argument(
            flag_of(name), required=field.is_required(), default=default, help=field.description, **form
        )
    try:
        flags = Flags.model_validate(vars(parser.parse_args(arguments)), strict=False)
    except ValidationError as error:
        wrong = error.errors()[0]
        parser.error(f"argument {flag_of(str(wrong['loc'][0]))}: {wrong['input']!r}: {wrong['msg']}")
    if flags.worker_process and flags.connector is None:
        parser.error("--worker-process requires --connector")
    return flags


def _error_text(error: KvbmError) -> str:
    lines = [f"error: {error.message}"]
    cause = error.__cause__
    while cause is not None:
        lines.append(f"  caused by: {cause or type(cause).__name__}")
        cause = cause.__cause__
    return "\n".join([*lines, *(["", f"hint: {error.hint}"] if error.hint else [])])


if __name__ == "__main__":
    write_log = use_queued_stderr()
    code = main()
    write_log()
    os._exit(code)  # a thread that is still loading a model would otherwise hold up, or crash, the interpreter's end
