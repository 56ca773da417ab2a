"""`python -m kvbm.embedded`: the embedded engine with its HTTP server.

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
from typing import TYPE_CHECKING, NoReturn

from kvbm.errors import EnvironmentProblem, KvbmError, ProfileError, UsageError
from kvbm.host.log_queue import use_queued_stderr
from kvbm.host.threads import started_pool
from kvbm.text.log_limit import LogLimit
from kvbm.types import MAX_SECONDS

if TYPE_CHECKING:
    from kvbm.embedded.driver import KvbmScheduler, KvbmWorker
    from kvbm.embedded.http.completion import Served

PROGRAM = "python -m kvbm.embedded"
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
        from kvbm.embedded.http.server import Server, ServerSettings
    except ImportError as error:
        raise _missing(error) from error
    settings = ServerSettings(host=flags.host, port=flags.port, drain_timeout_s=flags.drain_timeout)
    return Server(settings, lambda report: _load(flags, report), started_pool(HELPERS, "kvbm-http")).run()


def _load(flags: argparse.Namespace, report: Callable[[str], None]) -> Served:
    """Return a started engine. Runs in a separate thread; `report` shows the start-up step."""
    from kvbm.embedded.engine.config import EngineConfig

    config = EngineConfig(
        model=flags.model,
        num_blocks=flags.num_blocks,
        block_size=flags.block_size,
        dtype=flags.dtype,
        device=flags.device,
        max_model_len=flags.max_model_len,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_num_seqs=flags.max_num_seqs,
        seed=flags.seed,
        threads=flags.threads,
        prefix_caching=not flags.no_prefix_caching,
        kv_layout=flags.kv_layout,
        served_model_name=flags.served_model_name,
        verify=not flags.no_verify,
    )
    report("importing torch and transformers")
    try:
        from kvbm.embedded.engine.engine import Engine
        from kvbm.embedded.http.completion import Served
        from kvbm.embedded.http.metrics import EngineMetrics
        from kvbm.embedded.http.text_codec import TextCodec

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
        connector=None if connector is None else connector[0].metrics(),
    )
    return Served(engine, engine.model.vocabulary_size, TextCodec(engine.tokenizer), metrics)


def _connector(flags: argparse.Namespace, report: Callable[[str], None]) -> tuple[KvbmScheduler, KvbmWorker] | None:
    if flags.connector is None:
        return None
    from kvbm.embedded.driver import create_connector

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


def _read_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog=PROGRAM,
        description="Run the embedded reference engine with an OpenAI-compatible server.",
        allow_abbrev=False,
    )
    positive, natural = _integer(minimum=1), _integer(minimum=0)
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="synthetic:tiny, synthetic:small, synthetic:8b, or a local Hugging Face directory",
    )
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=_integer(minimum=0, maximum=65535), default=8000, help="0 selects a free port (%(default)s)")
    add("--num-blocks", type=positive, default=2048, metavar="N", help="blocks of device memory, G1 (%(default)s)")
    add("--block-size", type=positive, default=16, metavar="TOKENS", help="tokens per block (%(default)s)")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="type of weights and KV (%(default)s)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device of the model (%(default)s)")
    add("--max-model-len", type=positive, metavar="TOKENS", help="maximum of prompt and output (the model's limit)")
    add("--max-num-batched-tokens", type=positive, metavar="TOKENS", help="maximum tokens per step")
    add(
        "--max-num-seqs", type=positive, default=64, metavar="N", help="maximum requests at the same time (%(default)s)"
    )
    add("--seed", type=natural, default=0, metavar="N", help="seed of synthetic weights and of sampling (%(default)s)")
    add("--threads", type=positive, metavar="N", help="CPU threads of the model")
    add("--no-prefix-caching", action="store_true", help="do not reuse blocks in G1")
    add("--kv-layout", choices=("block_first", "layer_first"), default="block_first", help="layout of G1 (%(default)s)")
    add("--served-model-name", metavar="NAME", help="model name in the API (the value of --model)")
    add("--connector", metavar="JSON", help="a resolved profile: run with the block manager")
    add("--worker-process", action="store_true", help="run the block manager's worker in a separate process")
    add("--no-verify", action="store_true", help="skip the comparison with the model's own attention at start-up")
    add(
        "--drain-timeout",
        type=_seconds,
        default=20.0,
        metavar="SECONDS",
        help="time for open requests at shutdown (%(default)s)",
    )
    flags = parser.parse_args(arguments)
    if flags.worker_process and flags.connector is None:
        parser.error("--worker-process requires --connector")
    return flags


def _integer(*, minimum: int, maximum: int = 2**63 - 1) -> Callable[[str], int]:
    right = f"an integer from {minimum} to {maximum}" if maximum < 2**63 - 1 else f"an integer of at least {minimum}"

    def convert(text: str) -> int:
        if text.isdecimal() and len(text) < 20 and minimum <= int(text) <= maximum:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not {right}")

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
