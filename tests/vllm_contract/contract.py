"""Holds a connector against the surface of a vLLM version, with mypy as the judge and without vLLM.

mypy sees the stub files of that version, the connector, and a file in which the engine constructs the connector and
makes every call that it makes in reality. A complaint is what would raise in that version: a name or an attribute that
is not there, arguments that a method does not take, an abstract method that is missing. Types that merely do not fit
are none of its business.

What a version lacks is no complaint where the code expects that: an import under `try ... except ImportError` or
`if TYPE_CHECKING`, an attribute read with `getattr` or after `hasattr`, and all that stands in a hook that this version
does not have and so never calls.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from mypy import api
from stubs import Surface, write_calls, write_stubs

WOULD_RAISE = {"abstract", "attr-defined", "call-arg", "import-not-found", "name-defined", "union-attr"}
OPTIONS = """
[mypy]
python_version = 3.11
no_site_packages = true
check_untyped_defs = true
follow_imports = skip
[mypy-vllm.*]
follow_imports = normal
ignore_errors = true
"""
"""Only vLLM's names matter, so that nothing else that is imported is even read."""
_LINE = re.compile(r"(?P<path>[^:]+):(?P<line>\d+): error: (?P<message>.*)  \[(?P<code>[a-z-]+)\]")


def hooks(surface: Surface) -> set[str]:
    """The methods of a connector that a version knows."""
    owners = surface["classes"]["vllm.distributed.kv_transfer.kv_connector.v1.base"]
    return set(owners["KVConnectorBase_V1"]["methods"]) | set(owners["SupportsHMA"]["methods"])


def complaints(
    surface: Surface,
    sources: Iterable[Path],
    connectors: dict[str, str],
    directory: Path,
    cache: Path,
    all_hooks: Set[str] = frozenset(),
) -> list[str]:
    """What would raise in this version.

    `sources` are the files of the connectors, `connectors` is class -> module, `all_hooks` are those of all versions.
    """
    write_stubs(surface, directory)
    callers = [directory / f"engine_calls_{name.lower()}.py" for name in connectors]
    for (name, module), path in zip(connectors.items(), callers, strict=True):
        write_calls(surface, name, module, path)
    options = directory / "mypy.ini"
    options.write_text(OPTIONS)
    files = [path.resolve() for path in (*sources, *callers)]
    arguments = ["--config-file", str(options), "--cache-dir", str(cache), "--show-absolute-path", *map(str, files)]
    output, trouble, _ = api.run(arguments)
    assert not trouble, trouble
    tolerated = {str(path): set(_tolerated(ast.parse(path.read_text()), all_hooks - hooks(surface))) for path in files}
    return [line for line in output.splitlines() if _counts(line, tolerated)]


def _counts(line: str, tolerated: dict[str, set[int]]) -> bool:
    match = _LINE.match(line)
    if match is None or match["path"] not in tolerated or match["code"] not in WOULD_RAISE:
        return False
    if match["code"] == "import-not-found" and '"vllm' not in match["message"]:
        return False
    if match["message"].startswith('Item "None" of'):
        return False
    return int(match["line"]) not in tolerated[match["path"]]


def _tolerated(module: ast.Module, never_called: Set[str]) -> Iterator[int]:
    """The lines that this version does not execute, or whose imports may fail."""
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef(name=name) if name in never_called:
                yield from _lines(node)
                continue
            case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
                pass
            case ast.Try(handlers=handlers) if any("ImportError" in ast.unparse(handler) for handler in handlers):
                pass
            case _:
                continue
        for statement in node.body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                yield from _lines(statement)


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)
