"""`kvbm doctor`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvbm_cli.profile.options import OptionalProfilesOption, SetOption
from kvbm_cli.terminal.options import JsonOption, flag, option, path_option


def doctor(
    profile: OptionalProfilesOption = None,
    set_: SetOption = None,
    directory: Annotated[
        Path | None,
        path_option("--dir", "DIR", "Directory to check [default: from the profile, else ~/.cache/kvbm]."),
    ] = None,
    quick: Annotated[bool, flag("--quick", "Finish within 20 seconds and skip slow checks.")] = False,
    url: Annotated[
        str | None, option("--url", "URL", "Store of a shared tier to check [default: from the profile].")
    ] = None,
    prefill: Annotated[
        float | None,
        option(
            "--prefill-tokens-per-s",
            "N",
            "Prefill rate of the engine; shows the shortest prefix for which loading from the store is faster.",
            min=1e-3,
            max=1e9,
        ),
    ] = None,
    write: Annotated[
        Path | None, path_option("--write", "FILE", "Write a profile that extends it with the recommended settings.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Check a machine, a directory and a store."""
    from kvbm_cli.doctor import command as body

    return body.doctor(
        profile or (),
        set_ or [],
        directory=directory,
        as_json=json,
        is_quick=quick,
        write=write,
        url=url,
        prefill_rate=prefill,
    )
