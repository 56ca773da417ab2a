"""`kvbm doctor`: runs every group of checks, shows what each finds at once, and says how it ended.

With --quick, checks that have not had their turn after QUICK_WORK_S are skipped (examination.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.config.variables import others
from kvbm.errors import ProfileError, UsageError
from kvbm_cli.doctor import disk, engine, environment, memory, ports, self_test, tiers
from kvbm_cli.doctor.display import as_data, summary
from kvbm_cli.doctor.examination import OVER, Examination
from kvbm_cli.doctor.in_variables import in_variables
from kvbm_cli.doctor.machine import Machine
from kvbm_cli.doctor.result import Check, State, failure, skipped
from kvbm_cli.doctor.subject import Subject
from kvbm_cli.doctor.write_profile import require_disk_tier, write_profile
from kvbm_cli.terminal.console import print_data, print_json, print_note
from kvbm_cli.terminal.progress import ProgressDisplay

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import Tiers
    from kvbm.sizing import Sizing
    from kvbm_cli.doctor.probe import Settings

QUICK_WORK_S = 14.0  # of the QUICK_S; the rest is for clearing away
FAILED = 1
PROGRESS_AFTER_S = 2.0
DIRECTORY_KEY = "tiers.disk.directory"


def doctor(
    profile: str | None,
    overrides: Sequence[str],
    *,
    directory: Path | None,
    as_json: bool,
    is_quick: bool,
    write: Path | None,
    machine: Machine | None = None,
) -> int:
    """The exit code. ProfileError for a profile that cannot be read, UsageError for options that do not go together."""
    machine = machine or Machine()
    _require_options(profile, overrides, write)
    lint, variables = environment.lint(machine.environment)
    resolved = _resolve(profile, overrides, {**others(machine.environment), **variables}, directory)
    if write is not None:
        require_disk_tier(resolved)
    if resolved is None:
        tiers_wanted, mistakes = environment.tiers(variables)
    else:
        tiers_wanted, mistakes = resolved.profile.tiers, environment.beside(resolved)
    with ProgressDisplay("checking", delay_s=PROGRESS_AFTER_S) as progress:
        examination = Examination(progress, as_json=as_json, say_remedy=_way_of_saying(resolved, tiers_wanted))
        with examination.at_most(QUICK_WORK_S if is_quick else None):
            examination.group("environment", _each(environment.all_or_none([*lint, *mistakes], len(variables))))
            sizing, unsized = examination.in_time(partial(_size, resolved)) or (None, [skipped("size", OVER)])
            place = _directory(tiers_wanted, directory)
            subject = Subject(machine, place, resolved, tiers_wanted, sizing, is_quick=is_quick, say=progress.report)
            settings = examination.group("disk", disk.checks(subject), about=_shown(subject.directory))
            examination.group("memory", memory.checks(subject))
            examination.group("tiers", _each([*unsized, *tiers.checks(subject)]))
            examination.group("ports", ports.checks(subject))
            examination.group("self test", self_test.checks(subject, settings))
            examination.group("engine", engine.checks(subject))
    exit_code = _end(examination.groups, subject, settings, as_json=as_json)
    if write is not None:
        exit_code = max(exit_code, _write(resolved, settings, write, place))
    return exit_code


def _require_options(profile: str | None, overrides: Sequence[str], write: Path | None) -> None:
    if profile is None and (write is not None or overrides):
        what = "--write" if write is not None else "--set"
        raise UsageError(f"`{what}` needs a profile", hint="`--profile PROFILE`")
    if write is not None and os.path.lexists(write):
        raise UsageError(f"`{write}` exists", hint="name a file that does not")
    if write is not None and not write.parent.is_dir():
        raise UsageError(f"there is no directory `{write.parent}` to write to", hint=f"`mkdir -p {write.parent}`")


def _resolve(
    profile: str | None, overrides: Sequence[str], variables: Mapping[str, str], directory: Path | None
) -> ResolvedProfile | None:
    """The profile under the variables that mean something, with the directory of the command line if it has a disk."""
    from kvbm.config.load import load
    from kvbm_cli.package_data import profiles_directory

    if profile is None:
        return None
    places = [profiles_directory()]
    resolved = load(profile, directories=places, variables=variables, overrides=overrides)
    if directory is None or resolved.profile.tiers.disk is None:
        return resolved
    options = {DIRECTORY_KEY: ("--dir", str(_absolute(directory)))}
    return load(profile, directories=places, variables=variables, overrides=overrides, options=options)


def _absolute(directory: Path) -> Path:
    return Path(os.path.abspath(os.path.expanduser(directory)))


def _directory(tiers: Tiers | None, given: Path | None) -> Path | None:
    """The one of the command line, else of the disk tier, else the default where nothing says which tiers there are."""
    from kvbm.config.schema import DiskTierSection

    if given is not None:
        return _absolute(given)
    if tiers is None:
        return _absolute(Path(DiskTierSection.model_fields["directory"].default))
    return None if tiers.disk is None else _absolute(Path(tiers.disk.directory))


def _shown(directory: Path | None) -> str | None:
    return None if directory is None else str(directory)


def _size(resolved: ResolvedProfile | None) -> tuple[Sizing | None, list[Check]]:
    """The sizes, or None; and what is wrong with them."""
    from kvbm.sizing import SizeUnknown
    from kvbm_cli.profile.size import size_of

    if resolved is None:
        return None, []
    try:
        return size_of(resolved), []
    except SizeUnknown as unknown:
        return None, [skipped("size", unknown.message, unknown.hint)]
    except ProfileError as error:
        return None, [failure("size", error.message.splitlines()[0], error.hint)]


def _way_of_saying(resolved: ResolvedProfile | None, tiers: Tiers | None) -> Callable[[str], str]:
    """Variables speak of variables where they are all that there is."""
    return in_variables if resolved is None and tiers is not None else str


def _each(found: Sequence[Check] | Iterator[Check]) -> Generator[Check, None, None]:
    yield from found


def _write(resolved: ResolvedProfile | None, settings: Settings | None, target: Path, directory: Path | None) -> int:
    assert resolved is not None
    if settings is None:
        print_note(f"{target} is not written: what {directory} needs is not known, as it cannot be used")
        return FAILED
    write_profile(resolved, _keys(settings), target)
    print_note(f"written: {target}")
    return 0


def _keys(settings: Settings) -> dict[str, str | bool]:
    return {f"tiers.disk.{name}": value for name, value in asdict(settings).items()}


def _end(groups: Mapping[str, Sequence[Check]], subject: Subject, settings: Settings | None, *, as_json: bool) -> int:
    checks = [check for of in groups.values() for check in of]
    exit_code = int(any(check.state is State.FAILURE for check in checks))
    if as_json:
        print_json(
            {
                "profile": None if subject.resolved is None else subject.resolved.name,
                "directory": _shown(subject.directory),
                "checks": as_data(groups),
                "recommended": None if settings is None else _keys(settings),
                "exit_code": exit_code,
            }
        )
    else:
        if settings is not None:
            print_data(f"\nrecommended for {subject.directory}")
            say = _way_of_saying(subject.resolved, subject.tiers)
            for key, value in _keys(settings).items():
                print_data("  " + say(f"`{key}: {str(value).lower()}`").strip("`"))
        print_data(f"\n{summary(checks)}")
    return exit_code
