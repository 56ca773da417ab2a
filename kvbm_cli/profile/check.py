"""`kvbm profile check`: every mistake of a profile that can be found without starting an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvbm.config.document import Mistake, together
from kvbm.config.load import Examined, ResolvedProfile, place_of
from kvbm.errors import ProfileError, UsageError
from kvbm.sizing import Sizing, StateLevel
from kvbm_cli.bench.workload.files import load_workload
from kvbm_cli.profile.machine_problems import problems_here
from kvbm_cli.profile.preflight import all_mistakes
from kvbm_cli.profile.resolve import examined
from kvbm_cli.profile.size import order_checks
from kvbm_cli.profile.state_check import state_findings, state_notes
from kvbm_cli.terminal.console import print_data, print_json
from kvbm_cli.terminal.show_error import show_warning


def check_profile(
    references: Sequence[str], overrides: Sequence[str], *, as_json: bool, is_strict: bool = False
) -> int:
    """Report all mistakes, including those of the workload for `kvbm bench`. Returns the exit code.

    `is_strict`: it is 1 if a tier holds less than the one above it, or if kvbm is disabled.
    """
    try:
        found = examined(*references, overrides=overrides)
    except ProfileError as error:
        found = Examined(place_of(list(map(Path, references))), (error,), None)
    sizing, mistakes = all_mistakes(found)
    mistakes += [] if found.resolved is None else workload_mistakes(found.resolved)
    warnings = list(found.resolved.warnings) if found.resolved is not None else []
    has_problem, notes = False, []
    if found.resolved is not None and sizing is not None and not mistakes:
        order = order_checks(found.resolved, sizing) if isinstance(sizing, Sizing) else []
        warnings += [one.warning_text(found.resolved) for one in (*problems_here(found.resolved, sizing), *order)]
        states = state_findings(found.resolved, StateLevel.WARNING)
        has_problem = bool(order) or any(one.disables for one in states)
        notes = state_notes(found.resolved)
    if as_json:
        print_json(
            {"file": found.place, "mistakes": list(map(_as_data, mistakes)), "warnings": warnings, "notes": notes}
        )
        return ProfileError.exit_code if mistakes else int(is_strict and has_problem)
    for warning in warnings:
        show_warning(warning)
    if mistakes:
        raise together(mistakes)
    print_data("\n".join([f"{found.place}: no mistakes found", *(f"note: {note}" for note in notes)]))
    return int(is_strict and has_problem)


def workload_mistakes(resolved: ResolvedProfile) -> list[ProfileError]:
    """Return the mistakes of a workload of `kvbm bench` that is missing or invalid."""
    try:
        if (workload := resolved.profile.bench.workload) is not None:
            load_workload(workload)
    except UsageError as error:
        return [resolved.mistake("bench.workload", error.message, hint=error.hint)]
    except ProfileError as mistake:
        return [mistake]
    return []


def _as_data(mistake: ProfileError) -> dict[str, object]:
    if not isinstance(mistake, Mistake):
        nowhere = dict.fromkeys(("key", "file", "line", "column", "text"))
        return {"message": mistake.message, **nowhere, "hint": mistake.hint}
    source = mistake.source
    place: dict[str, object] = {"file": mistake.file, "line": None, "column": None, "text": None}
    if source is not None:
        column = None if source.line is None else source.column + 1
        place |= {"line": source.line, "column": column, "text": source.written}
    return {"message": mistake.text, "key": mistake.key or None, **place, "hint": mistake.hint}
