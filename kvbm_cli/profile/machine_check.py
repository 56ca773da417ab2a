"""Check: what one check of this machine has found, how bad it is, and what to do.

`kvbm doctor` prints every check. `kvbm serve` and `kvbm bench` refuse to start for those that are problems, and
`kvbm profile check` and `serve --dry-run` print them as warnings, each at the place of its key in the profile.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvbm.errors import EnvironmentProblem, EnvironmentProblems
from kvbm_cli.terminal.show_error import show_warning

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile

Fact = str | int | float | bool | None
STATES = ("ok", "warning", "failure", "skipped")


class Severity(enum.Enum):
    """What the result means for a start. WARNING never refuses it, FAILURE always does. STRICT refuses it only with
    `--strict`, FORCEABLE and NO_DISK only without `--force`, and NO_DISK not that of `kvbm serve`, whose engine runs
    without the disk tier. What does not refuse a start is a warning."""

    OK = enum.auto()
    SKIPPED = enum.auto()
    WARNING = enum.auto()
    STRICT = enum.auto()
    NO_DISK = enum.auto()
    FORCEABLE = enum.auto()
    FAILURE = enum.auto()


@dataclass(frozen=True, slots=True)
class Check:
    """`remedy` names a command or a profile key. `facts` are for JSON. `key` is the key of the profile that the finding
    is about, None if it is about the machine alone."""

    name: str
    severity: Severity
    finding: str
    remedy: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)
    key: str | None = None

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
        return EnvironmentProblem(message, hint=self.remedy)


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
    is_forced: bool = False,
    is_strict: bool = False,
    may_lack_disk: bool = False,
) -> None:
    """Raise EnvironmentProblem for the problems, and print those that are only warnings."""
    accepted = {Severity.WARNING}
    if is_forced:
        accepted |= {Severity.FORCEABLE, Severity.NO_DISK}
    if may_lack_disk:
        accepted.add(Severity.NO_DISK)
    if not is_strict:
        accepted.add(Severity.STRICT)
    warn_of(resolved, [one for one in problems if one.severity in accepted])
    if errors := [one.error(resolved) for one in problems if one.severity not in accepted]:
        raise errors[0] if len(errors) == 1 else EnvironmentProblems(errors)


def warn_of(resolved: ResolvedProfile, problems: Sequence[Check]) -> None:
    for problem in problems:
        show_warning(problem.error(resolved).message)
