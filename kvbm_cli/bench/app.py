"""`kvbm bench`: its options and help, and those of its subcommands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbm.types import MAX_SECONDS
from kvbm_cli.profile.options import OptionalProfilesOption, SetOption
from kvbm_cli.size.app import models
from kvbm_cli.terminal.command_line import Command, CommandGroup
from kvbm_cli.terminal.options import (
    JsonOption,
    Text,
    flag,
    matching,
    names_in,
    option,
    path_argument,
    path_option,
)

bench_app = typer.Typer(
    cls=CommandGroup, invoke_without_command=True, rich_markup_mode=None, subcommand_metavar="[COMMAND]"
)
COMPARE_HELP = (
    "Compare with `baseline`, the engine without kvbm; with a profile; with the engine of a profile without kvbm; with "
    "the engine that a command line starts, as NAME='COMMAND'; or with a running server, as URL or "
    "NAME=URL [default: baseline]. May be repeated. Without --profile, the first server is measured."
)
DirectoryArgument = Annotated[Path, path_argument("DIR", "Directory of a benchmark.")]

# Of every command that reads a trace.
ModelOption = Annotated[
    str | None, option("--model", "MODEL", "Model, as `kvbm size` takes it; shows capacities in bytes.", models)
]
BytesPerTokenOption = Annotated[
    str | None, option("--bytes-per-token", "BYTES", "Bytes of the KV of a token, such as 131072 or 128KiB.")
]
BlockTokensOption = Annotated[
    int, option("--block-tokens", "N", "Tokens of a block that a hash id names.", min=1, max=65536)
]
TimeScaleOption = Annotated[float, option("--time-scale", "X", "Factor on all times of the trace.", min=1e-6, max=1e6)]
ColumnsOption = Annotated[
    list[str] | None, option("--column", "FIELD=NAME", "Read a field from another name in the file; may be repeated.")
]
LimitOption = Annotated[int | None, option("--limit", "N", "Read only the first N requests of the file.", min=1)]
SessionsOption = Annotated[
    int | None, option("--sessions", "N", "Read only the first N sessions of the file, with all their turns.", min=1)
]
TurnsOption = Annotated[
    str, option("--turns", "added|whole", "Whether a line of a session holds what its turn adds, or the whole prompt.")
]

PolicyOption = Annotated[str, option("--policy", "NAME,NAME", "Evictions: `lru`, `adaptive`.")]
BOTH_EVICTIONS = "lru,adaptive"


def compared(incomplete: str) -> list[str]:
    """Return what `kvbm bench --compare` takes."""
    from kvbm_cli.bench.arms import BASELINE
    from kvbm_cli.package_data import profiles_directory

    return [*matching([BASELINE], incomplete), *names_in(profiles_directory(), incomplete)]


def workloads(incomplete: str) -> list[str]:
    from kvbm_cli.package_data import workloads_directory

    return names_in(workloads_directory(), incomplete)


def endpoints(incomplete: str) -> list[str]:
    from kvbm_cli.bench.workload.plan import PATHS

    return matching([*PATHS], incomplete)


@bench_app.callback()
def bench(
    context: typer.Context,
    profile: OptionalProfilesOption = None,
    set_: SetOption = None,
    compare: Annotated[
        list[str] | None,
        option("--compare", "baseline|PROFILE|baseline:PROFILE|COMMAND|URL", COMPARE_HELP, compared),
    ] = None,
    ca_file: Annotated[
        Path | None,
        path_option("--ca-file", "FILE", "Certificates for servers by https, in PEM format [default: the system's]."),
    ] = None,
    workload: Annotated[
        list[str] | None,
        option(
            "--workload",
            "NAME|PATH",
            "Name or file of a workload; may be repeated [default: from the profile, else conversations].",
            workloads,
        ),
    ] = None,
    pressure: Annotated[
        Text,
        option(
            "--pressure",
            "X,Y,...|auto|none",
            "Scale the working set to these multiples of G1, such as `0.8,1.2,2,4`; `auto` is 2; `none` keeps the size "
            "of the workload [default: auto on a GPU, else none].",
        ),
    ] = None,
    find_limit: Annotated[
        Text,
        option(
            "--find-limit",
            "LIMITS",
            "Find the highest rate at which each arm keeps limits such as `ttft_p90<800ms, itl_p90<60ms`.",
        ),
    ] = None,
    endpoint: Annotated[
        Text, option("--endpoint", "NAME", "Where requests go: `completions`, `chat` or `responses`.", endpoints)
    ] = None,
    sweep: Annotated[
        Text,
        option("--sweep", "KEY=X,Y,...", "Run each workload at these loads: `rate=1,2,4` or `concurrency=1,8,32`."),
    ] = None,
    price: Annotated[
        Path | None,
        path_option("--price", "FILE", "Price list in YAML: `engine_price` per hour, `memory_price` per GB and month."),
    ] = None,
    rate: Annotated[
        float | None,
        option("--rate", "N", "Requests per second and arm; at fixed times without --burstiness.", min=1e-6, max=1e6),
    ] = None,
    ramp_to: Annotated[
        float | None,
        option("--ramp-to", "N", "Change the rate linearly from --rate to this one.", min=1e-6, max=1e6),
    ] = None,
    burstiness: Annotated[
        float | None,
        option(
            "--burstiness",
            "X",
            "Random times with this mean rate: 1 for a Poisson process, less for bursts [default: fixed times].",
            min=0.01,
            max=1000,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        option(
            "--concurrency",
            "N",
            "Sessions in flight; each sends its next request after the answer.",
            min=1,
            max=100_000,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        option(
            "--duration", "SECONDS", "Launch no request after this many seconds of a run.", min=1e-3, max=MAX_SECONDS
        ),
    ] = None,
    pairs: Annotated[
        int | None,
        option("--pairs", "N", "How often each arm runs [default: 3 in turn, 1 interleaved].", min=1, max=100),
    ] = None,
    no_floor: Annotated[
        bool, flag("--no-floor", "Leave out the arm `floor`, whose engine has room in G1 for everything.")
    ] = False,
    dry_run: Annotated[
        bool, flag("--dry-run", "Print what would run, how long, and with how much memory; start no engine.")
    ] = False,
    output: Annotated[
        Path | None,
        path_option("--output", "DIR", "New directory for the records and the report [default: kvbm-runs/TIME]."),
    ] = None,
    resume: Annotated[
        Path | None,
        path_option(
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
        profiles=profile or (),
        overrides=set_ or (),
        compare=compare or (),
        ca_file=ca_file,
        workloads=workload or (),
        pressure=pressure,
        find_limit=find_limit,
        sweep=sweep,
        price=price,
        schedule=Overrides(rate, concurrency, duration, pairs, burstiness, endpoint, ramp_to),
        output=output,
        resume=resume,
        has_floor=not no_floor,
        is_dry_run=dry_run,
        as_json=json,
    )
    return body.bench(request)


@bench_app.command("trace", cls=Command)
def bench_trace(
    file: Annotated[Path, path_argument("FILE", "Trace in Mooncake's format: .jsonl or .jsonl.gz.")],
    model: ModelOption = None,
    bytes_per_token: BytesPerTokenOption = None,
    block_tokens: BlockTokensOption = 512,
    time_scale: TimeScaleOption = 1.0,
    column: ColumnsOption = None,
    turns: TurnsOption = "added",
    limit: LimitOption = None,
    sessions: SessionsOption = None,
    policy: PolicyOption = BOTH_EVICTIONS,
    json: JsonOption = False,
) -> int:
    """Show the lengths, the sharing and the hit rates of a trace."""
    from kvbm_cli.bench.trace.command import parse_policies, trace, trace_format

    form = trace_format(block_tokens, time_scale, column or [], turns, limit, sessions)
    policies = parse_policies(policy)
    return trace(file, form, bytes_per_token=bytes_per_token, model=model, policies=policies, as_json=json)


@bench_app.command("report", cls=Command)
def bench_report(
    directory: DirectoryArgument,
    replay: Annotated[
        Path | None,
        path_option("--replay", "FILE", "Also write the requests to this new file, as a trace with times and bodies."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Compute the summary, report and exports again."""
    from kvbm_cli.bench import command as body

    return body.report(directory, replay=replay, as_json=json)


@bench_app.command("diff", cls=Command)
def bench_diff(
    first: Annotated[Path, path_argument("A", "Directory of the first benchmark.")],
    second: Annotated[Path, path_argument("B", "Directory of the second benchmark; `faster` means that it is faster.")],
    json: JsonOption = False,
) -> int:
    """Compare two benchmarks that sent the same requests, arm by arm."""
    from kvbm_cli.bench.diff import diff

    return diff(first, second, as_json=json)
