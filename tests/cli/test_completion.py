"""Completion as the shells do it: bash, zsh and fish are asked what they would offer."""

from __future__ import annotations

import os
import pty
import re
import resource
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from terminal import environment, kvbm

SHIPPED = {"demo", "demo-disk"}
ASKED = {
    "kvbm ser": {"serve"},
    "kvbm serve --det": {"--detach"},
    "kvbm serve --profile demo": SHIPPED,
    "kvbm serve -p demo-": {"demo-disk"},
    "kvbm profile show demo-": {"demo-disk"},
    "kvbm completion f": {"fish"},
    "kvbm bench -p demo --workload conv": {"conversations"},
    "kvbm size -p demo --set tiers.disk.dir": {"tiers.disk.directory="},
}
BASH = """
set -eu
{script}
COMP_WORDS=({line}) COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_kvbm_completion kvbm
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def bin_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `kvbm`, whatever is installed where."""
    directory = tmp_path_factory.mktemp("bin")
    program = directory / "kvbm"
    program.write_text(f"#!{sys.executable}\nfrom kvbm_cli.app import main\nmain()\n")
    program.chmod(0o755)
    return directory


def asked_by(shell: str, line: str, home: Path, bin_directory: Path) -> set[str]:
    """What the shell offers for a line, without the descriptions that some show."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    variables = {**environment(home), "PATH": f"{bin_directory}{os.pathsep}{os.environ['PATH']}"}
    script = kvbm("completion", shell, home=home).stdout
    program, options = {
        "bash": (BASH.format(script=script, line=line), "--norc"),
        "fish": (f"{script}\ncomplete -C '{line}'\n", "--no-config"),
    }[shell]
    done = subprocess.run(
        [shell, options, "-c", program], env=variables, cwd=home, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == "", done.stderr
    return {entry.split("\t")[0] for entry in done.stdout.splitlines() if entry}


@pytest.mark.parametrize("line", ASKED)
def test_bash_offers(line: str, tmp_path: Path, bin_directory: Path) -> None:
    assert asked_by("bash", line, tmp_path, bin_directory) == ASKED[line]


@pytest.mark.parametrize("line", ASKED)
def test_fish_offers(line: str, tmp_path: Path, bin_directory: Path) -> None:
    assert asked_by("fish", line, tmp_path, bin_directory) == ASKED[line]


@pytest.mark.parametrize(("line", "completed"), [("kvbm ser", "kvbm serve"), ("kvbm size -p demo-", "demo-disk")])
def test_zsh_completes_at_a_terminal(line: str, completed: str, tmp_path: Path, bin_directory: Path) -> None:
    """Tab is pressed in a real zsh, on a terminal of its own."""
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    (tmp_path / "kvbm.zsh").write_text(kvbm("completion", "zsh", home=tmp_path).stdout)
    variables = {**environment(tmp_path), "TERM": "xterm", "PATH": f"{bin_directory}{os.pathsep}{os.environ['PATH']}"}
    leader, follower = pty.openpty()
    with subprocess.Popen(
        ["zsh", "-f", "-i"],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=variables,
        cwd=tmp_path,
        start_new_session=True,
    ) as shell:
        os.close(follower)
        try:
            os.write(leader, b"autoload -U compinit; compinit -u -D; source ./kvbm.zsh; print rea''dy\n")
            shown = _read_until(leader, "ready")
            os.write(leader, f"{line}\t".encode())
            shown = _read_until(leader, completed)
            assert completed in shown
        finally:
            shell.kill()
            os.close(leader)


def _read_until(terminal: int, text: str) -> str:
    """What the terminal shows, at most ten seconds long, without what moves its cursor."""
    shown, deadline = "", time.monotonic() + 10
    while text not in shown and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(terminal, 4096).decode(errors="replace"))
    return shown


def test_runs_are_offered_by_their_names(tmp_path: Path, bin_directory: Path) -> None:
    from test_runs import facts

    from kvbm_cli.runs import Runs

    (tmp_path / ".local/state/kvbm/runs").mkdir(parents=True)
    run = Runs(tmp_path / ".local/state/kvbm").create("demo")
    run.begin(facts(run.name))
    assert asked_by("bash", "kvbm stop d", tmp_path, bin_directory) == {"demo-1"}
    run.end(0, "")
    run.close()
    assert asked_by("bash", "kvbm stop d", tmp_path, bin_directory) == set()
    assert asked_by("bash", "kvbm logs d", tmp_path, bin_directory) == {"demo-1"}


def test_a_shell_does_not_wait(tmp_path: Path, bin_directory: Path) -> None:
    """The least of several: children of earlier tests that end meanwhile are counted too."""
    variables = {"_KVBM_COMPLETE": "complete_bash", "COMP_WORDS": "kvbm\nserve\n-p\ndemo", "COMP_CWORD": "3"}

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert set(kvbm(home=tmp_path, **variables).stdout.split()) == SHIPPED
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(5)) < 0.5
