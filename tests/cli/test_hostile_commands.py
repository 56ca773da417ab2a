"""Hostile command lines that have no row in mistakes.py: each is refused or harmless, quickly, and no bug."""

import pytest
from recorded_runs import facts
from terminal import kvbm_here
from test_serve import write_home

from kvbm_cli.runs.run_directory import Runs
from kvbm_cli.runs.run_facts import RunState

LONG = "x" * 5000
NO_RUN = "error: no run is named `"
NO_ENGINE = "no engine is running\n"
NO_CACHE = "error: `--baseline` starts the engine without the cache, so `--set "
ROWS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "serve two": (("serve", "-p", "mine.yaml", "extra"), 2, "unexpected extra argument"),
    "serve a directory": (("serve", "-p", "model"), 2, "error: "),
    "serve a device": (("serve", "-p", "/dev/null"), 2, "error: "),
    "serve a long name": (("serve", "-p", LONG), 2, "error: "),
    "port below": (("serve", "-p", "mine.yaml", "--port", "-1"), 2, "must be at least 0, not `-1`"),
    "port above": (("serve", "-p", "mine.yaml", "--port", "65536"), 2, "must be at most 65535"),
    "port of another script": (("serve", "-p", "mine.yaml", "--port", "٨٠٠٠"), 2, "error: "),
    "log is the profile": (("serve", "-p", "mine.yaml", "--log", "./mine.yaml"), 2, "is the profile itself"),
    "baseline has no value": (("serve", "-p", "mine.yaml", "--baseline=no"), 2, "does not take a value"),
    "baseline of a tier": (("serve", "-p", "mine.yaml", "--baseline", "--set", "tiers={}"), 2, NO_CACHE),
    "baseline of a metric": (("serve", "-p", "mine.yaml", "--baseline", "--set", "metrics.port=1"), 2, NO_CACHE),
    "baseline with spaces": (("serve", "-p", "mine.yaml", "--baseline", "--set", " tiers.host.blocks=9"), 2, NO_CACHE),
    "dry run of all": (("serve", "-p", "mine.yaml", "--dry-run", "-q", "--baseline", "--force", "--json"), 0, ""),
    "status of nothing": (("status", ""), 2, "error: "),
    "status of two": (("status", "demo-1", "demo-2"), 2, "unexpected extra argument"),
    "status of a path": (("status", "../../../../etc/passwd"), 2, NO_RUN),
    "status of a long name": (("status", LONG), 2, NO_RUN),
    "status of a command": (("status", "\x1b[2J"), 2, NO_RUN),
    "log with a command": (("logs", "title-1"), 1, "was removed: `"),
    "status of a run with commands": (("status", "title-1"), 0, "title-1"),
    "status of a number": (("status", "-1"), 2, "no such option"),
    "status of a pattern": (("status", "demo-*"), 2, NO_RUN),
    "status as JSON of none": (("status", "--json", "nope"), 2, NO_RUN),
    "stop not a number": (("stop", "--timeout", "nan"), 2, "`--timeout` requires a number of seconds"),
    "stop at no time": (("stop", "--timeout", "inf"), 2, "`--timeout` requires a number of seconds from 0 to 1000000"),
    "stop too late": (("stop", "--timeout", "1e308"), 2, "not `1e308`"),
    "stop none": (("stop", "--all", "-t", "1e5"), 0, NO_ENGINE),
    "stop an ended one": (("stop", "demo-1"), 0, "demo-1 has already ended"),
    "stop a path": (("stop", "/"), 2, NO_RUN),
    "lines with an exponent": (("logs", "demo-1", "-n", "1e3"), 2, "`--lines` requires a number of lines"),
    "more lines than bytes": (("logs", "demo-1", "-n", "9" * 30), 0, ""),
    "no lines": (("logs", "demo-1", "-n", "0", "-f"), 0, ""),
    "log that is no file": (("logs", "zero-1"), 1, "the log of `zero-1` was removed: `/dev/zero`"),
    "log of a process": (("logs", "demo-1"), 0, ""),
    "bench nothing": (("bench",), 2, "without `--profile`, `--compare` takes URLs"),
    "bench a device": (("bench", "-p", "mine.yaml", "--workload", "/dev/null"), 2, "`/dev/null`"),
    "bench into a file": (("bench", "-p", "mine.yaml", "--output", "mine.yaml"), 1, "mine.yaml"),
    "bench into proc": (("bench", "-p", "mine.yaml", "--output", "/proc/x"), 1, "cannot write to /proc/x"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    write_home(home)
    state = home / ".local/state/kvbm"
    (state / "runs").mkdir(parents=True)
    for profile, log in (("demo", "/proc/self/mem"), ("zero", "/dev/zero"), ("title", "\x1b]0;x\x07")):
        made = Runs(state).create(profile)
        made.begin(facts(made.name, state=RunState.ENDED, ended_s=1.0, exit_code=0, logs={"engine": log}))
        made.close()
    return home


@pytest.mark.parametrize("name", ROWS)
def test_hostile_command_line_is_no_bug(home, name):
    command, exit_code, text = ROWS[name]
    before = (home / "mine.yaml").read_text()
    outcome = kvbm_here(*command, home=home)
    assert outcome.exit_code == exit_code, outcome
    assert text in outcome.stdout + outcome.stderr
    assert not any(sign in outcome.stderr for sign in ("a bug in kvbm", "Traceback"))
    assert "\x1b" not in outcome.stdout + outcome.stderr
    assert (home / "mine.yaml").read_text() == before
    assert sorted(path.name for path in home.iterdir()) == [".local", "mine.yaml", "model"], "nothing is left"
