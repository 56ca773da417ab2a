"""Turns the surface of one vLLM version (`collect.py`) into stub files, so that mypy can hold a connector against it.

What the surface does not describe becomes `Any`: an attribute of a class that is not in it is never complained about.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Surface = dict[str, Any]
GENERICS = {"Callable", "Iterable", "Iterator", "Mapping", "Sequence"}
HEADER = (
    "from abc import ABC, abstractmethod\n"
    "from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence\n"
    "from dataclasses import dataclass\n"
    "from enum import Enum, IntEnum\n"
    "from typing import Any\n"
)


def write_stubs(surface: Surface, directory: Path) -> None:
    """Writes a package `vllm` into the directory."""
    homes = {name: module for module, classes in surface["classes"].items() for name in classes}
    modules = set(surface["classes"]) | set(surface["names"])
    packages = {module.rpartition(".")[0] for module in modules}
    packages |= {parent for package in packages for parent in _parents(package)}
    for module in sorted(modules | packages - {""}):
        base = directory.joinpath(*module.split("."))
        path = base / "__init__.pyi" if module in packages else base.with_suffix(".pyi")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEADER + "\n".join(_lines(surface, module, homes)) + "\n")


def write_calls(surface: Surface, connector: str, module: str, path: Path) -> None:
    """Writes a file in which the engine constructs the connector and calls it in each way that it has."""
    construct, *others = surface["calls"]["__init__"]
    assert not others, others
    lines = ["from typing import Any", f"from {module} import {connector}"]
    lines += [f"def construct(_: Any) -> {connector}: return {connector}({construct})"]
    lines += [f"def call(connector: {connector}, _: Any) -> None:"]
    lines += [
        f"    connector.{method}({arguments})"
        for method, ways in surface["calls"].items()
        for arguments in ways
        if method != "__init__"
    ]
    path.write_text("\n".join(lines) + "\n")


def _parents(package: str) -> Iterator[str]:
    while package:
        yield package
        package = package.rpartition(".")[0]


def _lines(surface: Surface, module: str, homes: dict[str, str]) -> Iterator[str]:
    classes = surface["classes"].get(module, {})
    functions = surface["functions"].get(module, {})
    exported = surface["names"].get(module, [])
    for name, home in homes.items():
        if home != module:  # in a stub file, only `as` makes an import visible to who imports this module
            yield f"from {home} import {name}" + (f" as {name}" if name in exported else "")
    yield from (f"{name}: Any" for name in exported if name not in homes and name not in functions)
    for name, signature in functions.items():
        yield _function(name, signature, homes)
    for name in _bases_first(classes):
        yield from _class(name, classes[name], homes)


def _bases_first(classes: dict[str, Any]) -> Iterator[str]:
    done: set[str] = set()
    while len(done) < len(classes):
        for name, owner in classes.items():
            if name not in done and all(base in done for base in owner["bases"] if base in classes):
                done.add(name)
                yield name


def _class(name: str, owner: dict[str, Any], homes: dict[str, str]) -> Iterator[str]:
    plain = {"ABC": "ABC", "Enum": "Enum", "enum.Enum": "Enum", "IntEnum": "IntEnum", "enum.IntEnum": "IntEnum"}
    bases = [base if base in homes else plain[base] for base in owner["bases"] if base in homes or base in plain]
    if owner["fields"]:
        yield "@dataclass"
    yield f"class {name}({', '.join(bases)}):"
    yield "    ..."
    for attribute, text in owner["attributes"].items():
        annotation, _, default = text.partition(" = ")
        yield f"    {attribute}: {_annotation(annotation, homes)}" + (f" = {default}" if default else "")
    for method, text in owner["methods"].items():
        kind, _, signature = text.partition(" (")
        decorators = [word for word in kind.split() if word not in ("abstract", "method")]
        decorators += ["abstractmethod"] if kind.startswith("abstract") else []
        yield from (f"    @{decorator}" for decorator in decorators)
        yield "    " + _function(method, f"({signature}", homes)


def _function(name: str, signature: str, homes: dict[str, str]) -> str:
    (function,) = ast.parse(f"def {name}{signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None and argument.annotation is not None:
            argument.annotation = _Known(homes).visit(argument.annotation)
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(...) for default in arguments.kw_defaults]
    if function.returns is not None:
        function.returns = _Known(homes).visit(function.returns)
    return ast.unparse(function).replace("\n    ", " ")


def _annotation(text: str, homes: dict[str, str]) -> str:
    return ast.unparse(_Known(homes).visit(ast.parse(text, mode="eval").body))


class _Known(ast.NodeTransformer):
    """An annotation in which every name that the stubs do not have is `Any`."""

    def __init__(self, homes: dict[str, str]) -> None:
        self._homes = homes

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = node.id in self._homes or node.id in GENERICS or hasattr(builtins, node.id)
        return node if known else ast.Name("Any")

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.Name("Any")

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return self.visit(ast.parse(node.value, mode="eval").body) if isinstance(node.value, str) else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        generic = self.visit(node.value)
        if ast.unparse(generic) == "Any":
            return generic
        return ast.Subscript(generic, self.visit(node.slice))
