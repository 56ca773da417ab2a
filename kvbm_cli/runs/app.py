"""`kvbm status`, `kvbm stop` and `kvbm logs`: their options and help."""

from __future__ import annotations

from typing import Annotated

from kvbm.types import MAX_SECONDS
from kvbm_cli.terminal.options import JsonOption, argument, flag, matching, option


def runs(incomplete: str) -> list[str]:
    return _runs(incomplete, living=False)


def living_runs(incomplete: str) -> list[str]:
    return _runs(incomplete, living=True)


def _runs(incomplete: str, *, living: bool) -> list[str]:
    from kvbm_cli.runs.run_directory import Runs

    found = Runs.of_user_if_known()
    return matching([run.name for run in found if run.is_living or not living], incomplete)


RUN_HELP = "Name of a run (`demo-1`) or of its profile [default: the only running engine]."
RunArgument = Annotated[str | None, argument("RUN", RUN_HELP, runs)]
LivingRunArgument = Annotated[str | None, argument("RUN", RUN_HELP, living_runs)]


def status(
    run: RunArgument = None,
    all_: Annotated[bool, flag("--all -a", "Include runs that have ended.")] = False,
    json: JsonOption = False,
) -> None:
    """Show running engines."""
    from kvbm_cli.runs.status import show_status

    show_status(run, with_ended=all_, as_json=json)


def stop(
    run: LivingRunArgument = None,
    all_: Annotated[bool, flag("--all -a", "Stop all running engines.")] = False,
    timeout: Annotated[
        float | None,
        option(
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


def logs(
    run: RunArgument = None,
    follow: Annotated[bool, flag("--follow -f", "Follow the log until the engine exits.")] = False,
    lines: Annotated[
        int | None, option("--lines -n", "N", "Print only the last N lines [default: all].", min=0)
    ] = None,
) -> None:
    """Show the log of a run."""
    from kvbm_cli.runs.logs import show_logs

    show_logs(run, follow=follow, line_count=lines)
