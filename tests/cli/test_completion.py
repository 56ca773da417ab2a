"""Completion as a shell does it: bash is asked what it would offer. The scripts are those of typer."""

import os
import shutil
import subprocess
import sys
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
COMP_WORDS=({line}) COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
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


def asked(line: str, home: Path, bin_directory: Path) -> set[str]:
    """What bash offers for a line."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    variables = {**environment(home), "PATH": f"{bin_directory}{os.pathsep}{os.environ['PATH']}"}
    program = BASH.format(script=kvbm("completion", "bash", home=home).stdout, line=line)
    done = subprocess.run(
        ["bash", "--norc", "-c", program], env=variables, cwd=home, capture_output=True, text=True, timeout=HANGS_S
    )
    assert done.stderr == "", done.stderr
    return set(filter(None, done.stdout.splitlines()))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("line", ASKED)
def test_bash_offers(line, tmp_path, bin_directory):
    assert asked(line, tmp_path, bin_directory) == ASKED[line]


def test_runs_are_offered_by_their_names(tmp_path, bin_directory):
    from recorded_runs import facts

    from kvbm_cli.runs.run_directory import Runs

    (tmp_path / ".local/state/kvbm/runs").mkdir(parents=True)
    run = Runs(tmp_path / ".local/state/kvbm").create("demo")
    run.begin(facts(run.name))
    assert asked("kvbm stop d", tmp_path, bin_directory) == {"demo-1"}
    run.end(0, "")
    run.close()
    assert asked("kvbm stop d", tmp_path, bin_directory) == set()
    assert asked("kvbm logs d", tmp_path, bin_directory) == {"demo-1"}


def test_a_shell_does_not_wait(tmp_path):
    """Against what the libraries alone take to be imported, so that the speed of the machine does not count."""
    variables = {"_KVBM_COMPLETE": "complete_bash", "COMP_WORDS": "kvbm serve -p demo", "COMP_CWORD": "3"}

    def libraries():
        subprocess.run([sys.executable, "-c", LIBRARIES], check=True)

    def completion():
        assert set(kvbm(home=tmp_path, **variables).stdout.split()) == SHIPPED

    assert min(of_children_s(completion) for _ in range(5)) < 5 * min(of_children_s(libraries) for _ in range(5))
