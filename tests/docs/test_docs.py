"""The documentation cannot fall behind: every key, variable, command and option has its line, made from the code."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

import generate

from kvbm.config.engine import ENGINE_KINDS
from kvbm.config.key_list import Key, keys
from kvbm.config.variables import VARIABLES
from kvbm.engines.table import load

PAGES = {name: (generate.REFERENCE / name).read_text() for name in generate.PAGES}
COMMANDS = dict(generate.commands())


@pytest.mark.parametrize("name", generate.PAGES)
def test_reference_page_is_what_the_code_says(name: str) -> None:
    assert name not in generate.outdated(), "run `python docs/generate.py`"


@pytest.mark.parametrize("key", [key for kind in ENGINE_KINDS for key in keys(engine=kind)], ids=lambda key: key.path)
def test_key_is_documented(key: Key) -> None:
    assert key.description.endswith("."), "a description is a sentence"
    assert key.path == "engine.arguments" or f"| `{key.path}` |" in PAGES["profile.md"]


def test_profile_in_the_reference_is_right(tmp_path: Path) -> None:
    example = PAGES["profile.md"].partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "mine.yaml").write_text(example)
    assert load(str(tmp_path / "mine.yaml"), directories=[]).profile.tiers.host.capacity == 64 * 2**30


@pytest.mark.parametrize("name", [variable.name for variable in VARIABLES])
def test_variable_is_documented(name: str) -> None:
    assert f"| `{name}` |" in PAGES["variables.md"]


@pytest.mark.parametrize("name", COMMANDS)
def test_command_is_documented(name: str) -> None:
    assert COMMANDS[name].help
    assert f"\n## {name}\n" in PAGES["commands.md"]
    assert all(parameter.help for parameter in COMMANDS[name].params)
