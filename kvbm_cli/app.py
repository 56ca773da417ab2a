"""The command `kvbm`: its commands and options, and the one place that converts a failure to text and an exit code.

Each command imports its body when it runs, so that `kvbm --help` is fast and needs no torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbm.errors import KvbmError, UsageError
from kvbm.types import MAX_SECONDS
from kvbm_cli.system.filesystem import problem_of
from kvbm_cli.terminal import streams
from kvbm_cli.terminal.command_line import Command, CommandGroup
from kvbm_cli.terminal.show_error import show_kvbm_error
from kvbm_cli.terminal.usage_error import show_usage_error

COMPLETION_VARIABLE = "_KVBM_COMPLETE"
INTERRUPTED = 130
OTHERS_WRITE = 0o022
WITHOUT_RUNS = frozenset({"completion", "--version", "--help", "-h"})
TIER_OPTION = "--dir"  # each command with it says what a tier that hangs means

app = typer.Typer(
    name="kvbm",
    help="Offload KV cache blocks of an LLM engine to host memory, disk and a shared store, and measure the effect.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
profile_app = typer.Typer(help="List, check, write and compare profiles.", rich_markup_mode=None)
app.add_typer(profile_app, name="profile")
cache_app = typer.Typer(help="List, verify and clear caches.", rich_markup_mode=None)
app.add_typer(cache_app, name="cache")


def _completed_by(name: str) -> Callable[[str], list[Any]]:
    """Return a completer that calls the function `name` of completion.py."""

    def complete(incomplete: str) -> list[Any]:
        from kvbm_cli import completion

        offered: list[Any] = getattr(completion, name)(incomplete)
        return offered

    return complete


PROFILES = _completed_by("profiles")
FILES = _completed_by("files")
PROFILE_HELP = "Name of a shipped profile, or path to a profile file."


def _option(names: str, metavar: str, help_: str, completer: Any = None, **limits: Any) -> Any:
    """Declare an option with a value. `names` are separated by a space; `completer` offers values."""
    return typer.Option(*names.split(), metavar=metavar, help=help_, autocompletion=completer, **limits)


def _path_option(names: str, metavar: str, help_: str) -> Any:
    """Declare an option with a path. The parser does not touch the file, whose file system may hang: each command
    reports what is wrong with it."""
    return _option(names, metavar, help_, FILES, parser=Path)


def _flag(names: str, help_: str) -> Any:
    return typer.Option(*names.split(), help=help_)


def _argument(metavar: str, help_: str, completer: Any, **how: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help_, autocompletion=completer, **how)


def _path_argument(metavar: str, help_: str) -> Any:
    """Declare an argument with a path, as `_path_option`."""
    return _argument(metavar, help_, FILES, parser=Path)


def _profile_option(help_: str = PROFILE_HELP) -> Any:
    return _option("--profile -p", "NAME|PATH", help_, PROFILES)


ProfileOption = Annotated[str, _profile_option()]
ProfileArgument = Annotated[str, _argument("NAME|PATH", PROFILE_HELP, PROFILES)]
SET_HELP = "Override a profile key; may be repeated, the last one wins. `kvbm profile schema KEY` describes it."
SetOption = Annotated[list[str] | None, _option("--set", "KEY=VALUE", SET_HELP, _completed_by("keys"))]
DIR_HELP = "Directory of the caches [default: from the profile, else ~/.cache/kvbm]."
CacheDirectoryOption = Annotated[Path | None, _path_option("--dir", "DIR", DIR_HELP)]
CacheProfileOption = Annotated[str | None, _profile_option("Use the `tiers.disk.directory` of this profile.")]
STORE_HELP = "Store of a shared tier, such as s3://bucket/prefix or file:///directory."
StoreOption = Annotated[str | None, _option("--url", "URL", STORE_HELP)]
NAMESPACE_HELP = "Only namespaces that begin with HEX; requires --url."
NamespaceOption = Annotated[str | None, _option("--namespace", "HEX", NAMESPACE_HELP)]
ModelOption = Annotated[str | None, _option("--model", "NAME", "Only this model, as `ls` shows it; requires --url.")]
TENANT_HELP = "Only objects of requests with this cache salt; requires --url."
TenantOption = Annotated[str | None, _option("--tenant", "SALT", TENANT_HELP)]
AGE_HELP = "Only objects older than this, such as `12h` or `7d`; requires --url."
AgeOption = Annotated[str | None, _option("--older-than", "AGE", AGE_HELP)]
SIZED_HELP = "Directory or `config.json` of a model, or its name on Hugging Face [default profile: `vllm`]."
RUN_HELP = "Name of a run (`demo-1`) or of its profile [default: the only running engine]."
RunArgument = Annotated[str | None, _argument("RUN", RUN_HELP, _completed_by("runs"))]
LivingRunArgument = Annotated[str | None, _argument("RUN", RUN_HELP, _completed_by("living_runs"))]
Text = str | None
JsonOption = Annotated[bool, _flag("--json", "Print JSON to stdout.")]
STRICT_HELP = "Exit with 1 if a tier holds less than the one above it."
StrictOption = Annotated[bool, _flag("--strict", STRICT_HELP)]
StrictCheckOption = Annotated[bool, _flag("--strict", f"{STRICT_HELP[:-1]}, or if kvbm is disabled for its model.")]


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        print(f"kvbm {version('kvbm-cli')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, _flag("--debug", "Show the traceback of an error.")] = False,
) -> None:
    """Options of every command; `run` reads --debug itself."""
    _help_without_command(context)


@profile_app.callback(invoke_without_command=True)
@cache_app.callback(invoke_without_command=True)
def _help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(cls=Command)
def serve(
    profile: ProfileOption,
    set_: SetOption = None,
    port: Annotated[
        str | None, _option("--port", "PORT", "Port of the engine's server; 0 chooses a free port.")
    ] = None,
    dry_run: Annotated[bool, _flag("--dry-run", "Print the plan and the command without starting the engine.")] = False,
    detach: Annotated[bool, _flag("--detach -d", "Run the engine in the background; return when it is ready.")] = False,
    force: Annotated[
        bool, _flag("--force", "Start even with an untested engine version, or too little memory or disk space.")
    ] = False,
    strict: StrictOption = False,
    baseline: Annotated[bool, _flag("--baseline", "Start the same engine without the cache, to compare with.")] = False,
    quiet: Annotated[
        bool, _flag("--quiet -q", "Do not print the engine's log while it runs; `kvbm logs` shows it.")
    ] = False,
    json: JsonOption = False,
    log: Annotated[
        Path | None,
        _path_option("--log", "FILE", "File for the engine's log [default: a file in the run's directory]."),
    ] = None,
) -> int:
    """Start an engine with a profile."""
    from kvbm_cli.serve import command as body
    from kvbm_cli.serve.options import ServeOptions

    options = ServeOptions(
        port=port,
        is_dry_run=dry_run,
        is_forced=force,
        is_strict=strict,
        is_detached=detach,
        is_baseline=baseline,
        is_quiet=quiet,
        as_json=json,
        log=log,
    )
    return body.serve(profile, set_ or [], options)


@app.command(cls=Command)
def status(
    run: RunArgument = None,
    all_: Annotated[bool, _flag("--all -a", "Include runs that have ended.")] = False,
    json: JsonOption = False,
) -> None:
    """Show running engines."""
    from kvbm_cli.runs.status import show_status

    show_status(run, with_ended=all_, as_json=json)


@app.command(cls=Command)
def stop(
    run: LivingRunArgument = None,
    all_: Annotated[bool, _flag("--all -a", "Stop all running engines.")] = False,
    timeout: Annotated[
        float | None,
        _option(
            "--timeout -t",
            "SECONDS",
            "Seconds to wait for running requests before the engine is killed [default: from the profile].",
            min=0,
            max=MAX_SECONDS,
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Stop a running engine."""
    from kvbm_cli.runs.stop import stop_runs

    return stop_runs(run, every=all_, timeout_s=timeout, as_json=json)


