"""Code: the content of modules from outside an engine's own package that can compute KV, and of what they import.

    root       a module that the engine has to use: of a model class, a worker, a plugin
    brought    a module that a file of these imports, also within a function
    known      the standard library, kvbm, the engine, and all that the engine requires: their versions count elsewhere

A package counts with every file of its directory, another module with its file. Code that cannot be read beforehand is
in doubt: without a file, from `exec`, imported by a computed name, or changed since the process was started.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import multiprocessing
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from kvbm.identity.digests import Unidentified
from kvbm.identity.loading import FileContent, loaded
from kvbm.identity.look import process_start_ns

OURS = frozenset({"kvbm", "kvbm_cli"})
OF_THE_MODEL = "transformers_modules"  # copies of code in the model's directory, which counts
COMMON = frozenset({OF_THE_MODEL, "builtins", "torch", "transformers"})  # each engine has them and counts them
MAINS = frozenset({"__main__", "__mp_main__"})
IMPORTS = frozenset({"import_module", "__import__"})
UNSEEN = frozenset({"exec", "run_path", "spec_from_file_location", "load_library", "load_inline", "CDLL"})
COMPILED = re.compile(r"\.(so|pyd)(\.|$)")
MAX_COMPILED_BYTES = 64 << 20
MAX_SOURCES = 5_000

Root = object  # a class, a function, or the name of a module or of something in it


def code_of(roots: Iterable[Root], engine: str) -> dict[str, list[FileContent]]:
    """Return the content of each foreign module by its name, empty if all roots are of the engine. Raises
    Unidentified, which names the module."""
    parts = (part for root in roots for part in getattr(root, "__mro__", (root,)))
    common = OURS | COMMON | {engine} | sys.stdlib_module_names
    foreign = [part for part in parts if _top_of(part) not in common]
    if not foreign:
        return {}
    known = common | _required(engine)
    waiting = {_top_of(root) for root in foreign} - known
    required, found = set(waiting), dict[str, list[FileContent]]()
    for part in foreign:
        if _top_of(part) not in known:
            _require_files(part)
    while waiting:
        name = waiting.pop()
        try:
            paths = _paths_of(name)
            if not paths and name in required:
                raise Unidentified("it has no file")
            contents = [_content(path) for path in paths]
            brought = {top for content in contents for top in _brought(content)}
        except (Unidentified, OSError) as error:
            raise Unidentified(f"code of `{name}`: {error}") from error
        found[name] = contents
        waiting |= brought - known - found.keys()
    return {name: contents for name, contents in found.items() if contents}


def registered(module: str, name: str) -> list[object]:
    """Return what a registry of an engine holds, nothing if its module has not been imported."""
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return list(found.values()) if isinstance(found, Mapping) else []


def plugins(group: str, allowed: Iterable[str] | None) -> list[str]:
    """Return the modules of the installed plugins that an engine loads."""
    return [point.module for point in metadata.entry_points(group=group) if allowed is None or point.name in allowed]


def _top_of(root: Root) -> str:
    top = (root if isinstance(root, str) else str(getattr(root, "__module__", None))).partition(".")[0]
    return "__main__" if top in MAINS else top


def _required(engine: str) -> frozenset[str]:
    """Return the top-level modules of everything that the engine requires."""
    owners = metadata.packages_distributions()
    waiting, required = {_normal(name) for name in owners.get(engine, ())}, set[str]()
    while waiting:
        name = waiting.pop()
        required.add(name)
        try:
            lines = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            continue
        names = (re.match(r"[\w.-]+", line) for line in lines if "extra ==" not in line)
        waiting |= {_normal(found[0]) for found in names if found} - required
    return frozenset(top for top, names in owners.items() if all(_normal(name) in required for name in names))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _require_files(root: Root) -> None:
    """Raise Unidentified if a class has a function that was not read from a file."""
    if not isinstance(root, type):
        return
    for name, value in vars(root).items():
        code = getattr(value, "__code__", None)
        is_made = dataclasses.is_dataclass(root) and name.startswith("__")
        if code is not None and not is_made and not os.path.exists(code.co_filename):
            raise Unidentified(f"code of `{root.__module__}`: `{root.__qualname__}.{name}` has no file")


def _paths_of(name: str) -> list[Path]:
    """Return the directories of a package, or the file of another module; nothing if there is none."""
    if name == "__main__":
        spec, file = getattr(sys.modules[name], "__spec__", None), getattr(sys.modules[name], "__file__", None)
        if spec is None or spec.parent == "":
            return [] if file is None else [Path(file)]
        name = spec.name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    if spec is None or spec.origin in ("built-in", "frozen"):
        return []
    if spec.submodule_search_locations is not None:
        return [Path(path) for path in sorted(spec.submodule_search_locations)]
    return [] if spec.origin is None else [Path(spec.origin)]


def _content(path: Path) -> FileContent:
    """Return the content of a file or of all files of a directory. Raises Unidentified or OSError."""
    content = loaded(path, every=True, start_ns=_start_ns())
    for name, signature in content.look.files.items():
        if COMPILED.search(name or str(path)) and signature.size > MAX_COMPILED_BYTES:
            raise Unidentified(f"`{name or path}` is compiled and larger than {MAX_COMPILED_BYTES >> 20} MiB")
    return content


def _start_ns() -> int:
    """Return when this process started, or the one whose modules it may have inherited."""
    parent = multiprocessing.parent_process()
    own_ns = process_start_ns()
    return own_ns if parent is None or parent.pid is None else min(own_ns, process_start_ns(parent.pid))


def _brought(content: FileContent) -> Iterator[str]:
    """Yield the top-level modules that the sources import. Raises Unidentified or OSError."""
    sources = [
        Path(path) for path, _ in content.look.paths() if path.endswith(".py") or content.look.files.keys() == {""}
    ]
    if len(sources) > MAX_SOURCES:
        raise Unidentified(f"it has more than {MAX_SOURCES} sources")
    for source in sources:
        if COMPILED.search(source.name):
            continue
        try:
            tree = ast.parse(source.read_bytes())
        except (SyntaxError, ValueError, RecursionError):
            continue  # Python cannot import it either
        for node in ast.walk(tree):
            match node:
                case ast.Import():
                    yield from (alias.name.partition(".")[0] for alias in node.names)
                case ast.ImportFrom(level=0, module=str(module)):
                    yield module.partition(".")[0]
                case ast.Call():
                    yield from _called(node, source)


def _called(call: ast.Call, source: Path) -> Iterator[str]:
    """Yield the module that a call imports. Raises Unidentified if it runs code that kvbm cannot find."""
    function = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", None)
    if function in UNSEEN and not (function == "exec" and isinstance(call.func, ast.Attribute)):
        raise Unidentified(f"{source}:{call.lineno} runs other code with `{function}`")
    if function not in IMPORTS or not call.args:
        return
    argument = call.args[0]
    start = argument.values[0] if isinstance(argument, ast.JoinedStr) and argument.values else argument
    text = start.value if isinstance(start, ast.Constant) and isinstance(start.value, str) else ""
    if not text or (start is not argument and "." not in text):
        raise Unidentified(f"{source}:{call.lineno} imports a module by a computed name")
    if not text.startswith("."):
        yield text.partition(".")[0]
