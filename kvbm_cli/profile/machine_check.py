"""Check: what one check of this machine has found, how bad it is, and what to do.

`kvbm doctor` prints every check. `kvbm serve` and `kvbm bench` refuse to start for those that are problems, and
`kvbm profile check` and `serve --dry-run` print them as warnings, each at the place of its key in the profile.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvbm.errors import EnvironmentProblem, EnvironmentProblems
from kvbm_cli.terminal.show_error import show_warning

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile

Fact = str | int | float | bool | None
STATES = ("ok", "warning", "failure", "skipped")
ROOM = ("available", "free space")  # names of checks of memory and disk


class Severity(enum.Enum):
    """What the result means for a start: it is refused, or a warning is printed.

                 serve    serve --force    serve --strict    bench
    WARNING      warns    warns            warns             warns
    STRICT       warns    warns            refuses           -
    NO_DISK      warns    warns            warns             refuses
    FORCEABLE    refuses  warns            refuses           refuses
    FAILURE      refuses  refuses          refuses           refuses

    With NO_DISK, the engine of `kvbm serve` runs without the disk tier. `kvbm bench` does not look for STRICT. OK and
    SKIPPED print nothing.
    """

    OK = enum.auto()
    SKIPPED = enum.auto()
    WARNING = enum.auto()
    STRICT = enum.auto()
    NO_DISK = enum.auto()
    FORCEABLE = enum.auto()
    FAILURE = enum.auto()


@dataclass(frozen=True, slots=True)
class Check:
    """`finding` and `remedy` are one line each. A remedy names a command or a profile key. `facts` are for JSON. `key`
    is the key of the profile that the finding is about, None if it is about the machine alone. `details` are lines that
    are shown below the finding."""

    name: str
    severity: Severity
    finding: str
    remedy: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)
    key: str | None = None
    details: Sequence[str] = ()

    @property
    def state(self) -> str:
        """The word of STATES that `kvbm doctor` shows."""
        if self.severity in (Severity.OK, Severity.SKIPPED):
            return self.severity.name.lower()
        return "warning" if self.severity in (Severity.WARNING, Severity.STRICT) else "failure"

    @property
    def text(self) -> str:
        """The finding with its remedy, for a warning without a hint."""
        return self.finding if self.remedy is None else f"{self.finding}; {self.remedy}"

    def error(self, resolved: ResolvedProfile) -> EnvironmentProblem:
        """Return it as an error, at the place of its key in the profile."""
        message = self.finding if self.key is None else resolved.mistake(self.key, self.finding).message
        return EnvironmentProblem("\n".join([message, *self.details]), hint=self.remedy)

    def warning_text(self, resolved: ResolvedProfile) -> str:
        """Return it as a warning, which has no hint: only a tier that adds little says here to what it must be set."""
        return self.text if self.severity is Severity.STRICT else self.error(resolved).message


def ok(name: str, finding: str, /, **facts: Fact) -> Check:
    return Check(name, Severity.OK, finding, None, facts)


def warning(name: str, finding: str, remedy: str | None = None, /, **facts: Fact) -> Check:
    return Check(name, Severity.WARNING, finding, remedy, facts)


def failure(name: str, finding: str, remedy: str | None = None, /, **facts: Fact) -> Check:
    return Check(name, Severity.FAILURE, finding, remedy, facts)


def skipped(name: str, finding: str, remedy: str | None = None) -> Check:
    return Check(name, Severity.SKIPPED, finding, remedy)


def require_none(
    resolved: ResolvedProfile,
    problems: Sequence[Check],
    *,
    is_forced: bool | None = None,
    is_strict: bool = False,
    may_lack_disk: bool = False,
) -> None:
    """Raise EnvironmentProblem for the problems, and print those that are only warnings. `is_forced` is None for a
    command without `--force`."""
    accepted = {Severity.WARNING}
    if is_forced:
        accepted |= {Severity.FORCEABLE, Severity.NO_DISK}
    if may_lack_disk:
        accepted.add(Severity.NO_DISK)
    if not is_strict:
        accepted.add(Severity.STRICT)
    warn_of(resolved, [one for one in problems if one.severity in accepted])
    refused = [one for one in problems if one.severity not in accepted]
    if is_forced is not None:
        refused = [_with_force(one) if one.severity is Severity.FORCEABLE else one for one in refused]
    if errors := [one.error(resolved) for one in refused]:
        raise errors[0] if len(errors) == 1 else EnvironmentProblems(errors)


def warn_of(resolved: ResolvedProfile, problems: Sequence[Check]) -> None:
    for problem in problems:
        show_warning(problem.warning_text(resolved))


def _with_force(check: Check) -> Check:
    """Name `--force` in the remedy for a lack of room. Others have their own words, or nothing to recommend."""
    return replace(check, remedy=f"{check.remedy}; `--force` starts it anyway") if check.name in ROOM else check