@app.command(cls=Command)
def logs(
    run: RunArgument = None,
    follow: Annotated[bool, _flag("--follow -f", "Follow the log until the engine exits.")] = False,
    lines: Annotated[
        int | None, _option("--lines -n", "N", "Print only the last N lines [default: all].", min=0)
    ] = None,
) -> None:
    """Show the log of a run."""
    from kvbm_cli.runs.logs import show_logs

    show_logs(run, follow=follow, line_count=lines)


bench_app = typer.Typer(
    cls=CommandGroup, invoke_without_command=True, rich_markup_mode=None, subcommand_metavar="[COMMAND]"
)
app.add_typer(bench_app, name="bench")

COMPARE_HELP = (
    "Compare with `baseline`, the engine without kvbm; with a profile; with the engine of a profile without kvbm; or "
    "with a running server, as URL or NAME=URL [default: baseline]. May be repeated. Without --profile, the first "
    "server is measured."
)


@bench_app.callback()
def bench(
    context: typer.Context,
    profile: Annotated[str | None, _profile_option()] = None,
    set_: SetOption = None,
    compare: Annotated[
        list[str] | None,
        _option("--compare", "baseline|PROFILE|baseline:PROFILE|URL", COMPARE_HELP, _completed_by("compared")),
    ] = None,
    workload: Annotated[
        list[str] | None,
        _option(
            "--workload",
            "NAME|PATH",
            "Name or file of a workload; may be repeated [default: from the profile, else conversations].",
            _completed_by("workloads"),
        ),
    ] = None,
    pressure: Annotated[
        Text, _option("--pressure", "X,Y,...", "Scale the working set to these multiples of G1, such as `0.8,1.2,2,4`.")
    ] = None,
    rate: Annotated[
        float | None, _option("--rate", "N", "Requests per second and arm, at fixed times.", min=1e-6, max=1e6)
    ] = None,
    concurrency: Annotated[
        int | None,
        _option(
            "--concurrency",
            "N",
            "Sessions in flight; each sends its next request after the answer.",
            min=1,
            max=100_000,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        _option(
            "--duration", "SECONDS", "Launch no request after this many seconds of a run.", min=1e-3, max=MAX_SECONDS
        ),
    ] = None,
    pairs: Annotated[
        int | None,
        _option("--pairs", "N", "How often each arm runs [default: 3 in turn, 1 interleaved].", min=1, max=100),
    ] = None,
    dry_run: Annotated[
        bool, _flag("--dry-run", "Print what would run, how long, and with how much memory; start no engine.")
    ] = False,
    output: Annotated[
        Path | None,
        _path_option("--output", "DIR", "New directory for the records and the report [default: kvbm-runs/TIME]."),
    ] = None,
    resume: Annotated[
        Path | None,
        _path_option(
            "--resume", "DIR", "Continue the interrupted benchmark in this directory; requires the same options."
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Measure engines with and without kvbm."""
    if context.invoked_subcommand is not None:
        return 0
    from kvbm_cli.bench import command as body
    from kvbm_cli.bench.cells import Overrides

    request = body.BenchRequest(
        profile=profile,
        overrides=set_ or (),
        compare=compare or (),
        workloads=workload or (),
        pressure=pressure,
        schedule=Overrides(rate, concurrency, duration, pairs),
        output=output,
        resume=resume,
        is_dry_run=dry_run,
        as_json=json,
    )
    return body.bench(request)


@bench_app.command("trace", cls=Command)
def bench_trace(
    file: Annotated[Path, _path_argument("FILE", "Trace in Mooncake's format: .jsonl or .jsonl.gz.")],
    model: Annotated[
        str | None,
        _option(
            "--model", "MODEL", "Model, as `kvbm size` takes it; shows capacities in bytes.", _completed_by("models")
        ),
    ] = None,
    bytes_per_token: Annotated[
        str | None, _option("--bytes-per-token", "BYTES", "Bytes of the KV of a token, such as 131072 or 128KiB.")
    ] = None,
    block_tokens: Annotated[int, _option("--block-tokens", "N", "Tokens of a block that a hash id names.")] = 512,
    time_scale: Annotated[float, _option("--time-scale", "X", "Factor on all times of the trace.")] = 1.0,
    column: Annotated[
        list[str] | None,
        _option("--column", "FIELD=NAME", "Read a field from another name in the file; may be repeated."),
    ] = None,
    turns: Annotated[
        str,
        _option(
            "--turns",
            "added|whole",
            "Whether a line of a session holds what its turn adds, or the whole prompt.",
        ),
    ] = "added",
    json: JsonOption = False,
) -> int:
    """Show the lengths, the sharing and the hit rates of a trace."""
    from kvbm_cli.bench.trace.command import trace

    return trace(
        file,
        block_tokens=block_tokens,
        bytes_per_token=bytes_per_token,
        model=model,
        time_scale=time_scale,
        columns=column or [],
        turns=turns,
        as_json=json,
    )


DirectoryArgument = Annotated[Path, _path_argument("DIR", "Directory of a benchmark.")]


@bench_app.command("report", cls=Command)
def bench_report(directory: DirectoryArgument, json: JsonOption = False) -> int:
    """Compute the summary, report and exports again."""
    from kvbm_cli.bench import command as body

    return body.report(directory, as_json=json)


@bench_app.command("diff", cls=Command)
def bench_diff(
    first: Annotated[Path, _path_argument("A", "Directory of the first benchmark.")],
    second: Annotated[
        Path, _path_argument("B", "Directory of the second benchmark; `faster` means that it is faster.")
    ],
    json: JsonOption = False,
) -> int:
    """Compare two benchmarks that sent the same requests, arm by arm."""
    from kvbm_cli.bench.diff import diff

    return diff(first, second, as_json=json)


@app.command(cls=Command)
def size(
    model: Annotated[str | None, _argument("MODEL", SIZED_HELP, _completed_by("models"))] = None,
    profile: Annotated[str | None, _profile_option()] = None,
    set_: SetOption = None,
    engine: Annotated[Text, _option("--engine", "ENGINE", "`vllm` (default), `tensorrt-llm` or `sglang`.")] = None,
    tp: Annotated[Text, _option("--tp", "N", "Tensor parallel ranks [default: 1].")] = None,
    pp: Annotated[Text, _option("--pp", "N", "Pipeline parallel stages [default: 1].")] = None,
    kv_cache_dtype: Annotated[Text, _option("--kv-cache-dtype", "TYPE", "Type of the KV cache, such as `fp8`.")] = None,
    block_size: Annotated[Text, _option("--block-size", "TOKENS", "Tokens in a block [default: the engine's].")] = None,
    layout: Annotated[Text, _option("--layout", "LAYOUT", "Memory layout of vLLM, such as `BLHNC`.")] = None,
    gpu: Annotated[Text, _option("--gpu", "GPU", "Estimate G1 on a GPU such as `h100`.")] = None,
    gpu_memory: Annotated[Text, _option("--gpu-memory", "SIZE", "Estimate G1 on a GPU with this memory.")] = None,
    weights: Annotated[Text, _option("--weights", "SIZE", "Size of the weights [default: of the files].")] = None,
    host: Annotated[Text, _option("--host", "SIZE", "Capacity of host memory (G2).")] = None,
    disk: Annotated[Text, _option("--disk", "SIZE", "Capacity of the disk tier (G3).")] = None,
    length: Annotated[Text, _option("--length", "TOKENS", "Length of a sequence [default: the maximum].")] = None,
    tokens: Annotated[Text, _option("--tokens", "TOKENS", "Show the capacity for a sequence of this length.")] = None,
    users: Annotated[Text, _option("--users", "N", "Show the capacity for this many conversations.")] = None,
    turns: Annotated[Text, _option("--turns", "N", "Turns of each conversation.")] = None,
    turn_tokens: Annotated[Text, _option("--turn-tokens", "TOKENS", "Tokens of each turn, with the answer.")] = None,
    doctor_: Annotated[Path | None, _path_option("--doctor", "FILE", "Result of `kvbm doctor --json`.")] = None,
    list_: Annotated[bool, _flag("--list", "List the models that require no download.")] = False,
    strict: StrictOption = False,
    json: JsonOption = False,
) -> int:
    """Show the blocks and tokens of each tier."""
    from kvbm_cli.profile import size_report as body
    from kvbm_cli.profile.size_request import SizeRequest

    if list_:
        body.show_catalogue(as_json=json)
        return 0
    engine_options = {"--engine": engine, "--tp": tp, "--pp": pp, "--kv-cache-dtype": kv_cache_dtype}
    block_options = {"--block-size": block_size, "--layout": layout, "--host": host, "--disk": disk, "--length": length}
    memory_options = {"--gpu": gpu, "--gpu-memory": gpu_memory, "--weights": weights, "--doctor": doctor_}
    demand = {"--tokens": tokens, "--users": users, "--turns": turns, "--turn-tokens": turn_tokens}
    options = {**engine_options, **block_options, **memory_options, **demand}
    given = {name: str(text) for name, text in options.items() if text is not None}
    return body.show_size(SizeRequest(profile, model, set_ or [], given), as_json=json, is_strict=strict)


@app.command(cls=Command)
def doctor(
    profile: Annotated[str | None, _profile_option()] = None,
    set_: SetOption = None,
    directory: Annotated[
        Path | None,
        _path_option("--dir", "DIR", "Directory to check [default: from the profile, else ~/.cache/kvbm]."),
    ] = None,
    quick: Annotated[bool, _flag("--quick", "Finish within 20 seconds and skip slow checks.")] = False,
    url: Annotated[
        str | None, _option("--url", "URL", "Store of a shared tier to check [default: from the profile].")
    ] = None,
    prefill: Annotated[
        float | None,
        _option(
            "--prefill-tokens-per-s",
            "N",
            "Prefill rate of the engine; shows the shortest prefix for which loading from the store is faster.",
            min=1e-3,
            max=1e9,
        ),
    ] = None,
    write: Annotated[
        Path | None, _path_option("--write", "FILE", "Write a copy of the profile with the recommended settings.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Check a machine, a directory and a store."""
    from kvbm_cli.doctor import command as body

    return body.doctor(
        profile,
        set_ or [],
        directory=directory,
        as_json=json,
        is_quick=quick,
        write=write,
        url=url,
        prefill_rate=prefill,
    )


@profile_app.command("list", cls=Command)
def profile_list(json: JsonOption = False) -> None:
    """List the shipped profiles."""
    from kvbm_cli.profile.show import list_profiles

    list_profiles(as_json=json)


@profile_app.command("show", cls=Command)
def profile_show(profile: ProfileArgument, set_: SetOption = None, json: JsonOption = False) -> None:
    """Show all keys, values and their origins."""
    from kvbm_cli.profile.show import show_profile

    show_profile(profile, set_ or [], as_json=json)


@profile_app.command("check", cls=Command)
def profile_check(
    profile: ProfileArgument, set_: SetOption = None, strict: StrictCheckOption = False, json: JsonOption = False
) -> int:
    """Check a profile and report every mistake. Exits with 2 if there is one."""
    from kvbm_cli.profile.check import check_profile

    return check_profile(profile, set_ or [], as_json=json, is_strict=strict)


@profile_app.command("diff", cls=Command)
def profile_diff(
    profile: ProfileArgument,
    other: Annotated[str, _argument("NAME|PATH", "Profile to compare with.", PROFILES)],
    set_: SetOption = None,
    json: JsonOption = False,
) -> int:
    """Compare two profiles key by key. Exits with 1 if they differ."""
    from kvbm_cli.profile.diff import diff_profiles

    return diff_profiles(profile, other, set_ or [], as_json=json)


@profile_app.command("new", cls=Command)
def profile_new(
    file: Annotated[Path, _path_argument("FILE", "File to write; ends in .yaml.")],
    engine: Annotated[
        str | None, _option("--engine", "KIND", "Engine: vllm, tensorrt-llm or embedded.", _completed_by("engines"))
    ] = None,
    model: Annotated[
        str | None, _option("--model", "MODEL", "Model: a directory or a name that the engine accepts.", FILES)
    ] = None,
    host: Annotated[str | None, _option("--host", "SIZE", "Host memory for blocks, such as 64GiB.")] = None,
    disk: Annotated[str | None, _option("--disk", "SIZE", "Disk space for blocks, such as 1TB.")] = None,
    directory: Annotated[str | None, _option("--dir", "DIR", "Directory of the disk tier.", FILES)] = None,
    port: Annotated[str | None, _option("--port", "PORT", "Port of the engine's server.")] = None,
    extends: Annotated[
        str | None, _option("--extends", "NAME|PATH", "Profile to extend: a name or a path.", PROFILES)
    ] = None,
    set_: SetOption = None,
    force: Annotated[bool, _flag("--force", "Overwrite FILE.")] = False,
) -> None:
    """Write a new profile. On a terminal, asks for missing values."""
    from kvbm_cli.profile.new import new_profile

    given = {"--engine": engine, "--model": model, "--host": host, "--disk": disk, "--dir": directory, "--port": port}
    answers = {option: text for option, text in given.items() if text is not None}
    new_profile(file, answers, set_ or [], extends=extends, is_forced=force)


@profile_app.command("import-env", cls=Command)
def profile_import_env(
    output: Annotated[
        Path | None, _path_option("--output", "FILE", "New file; ends in .yaml [default: stdout].")
    ] = None,
    model: Annotated[
        str | None, _option("--model", "MODEL", "Model of the engine; no variable sets it.", FILES)
    ] = None,
    engine: Annotated[
        str | None,
        _option(
            "--engine", "KIND", "Engine [default: tensorrt-llm for its variables, else vllm].", _completed_by("engines")
        ),
    ] = None,
) -> None:
    """Convert DYN_KVBM_* variables to a profile."""
    from kvbm_cli.profile.import_env import import_env

    import_env(os.environ, output=output, model=model, engine=engine)


@profile_app.command("schema", cls=Command)
def profile_schema(
    key: Annotated[
        str | None, _argument("KEY", "Describe this key or section instead.", _completed_by("sections_and_keys"))
    ] = None,
) -> None:
    """Print the JSON Schema, or describe a key."""
    from kvbm_cli.profile.schema import show_schema

    show_schema(key)


@cache_app.command("ls", cls=Command)
def cache_ls(
    dir_: CacheDirectoryOption = None,
    profile: CacheProfileOption = None,
    url: StoreOption = None,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tenant: TenantOption = None,
    older_than: AgeOption = None,
    json: JsonOption = False,
) -> int:
    """List caches, or objects of a store."""
    options = {"--namespace": namespace, "--model": model, "--tenant": tenant, "--older-than": older_than}
    if url is None:
        _require_url(options)
        from kvbm_cli.cache.disk_caches import list_caches

        return list_caches(dir_, profile, as_json=json)
    _require_no_directory(dir_, profile)
    from kvbm_cli.cache.store_objects import list_objects
    from kvbm_cli.cache.store_selection import StoreRequest

    return list_objects(StoreRequest(url, namespace, model, tenant, older_than), as_json=json)


def _require_url(options: Mapping[str, object]) -> None:
    """UsageError for an option that selects objects of a store, but without a store."""
    for option, value in options.items():
        if value is not None and value is not False:
            raise UsageError(f"`{option}` requires a store", hint="add `--url URL`")


def _require_no_directory(directory: Path | None, profile: str | None) -> None:
    """UsageError for a directory and a store."""
    option = "--dir" if directory is not None else "--profile"
    if directory is not None or profile is not None:
        raise UsageError(f"`{option}` and `--url` cannot be used together", hint="remove one of them")


@cache_app.command("verify", cls=Command)
def cache_verify(
    dir_: CacheDirectoryOption = None,
    profile: CacheProfileOption = None,
    url: StoreOption = None,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tenant: TenantOption = None,
    older_than: AgeOption = None,
    sample: Annotated[
        int | None, _option("--sample", "N", "Verify only N random objects; requires --url.", min=1)
    ] = None,
    key_file: Annotated[
        Path | None,
        _path_option("--key-file", "FILE", "Secret of protected objects [default: KVBM_SHARED_KEY]; requires --url."),
    ] = None,
    delete_bad: Annotated[bool, _flag("--delete-bad", "Delete bad objects; requires --url.")] = False,
    json: JsonOption = False,
) -> int:
    """Verify every block of caches or objects. Exits with 1 if one is damaged.

    Damaged blocks of a cache on disk are dropped."""
    options = {"--namespace": namespace, "--model": model, "--tenant": tenant, "--older-than": older_than}
    if url is None:
        _require_url({**options, "--sample": sample, "--key-file": key_file, "--delete-bad": delete_bad})
        from kvbm_cli.cache.disk_caches import verify_caches

        return verify_caches(dir_, profile, as_json=json)
    _require_no_directory(dir_, profile)
    from kvbm_cli.cache.store_selection import StoreRequest
    from kvbm_cli.cache.store_verification import verify_objects

    request = StoreRequest(url, namespace, model, tenant, older_than)
    return verify_objects(request, key_file=key_file, sample=sample, deletes_bad=delete_bad, as_json=json)


@cache_app.command("purge", cls=Command)
def cache_purge(
    url: Annotated[str, _option("--url", "URL", STORE_HELP)],
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tenant: TenantOption = None,
    older_than: AgeOption = None,
    dry_run: Annotated[bool, _flag("--dry-run", "Show what would be deleted, and delete nothing.")] = False,
    yes: Annotated[bool, _flag("--yes", "Do not ask for confirmation.")] = False,
) -> int:
    """Delete objects of a store."""
    from kvbm_cli.cache.store_objects import purge
    from kvbm_cli.cache.store_selection import StoreRequest

    request = StoreRequest(url, namespace, model, tenant, older_than)
    return purge(request, is_sure=yes, is_dry_run=dry_run)


@cache_app.command("clear", cls=Command)
def cache_clear(
    dir_: CacheDirectoryOption = None,
    profile: CacheProfileOption = None,
    salt: Annotated[
        str | None, _option("--salt", "SALT", "Remove only blocks of requests with this cache salt.")
    ] = None,
    yes: Annotated[bool, _flag("--yes", "Do not ask for confirmation.")] = False,
) -> int:
    """Remove caches. Refuses to run while an engine uses one of them."""
    from kvbm_cli.cache.disk_caches import clear_caches

    return clear_caches(dir_, profile, salt=salt, is_sure=yes)


@cache_app.command("export-stats", cls=Command)
def cache_export_stats(
    dir_: CacheDirectoryOption = None,
    profile: CacheProfileOption = None,
    format_: Annotated[str, _option("--format", "FORMAT", "Output format: json or csv.")] = "json",
    output: Annotated[Path | None, _path_option("--output", "FILE", "File to write [default: stdout].")] = None,
) -> None:
    """Export statistics as JSON or CSV."""
    from kvbm_cli.cache.disk_caches import export_stats

    export_stats(dir_, profile, form=format_, output=output)


@app.command(cls=Command)
def completion(
    shell: Annotated[str, _argument("bash|zsh|fish", "Shell to generate the script for.", _completed_by("shells"))],
) -> None:
    """Print a shell completion script. Use it with eval "$(kvbm completion bash)"."""
    from kvbm_cli.completion import print_script

    print_script(shell, COMPLETION_VARIABLE)


def main() -> None:
    os.umask(os.umask(OTHERS_WRITE) | OTHERS_WRITE)  # no file of kvbm or of its engines is writable by others
    streams.repair()
    sys.exit(run(sys.argv[1:]))


def _require_answers(arguments: Sequence[str]) -> None:
    """Raise EnvironmentProblem if a path of the command line, or the directory of runs, is on a file system that hangs:
    whatever a command does with it could not be interrupted. Directories of tiers are left to the commands."""
    from kvbm_cli.system.answering import require_all_answer
    from kvbm_cli.system.filesystem import state_directory

    paths, option = [], ""
    for text in arguments:
        is_option = text.startswith("-")
        name, _, value = text.partition("=") if is_option else (option, "", text)
        if value and name != TIER_OPTION and "://" not in value:
            paths.append(value)
        option = text if is_option else ""
    if WITHOUT_RUNS.isdisjoint(arguments[:1]):
        with contextlib.suppress(RuntimeError):  # without a home, which the command reports
            paths.append(str(state_directory()))
    require_all_answer(paths)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Prints failures; raises them only with --debug."""
    if COMPLETION_VARIABLE in os.environ:
        from kvbm_cli.terminal.completion_shells import answer_shells

        answer_shells()
    try:
        _require_answers(arguments)
        result = typer.main.get_command(app).main(args=list(arguments), prog_name="kvbm", standalone_mode=False)
        sys.stdout.flush()
    except KvbmError as error:
        if "--debug" in arguments:
            raise
        show_kvbm_error(error)
        return error.exit_code
    except typer.TyperException as error:
        return show_usage_error(error, arguments)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return streams.BROKEN_PIPE
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # the parser exits with 1 then
            return streams.BROKEN_PIPE
        raise
    except Exception as error:
        if "--debug" in arguments:
            raise
        problem = problem_of(error)
        if problem is None:
            from kvbm_cli.terminal.crash_report import show_bug

            return show_bug(error, arguments)
        show_kvbm_error(problem)
        return problem.exit_code
    return result if isinstance(result, int) else 0
