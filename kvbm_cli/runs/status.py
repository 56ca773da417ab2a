"""`kvbm status`: which engines of this user run, as their run directories say and as they answer themselves."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm_cli.runs.run_directory import PROFILE, Run, Runs, State
from kvbm_cli.system.http_client import get
from kvbm_cli.terminal.console import print_data, print_json, print_note, table
from kvbm_cli.terminal.show_error import show_warning

ASK_TIMEOUT_S = 1.0
ASKED_AT_ONCE = 16
TIERS = {"host": "G2", "disk": "G3"}
FREE = "free"
UNREACHABLE = "no answer"
_BLOCKS = re.compile(r'^kvbm_(host|disk)_blocks\{.*?state="(\w+)".*?\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Seen:
    """A run, and what its engine answered: whether it is healthy (None: not asked) and blocks of each tier by state."""

    run: Run
    is_healthy: bool | None
    blocks: dict[str, dict[str, int]]

    @property
    def state(self) -> str:
        return UNREACHABLE if self.is_healthy is False else self.run.state.value

    def tiers(self) -> str:
        shares = []
        for name, states in self.blocks.items():
            total = sum(states.values())
            shares.append(f"{TIERS[name]} {(total - states.get(FREE, 0)) / total:.0%}" if total else "")
        return ", ".join(filter(None, shares)) or "-"

    def as_data(self) -> dict[str, Any]:
        facts = self.run.facts
        return {
            "run": facts.name,
            "state": self.state,
            "profile": facts.profile,
            "engine": facts.engine,
            "model": facts.model,
            "url": facts.url,
            "pid": facts.launcher.pid,
            "processes": {name: one.pid for name, one in facts.processes.items()},
            "is_here": facts.launcher.is_here(),
            "is_detached": facts.is_detached,
            "started_s": facts.started_s,
            "ready_s": facts.ready_s,
            "ended_s": facts.ended_s,
            "exit_code": facts.exit_code,
            "message": facts.message,
            "memory_bytes": facts.memory_bytes,
            "blocks": self.blocks,
            "directory": str(self.run.path),
            "logs": dict(facts.logs),
            "versions": dict(facts.versions),
        }


def show_status(reference: str | None, *, with_ended: bool, as_json: bool) -> None:
    runs = Runs.of_user()
    every = runs.all()
    warn_of_unreadable(runs)
    if reference is not None:
        found = runs.find(reference, ended=True)
    else:
        found = [run for run in every if run.is_living or with_ended]
    with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        seen = list(threads.map(_see, found))
    if as_json:
        print_json([one.as_data() for one in seen])
    elif reference is not None:
        print_data("\n\n".join(_page(one) for one in seen))
    elif seen:
        print_data(_table(seen, with_start=with_ended))
    else:
        more = f"; `kvbm status --all` shows {len(every)} that did" if every and not with_ended else ""
        print_note(f"nothing runs{more}")
    if reference is None and not as_json and not with_ended:
        for run in {run.facts.profile: run for run in every}.values():  # the last of each profile
            if (end := _bad_end(run)) is not None:
                print_note(f"{run.facts.name} {end}; `kvbm logs {run.facts.name}`")


def _bad_end(run: Run) -> str | None:
    """Of a run that nobody has stopped."""
    if run.state is State.DEAD:
        return f"died, {_death(run)}"
    if run.state is State.ENDED and run.facts.exit_code and run.facts.message:
        return f"ended at {_when(run.facts.ended_s)}: {run.facts.message.splitlines()[0]}"
    return None


def _death(run: Run) -> str:
    return f"last seen at {_when(run.last_sign_s())}: its launcher was killed, or the machine was restarted"


def _when(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def warn_of_unreadable(runs: Runs) -> None:
    for path in runs.unreadable():
        show_warning(f"`{path}` is damaged, or of another version: whether something runs there is not known")


def _see(run: Run) -> Seen:
    """Only an engine that says that it is healthy is asked: another one has nothing to say, or another's port."""
    if run.state is not State.HEALTHY or run.is_elsewhere:
        return Seen(run, None, {})
    is_healthy = get(f"{run.facts.url}/health", timeout_s=ASK_TIMEOUT_S).status == 200
    blocks: dict[str, dict[str, int]] = {}
    if is_healthy:
        text = get(f"{run.facts.url}/metrics", timeout_s=ASK_TIMEOUT_S).text()
        for tier, state, count in _BLOCKS.findall(text):
            states = blocks.setdefault(tier, {})
            states[state] = states.get(state, 0) + int(float(count))
    return Seen(run, is_healthy, blocks)


def _table(seen: Sequence[Seen], *, with_start: bool) -> str:
    rows = [("run", "state", "launcher", "up", "address", "used"), *map(_row, seen)]
    if with_start:
        starts = ["started", *(_when(one.run.facts.started_s) for one in seen)]
        rows = [(*row, start) for row, start in zip(rows, starts, strict=True)]
    return table(rows, right=(2, 3))


def _row(seen: Seen) -> tuple[str, ...]:
    run = seen.run
    state = f"{seen.state} ({run.facts.exit_code})" if run.state is State.ENDED else seen.state
    pid = str(run.facts.launcher.pid) if run.is_living else "-"
    return run.facts.name, state, pid, _age(run), run.facts.url if run.is_living else "-", seen.tiers()


def _age(run: Run) -> str:
    """How long it has run, or ran; a dash where its end is not known."""
    facts = run.facts
    if run.state is State.DEAD:
        return "-"
    return duration((facts.ended_s or time.time()) - facts.started_s)


def duration(seconds: float) -> str:
    for unit, length, limit in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < limit * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def _page(seen: Seen) -> str:
    run, facts = seen.run, seen.run.facts
    processes = ", ".join(f"{name} {one.pid}" for name, one in {"launcher": facts.launcher, **facts.processes}.items())
    lines = [
        ("run", facts.name),
        ("state", _state_text(seen)),
        ("profile", f"{facts.profile} ({run.path / PROFILE})"),
        ("engine", f"{facts.engine}, {facts.model}"),
        ("url", facts.url),
        *([("processes", processes)] if run.is_living else []),
        *([("used", seen.tiers())] if seen.blocks else []),
        ("versions", ", ".join(f"{name} {version}" for name, version in facts.versions.items())),
        *(("log", path if len(facts.logs) == 1 else f"{path} ({name})") for name, path in facts.logs.items()),
    ]
    message = [f"\n{facts.message}"] if facts.message else []
    return "\n".join([*(f"{label:<9}  {text}" for label, text in lines), *message])


def _state_text(seen: Seen) -> str:
    run, facts = seen.run, seen.run.facts
    if run.state is State.DEAD:
        return f"dead, {_death(run)}"
    if run.state is State.ENDED:
        return f"ended at {_when(facts.ended_s)} with exit code {facts.exit_code}, after {_age(run)}"
    where = f", on {facts.launcher.host}, where this machine cannot see it" if run.is_elsewhere else ""
    return f"{seen.state} for {_age(run)}{where}" if not where else f"{seen.state}{where}"


def names(runs: Sequence[Run]) -> list[str]:
    return [run.facts.name for run in runs]


def log_paths(run: Run) -> dict[str, Path]:
    return {name: Path(path) for name, path in run.facts.logs.items()}
