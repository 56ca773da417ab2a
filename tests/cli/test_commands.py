"""What all commands share: errors and bugs, colours and widths, start-up, hints, and hostile command lines."""

import ast
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu_time import of_children_s
from recorded_runs import facts
from terminal import (
    HANGS_S,
    PROGRAM,
    environment,
    kvbm,
    kvbm_here,
    on_a_terminal,
    ways,
)
from test_serve import write_home

from kvbm.config.layers import shipped, shipped_halves
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.runs.run_directory import Runs
from kvbm_cli.runs.run_facts import RunState
from kvbm_cli.terminal.crash_report import A_BUG, KEPT_REPORTS, save_report
from kvbm_cli.terminal.show_error import show_error


@pytest.mark.parametrize("command", ["", "profile"])
def test_no_command_shows_the_help(tmp_path, command):
    assert kvbm_here(*command.split(), home=tmp_path) == kvbm_here(*command.split(), "--help", home=tmp_path)


def test_warning_stands_before_the_data_where_both_go_to_one_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: demo\ntiers: {host: {capacity: 1GiB}}\n")
    with (tmp_path / "both").open("w") as both:
        env = environment(tmp_path, DYN_KVBM_CPU_CACHE_GB="0.5")
        subprocess.run(
            [*PROGRAM, "size", "-p", "mine.yaml"], cwd=tmp_path, env=env, stdout=both, stderr=both, check=True
        )
    assert (tmp_path / "both").read_text().startswith("warning: `DYN_KVBM_CPU_CACHE_GB=0.5` overrides `tiers.host")


def test_debug_shows_the_traceback_of_a_mistake(tmp_path):
    outcome = kvbm("--debug", "size", "--profile", "dmo", home=tmp_path)
    assert outcome.exit_code == 1
    assert "Traceback (most recent call last)" in outcome.stderr
    assert "ProfileError" in outcome.stderr


def test_bug_is_one_line_without_a_traceback(tmp_path):
    breaks = (
        "import kvbm_cli.profile.size as s; s.size_of = None; "
        "from kvbm_cli.app import run; exit(run(['size', '-p', 'demo']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", breaks], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == A_BUG
    (saved,) = (tmp_path / ".local/state/kvbm/crashes").iterdir()
    assert done.stderr == (
        "error: a bug in kvbm: TypeError: 'NoneType' object is not callable\n\n"
        f"hint: report it with the traceback in {saved}\n"
    )
    assert "$ kvbm size -p demo\n\nTraceback (most recent call last):" in saved.read_text()
    assert saved.stat().st_mode & 0o777 == 0o600


def test_reports_of_bugs_are_few_and_go_elsewhere_where_there_is_no_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for number in range(KEPT_REPORTS + 3):
        (tmp_path / "kvbm" / "crashes").mkdir(parents=True, exist_ok=True)
        (tmp_path / "kvbm" / "crashes" / f"2000010{number:03}-1.txt").touch()
    assert save_report(ValueError("x"), ["size"]) is not None
    assert len(list((tmp_path / "kvbm" / "crashes").iterdir())) == KEPT_REPORTS
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    elsewhere = save_report(ValueError("x"), ["size"])
    assert elsewhere.parent.parent == tmp_path


def test_causes_are_listed_between_error_and_hint(capsys):
    inner = OSError("the disk is full")
    outer = RuntimeError("cannot write")
    outer.__cause__ = inner
    show_error("it failed", cause=outer, hint="`df`")
    assert capsys.readouterr().err == (
        "error: it failed\n  caused by: cannot write\n  caused by: the disk is full\n\nhint: `df`\n"
    )


def test_help_of_a_narrow_terminal_cuts_no_summary(tmp_path):
    for command in ("", "profile", "cache"):
        shown = kvbm_here(*command.split(), "-h", home=tmp_path, COLUMNS="60")
        assert shown.exit_code == 0
        assert "..." not in shown.stdout.partition("Commands:")[2]


def test_output_that_nobody_reads_ends_with_the_code_of_a_broken_pipe(tmp_path):
    command, pipes = [*PROGRAM, "profile", "show", "demo"], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as program:
        program.stdout.close()
        assert (program.wait(timeout=HANGS_S), program.stderr.read()) == (141, b"")


