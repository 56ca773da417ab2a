"""`kvbm status`: lists the engines of this user, from their run directories and from their own HTTP answers."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kvbm.text.outside import one_line, shortened
from kvbm_cli.runs.run_client import metrics_of, request_run
from kvbm_cli.runs.run_directory import PROFILE, EngineRun, Runs, UnreadableRun
from kvbm_cli.runs.run_facts import RunState
from kvbm_cli.system.metrics_page import MetricsPage
from kvbm_cli.terminal.console import print_data, print_json, print_note, table
from kvbm_cli.terminal.quantities import duration
from kvbm_cli.terminal.show_error import show_warning

PROBE_TIMEOUT_S = 1.0
PARALLEL_PROBES = 16
TIERS = {"host": "G2", "disk": "G3", "shared": "G4"}
WHY_OFF = {  # as of the engine's last step, the first that is true
    "unnamed": "waits until the files of the model have been read, which identify its blocks",
    "silent": "is off: its storage or its process does not answer; it is used again when it does",
    "off": "is off; the reason is in `kvbm logs {run}`",
}
FREE = "free"
UNREACHABLE = "no answer"
UNREADABLE = "unreadable"
ORDERS = ("lru", "adaptive: lru", "adaptive: probation", "adaptive: incumbents")  # by `kvbm_eviction_order`
BLOCKS = {"kvbm_host_blocks": "host", "kvbm_disk_blocks": "disk"}
EVICTION = tuple(f"{tier}eviction_{what}" for tier in ("", "disk_") for what in ("order", "gain_percent"))
OFF = {(tier, why): f"kvbm_{tier}_{why}" for tier in ("disk", "shared") for why in WHY_OFF}
INFO = "kvbm_info"
NAMES = frozenset([INFO, *BLOCKS, *OFF.values(), *(f"kvbm_{name}" for name in EVICTION)])


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run with the answer of its engine: `is_healthy` (None if not probed), blocks of each tier by state, why
    lower tiers are off, by WHY_OFF, how host memory evicts, and which blocks are copied to it, if known."""

    run: EngineRun
    is_healthy: bool | None
    blocks: dict[str, dict[str, int]]
    off: dict[str, str] = field(default_factory=dict)
    eviction: dict[str, int] = field(default_factory=dict)
    to_host: str = ""

    @property
    def state(self) -> str:
        return UNREACHABLE if self.is_healthy is False else self.run.state.value

    def tiers(self) -> str:
        if self.run.facts.is_baseline:
            return "no cache"
        shares = {}
        for name, states in self.blocks.items():
            total = sum(states.values())
            shares[name] = f"{(total - states.get(FREE, 0)) / total:.0%}" if total else ""
        shares |= {name: "waits" if why == "unnamed" else "off" for name, why in self.off.items()}
        return ", ".join(f"{TIERS[name]} {share}" for name, share in shares.items() if share) or "-"

    def eviction_text(self, tier: str = "") -> str:
        """Say which blocks leave host memory first, or the disk (`disk_`), and why. Empty if it is not known."""
        order = self.eviction.get(f"{tier}eviction_order", -1)
        gain = self.eviction.get(f"{tier}eviction_gain_percent", 0)
        if not 0 <= order < len(ORDERS):
            return ""
        why = (
            ("", "no other order has a significant gain")[order] if order < 2 else f"{gain:+} % hits compared with lru"
        )
        return f"{ORDERS[order]} ({why})" if why else ORDERS[order]

    def disk_eviction_text(self) -> str:
        """Like `eviction_text`, of the disk; also empty for `lru`."""
        return self.eviction_text("disk_") if self.eviction.get("disk_eviction_order") else ""

    def notes(self) -> list[str]:
        """Say of each tier that is off why."""
        run = self.run.name
        names = {"disk": "disk tier (G3)", "shared": "shared tier (G4)"}
        return [
            f"the {names[tier]} of {run} {WHY_OFF[why].format(run=shlex.quote(run))}" for tier, why in self.off.items()
        ]

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
            "is_baseline": facts.is_baseline,
            "started_s": facts.started_s,
            "ready_s": facts.ready_s,
            "ended_s": facts.ended_s,
            "exit_code": facts.exit_code,
            "message": facts.message,
            "memory_bytes": facts.memory_bytes,
            "chosen": dict(facts.chosen),
            "blocks": self.blocks,
            "off": self.off,
            "eviction": self.eviction_text() or None,
            "disk_eviction": self.disk_eviction_text() or None,
            "to_host": self.to_host or None,
            "is_shared_off": "shared" in self.off,
            "directory": str(self.run.path),
            "logs": dict(facts.logs),
            "versions": dict(facts.versions),
        }


