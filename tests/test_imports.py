"""The layers of the house as a table, one rule per folder: what a folder may import, and what it must never import.

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

REPOSITORY = Path(__file__).parent.parent
ENGINES = ("torch", "transformers", "vllm", "tensorrt_llm", "sglang")
BASE = ("kvbm.types", "kvbm.errors", "kvbm.text")
DECIDES_WITHOUT_THE_MACHINE = ("numpy", "threading", "os", "time", "pydantic", *ENGINES)
RUNS_THE_CACHE = (
    *("kvbm.leader", "kvbm.tiers", "kvbm.device", "kvbm.host", "kvbm.observe", "kvbm.core.groups", "kvbm.boundary"),
    *("kvbm.plan", "kvbm.metrics", "kvbm.events", "kvbm.hashing", "kvbm.config", "kvbm.identity"),
    "kvbm.engines.launch_plan",
    "kvbm.engines.engine_code",
    "kvbm.engines.opening",
)
# Modules of an engine's folder that say what is known before it starts. They import no engine and no cache.
FOLDERS = ("vllm", "trtllm", "sglang", "embedded")
BEFORE_A_START = (
    *("kind", "launch", "options", "flags", "models", "versions", "findings"),
    *("disaggregated", "sizing", "sizing_groups", "cpu", "state_settings"),
)
SHARED_BY_ENGINES = tuple(
    f"kvbm.engines.{name}"
    for name in (
        "engine_kind",
        "disaggregated",
        "installation",
        "launch_plan",
        "make_model",
        "model_facts",
        "python_probe",
        "synthetic_directory",
        "token_pools",
    )
)
EMBEDDED_MODELS = tuple(f"kvbm.engines.embedded.engine.{name}" for name in ("synthetic_models", "supported_models"))


@dataclass(frozen=True)
class Rule:
    """Modules in `folder` may import of kvbm their own folder, BASE and `may`, and never `never`; `lazily` only inside
    functions."""

    folder: str
    may: tuple[str, ...] = ()
    never: tuple[str, ...] = ENGINES
    lazily: tuple[str, ...] = ()


RULES = (  # the first that fits a module counts
    Rule("kvbm.types", never=("numpy", "pydantic", *ENGINES)),
    Rule("kvbm.errors", never=("numpy", "pydantic", *ENGINES)),
    Rule("kvbm.text", never=("numpy", "pydantic", *ENGINES)),
    Rule("kvbm.hashing", never=DECIDES_WITHOUT_THE_MACHINE),
    Rule("kvbm.events", never=DECIDES_WITHOUT_THE_MACHINE),
    Rule("kvbm.boundary", never=("numpy", "pydantic", *ENGINES)),
    Rule("kvbm.metrics", ("kvbm.boundary",)),
    Rule("kvbm.plan"),
    Rule("kvbm.core", ("kvbm.events", "kvbm.hashing"), never=DECIDES_WITHOUT_THE_MACHINE),
    Rule("kvbm.host", never=("pydantic", *ENGINES[1:]), lazily=("torch",)),
    Rule(
        "kvbm.device",
        ("kvbm.boundary", "kvbm.host", "kvbm.plan"),
        never=("pydantic", *ENGINES[1:]),
        lazily=("torch",),
    ),
    Rule("kvbm.child", ("kvbm.host",), never=("numpy", "pydantic", *ENGINES)),
    Rule("kvbm.tiers.disk.io", ("kvbm.host", "kvbm.child"), never=("pydantic", *ENGINES)),
    Rule("kvbm.tiers.disk.tier", ("kvbm.tiers", "kvbm.core", "kvbm.host", "kvbm.child")),
    Rule("kvbm.tiers.disk", ("kvbm.tiers.rates", "kvbm.host", "kvbm.child"), never=("pydantic", *ENGINES)),
    Rule("kvbm.tiers.shared.tier", ("kvbm.tiers", "kvbm.core", "kvbm.host", "kvbm.child")),
    Rule("kvbm.tiers.shared", ("kvbm.host", "kvbm.child"), never=("pydantic", *ENGINES)),
    Rule("kvbm.tiers.rates", ("kvbm.metrics",), never=DECIDES_WITHOUT_THE_MACHINE),
    Rule("kvbm.tiers", ("kvbm.core", "kvbm.host", "kvbm.metrics", "kvbm.config.schema")),
    Rule(
        "kvbm.leader",  # which names no tier
        (
            *("kvbm.core", "kvbm.host", "kvbm.plan", "kvbm.metrics", "kvbm.events", "kvbm.hashing"),
            *("kvbm.boundary", "kvbm.config.schema", "kvbm.child.deadlines"),
            *(f"kvbm.tiers.{name}" for name in ("host_tier", "lower_tier", "open_reads", "rates", "settings")),
        ),
    ),
    Rule(
        "kvbm.observe",
        (
            "kvbm.leader",
            "kvbm.tiers.settings",
            "kvbm.core.shadow_caches",
            "kvbm.plan",
            "kvbm.metrics",
            "kvbm.config.schema",
            "kvbm.host.directories",
            "kvbm.host.threads",
        ),
        never=("numpy", *ENGINES),
    ),
    Rule("kvbm.config"),
    Rule(
        "kvbm.identity",
        ("kvbm.host", "kvbm.child"),
        never=("pydantic", *ENGINES),
    ),
    Rule("kvbm.sizing", ("kvbm.config",)),
    Rule("kvbm.engines.installation"),
    Rule("kvbm.engines.engine_code", ("kvbm.identity.machine",), never=ENGINES[1:], lazily=("torch",)),
    Rule(
        "kvbm.engines.opening",
        (
            *("kvbm.device", "kvbm.host", "kvbm.leader", "kvbm.tiers", "kvbm.hashing", "kvbm.boundary"),
            "kvbm.config.schema",
        ),
    ),
    Rule("kvbm.engines.launch_plan", ("kvbm.config.schema",)),
    Rule("kvbm.engines.engine_kind", ("kvbm.config", "kvbm.sizing", *SHARED_BY_ENGINES)),
    Rule("kvbm.engines.disaggregated", ("kvbm.config.schema", "kvbm.engines.launch_plan")),
    Rule("kvbm.engines.python_probe", ("kvbm.child.run", "kvbm.engines.installation")),
    Rule("kvbm.engines.make_model", never=ENGINES[2:], lazily=("torch", "transformers", "numpy")),
    Rule("kvbm.engines.token_pools", ("kvbm.sizing",)),
    Rule(
        "kvbm.engines.model_facts",
        ("kvbm.config.engine", "kvbm.config.sizes", "kvbm.sizing"),
    ),
    Rule("kvbm.engines.synthetic_directory", ("kvbm.config", "kvbm.engines.make_model", "kvbm.engines.model_facts")),
    Rule("kvbm.engines.model_tokenizer", ("kvbm.engines.model_facts",)),
    Rule(
        "kvbm.engines.table", ("kvbm.config", "kvbm.sizing", "kvbm.identity.machine", "kvbm.child.run", "kvbm.engines")
    ),
    *(
        Rule(
            f"kvbm.engines.{engine}.{module}",
            (
                *("kvbm.config", "kvbm.sizing", *SHARED_BY_ENGINES, *EMBEDDED_MODELS),
                *(f"kvbm.engines.{engine}.{other}" for other in BEFORE_A_START),
            ),
        )
        for engine in FOLDERS
        for module in BEFORE_A_START
        if (engine, module) != ("vllm", "options")  # which are those of a running engine
    ),
    Rule("kvbm.engines.vllm", (*RUNS_THE_CACHE, "kvbm.config.heads"), never=("tensorrt_llm", "sglang")),
    Rule(
        "kvbm.engines.trtllm",
        RUNS_THE_CACHE,
        never=("vllm", "sglang", "transformers"),
        lazily=("tensorrt_llm", "torch"),
    ),
    Rule(
        "kvbm.engines.sglang",
        RUNS_THE_CACHE,
        never=("vllm", "tensorrt_llm", "transformers"),
        lazily=("sglang", "torch"),
    ),
    Rule(
        "kvbm.engines.embedded.engine",
        (
            "kvbm.host",
            "kvbm.hashing",
            "kvbm.identity",
            "kvbm.config.engine",
            "kvbm.engines.model_facts",
            "kvbm.engines.make_model",
        ),
        never=ENGINES[2:],
    ),
    Rule(
        "kvbm.engines.embedded.http",
        (
            *("kvbm.engines.embedded.engine", "kvbm.engines.launch_plan"),
            *("kvbm.observe.shared_page", "kvbm.observe.decision_trace"),
        ),
        never=ENGINES[2:],
    ),
    Rule("kvbm.engines.embedded", (*RUNS_THE_CACHE, "kvbm.child"), never=ENGINES[2:]),
    Rule("kvbm.vllm_integration", ("kvbm.engines.vllm.connector", "kvbm.engines.vllm.secondary_tier")),
    Rule("kvbm.trtllm_integration", ("kvbm.engines.trtllm.connector",)),
    Rule("kvbm.sglang_integration", ("kvbm.engines.sglang.storage",)),
    Rule("kvbm.embedded"),
    Rule("kvbm_cli.cache.disk_verification", ("kvbm.tiers.disk", "kvbm.host")),  # imported by its command
    Rule("kvbm_cli.doctor.probes.disk_speed", ("kvbm.tiers.disk",)),  # runs in the process of the probe
    Rule(
        "kvbm_cli.system",
        ("kvbm.child.start", "kvbm.host.mounts", "kvbm.host.processes", "kvbm.host.tree"),
        lazily=(*ENGINES, "numpy"),
    ),
    Rule("kvbm_cli", ("kvbm",), never=(), lazily=(*ENGINES, "numpy")),
)
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
