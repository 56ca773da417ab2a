"""`kvbm serve`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvbm_cli.profile.options import ProfilesOption, SetOption, StrictOption
from kvbm_cli.terminal.options import JsonOption, flag, option, path_option


def serve(
    profile: ProfilesOption,
    set_: SetOption = None,
    port: Annotated[str | None, option("--port", "PORT", "Port of the engine's server; 0 chooses a free port.")] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Print the plan and the command without starting the engine.")] = False,
    detach: Annotated[bool, flag("--detach -d", "Run the engine in the background; return when it is ready.")] = False,
    force: Annotated[
        bool, flag("--force", "Start even with an untested engine version or flag, or too little memory or disk space.")
    ] = False,
    strict: StrictOption = False,
    baseline: Annotated[bool, flag("--baseline", "Start the same engine without the cache, to compare with.")] = False,
    quiet: Annotated[
        bool, flag("--quiet -q", "Do not print the engine's log while it runs; `kvbm logs` shows it.")
    ] = False,
    json: JsonOption = False,
    log: Annotated[
        Path | None,
        path_option("--log", "FILE", "File for the engine's log [default: a file in the run's directory]."),
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
