"""Pages name tests that exist, and the page about security one for every rule."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvbm.observe.control_desk import MAX_BYTES

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if NAMED.search(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_named_tests_exist(page: Path) -> None:
    for file, name in NAMED.findall(page.read_text()):
        tree = ast.parse((ROOT / file).read_text())
        functions = {one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"{file}::{name}"


def test_every_row_of_a_rule_names_a_test() -> None:
    page = (ROOT / "docs/reference/security.md").read_text()
    assert len(NAMED.findall(page)) > 20
    for table in re.findall(r"^\| [^\n]*\| test \|\n\|[-| ]+\|\n((?:\|.*\n)+)", page, re.MULTILINE):
        for row in table.splitlines():
            assert NAMED.search(row), row


def test_the_page_has_the_size_of_a_control_message() -> None:
    assert f"| a message has at most {MAX_BYTES:,} bytes and " in (ROOT / "docs/reference/security.md").read_text()
