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

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

import generate

ROOT = Path(__file__).resolve().parents[2]

# Packages whose string literals are checked. To switch a package on, add its name; its files must be clean then.
PACKAGES: tuple[str, ...] = ("kvbm", "kvbm_cli")

REPLACEMENTS = {
    r"without a word": "silently",
    r"nobody": "name the actor: no user, no process, no engine",
    r"everybody": "name them: all users, all processes",
    r"whoever": "name the actor: a user who, a process that",
    r"tells|told": "reports, notifies, knows, detects",
    r"(is|are) said (in|so|of)": "is reported in",
    r"for want of": "because there is no, without",
    r"wants": "requires, expects, uses; or the imperative: run it on an idle machine",
    r"(is|are) to be \w+": "must be; or the imperative: run it again",
    r"beside (it|them|the|an?|each|this|that|one|which|those|another)": (
        "next to, in addition to, compared with, in the same environment as, together with"
    ),
    r"good end|(end|ends|ended|went|gone) well": "succeeds, has succeeded",
    r"a miss and a counter": "counts as a miss and increments a metric",
    r"(is|are) (that|those) of": "say it again: `port 8000 is used by`, `belongs to`",
    r"the ones? of": "say it again: `the port of`",
    r"(take|takes|took) (its|the) place": "replaces, is started",
    r"once more|anew": "again",
    r"(go|goes|went|going) on": "continues",
    r"all the same": "anyway",
    r"asked of|(is|are|was|were) asked for|asked for again": "requested, requested again",
    r"(has|have) learnt": "has measured",
    r"(has|have) come": "has arrived",
    r"(has|have) gone": "is missing, has ended",
    r"knows? nothing of": "does not know",
    r"in earnest": "under load",
    r"mended": "corrected",
    r"is not ours": "is unknown, is ignored",
    r"nothing (of it )?stays behind": "nothing remains",
    r"lies": "is, is stored",
    r"nowhere": "in no tier, missing",
    r"theirs": "say it again",
    r"by far|hardly": "give the number",
    r"(come|comes|came) about": "happens",
    r"(?<![Tt]here\s)(is|are) no (field|file|directory|local|mapping|text|memfd|terminal|regular|tier|finding|result|"
    r"pickle|message|content|error|run of|character)": "is not a",
    r"(did|does) not live to \w+": "say what ended, and when",
    r"somebody": "name the actor: another user, another process",
}
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
