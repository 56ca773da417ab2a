"""Check: the result of one check, with its state, finding and remedy. DoctorContext: what a check may use.

A group of checks is a module of its own, such as `memory.py`; `command.py` has the list of them. CheckRunner runs
groups, collects the results, and prints each immediately unless JSON was requested. Within `at_most` a SIGALRM
interrupts the running check when the time is up, even if it waits for another process. That check and all later ones
are skipped.
"""

from __future__ import annotations

import contextlib
import enum
import signal
import textwrap
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvbm.engines.table import copy_count
from kvbm_cli.doctor.machine import Machine, PhaseCallback, ProbeFailed
from kvbm_cli.system.answering import ANSWER_LIMIT_S
from kvbm_cli.terminal.console import WIDTH, columns, print_data
from kvbm_cli.terminal.progress import ProgressDisplay

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import DiskTierSection, SharedTierSection, Tiers
    from kvbm.sizing import Sizing

Fact = str | int | float | bool | None


class CheckState(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """`finding` and `remedy` are one line each. A remedy names a command or a profile key. `facts` are for JSON."""

    name: str
    state: CheckState
    finding: str
    remedy: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)


def capacity(byte_count: int) -> str:
    """Format a capacity for a profile: whole units, rounded down."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if byte_count >= 10 * factor:
            return f"{byte_count // factor}{unit}"
    return f"{byte_count // 1000}KB"


def ok(name: str, finding: str, /, **facts: Fact) -> Check:
    return Check(name, CheckState.OK, finding, None, facts)


def warning(name: str, finding: str, remedy: str | None = None, /, **facts: Fact) -> Check:
    return Check(name, CheckState.WARNING, finding, remedy, facts)


def failure(name: str, finding: str, remedy: str | None = None, /, **facts: Fact) -> Check:
    return Check(name, CheckState.FAILURE, finding, remedy, facts)


def skipped(name: str, finding: str, remedy: str | None = None) -> Check:
    return Check(name, CheckState.SKIPPED, finding, remedy)


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
        if self.sizing is not None:
            return self.sizing.host.total_bytes * self.engine_count
        host = self.tiers.host if self.tiers is not None else None
        if host is None or host.is_auto or host.capacity_bytes is None:
            return None
        return host.capacity_bytes * self.engine_count

    def answer_of(
        self, name: str, python: str, program: str, arguments: Sequence[str], *, timeout_s: float, remedy: str
    ) -> dict[str, Any] | Check:
        """Run a probe with an engine's interpreter. Return its answer, or a check `name` with the reason for none."""
        try:
            return self.machine.run_probe(python, program, arguments, timeout_s=timeout_s)
        except ProbeFailed as error:
            if self.is_quick:
                return skipped(name, str(error), "run `kvbm doctor` without `--quick`, which waits longer")
            return failure(name, f"`{python}`: {error}", remedy)


QUICK_S = 20.0
TIME_IS_UP = f"the {QUICK_S:.0f} s of --quick are over"

Returned = TypeVar("Returned")


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

    def group(
        self, name: str, checks: Generator[Check, None, Returned] | Iterator[Check], *, about: str | None = None
    ) -> Returned | None:
        """Run the checks of one group and print them below `name` and `about`.

        Returns what the generator returns, or None if the time is up first.
        """
        self.groups[name] = []
        if not self._as_json:
            self._progress.clear()
            show_group(name, about, is_first=len(self.groups) == 1)
        self._progress.report(name)
        while (check := self.in_time(lambda: _next(checks))) is not None:
            if isinstance(check, _GeneratorEnd):
                returned: Returned = check.value
                return returned
            self._add(name, check)
        self._add(name, skipped("the rest", TIME_IS_UP, "run `kvbm doctor` without `--quick`"))
        return None

    def _add(self, group: str, check: Check) -> None:
        if check.remedy is not None:
            check = replace(check, remedy=self._format_remedy(check.remedy))
        self.groups[group].append(check)
        if not self._as_json:
            self._progress.clear()
            show_check(check)


class _GeneratorEnd:
    """The end of a generator, with its return value."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _next(checks: Iterator[Check]) -> Check | _GeneratorEnd:
    try:
        return next(checks)
    except StopIteration as end:
        return _GeneratorEnd(end.value)


STATE_WIDTH = max(len(state.value) for state in CheckState)
NAME_WIDTH = 17
COLUMN = 2 + STATE_WIDTH + 2 + NAME_WIDTH + 2
INDENT = " " * COLUMN


def show_group(name: str, about: str | None, *, is_first: bool) -> None:
    heading = name if about is None else f"{name}: {about}"
    print_data(heading if is_first else f"\n{heading}")


def show_check(check: Check) -> None:
    """CheckState, name and finding in columns; the remedy below the finding."""
    head = f"  {check.state.value:{STATE_WIDTH}}  {check.name:{NAME_WIDTH}}"
    print_data(
        f"{head}  {_beside(check.finding)}" if len(head) < COLUMN else f"{head}\n{INDENT}{_beside(check.finding)}"
    )
    if check.remedy is not None:
        print_data(f"{INDENT}remedy: {check.remedy}")  # in one line: some are commands to copy


def _beside(text: str) -> str:
    """Return the text in lines that begin at COLUMN; a word that is too long for one, such as a path, stays whole."""
    room = max(1, (columns() or WIDTH) - COLUMN)
    return f"\n{INDENT}".join(textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False))


def summary(checks: Sequence[Check]) -> str:
    counts = Counter(check.state for check in checks)
    shown = (f"{counts[state]} {_NOUNS[state][counts[state] != 1]}" for state in CheckState if counts[state])
    return f"{len(checks)} checks: {', '.join(shown)}"


_NOUNS = {state: (state.value, state.value) for state in CheckState} | {
    CheckState.WARNING: ("warning", "warnings"),
    CheckState.FAILURE: ("failure", "failures"),
}


def as_data(groups: Mapping[str, Sequence[Check]]) -> list[Mapping[str, object]]:
    return [
        {"group": group, **asdict(check), "state": check.state.value} for group, of in groups.items() for check in of
    ]
