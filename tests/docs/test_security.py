"""The page about security names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_rule_names_a_test_that_exists() -> None:
    page = (ROOT / "docs/reference/security.md").read_text()
    named = NAMED.findall(page)
    assert len(named) > 20
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text())
        functions = {one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"{file}::{name}"


def test_every_row_of_a_rule_names_a_test() -> None:
    page = (ROOT / "docs/reference/security.md").read_text()
    for table in re.findall(r"^\| [^\n]*\| test \|\n\|[-| ]+\|\n((?:\|.*\n)+)", page, re.MULTILINE):
        for row in table.splitlines():
            assert NAMED.search(row), row
