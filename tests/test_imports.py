"""The layers of the house as a table, one rule per folder: what a folder may import, and what it must never import.
The table is `imports.yaml`.

Imports are read from the syntax trees. Imports inside functions count too, except those that a rule allows `lazily`.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parent.parent
TABLE = yaml.safe_load((REPOSITORY / "tests" / "imports.yaml").read_text())
ENGINES, BASE = tuple(TABLE["engines"]), tuple(TABLE["base"])
FOLDERS = ("vllm", "trtllm", "sglang", "embedded")
BEFORE_A_START = TABLE["before_a_start"]


@dataclass(frozen=True)
class Rule:
    """Modules in `folder` may import of kvbm their own folder, BASE and `may`, and never `never`; `lazily` only inside
    functions."""

    folder: str
    may: tuple[str, ...] = ()
    never: tuple[str, ...] = ENGINES
    lazily: tuple[str, ...] = ()


def names_in(value):
    """The names of a list that may hold lists."""
    return [name for part in value for name in (names_in(part) if isinstance(part, list) else [part])]


def rule(folder, **lists):
    return Rule(folder, **{key: tuple(names_in(value)) for key, value in lists.items()})


def rules_of_engines(may):
    """A rule for each module that says what is known of an engine before it starts."""
    for engine in FOLDERS:
        own = [f"kvbm.engines.{engine}.{module}" for module in BEFORE_A_START]
        # The options of vLLM are those of a running engine.
        yield from (rule(folder, may=[*may, own]) for folder in own if folder != "kvbm.engines.vllm.options")


RULES = [
    made
    for row in TABLE["rules"]
    for made in (rules_of_engines(row["may"]) if row["folder"] == "BEFORE_A_START" else [rule(**row)])
]
SUBJECTS = (
    "kvbm.core",
    "kvbm.tiers.disk",
    "kvbm.tiers.shared",
    "kvbm.engines.embedded",
)  # rooms with folders


def within(name, packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


@cache
def imports_of(path, module):
    """Return (line, imported name, whether it happens at import) for each import of one file."""
    tree = ast.parse(path.read_text())
    deferred, found = set(), []
    for node in ast.walk(tree):
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if is_typing or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            body = node.body if isinstance(node.body, list) else [node.body]
            deferred.update(id(inner) for statement in body for inner in ast.walk(statement))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [(node.lineno, name, id(node) not in deferred) for name in names]
    return found


def modules():
    for package in ("kvbm", "kvbm_cli"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def rule_for(module):
    return next((rule for rule in RULES if within(module, (rule.folder,))), None)


def violations(module, path):
    rule = rule_for(module)
    for line, name, at_import in imports_of(path, module):
        where = f"{path.relative_to(REPOSITORY)}:{line}: {module} imports {name}"
        if within(name, ("kvbm_cli",)) and not within(module, ("kvbm_cli",)):
            yield f"{where}, but the block manager never imports the command"
        elif rule is None:
            if module != "kvbm" or within(name, ("kvbm", *ENGINES)):
                yield f"{where}, and no rule names {module}"
        elif within(name, ("kvbm",)) and not within(name, (*BASE, rule.folder, *rule.may)):
            yield f"{where}, which is not below {rule.folder}"
        elif within(name, rule.never):
            yield f"{where}, which {rule.folder} must never import"
        elif at_import and within(name, rule.lazily):
            yield f"{where} when it is imported; such imports belong inside the function that needs them"


def room_of(module):
    """The subject or folder of a module, or of a name in one; a module in the root of a package is its own room."""
    if subject := next((one for one in SUBJECTS if within(module, (one,))), None):
        return subject
    parts = module.split(".")
    if parts[:2] == ["kvbm", "engines"] and REPOSITORY.joinpath(*parts[:3]).with_suffix(".py").exists():
        return ".".join(parts[:3])  # the table lies above the engines, and what they share below them
    while (
        not (is_folder := REPOSITORY.joinpath(*parts).is_dir())
        and not REPOSITORY.joinpath(*parts).with_suffix(".py").exists()
    ):
        parts.pop()  # a name inside a module
    return ".".join(parts if is_folder or len(parts) <= 2 else parts[:-1])


def rooms_and_what_they_import():
    """Every room with the rooms that its modules import, imports inside functions included."""
    graph = {}
    for module, path in modules():
        for _, name, _ in imports_of(path, module):
            if within(name, ("kvbm", "kvbm_cli")) and room_of(name) != room_of(module):
                graph.setdefault(room_of(module), set()).add(room_of(name))
    return graph


def test_every_import_follows_the_table():
    assert [line for module, path in modules() for line in violations(module, path)] == []


def test_no_two_rooms_import_each_other():
    list(TopologicalSorter(rooms_and_what_they_import()).static_order())  # raises CycleError, which names the circle


# Imports for annotations that close a circle: (module, imported module). To be emptied.
KNOWN_BACK_IMPORTS = {("kvbm.device.cuda", "kvbm.device.copier")}
KNOWN_DUPLICATES = set()  # class names defined twice. To stay empty.


def modules_and_what_they_import():
    """Every module with the modules that it imports, imports inside functions and for annotations included."""
    paths = dict(modules())
    graph = {}
    for module, path in paths.items():
        for _, name, _ in imports_of(path, module):
            imported = name if name in paths else name.rpartition(".")[0]
            if imported in paths and imported != module:
                graph.setdefault(module, set()).add(imported)
    return graph


def duplicate_classes():
    names = [
        node.name
        for _, path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    return {name for name, count in Counter(names).items() if count > 1}


def test_no_two_modules_import_each_other():
    graph = modules_and_what_they_import()
    for module, imported in KNOWN_BACK_IMPORTS:
        graph.get(module, set()).discard(imported)
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_no_class_name_is_defined_twice():
    assert duplicate_classes() <= KNOWN_DUPLICATES


@pytest.mark.parametrize(
    ("sources", "test"),
    [
        (
            {"a": "def f():\n    from kvbm import b", "b": "from kvbm.a import f"},
            "test_no_two_modules_import_each_other",
        ),
        ({"a": "class C: ...", "b": "def f():\n    class C: ..."}, "test_no_class_name_is_defined_twice"),
    ],
)
def test_a_circle_and_a_duplicate_are_found(tmp_path, monkeypatch, sources, test):
    (tmp_path / "kvbm").mkdir()
    for name, source in sources.items():
        (tmp_path / "kvbm" / f"{name}.py").write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "REPOSITORY", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "KNOWN_BACK_IMPORTS", set())
    with pytest.raises((CycleError, AssertionError)):
        globals()[test]()


def test_nothing_calls_select_which_fails_beyond_1024_open_files():
    folders = ("kvbm", "kvbm_cli", "bench", "tests")
    paths = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    calls = [path for path in paths if "select.select" + "(" in path.read_text()]
    assert paths
    assert calls == []


def test_the_roots_stay_small():
    """`ls` shows the architecture as long as the modules lie in rooms."""
    assert len([path for path in (REPOSITORY / "kvbm").glob("*.py") if path.name != "__init__.py"]) <= 7
    assert len(list((REPOSITORY / "kvbm_cli").glob("*.py"))) <= 6


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvbm.core.store", "import numpy"),
        ("kvbm.core.store", "def f():\n    import threading"),
        ("kvbm.core.store", "from kvbm.device import pool"),
        ("kvbm.hashing", "from os import path"),
        ("kvbm.host.region", "import torch"),
        ("kvbm.host.region", "from kvbm import leader"),
        ("kvbm.device.pool", "from kvbm.core.store import BlockStore"),
        ("kvbm.tiers.disk.storage", "from kvbm.core.store import BlockStore"),
        ("kvbm.leader.leader", "def f():\n    import torch"),
        ("kvbm.leader.leader", "from kvbm.config.load import load"),
        ("kvbm.device.worker", "from kvbm.leader.leader import Leader"),
        ("kvbm.config.schema", "from kvbm.core.store import BlockStore"),
        ("kvbm.engines.vllm.connector", "import sglang"),
        ("kvbm.engines.vllm.launch", "def f():\n    import vllm"),
        ("kvbm.engines.trtllm.connector", "import tensorrt_llm"),
        ("kvbm.engines.trtllm.rank_side", "import torch"),
        ("kvbm.engines.trtllm.connector", "def f():\n    import vllm"),
        ("kvbm.engines.trtllm.leader_side", "from kvbm.core.store import BlockStore"),
        ("kvbm.engines.embedded.engine.engine", "from kvbm_cli import app"),
        ("kvbm.engines.embedded.engine.engine", "from kvbm.leader.leader import Leader"),
        ("kvbm.engines.embedded.driver", "from kvbm.core.store import BlockStore"),
        ("kvbm_cli.app", "import torch"),
        ("kvbm.manager", "import json"),
    ],
)
def test_table_forbids_what_it_is_there_to_forbid(tmp_path, monkeypatch, module, source):
    monkeypatch.setattr(sys.modules[__name__], "REPOSITORY", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(source)
    assert list(violations(module, path))


@pytest.mark.parametrize("module", ["kvbm", "kvbm.core.store", "kvbm.config.schema", "kvbm_cli.app"])
def test_importing_a_light_module_loads_nothing_heavy(module):
    if not (REPOSITORY / (module.replace(".", "/") + ".py")).exists() and module != "kvbm":
        pytest.skip(f"{module} does not exist yet")
    script = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'numpy', 'aiohttp'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["kvbm_cli.app", "kvbm.leader.leader", "kvbm.engines.embedded.driver"])
def test_importing_an_engine_loads_no_library_of_the_shared_tier(module):
    libraries = "{'obstore', 'mooncake', 'cryptography', 'kvbm.tiers.shared.storage', 'kvbm.tiers.shared.service'}"
    script = f"import sys, {module}; print(sorted({libraries} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert result.stdout.strip() == "[]"


def test_no_two_test_modules_have_one_name():
    """pytest imports them by their names alone, so that one would hide the other in a run of all."""
    names = [path.name for path in (REPOSITORY / "tests").rglob("test_*.py")]
    assert [name for name, count in Counter(names).items() if count > 1] == []


@cache
def words_of(path):
    """Return the identifiers and strings of a module, without its docstrings, in lower case."""
    words, docstrings = [], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            docstrings.add(getattr(node.body[0], "value", None))
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and node not in docstrings:
                words.append(node.value)
        else:
            words += [value for _, value in ast.iter_fields(node) if isinstance(value, str)]
    return "\n".join(words).lower()


@pytest.mark.parametrize(
    ("folder", "name", "most"), [("sglang", "sglang", 7), ("trtllm", "trtllm|tensorrt", 7), ("vllm", "vllm", 19)]
)
def test_few_files_outside_its_folder_name_an_engine(folder, name, most):
    """What is true of one engine only is in its folder, and the rest asks the table."""
    own = (f"kvbm.engines.{folder}", f"kvbm.{folder}_integration")
    files = [module for module, path in modules() if not within(module, own) and re.search(name, words_of(path))]
    assert len(files) <= most, files
