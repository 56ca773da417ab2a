"""User texts are plain English: phrases that made readers stumble are refused, and the failure names a replacement.

Checked are README.md, CONTRIBUTING.md, CHANGELOG.md and the hand-written pages of docs/, without their fenced blocks,
which quote the output of commands. Also checked are the string literals of docs/generate.py and of the packages in
PACKAGES: help texts, messages, log lines, docstrings. The generated pages of docs/reference/ consist of those literals.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

import generate

ROOT = Path(__file__).resolve().parents[2]

# Packages whose string literals are checked. To switch a package on, add its name; its files must be clean then.
PACKAGES: tuple[str, ...] = ("kvbm", "kvbm_cli")

REPLACEMENTS = yaml.safe_load(Path(__file__).with_name("replacements.yaml").read_text())
PATTERNS = [
    (re.compile(rf"\b(?:{phrase})\b".replace(" ", r"\s+"), re.IGNORECASE), replacement)
    for phrase, replacement in REPLACEMENTS.items()
]
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
QUOTED = re.compile(r"`[^`\n]*`|\]\([^)\s]*\)")  # code, and the target of a link


def pages() -> list[Path]:
    generated = {generate.REFERENCE / name for name in generate.PAGES}
    written = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return written + sorted(set((ROOT / "docs").rglob("*.md")) - generated)


def modules() -> list[Path]:
    return [
        ROOT / "docs/generate.py",
        *(path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))),
    ]


def blank(match: re.Match[str]) -> str:
    """As many lines as before, so that line numbers stay right."""
    return "\n" * match[0].count("\n")


def page_texts(page: str) -> Iterator[tuple[int, str]]:
    """The text of a page without what it quotes, as (first line, text)."""
    yield 1, QUOTED.sub("", FENCE.sub(blank, page))


def module_texts(source: str) -> Iterator[tuple[int, str]]:
    """Every string literal of a module, docstrings and pieces of f-strings included, as (first line, text)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def findings(texts: Iterator[tuple[int, str]]) -> list[str]:
    found = [
        (first + text.count("\n", 0, match.start()), match[0], replacement)
        for first, text in texts
        for pattern, replacement in PATTERNS
        for match in pattern.finditer(text)
    ]
    return [f"line {line}: `{' '.join(phrase.split())}`; instead: {use}" for line, phrase, use in sorted(found)]


@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_page_is_plain_english(page: Path) -> None:
    found = findings(page_texts(page.read_text()))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("module", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_texts_of_module_are_plain_english(module: Path) -> None:
    found = findings(module_texts(module.read_text()))
    assert not found, "\n".join(found)


def test_phrase_is_found_across_lines_with_its_line_number() -> None:
    page = "# Title\n\n```console\n$ nobody\n```\nIt fails without\na word, as `whoever` says.\n"
    assert findings(page_texts(page)) == ["line 6: `without a word`; instead: silently"]


def test_phrases_are_found_in_docstrings_messages_and_f_strings_only() -> None:
    source = '"""Nobody."""\n# whoever\nnobody = f"{1} goes on"\n'
    assert [line.partition("`;")[0] for line in findings(module_texts(source))] == [
        "line 1: `Nobody",
        "line 3: `goes on",
    ]
