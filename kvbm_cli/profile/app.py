"""`kvbm profile`: its subcommands with their options and help."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from kvbm.errors import UsageError
from kvbm_cli.profile.options import (
    ENGINES,
    STRICT_HELP,
    FirstProfileArgument,
    MoreProfilesOption,
    ProfileArgument,
    SetOption,
    engines,
    profiles,
    sections_and_keys,
)
from kvbm_cli.terminal.command_line import Command
from kvbm_cli.terminal.options import (
    JsonOption,
    argument,
    command_group,
    flag,
    option,
    path_argument,
    path_option,
)

profile_app = command_group("List, check, write and compare profiles.")
StrictCheckOption = Annotated[bool, flag("--strict", f"{STRICT_HELP[:-1]}, or if kvbm is disabled for its model.")]


@profile_app.command("list", cls=Command)
def profile_list(json: JsonOption = False) -> None:
    """List the shipped profiles."""
    from kvbm_cli.profile.show import list_profiles

    list_profiles(as_json=json)


@profile_app.command("show", cls=Command)
def profile_show(
    profile: FirstProfileArgument = None,
    more: MoreProfilesOption = None,
    set_: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Show all keys, values and their origins."""
    from kvbm_cli.profile.show import show_profile

    show_profile(_references(profile, more), set_ or [], as_json=json)


@profile_app.command("check", cls=Command)
def profile_check(
    profile: FirstProfileArgument = None,
    more: MoreProfilesOption = None,
    set_: SetOption = None,
    strict: StrictCheckOption = False,
    json: JsonOption = False,
) -> int:
    """Check a profile and report every mistake. Exits with 2 if there is one."""
    from kvbm_cli.profile.check import check_profile

    return check_profile(_references(profile, more), set_ or [], as_json=json, is_strict=strict)


def _references(profile: str | None, more: list[str] | None) -> list[str]:
    """UsageError without a profile."""
    references = [*([] if profile is None else [profile]), *(more or [])]
    if not references:
        raise UsageError("missing argument `NAME|PATH`", hint="`kvbm profile list` lists the shipped profiles")
    return references


@profile_app.command("diff", cls=Command)
def profile_diff(
    profile: ProfileArgument,
    other: Annotated[str, argument("NAME|PATH", "Profile to compare with.", profiles)],
    set_: SetOption = None,
    json: JsonOption = False,
) -> int:
    """Compare two profiles key by key. Exits with 1 if they differ."""
    from kvbm_cli.profile.diff import diff_profiles

    return diff_profiles(profile, other, set_ or [], as_json=json)


@profile_app.command("new", cls=Command)
def profile_new(
    file: Annotated[Path, path_argument("FILE", "File to write; ends in .yaml.")],
    engine: Annotated[str | None, option("--engine", "KIND", f"Engine: {ENGINES}.", engines)] = None,
    model: Annotated[
        str | None, option("--model", "MODEL", "Model: a directory or a name that the engine accepts.")
    ] = None,
    host: Annotated[str | None, option("--host", "SIZE", "Host memory for blocks, such as 64GiB.")] = None,
    disk: Annotated[str | None, option("--disk", "SIZE", "Disk space for blocks, such as 1TB.")] = None,
    directory: Annotated[str | None, option("--dir", "DIR", "Directory of the disk tier.")] = None,
    port: Annotated[str | None, option("--port", "PORT", "Port of the engine's server.")] = None,
    extends: Annotated[
        list[str] | None,
        option("--extends", "NAME|PATH", "Profile to extend; may be repeated, the last one wins.", profiles),
    ] = None,
    set_: SetOption = None,
    force: Annotated[bool, flag("--force", "Overwrite FILE.")] = False,
) -> None:
    """Write a new profile."""
    from kvbm_cli.profile.new import new_profile

    given = {"--engine": engine, "--model": model, "--host": host, "--disk": disk, "--dir": directory, "--port": port}
    answers = {option: text for option, text in given.items() if text is not None}
    new_profile(file, answers, set_ or [], extends=extends or (), is_forced=force)


@profile_app.command("import", cls=Command)
def profile_import(
    file: Annotated[str, argument("FILE|-", "Script, manifest, Compose, Docker or env file; - is stdin.")],
    output: Annotated[
        Path | None, path_option("--output", "FILE", "New file; ends in .yaml [default: stdout].")
    ] = None,
    model: Annotated[str | None, option("--model", "MODEL", "Model [default: that of the file].")] = None,
    engine: Annotated[str | None, option("--engine", "KIND", "Engine [default: that of the file].", engines)] = None,
    select: Annotated[
        str | None, option("--select", "NAME", "Engine of a file that starts several [default: the first with kvbm].")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Convert a script or manifest to a profile."""
    from kvbm_cli.profile.import_file import import_file

    import_file(file, output=output, model=model, engine=engine, select=select, as_json=json)


@profile_app.command("import-env", cls=Command)
def profile_import_env(
    output: Annotated[
        Path | None, path_option("--output", "FILE", "New file; ends in .yaml [default: stdout].")
    ] = None,
    model: Annotated[str | None, option("--model", "MODEL", "Model of the engine; no variable sets it.")] = None,
    engine: Annotated[
        str | None,
        option("--engine", "KIND", "Engine [default: the one that the variables are for].", engines),
    ] = None,
) -> None:
    """Convert DYN_KVBM_* variables to a profile."""
    from kvbm_cli.profile.import_file import import_env

    import_env(os.environ, output=output, model=model, engine=engine)


@profile_app.command("schema", cls=Command)
def profile_schema(
    key: Annotated[str | None, argument("KEY", "Describe this key or section instead.", sections_and_keys)] = None,
) -> None:
    """Print the JSON Schema, or describe a key."""
    from kvbm_cli.profile.schema import show_schema

    show_schema(key)
