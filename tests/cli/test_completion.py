"""Completion as the shells do it: bash, zsh and fish are asked what they would offer."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cpu_time import of_children_s
from terminal import HANGS_S, environment, kvbm

LIBRARIES = "import pydantic.types, typer.main, yaml"
SHIPPED = {"demo", "demo-disk", "demo-shared"}
ASKED = {
    "kvbm ser": {"serve"},
    "kvbm serve --det": {"--detach"},
    "kvbm serve --profile demo": SHIPPED,
    "kvbm serve -p demo-": {"demo-disk", "demo-shared"},
    "kvbm profile show demo-": {"demo-disk", "demo-shared"},
    "kvbm serve -p vllm -p storage/l": {"storage/large-ssd", "storage/lustre"},
    "kvbm completion f": {"fish"},
    "kvbm bench -p demo --compare ba": {"baseline"},
    "kvbm bench -p demo --compare demo-": {"demo-disk", "demo-shared"},
    "kvbm bench -p demo --workload conv": {"conversations"},
    "kvbm size -p demo --set tiers.disk.dir": {"tiers.disk.directory="},
    "kvbm profile new mine.yaml --engine v": {"vllm"},
    "kvbm profile schema tiers.disk.dir": {"tiers.disk.directory"},
    "kvbm serve --port 1": set(),
}
BASH = """
set -u
{script}
COMP_LINE='{line}' COMP_POINT=${{#COMP_LINE}} COMP_WORDS=({line}) COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_kvbm_completion kvbm
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def bin_directory(tmp_path_factory):
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
        [shell, options, "-c", program], env=variables, cwd=home, capture_output=True, text=True, timeout=HANGS_S
    )
    assert done.stderr == "", done.stderr
    return {entry.split("\t")[0] for entry in done.stdout.splitlines() if entry}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("line", ASKED)
def test_bash_offers(line, tmp_path, bin_directory):
    assert asked_by("bash", line, tmp_path, bin_directory) == ASKED[line]


@pytest.mark.parametrize("line", ASKED)
def test_fish_offers(line, tmp_path, bin_directory):
    assert asked_by("fish", line, tmp_path, bin_directory) == ASKED[line]


STARTS = {
    "bash": (["bash", "--norc", "-i"], "bind 'set bell-style none'; source ./script; "),
    "zsh": (["zsh", "-f", "-i"], "autoload -U compinit; compinit -u -D; source ./script; "),
}
SHOW = "kvbm() { printf '<%s>' \"$@\"; }; echo rea''dy\n"  # completion still asks the program
TYPED = {  # the words that there are when an `X` is typed behind what Tab makes of the line
    "kvbm ser": "<serve><X>",
    "kvbm size -p demo-d": "<size><-p><demo-disk><X>",
    "kvbm size --profile=demo-d": "<size><--profile=demo-disk><X>",
    "kvbm size --set tiers.disk.dir": "<size><--set><tiers.disk.directory=X>",
    "kvbm size --set=tiers.disk.dir": "<size><--set=tiers.disk.directory=X>",
    "kvbm size --set offload.to_disk=fr": "<size><--set><offload.to_disk=frequency><X>",
    "kvbm size --profile=./oth": "<size><--profile=./other.yaml><X>",
    "kvbm serve --log ./oth": "<serve><--log><./other.yaml><X>",
    "kvbm stop ./oth": "<stop><./othX>",
    "kvbm profile schema oth": "<profile><schema><othX>",
}


@pytest.mark.parametrize("shell", STARTS)
def test_shell_completes_at_a_terminal(shell, tmp_path, bin_directory):
    """Tab is pressed in a real shell, on a terminal of its own."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(kvbm("completion", shell, home=tmp_path).stdout)
    (tmp_path / "other.yaml").touch()
    variables = {**environment(tmp_path), "TERM": "dumb", "PATH": f"{bin_directory}{os.pathsep}{os.environ['PATH']}"}
    command, first_line = STARTS[shell]
    leader, follower = pty.openpty()
    with subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=variables, cwd=tmp_path, start_new_session=True
    ) as program:
        os.close(follower)
        try:
            os.write(leader, f"{first_line}{SHOW}".encode())
            assert "ready" in _read_until(leader, "ready")
            for line, words in TYPED.items():
                os.write(leader, f"{line}\tX\n".encode())
                shown = _read_until(leader, "X>")
                assert words in shown, (line, shown)
        finally:
            program.kill()
            os.close(leader)


def _read_until(terminal: int, text: str) -> str:
    """What the terminal shows until this text, without what moves its cursor."""
    shown, deadline = "", time.monotonic() + HANGS_S
    output = select.poll()
    output.register(terminal, select.POLLIN)
    while text not in shown and time.monotonic() < deadline:
        if output.poll(100):
            shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(terminal, 4096).decode(errors="replace"))
    return shown


def test_runs_are_offered_by_their_names(tmp_path, bin_directory):
    from recorded_runs import facts

    from kvbm_cli.runs.run_directory import Runs

    (tmp_path / ".local/state/kvbm/runs").mkdir(parents=True)
    run = Runs(tmp_path / ".local/state/kvbm").create("demo")
    run.begin(facts(run.name))
    assert asked_by("bash", "kvbm stop d", tmp_path, bin_directory) == {"demo-1"}
    run.end(0, "")
    run.close()
    assert asked_by("bash", "kvbm stop d", tmp_path, bin_directory) == set()
    assert asked_by("bash", "kvbm logs d", tmp_path, bin_directory) == {"demo-1"}


def test_a_shell_does_not_wait(tmp_path):
    """Against what the libraries alone take to be imported, so that the speed of the machine does not count."""
    variables = {"_KVBM_COMPLETE": "complete_bash", "_TYPER_COMPLETE_ARGS": "kvbm serve -p demo", "_KVBM_WORD": "demo"}

    def libraries():
        subprocess.run([sys.executable, "-c", LIBRARIES], check=True)

    def completion():
        assert set(kvbm(home=tmp_path, **variables).stdout.split()) == SHIPPED

    assert min(of_children_s(completion) for _ in range(5)) < 5 * min(of_children_s(libraries) for _ in range(5))
