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

from kvbm.errors import EnvironmentProblem, KvbmError, ProfileError, UsageError
from kvbm.host.log_queue import use_queued_stderr
from kvbm.host.threads import started_pool
from kvbm.text.log_limit import LogLimit
from kvbm.types import MAX_SECONDS

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from kvbm.engines.embedded.driver import KvbmScheduler, KvbmWorker
    from kvbm.engines.embedded.http.completion import Served

PROGRAM = "python -m kvbm.engines.embedded"
MEBIBYTE = 2**20
HELPERS = 4  # threads for long prompts and bodies


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


def _serve(flags: argparse.Namespace) -> int:
    try:
        from kvbm.engines.embedded.http.server import Server, ServerSettings
    except ImportError as error:
        raise _missing(error) from error
    settings = ServerSettings(host=flags.host, port=flags.port, drain_timeout_s=flags.drain_timeout)
    return Server(settings, lambda report: _load(flags, report), started_pool(HELPERS, "kvbm-http")).run()


def _load(flags: argparse.Namespace, report: Callable[[str], None]) -> Served:
    """Return a started engine. Runs in a separate thread; `report` shows the start-up step."""
    from kvbm.engines.embedded.engine.config import EngineConfig

    config = EngineConfig(**{name: getattr(flags, name) for name in EngineConfig.model_fields})
    report("importing torch and transformers")
    try:
        from kvbm.engines.embedded.engine.engine import Engine
        from kvbm.engines.embedded.http.completion import Served
        from kvbm.engines.embedded.http.metrics import EngineMetrics
        from kvbm.engines.embedded.http.text_codec import TextCodec

        connector = _connector(flags, report)
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


def _connector(flags: argparse.Namespace, report: Callable[[str], None]) -> tuple[KvbmScheduler, KvbmWorker] | None:
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


def _read_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    from kvbm.config.engine import EmbeddedArguments, EmbeddedEngine

    parser = _Parser(
        prog=PROGRAM,
        description="Run the embedded reference engine with an OpenAI-compatible server.",
        allow_abbrev=False,
        formatter_class=_Formatter,
    )
    add = parser.add_argument
    add("--model", required=True, type=_text, help=EmbeddedEngine.model_fields["model"].description)
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=_integer(minimum=0, maximum=65535), default=8000, help="0 selects a free port")
    add("--connector", metavar="JSON", help="a resolved profile: run with the block manager")
    add("--drain-timeout", type=_seconds, default=20.0, metavar="S", help="time for open requests at shutdown")
    for name, field in EmbeddedArguments.model_fields.items():
        add(f"--{name.replace('_', '-')}", default=field.default, help=field.description, **_form_of(field))
    flags = parser.parse_args(arguments)
    if flags.worker_process and flags.connector is None:
        parser.error("--worker-process requires --connector")
    return flags


def _form_of(field: FieldInfo) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a profile key that is a flag."""
    kinds = get_args(field.annotation) or (field.annotation,)
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if int in kinds:
        limits = {name: getattr(one, name) for one in field.metadata for name in ("ge", "le") if hasattr(one, name)}
        return {"type": _integer(minimum=limits["ge"], maximum=limits["le"]), "metavar": "N"}
    return {"type": _text, "metavar": "NAME"} if str in kinds else {"choices": kinds}


def _text(text: str) -> str:
    if not text or any("\ud800" <= one <= "\udfff" for one in text):  # as Python reads what is not UTF-8
        raise argparse.ArgumentTypeError(f"{text!r} is empty or not UTF-8")
    return text


def _integer(*, minimum: int, maximum: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if text.isdecimal() and len(text) < 20 and minimum <= int(text) <= maximum:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {minimum} to {maximum}")

    return convert


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {MAX_SECONDS}")
    return value


def _error_text(error: KvbmError) -> str:
    lines = [f"error: {error.message}"]
    cause = error.__cause__
    while cause is not None:
        lines.append(f"  caused by: {cause or type(cause).__name__}")
        cause = cause.__cause__
    return "\n".join([*lines, *(["", f"hint: {error.hint}"] if error.hint else [])])


def _open_standard_streams() -> None:
    """Open /dev/null in place of closed streams (`2>&-`). A connection to a client would otherwise get the number of
    a closed one, and with it whatever a library writes to stderr."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _flush_standard_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk; the exit code remains
            stream.flush()


if __name__ == "__main__":
    _open_standard_streams()
    write_log = use_queued_stderr()
    code = main()
    _flush_standard_streams()
    write_log()
    os._exit(code)  # a thread that is still loading a model would otherwise hold up, or crash, the interpreter's end