@pytest.mark.parametrize(("extra", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_is_for_terminals_that_want_it(tmp_path, extra, coloured):
    leader, follower = pty.openpty()
    env = {**environment(tmp_path), "TERM": "xterm", **extra}
    done = subprocess.run([*PROGRAM, "size", "-p", "dmo"], cwd=tmp_path, env=env, stderr=follower)
    os.close(follower)
    shown = os.read(leader, 4096)
    os.close(leader)
    assert done.returncode == 2
    assert (b"\033[1;31merror:\033[0m" in shown) == coloured
    assert b"no profile is named `dmo`" in shown


@pytest.mark.parametrize("command", ["profile show demo", "profile list", "size -p demo"])
def test_tables_fit_into_a_terminal_and_are_not_wrapped_in_a_pipe(tmp_path, command):
    narrow, wide = (on_a_terminal(*command.split(), home=tmp_path, columns=columns) for columns in (60, 200))
    assert max(map(len, narrow)) <= 60
    assert len(wide) < len(narrow)
    assert wide == kvbm(*command.split(), home=tmp_path).stdout.splitlines()


def test_origin_stays_on_the_line_of_its_key_where_there_is_room(tmp_path):
    shown = on_a_terminal("profile", "show", "vllm", "--set", "tiers.host.capacity=2GB", home=tmp_path, columns=80)
    assert any(line.startswith("tiers.host.capacity ") and line.endswith(" # --set") for line in shown)


HEAVY = ("torch", "transformers", "numpy", "aiohttp", "httpx", "pydantic", "yaml", "jinja2", "markupsafe")


def test_help_imports_nothing_heavy(tmp_path):
    program = "import sys; from kvbm_cli.app import run; run(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not set(HEAVY) & set(done.stderr.split())


def test_help_takes_less_than_half_a_second_of_the_processor(tmp_path):
    assert of_children_s(lambda: kvbm("--help", home=tmp_path)) < 0.5


@pytest.mark.parametrize("command", ["size -p demo", "serve -p demo --dry-run", "profile list"])
def test_command_without_an_engine_needs_no_torch(tmp_path, command):
    program = f"import sys; from kvbm_cli.app import run; run({command.split()}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers"} & set(done.stderr.split())


NAMES = shipped([profiles_directory()])
HALVES = shipped_halves([profiles_directory()])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "way"), ways(NAMES))
def test_it_checks_clean_and_makes_a_plan(tmp_path, name, way):
    checked = way("profile", "check", name, "--json", home=tmp_path)
    assert (checked.exit_code, json.loads(checked.stdout)["mistakes"]) == (0, []), checked.stderr
    planned = way("serve", "--profile", name, "--dry-run", "--json", home=tmp_path)
    assert planned.exit_code == 0, planned.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_list_has_them_all(tmp_path):
    listed = json.loads(kvbm_here("profile", "list", "--json", home=tmp_path).stdout)
    assert [one["name"] for one in listed] == [*NAMES, *HALVES]
    assert {one["engine"] for one in listed} == {"embedded", "vllm", "tensorrt-llm", "sglang", None}


ROOT = Path(__file__).parents[2]
COMMAND = re.compile(
    r"(sudo )?(kvbm|less|chmod|chown|mkdir|namei|ls|rm|cat|tail|df|mv|cp|hf)( |$)|--(dir|resume|output|log|url)[ =]"
)
# Numbers, names of options, and text that is a command already.
NOT_FOR_THE_SHELL = {"os.geteuid()", "context.command_path", "ctx.command_path", "arguments[0]", "pattern"}