def show_status(reference: str | None, *, with_ended: bool, as_json: bool) -> None:
    runs = Runs.of_user()
    every = runs.all()
    found_unreadable = [] if reference is not None else warn_of_unreadable(runs)
    unreadable = [run for run in found_unreadable if run.has_launcher is not False or with_ended]
    if reference is not None:
        runs.require_readable(reference)
        found = runs.find(reference, ended=True)
    else:
        found = [run for run in every if run.is_living or with_ended]
    with ThreadPoolExecutor(PARALLEL_PROBES) as threads:
        status = list(threads.map(_probe, found))
    if as_json:
        print_json([*(one.as_data() for one in status), *map(_unreadable_data, unreadable)])
    elif reference is not None:
        print_data("\n\n".join(_page(one) for one in status))
    elif status or unreadable:
        print_data(_table(status, unreadable, with_start=with_ended))
    else:
        more = f"; `kvbm status --all` also lists ended runs ({len(every)})" if every and not with_ended else ""
        print_note(f"no engine is running{more}")
    for one in status if not as_json else ():
        for note in one.notes():
            print_note(note)
    if reference is None and not as_json and not with_ended:
        last = {(run.facts.profile, run.facts.is_baseline): run for run in every}
        for run in last.values():
            if (end := _failure(run)) is not None:
                print_note(f"{run.name} {end}; `kvbm logs {shlex.quote(run.name)}`")


def _failure(run: EngineRun) -> str | None:
    """Return how a run failed, None for one that runs or was stopped."""
    if run.state is RunState.DEAD:
        return f"died, {_death(run)}"
    if run.state is RunState.ENDED and run.facts.exit_code and run.facts.message:
        return f"ended at {_when(run.facts.ended_s)}: {run.facts.message.splitlines()[0]}"
    return None


def _death(run: EngineRun) -> str:
    rest = f"; `kvbm stop {shlex.quote(run.name)}` ends its remaining processes" if run.has_leftovers() else ""
    return f"last seen at {_when(run.last_sign_s())}: its launcher was killed or the machine was restarted{rest}"


