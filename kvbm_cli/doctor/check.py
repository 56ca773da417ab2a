"""DoctorContext: what a check may use. CheckRunner: runs groups of checks, and prints each result.

A group of checks is a module of its own, such as `memory.py`; `command.py` has the list of them. CheckRunner collects
the results, and prints each immediately unless JSON was requested. Within `at_most` a SIGALRM
interrupts the running check when the time is up, even if it waits for another process. That check and all later ones
are skipped.
"""

from __future__ import annotations

import contextlib
import signal
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvbm.engines.table import copy_count
from kvbm_cli.doctor.machine import Machine, NoAnswerInTime, PhaseCallback, ProbeFailed
from kvbm_cli.profile.machine_check import STATES, Check, failure, skipped
from kvbm_cli.profile.machine_problems import memory_bytes
from kvbm_cli.system.answering import ANSWER_LIMIT_S
from kvbm_cli.terminal.console import WIDTH, columns, print_data
from kvbm_cli.terminal.progress import ProgressDisplay
from kvbm_cli.terminal.quantities import counted

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import DiskTierSection, SharedTierSection, Tiers
    from kvbm.sizing import Sizing

NO_ANSWER = f"the filesystem does not respond: no answer within {ANSWER_LIMIT_S:g} s"
OTHER_DIRECTORY = "use another directory (`--dir` or `tiers.disk.directory`)"


@dataclass(frozen=True, slots=True)
class DoctorContext:
    """`sizing` is None without a profile, or if only the engine knows the sizes. `tiers` come from the profile; without
    one, from the variables, as for an engine that is started by its own command. `url` is the store of the shared tier,
    None without one; `prefill_rate` is in tokens per second, None if unknown."""

    machine: Machine
    directory: Path | None
    resolved: ResolvedProfile | None
    tiers: Tiers | None
    sizing: Sizing | None
    is_quick: bool
    on_phase: PhaseCallback
    url: str | None = None
    prefill_rate: float | None = None

    @property
    def disk(self) -> DiskTierSection | None:
        return self.tiers.disk if self.tiers is not None else None

    @property
    def shared(self) -> SharedTierSection | None:
        return self.tiers.shared if self.tiers is not None else None

    @property
    def engine_count(self) -> int:
        """How many engines have the tiers of the profile, each for itself."""
        return 1 if self.resolved is None else copy_count(self.resolved.profile)

    @property
    def host_bytes(self) -> int | None:
        """Host memory for blocks (G2) of all engines, None if it is unknown."""
        return None if self.tiers is None else memory_bytes(self.tiers, self.sizing, self.engine_count)

    def answer_of(
        self, name: str, python: str, program: str, arguments: Sequence[str], *, timeout_s: float, remedy: str
    ) -> dict[str, Any] | Check:
        """Run a probe with an engine's interpreter. Return its answer, or a check `name` with the reason for none."""
        try:
            return self.machine.run_probe(python, program, arguments, timeout_s=timeout_s)
        except ProbeFailed as error:
            if self.is_quick and isinstance(error, NoAnswerInTime):
                return skipped(name, str(error), "run `kvbm doctor` without `--quick`, which waits longer")
            return failure(name, f"`{python}`: {error}", remedy)


QUICK_S = 20.0
TIME_IS_UP = f"the {QUICK_S:.0f} s of --quick are over"

Returned = TypeVar("Returned")
_END = skipped("end", "")  # of a group


class _TimeIsUp(BaseException):
    """A BaseException, so that no check catches it."""


class CheckRunner:
    """Runs groups of checks. `groups` maps the name of each group to its checks; `format_remedy` rewrites remedies."""

    def __init__(self, progress: ProgressDisplay, *, as_json: bool, format_remedy: Callable[[str], str] = str) -> None:
        self._progress = progress
        self._as_json = as_json
        self._format_remedy = format_remedy
        self._is_running = False
        self._is_over = False
        self.groups: dict[str, list[Check]] = {}

    @contextlib.contextmanager
    def at_most(self, seconds: float | None) -> Iterator[None]:
        if seconds is None:
            yield
            return
        before = signal.signal(signal.SIGALRM, self._alarm)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _alarm(self, *ignored: object) -> None:
        self._is_over = True
        if self._is_running:
            raise _TimeIsUp

    def in_time(self, action: Callable[[], Returned]) -> Returned | None:
        """Run the action. Returns its result, or None if the time is up first."""
        try:
            try:
                self._is_running = not self._is_over
                return action() if self._is_running else None
            finally:
                self._is_running = False
        except _TimeIsUp:
            return None

    def group(self, name: str, checks: Iterable[Check], *, about: str | None = None) -> None:
        """Run the checks of one group and print them below `name` and `about`."""
        self.groups[name] = []
        if not self._as_json:
            self._progress.clear()
            show_group(name, about, is_first=len(self.groups) == 1)
        self._progress.report(name)
        waiting = iter(checks)
        while (check := self.in_time(lambda: next(waiting, _END))) is not _END:
            if check is None:
                self._add(name, skipped("the rest", TIME_IS_UP, "run `kvbm doctor` without `--quick`"))
                return
            self._add(name, check)

    def _add(self, group: str, check: Check) -> None:
        if check.remedy is not None:
            check = replace(check, remedy=self._format_remedy(check.remedy))
        self.groups[group].append(check)
        if not self._as_json:
            self._progress.clear()
            show_check(check)


STATE_WIDTH = max(map(len, STATES))
NAME_WIDTH = 17
COLUMN = 2 + STATE_WIDTH + 2 + NAME_WIDTH + 2
INDENT = " " * COLUMN


def show_group(name: str, about: str | None, *, is_first: bool) -> None:
    heading = name if about is None else f"{name}: {about}"
    print_data(heading if is_first else f"\n{heading}")


def show_check(check: Check) -> None:
    """State, name and finding in columns; the remedy below the finding."""
    head = f"  {check.state:{STATE_WIDTH}}  {check.name:{NAME_WIDTH}}"
    print_data(
        f"{head}  {_beside(check.finding)}" if len(head) < COLUMN else f"{head}\n{INDENT}{_beside(check.finding)}"
    )
    for line in check.details:
        print_data(f"{INDENT}{line}")
    if check.remedy is not None:
        print_data(f"{INDENT}remedy: {check.remedy}")  # in one line: some are commands to copy


def _beside(text: str) -> str:
    """Return the text in lines that begin at COLUMN; a word that is too long for one, such as a path, stays whole."""
    room = max(1, (columns() or WIDTH) - COLUMN)
    return f"\n{INDENT}".join(textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False))


def summary(checks: Sequence[Check]) -> str:
    counts = Counter(check.state for check in checks)
    shown = (
        counted(counts[state], state) if state in ("warning", "failure") else f"{counts[state]} {state}"
        for state in STATES
        if counts[state]
    )
    return f"{len(checks)} checks: {', '.join(shown)}"


def as_data(groups: Mapping[str, Sequence[Check]]) -> list[Mapping[str, object]]:
    names = ("name", "state", "finding", "remedy", "facts", "details")
    rows = ((group, check) for group, checks in groups.items() for check in checks)
    return [
        {"group": group, **{name: getattr(check, name) for name in names if name != "details" or check.details}}
        for group, check in rows
    ]