def commands_with_values(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the expression of each value in a command between backticks."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr):
            continue
        inside: str | None = None  # the command up to here, None outside of backticks
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                if inside is not None and COMMAND.match(inside):
                    yield node.lineno, ast.unparse(part.value)
                continue
            for position, text in enumerate(str(part.value).split("`")):  # type: ignore[attr-defined]
                if position:
                    inside = None if inside is not None else ""
                if inside is not None:
                    inside += text


def is_option_of_a_message(line: str) -> bool:
    """An error that repeats an option as it was given, which is no command."""
    return 'raise UsageError(f"`--' in line or line.lstrip().startswith('f"`--')


def test_every_value_in_a_command_of_a_message_is_quoted():
    bare = []
    for package in ("kvbm", "kvbm_cli"):
        for file in sorted((ROOT / package).rglob("*.py")):
            source = file.read_text()
            for line, expression in commands_with_values(ast.parse(source)):
                is_quoted = expression.startswith("shlex.quote(") or expression in NOT_FOR_THE_SHELL
                if not is_quoted and not is_option_of_a_message(source.splitlines()[line - 1]):
                    bare.append(f"{file.relative_to(ROOT)}:{line}: {expression}")
    assert bare == []


def test_the_check_finds_a_value_that_is_not_quoted():
    found = list(commands_with_values(ast.parse('f"run `ls -ld {path}`, not {other} or `{word}`"')))
    assert found == [(1, "path")]


LONG = "x" * 5000
NO_RUN = "error: no run is named `"
NO_ENGINE = "no engine is running\n"
HOSTILE: dict[str, tuple[tuple[str, ...], int, str]] = {
    "serve a directory": (("serve", "-p", "model"), 2, "error: "),
    "log is the profile": (("serve", "-p", "mine.yaml", "--log", "./mine.yaml"), 2, "is the profile itself"),
    "dry run of all": (("serve", "-p", "mine.yaml", "--dry-run", "-q", "--baseline", "--force", "--json"), 0, ""),
    "status of a long name": (("status", LONG), 2, NO_RUN),
    "status of a command": (("status", "\x1b[2J"), 2, NO_RUN),
    "log with a command": (("logs", "title-1"), 1, "was removed: `"),
    "status of a run with commands": (("status", "title-1"), 0, "title-1"),
    "status as JSON of none": (("status", "--json", "nope"), 2, NO_RUN),
    "stop none": (("stop", "--all", "-t", "1e5"), 0, NO_ENGINE),
    "stop an ended one": (("stop", "demo-1"), 0, "demo-1 has already ended"),
    "lines with an exponent": (("logs", "demo-1", "-n", "1e3"), 2, "`--lines` must be a whole number, not `1e3`"),
    "more lines than bytes": (("logs", "demo-1", "-n", "9" * 30), 0, ""),
    "no lines": (("logs", "demo-1", "-n", "0", "-f"), 0, ""),
    "log that is no file": (("logs", "zero-1"), 1, "the log of `zero-1` was removed: `/dev/zero`"),
    "log of a process": (("logs", "demo-1"), 0, ""),
    "bench into a file": (("bench", "-p", "mine.yaml", "--output", "mine.yaml"), 1, "mine.yaml"),
    "bench into proc": (("bench", "-p", "mine.yaml", "--output", "/proc/x"), 1, "cannot write to /proc/x"),
}


@pytest.fixture(scope="module")
def hostile_home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    write_home(home)
    state = home / ".local/state/kvbm"
    (state / "runs").mkdir(parents=True)
    for profile, log in (("demo", "/proc/self/mem"), ("zero", "/dev/zero"), ("title", "\x1b]0;x\x07")):
        made = Runs(state).create(profile)
        made.begin(facts(made.name, state=RunState.ENDED, ended_s=1.0, exit_code=0, logs={"engine": log}))
        made.close()
    return home


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_command_line_is_no_bug(hostile_home, name):
    command, exit_code, text = HOSTILE[name]
    before = (hostile_home / "mine.yaml").read_text()
    outcome = kvbm_here(*command, home=hostile_home)
    assert outcome.exit_code == exit_code, outcome
    assert text in outcome.stdout + outcome.stderr
    assert not any(sign in outcome.stderr for sign in ("a bug in kvbm", "Traceback"))
    assert "\x1b" not in outcome.stdout + outcome.stderr
    assert (hostile_home / "mine.yaml").read_text() == before
    assert sorted(path.name for path in hostile_home.iterdir()) == [".local", "mine.yaml", "model"], "nothing is left"