def _when(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def warn_of_unreadable(runs: Runs) -> list[UnreadableRun]:
    """Return the runs that cannot be read, after a warning for each."""
    found = runs.unreadable()
    for run in found:
        show_warning(run.problem())
    return found


def _probe(run: EngineRun) -> RunStatus:
    """Probes the engine if its run is healthy. Before and after, its port may belong to another program."""
    if run.state is not RunState.HEALTHY or run.is_elsewhere:
        return RunStatus(run, None, {})
    is_healthy = request_run(run, "GET", "/health", timeout_s=PROBE_TIMEOUT_S).status == 200
    figures: tuple[Any, ...] = ({},)
    if is_healthy and not run.facts.is_baseline:
        figures = _figures_of(metrics_of(run, timeout_s=PROBE_TIMEOUT_S).text())
    return RunStatus(run, is_healthy, *figures)


def _figures_of(text: str) -> tuple[dict[str, dict[str, int]], dict[str, str], dict[str, int], str]:
    """Return blocks by tier and state, why tiers are off, how they evict, and what is copied to host memory, of a page
    of metrics."""
    page, blocks = MetricsPage.parse(text, NAMES), dict[str, dict[str, int]]()
    for name, tier in BLOCKS.items():
        for labels, count in page.series.get(name, ()):
            if count >= 0:
                states, state = blocks.setdefault(tier, {}), labels.get("state", "")
                states[state] = states.get(state, 0) + int(count)
    eviction = {name: int(found[-1]) for name in EVICTION if (found := page.values(f"kvbm_{name}"))}
    to_host = next((labels.get("to_host", "") for labels in page.labels_of(INFO)), "")
    return blocks, _off(page), eviction, one_line(shortened(to_host))


def _off(page: MetricsPage) -> dict[str, str]:
    """Return why each tier is off, if it is."""
    found = {of for of, name in OFF.items() if 1 in page.values(name)}
    return {tier: next(why for why in WHY_OFF if (tier, why) in found) for tier in TIERS if (tier, "off") in found}


def _unreadable_data(run: UnreadableRun) -> dict[str, Any]:
    return {
        "run": run.name,
        "state": UNREADABLE,
        "is_locked": run.has_launcher is True,
        "problem": run.problem(),
        "directory": str(run.path),
    }


def _table(status: Sequence[RunStatus], unreadable: Sequence[UnreadableRun], *, with_start: bool) -> str:
    rows = [("run", "state", "launcher", "up", "address", "used"), *map(_row, status)]
    rows += [(run.name, UNREADABLE, *"----") for run in unreadable]
    if with_start:
        starts = ["started", *(_when(one.run.facts.started_s) for one in status), *("-" for _ in unreadable)]
        rows = [(*row, start) for row, start in zip(rows, starts, strict=True)]
    return table(rows, right=(2, 3))


def _row(status: RunStatus) -> tuple[str, ...]:
    run = status.run
    state = f"{status.state} ({run.facts.exit_code})" if run.state is RunState.ENDED else status.state
    pid = str(run.facts.launcher.pid) if run.is_living else "-"
    return run.name, state, pid, _age(run), run.facts.url if run.is_living else "-", status.tiers()


def _age(run: EngineRun) -> str:
    """Return how long it has run or ran, a dash if its end is unknown."""
    facts = run.facts
    if run.state is RunState.DEAD:
        return "-"
    if run.state is RunState.ENDED:
        return duration(max(0.0, (facts.ended_s or facts.started_s) - facts.started_s))
    return duration(facts.launcher.age_s() or max(0.0, time.time() - facts.started_s))


def _page(status: RunStatus) -> str:
    run, facts = status.run, status.run.facts
    processes = ", ".join(f"{name} {one.pid}" for name, one in {"launcher": facts.launcher, **facts.processes}.items())
    lines = [
        ("run", facts.name),
        ("state", _state_text(status)),
        ("profile", f"{facts.profile} ({run.path / PROFILE})"),
        ("engine", f"{facts.engine}, {facts.model}"),
        *([("cache", "none: this is the baseline")] if facts.is_baseline else []),
        ("url", facts.url),
        *([("processes", processes)] if run.is_living else []),
        *([("used", status.tiers())] if status.blocks else []),
        *facts.chosen.items(),
        *([("eviction", text)] if (text := status.eviction_text()) else []),
        *([("to host", status.to_host)] if status.to_host else []),
        *([("on disk", text)] if (text := status.disk_eviction_text()) else []),
        ("versions", ", ".join(f"{name} {version}" for name, version in facts.versions.items())),
        *(("log", path if len(facts.logs) == 1 else f"{path} ({name})") for name, path in facts.logs.items()),
    ]
    message = [f"\n{facts.message}"] if facts.message else []
    return "\n".join([*(f"{label:<9}  {text}" for label, text in lines), *message])


def _state_text(status: RunStatus) -> str:
    run, facts = status.run, status.run.facts
    if run.state is RunState.DEAD:
        return f"dead, {_death(run)}"
    if run.state is RunState.ENDED:
        return f"ended at {_when(facts.ended_s)} with exit code {facts.exit_code}, after {_age(run)}"
    if run.is_elsewhere:
        return f"{status.state}, on {facts.launcher.host} or in another container"
    return f"{status.state} for {_age(run)}"
