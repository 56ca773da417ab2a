"""Where kvbm writes a log: every handler has a LogLimit, and no format string is built from values."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
HANDLERS = ("basicConfig", "addHandler", "StreamHandler", "FileHandler", "QueueHandler")
LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
LOGGERS = ("log", "logger")


def calls() -> Iterator[tuple[Path, ast.Call, str]]:
    for package in ("kvbm", "kvbm_cli"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                    yield path.relative_to(REPOSITORY), node, name


def test_every_handler_has_a_limit() -> None:
    makers = {path for path, _, name in calls() if name in HANDLERS}
    assert makers
    assert [str(path) for path in makers if "LogLimit(" not in (REPOSITORY / path).read_text()] == []


def test_values_are_arguments_of_a_log_call_where_the_limit_sees_them() -> None:
    found = []
    for path, node, name in calls():
        on = node.func.value if isinstance(node.func, ast.Attribute) else None
        if name in LEVELS and isinstance(on, ast.Name) and on.id in LOGGERS:
            found.append(str(path))
            assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno}: a format string of its own"
    assert len(found) > 50
