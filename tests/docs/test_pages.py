"""Every page: its links lead somewhere, its commands exist with the options it gives them, and so do variables."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.core import TyperOption

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

import generate

from kvbm.config.variables import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
COMMANDS = dict(generate.commands())
BY_NAME = {str(page.relative_to(ROOT)): page for page in PAGES}

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(console|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)
MODULE = re.compile(r"(?<![\w/.-])[\w/]+\.py\b")
MODULES = {
    f"/{path.relative_to(ROOT)}"
    for room in ("kvbm", "kvbm_cli", "bench", "deploy", "docs", "tests")
    for path in (ROOT / room).rglob("*.py")
} | {"/noxfile.py"}
VARIABLE = re.compile(r"\bDYN_KVBM_[A-Z0-9_]*[A-Z0-9]\b")


def commands(text: str) -> list[list[str]]:
    """The words of each call of kvbm in a page's blocks: behind a prompt in `console`, anywhere in `sh`."""
    found = []
    for kind, body in BLOCK.findall(text):
        lines = body.replace("\\\n", " ").splitlines()
        calls = [line[2:] for line in lines if line.startswith("$ ")] if kind == "console" else lines
        for call in calls:
            for part in re.split(r"&&|\|\||[;|]", call):
                words = shlex.split(part, comments=True, posix=True) if part.count("'") % 2 == 0 else []
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words = words[1:]
                if words and words[0].rpartition("/")[2] == "kvbm":
                    found.append(words[1:])
    return found


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", BY_NAME)
def test_links_lead_somewhere(name: str) -> None:
    page = BY_NAME[name]
    for target in LINK.findall(page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize(
    ("name", "words"), [(name, words) for name, page in BY_NAME.items() for words in commands(page.read_text())]
)
def test_command_exists_with_its_options(name: str, words: list[str]) -> None:
    path, known, is_value = "kvbm", {"--help"}, False
    takes_value: set[str] = set()
    for word in words:
        options = [parameter for parameter in COMMANDS[path].params if isinstance(parameter, TyperOption)]
        known |= {name for option in options for name in option.opts}
        takes_value |= {name for option in options if not option.is_flag for name in option.opts}
        if is_value:
            is_value = False
        elif word == "--":
            break  # what follows is the command of an engine
        elif word.startswith("-") and word != "-":
            assert word.partition("=")[0] in known, (path, word)
            is_value = word in takes_value
        elif hasattr(COMMANDS[path], "commands") and not word.isupper():
            path = f"{path} {word}"
            assert path in COMMANDS


def test_the_pages_have_commands() -> None:
    assert sum(len(commands(page.read_text())) for page in PAGES) > 15


@pytest.mark.parametrize("name", BY_NAME)
def test_named_modules_exist(name: str) -> None:
    named = set(MODULE.findall(BY_NAME[name].read_text()))
    assert {one for one in named if not any(module.endswith(f"/{one}") for module in MODULES)} == set()


@pytest.mark.parametrize("name", BY_NAME)
def test_variables_exist(name: str) -> None:
    known = {variable.name for variable in VARIABLES}
    named = set(VARIABLE.findall(BY_NAME[name].read_text()))
    assert {one for one in named if not any(full.startswith(one) for full in known)} == set()


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        links = [(page.parent / target.partition("#")[0]).resolve() for target in LINK.findall(page.read_text())]
        waiting += [link for link in links if link.suffix == ".md" and link.exists()]
        if any(link == ROOT / "docs/adr" for link in links):
            waiting += (ROOT / "docs/adr").glob("*.md")
    assert {str(page.relative_to(ROOT)) for page in set(PAGES) - reached} == set()


# How a page tells its reader to write a file.
WRITES = re.compile(
    r"(?:cat > |--output |--write |^```yaml\n# |profile new |^In `)(?:\./)?([\w.-]+\.yaml)", re.MULTILINE
)


def test_no_two_pages_write_a_file_of_one_name() -> None:
    writers: dict[str, set[str]] = {}
    for name, page in BY_NAME.items():
        for written in WRITES.findall(page.read_text()):
            writers.setdefault(written, set()).add(name)
    assert len(writers) > 8
    assert {written: pages for written, pages in writers.items() if len(pages) > 1} == {}


WRITTEN = sorted({*BY_NAME, "CHANGELOG.md"} - {f"docs/reference/{name}" for name in generate.PAGES})


@pytest.mark.parametrize("name", WRITTEN)
def test_lines_end_at_120_columns(name: str) -> None:
    """Tables, links and blocks of code may be wider."""
    fence = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
    text = fence.sub(lambda block: "\n" * block[0].count("\n"), (ROOT / name).read_text())
    wide = [(number, line) for number, line in enumerate(text.splitlines(), 1) if len(line) > 120]
    assert [f"{name}:{number}" for number, line in wide if not re.search(r"^\s*\||\]\(", line)] == []
