"""The guide to profiles is true: its files are written, its commands run, and what they print is what it shows."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvbm.config.layers import shipped, shipped_halves
from kvbm_cli.package_data import profiles_directory

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "profiles.md"
TEXT = GUIDE.read_text()
PROGRAM = (sys.executable, "-c", "from kvbm_cli.app import main; main()")
FILES = re.findall(r"```(?:yaml|sh)\n# \./(\S+)\n(.*?)```", TEXT, flags=re.DOTALL)
COMMANDS = [
    (command, said)
    for block in re.findall(r"```console\n(.*?)```", TEXT, flags=re.DOTALL)
    for command, said in re.findall(r"^\$ kvbm (.*)\n((?:(?!\$ ).*\n)*)", block, flags=re.MULTILINE)
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("guide")
    for name, text in FILES:
        (directory / name).write_text(f"# ./{name}\n{text}")
    return directory


@pytest.mark.parametrize(("command", "said"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_command_says_what_the_guide_shows(home: Path, command: str, said: str) -> None:
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin", "COLUMNS": "80"}
    done = subprocess.run(
        [*PROGRAM, *shlex.split(command)],
        cwd=home,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    pieces = [as_pattern(piece.replace("[HOME]", str(home))) for piece in said.split("...\n")]
    assert re.fullmatch(r"(?:.*\n)*?".join(pieces), done.stdout), done.stdout


def as_pattern(shown: str) -> str:
    """The text itself, but for the width of columns, and for the line of a key in a file that holds all of them."""
    columns = re.sub(r"(?:\\ ){2,}", r"\\s+", re.escape(shown))
    return re.sub(r"small\\\.yaml:\d+", r"small\\.yaml:\\d+", columns)


def test_every_shipped_profile_is_in_the_table() -> None:
    table = TEXT.partition("## Shipped profiles")[2].partition("##")[0]
    places = [profiles_directory()]
    assert {*shipped(places), *shipped_halves(places)} <= set(re.findall(r"`([a-z0-9/-]+)`", table))


def test_there_are_files_and_commands() -> None:
    assert len(FILES) == 3
    assert len(COMMANDS) == 6
