"""`kvbm doctor`: runs every group of checks, prints each result immediately, and returns the exit code.

With --quick, checks that have not started after QUICK_WORK_S are skipped (check.py).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.config.files import real_path
from kvbm.config.layers import shipped_name
from kvbm.config.load import ResolvedProfile
from kvbm.config.schema import DiskTierSection, Tiers
from kvbm.config.variables import other_variables
from kvbm.engines.table import load
from kvbm.errors import ProfileError, UsageError
from kvbm.sizing import SizeUnknown, Sizing
from kvbm.tiers.shared.settings import directory_of
from kvbm_cli.cache.store_selection import checked_url
from kvbm_cli.doctor import disk, engine, environment, memory, self_test, store
from kvbm_cli.doctor.check import TIME_IS_UP, CheckRunner, DoctorContext, as_data, summary
from kvbm_cli.doctor.environment import with_variables
from kvbm_cli.doctor.machine import Machine
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.profile.machine_check import Check, failure, skipped
from kvbm_cli.profile.resolve import require_files_answer
from kvbm_cli.profile.size import size_if_known, size_of
from kvbm_cli.profile.text import extends_value, scalar
from kvbm_cli.system.answering import silent_among
from kvbm_cli.system.filesystem import expanded, write_new
from kvbm_cli.terminal.console import print_data, print_json, print_note
from kvbm_cli.terminal.progress import ProgressDisplay

if TYPE_CHECKING:
    from kvbm_cli.doctor.probes.disk import RecommendedSettings

QUICK_WORK_S = 14.0  # of QUICK_S; the rest is for cleanup
FAILED = 1
PROGRESS_AFTER_S = 2.0
SECTION = "tiers.disk."


def doctor(
    profiles: Sequence[str],
    overrides: Sequence[str],
    *,
    directory: Path | None,
    as_json: bool,
    is_quick: bool,
    write: Path | None,
    url: str | None = None,
    prefill_rate: float | None = None,
    machine: Machine | None = None,
) -> int:
    """Return the exit code. ProfileError for a profile that cannot be read, UsageError for options that conflict.

    With `url` but without a profile and a directory, only the store is checked.
    """
    machine = machine or Machine()
    _require_options(profiles, overrides, write)
    url = None if url is None else checked_url(url)
    checks_all = url is None or bool(profiles) or directory is not None
    found, variables = environment.check_variables(machine.environment)
    resolved = _resolve(profiles, overrides, {**other_variables(machine.environment), **variables}, directory)
    if write is not None and (resolved is None or resolved.profile.tiers.disk is None):
        raise UsageError("the profile has no `tiers.disk`, so there is nothing to write", hint="remove `--write`")
    if resolved is None:
        configured_tiers, mistakes = environment.tiers(variables)
    else:
        configured_tiers, mistakes = resolved.profile.tiers, environment.check_with_profile(resolved)
    with ProgressDisplay("checking", delay_s=PROGRESS_AFTER_S) as progress:
        runner = CheckRunner(progress, as_json=as_json, format_remedy=_remedy_format(resolved, configured_tiers))
        with runner.at_most(QUICK_WORK_S if is_quick else None):
            runner.group("environment", environment.or_all_valid([*found, *mistakes], len(variables)))
            sizing, unsized = runner.in_time(partial(_size, resolved)) or (None, [skipped("size", TIME_IS_UP)])
            place = _directory(configured_tiers, directory) if checks_all else None
            context = DoctorContext(
                machine,
                place,
                resolved,
                configured_tiers,
                sizing,
                is_quick=is_quick,
                on_phase=progress.report,
                url=url or _url(configured_tiers),
                prefill_rate=prefill_rate,
            )
            ask = partial(silent_among, _written_places(context), changes=True)
            runner.in_time(ask)  # in parallel; the checks ask again, and remember
            settings = _run_groups(runner, context, unsized) if checks_all else None
            if not checks_all:
                runner.group("store", store.checks(context), about=context.url)
    exit_code = _end(runner.groups, context, settings, as_json=as_json)
    if write is not None:
        exit_code = max(exit_code, _write(resolved, settings, write, place))
    return exit_code


def quick_checks(resolved: ResolvedProfile) -> list[Check]:
    """Run the quick checks of memory and of the engine, without printing them."""
    with ProgressDisplay("checking", delay_s=PROGRESS_AFTER_S) as progress:
        runner = CheckRunner(progress, as_json=True)
        sizing, place = size_if_known(resolved), _directory(resolved.profile.tiers, None)
        context = DoctorContext(
            Machine(), place, resolved, resolved.profile.tiers, sizing, is_quick=True, on_phase=progress.report
        )
        with runner.at_most(QUICK_WORK_S):
            runner.group("memory", memory.checks(context))
            runner.group("engine", engine.checks(context))
    return [check for of in runner.groups.values() for check in of]


def _run_groups(runner: CheckRunner, context: DoctorContext, unsized: Sequence[Check]) -> RecommendedSettings | None:
    """Return the recommended settings of the disk tier."""
    settings: list[RecommendedSettings] = []
    runner.group("disk", disk.checks(context, settings.append), about=_shown(context.directory))
    found = settings[0] if settings else None
    if context.url is not None:
        runner.group("store", store.checks(context), about=context.url)
    runner.group("memory", memory.checks(context))
    runner.group("tiers", [*unsized, *memory.tier_checks(context)])
    runner.group("ports", engine.port_checks(context))
    runner.group("self test", self_test.checks(context, found))
    runner.group("engine", engine.checks(context))
    return found


def _written_places(context: DoctorContext) -> list[Path]:
    """Return the directories of the tiers that the checks write into."""
    is_read = context.shared is not None and not context.shared.write
    store = None if context.url is None or is_read else directory_of(context.url)
    return [place for place in (context.directory, store) if place is not None]


def _url(tiers: Tiers | None) -> str | None:
    return None if tiers is None or tiers.shared is None else tiers.shared.resolved_url()


def _require_options(profiles: Sequence[str], overrides: Sequence[str], write: Path | None) -> None:
    if not profiles and (write is not None or overrides):
        what = "--write" if write is not None else "--set"
        raise UsageError(f"`{what}` requires a profile", hint="add `--profile PROFILE`")
    if write is not None and os.path.lexists(write):
        raise UsageError(f"`{write}` exists; `--write` overwrites no file", hint="name a file that does not exist")
    if write is not None and not write.parent.is_dir():
        raise UsageError(
            f"cannot write `{write}`: there is no directory `{write.parent}`",
            hint=f"run `mkdir -p {shlex.quote(str(write.parent))}`",
        )


def _resolve(
    profiles: Sequence[str], overrides: Sequence[str], variables: Mapping[str, str], directory: Path | None
) -> ResolvedProfile | None:
    """Resolve the profile with the valid variables, and with `--dir` as directory of its disk tier if it has one."""
    if not profiles:
        return None
    places = [profiles_directory()]
    resolved = load(*profiles, directories=places, variables=variables, overrides=overrides)
    require_files_answer(resolved)
    if directory is None or resolved.profile.tiers.disk is None:
        return resolved
    options = {f"{SECTION}directory": ("--dir", str(_absolute(directory)))}
    return load(*profiles, directories=places, variables=variables, overrides=overrides, options=options)


def _absolute(directory: Path) -> Path:
    return Path(os.path.abspath(expanded(str(directory))))


def _directory(tiers: Tiers | None, given: Path | None) -> Path | None:
    """Return `--dir`, else the directory of the disk tier, else the default if no tiers are configured."""
    if given is not None:
        return _absolute(given)
    if tiers is None:
        return _absolute(Path(DiskTierSection.model_fields["directory"].default))
    return None if tiers.disk is None else _absolute(Path(tiers.disk.directory))


def _shown(directory: Path | None) -> str | None:
    return None if directory is None else str(directory)


def _size(resolved: ResolvedProfile | None) -> tuple[Sizing | None, list[Check]]:
    """Return the sizes or None, and the checks that failed."""
    if resolved is None:
        return None, []
    try:
        return size_of(resolved), []
    except SizeUnknown as unknown:
        return None, [skipped("size", unknown.message, unknown.hint)]
    except ProfileError as error:
        return None, [failure("size", error.message.splitlines()[0], error.hint)]


def _remedy_format(resolved: ResolvedProfile | None, tiers: Tiers | None) -> Callable[[str], str]:
    """Return how remedies are formatted: as variables if only variables configure the tiers, else as profile keys."""
    return with_variables if resolved is None and tiers is not None else str


def _write(
    resolved: ResolvedProfile | None, settings: RecommendedSettings | None, target: Path, directory: Path | None
) -> int:
    assert resolved is not None
    if settings is None:
        print_note(f"did not write {target}: {directory} is not usable, so the settings for it are unknown")
        return FAILED
    write_profile(resolved, _keys(settings), target)
    print_note(f"wrote {target}")
    return 0


def write_profile(resolved: ResolvedProfile, recommended: Mapping[str, str | bool], target: Path) -> None:
    """Write `target`, which must not exist: a profile that extends the given ones with the keys of the disk tier that
    are recommended, or that come from the command line or a variable. EnvironmentProblem if it cannot be written."""
    given = [key for key, source in resolved.sources.items() if key.startswith(SECTION) and source.line is None]
    keys = {**{key: resolved.values[key] for key in given}, **recommended}
    parents = [shipped_name(path, [profiles_directory()]) or str(real_path(path)) for path in resolved.paths]
    lines = [f"    {key.removeprefix(SECTION)}: {scalar(value)}" for key, value in keys.items()]
    write_new(target, "\n".join([f"extends: {extends_value(parents)}", "", "tiers:", "  disk:", *lines, ""]))


def _keys(settings: RecommendedSettings) -> dict[str, str | bool]:
    return {f"{SECTION}{name}": value for name, value in asdict(settings).items()}


def _end(
    groups: Mapping[str, Sequence[Check]],
    context: DoctorContext,
    settings: RecommendedSettings | None,
    *,
    as_json: bool,
) -> int:
    checks = [check for of in groups.values() for check in of]
    exit_code = int(any(check.state == "failure" for check in checks))
    if as_json:
        print_json(
            {
                "profile": None if context.resolved is None else context.resolved.name,
                "directory": _shown(context.directory),
                "url": context.url,
                "checks": as_data(groups),
                "recommended": None if settings is None else _keys(settings),
                "exit_code": exit_code,
            }
        )
    else:
        if settings is not None:
            print_data(f"\nrecommended for {context.directory}")
            formatted = _remedy_format(context.resolved, context.tiers)
            for key, value in _keys(settings).items():
                print_data("  " + formatted(f"`{key}: {str(value).lower()}`").strip("`"))
        print_data(f"\n{summary(checks)}")
    return exit_code
