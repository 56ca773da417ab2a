"""`kvbm try`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvbm_cli.bench.app import workloads
from kvbm_cli.profile.options import SetOption, profiles
from kvbm_cli.terminal.options import JsonOption, Text, argument, flag, option, path_option

COMMAND_HELP = (
    "Command that starts an engine, with its options; or a script, a manifest, or a profile. The options of `kvbm try` "
    "come first."
)


def try_(
    command: Annotated[list[str] | None, argument("COMMAND", COMMAND_HELP, profiles)] = None,
    set_: SetOption = None,
    trace: Annotated[
        Path | None, path_option("--trace", "FILE", "Send the requests of this trace instead of conversations.")
    ] = None,
    workload: Annotated[
        Text, option("--workload", "NAME|PATH", "Send the requests of this workload instead.", workloads)
    ] = None,
    minutes: Annotated[
        float | None,
        option(
            "--minutes",
            "N",
            "Choose requests that take at most this long [default: 8, or up to 30 if G1 is not exceeded sooner].",
            min=1,
            max=10_000,
        ),
    ] = None,
    yes: Annotated[bool, flag("--yes", "Do not ask for confirmation.")] = False,
    resume: Annotated[
        Path | None, path_option("--resume", "DIR", "Continue the interrupted trial in this directory.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Measure what kvbm gains for your engine."""
    from kvbm_cli.try_ import command as body

    return body.try_engine(
        body.TryRequest(
            words=command or (),
            overrides=set_ or (),
            trace=trace,
            workload=workload,
            minutes=minutes,
            resume=resume,
            is_confirmed=yes,
            as_json=json,
        )
    )
