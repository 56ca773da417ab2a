"""The layers of the house, as a table: which package may import what, and what it must never import.

Imports are read from the syntax trees. One inside a function counts where the table says "anywhere"; elsewhere only
what runs when the module is imported does. Modules that do not exist yet are passed over.
"""

import ast
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
ENGINES = ("torch", "transformers", "vllm", "tensorrt_llm", "sglang")
SHARED = ("kvbm.types", "kvbm.errors")
LIBC = "kvbm.libc"
LOGICAL = ("kvbm.core", "kvbm.hashing", "kvbm.events")
PHYSICAL = ("kvbm.transfer", "kvbm.region", "kvbm.layout", "kvbm.host_memory", "kvbm.shared_memory", "kvbm.cores")
SEAMS = ("kvbm.core.groups", "kvbm.events", "kvbm.layout", "kvbm.region")  # what an engine's facts are translated into
DISK_PROCESS = ("kvbm.lasting_disk", "kvbm.disk_process", "kvbm.disk_child", "kvbm.disk_channel")
DECIDING = ("kvbm.leader", "kvbm.loads", "kvbm.disk_side", "kvbm.rates", "kvbm.known_rates")
OBSERVING = ("kvbm.observation", "kvbm.metrics_server", "kvbm.hit_rate_log", "kvbm.record")
ORCHESTRATION = (*DECIDING, "kvbm.lasting_disk", "kvbm.worker", "kvbm.plan", "kvbm.metrics", "kvbm.observation")


@dataclass(frozen=True)
class Layer:
    """Modules under `prefixes` may import of kvbm only `inside`, and never `never`; `lazily` only inside functions."""

    prefixes: tuple[str, ...]
    inside: tuple[str, ...]
    never: tuple[str, ...] = ()
    lazily: tuple[str, ...] = ()


TABLE = (
    Layer(
        LOGICAL,
        (*SHARED, *LOGICAL),
        never=("numpy", "threading", "os", "time", "pydantic", *ENGINES),
    ),
    Layer((*SHARED, LIBC), (), never=("numpy", "pydantic", *ENGINES)),
    Layer(
        PHYSICAL,
        (*SHARED, *PHYSICAL, LIBC),
        never=("pydantic", *ENGINES[1:]),
        lazily=("torch",),
    ),
    Layer(("kvbm.disk",), (*SHARED, "kvbm.disk", "kvbm.cores", LIBC), never=("pydantic", *ENGINES)),
    Layer(
        DISK_PROCESS, (*SHARED, "kvbm.disk", "kvbm.region", "kvbm.cores", *DISK_PROCESS), never=("pydantic", *ENGINES)
    ),
    Layer(
        DECIDING,
        (
            *SHARED,
            *DECIDING,
            *DISK_PROCESS,
            *LOGICAL,
            *PHYSICAL,
            "kvbm.disk",
            "kvbm.plan",
            "kvbm.metrics",
            "kvbm.config.schema",
        ),
        never=ENGINES,
    ),
    Layer(
        ("kvbm.worker",),
        (*SHARED, *PHYSICAL, "kvbm.plan"),
        never=ENGINES[1:],
        lazily=("torch",),
    ),
    Layer(
        OBSERVING,
        (*SHARED, *OBSERVING, "kvbm.leader", "kvbm.plan", "kvbm.metrics", "kvbm.config.schema"),
        never=("numpy", *ENGINES),
    ),
    Layer(("kvbm.plan", "kvbm.metrics"), (*SHARED, "kvbm.plan", "kvbm.leader"), never=ENGINES),
    Layer(("kvbm.config", "kvbm.sizing"), (*SHARED, "kvbm.config", "kvbm.sizing"), never=ENGINES),
    *(
        Layer(
            (f"kvbm.{name}_integration.launch", f"kvbm.{name}_integration.versions"),
            (*SHARED, "kvbm.config", f"kvbm.{name}_integration.versions"),
            never=ENGINES,
        )
        for name in ("vllm", "trtllm", "sglang")
    ),
    *(
        Layer(
            (f"kvbm.{name}_integration",),
            (*SHARED, *ORCHESTRATION, *SEAMS, "kvbm.hashing", "kvbm.disk", "kvbm.config", f"kvbm.{name}_integration"),
            never=tuple(engine for engine in ENGINES[2:] if engine != package),
        )
        for name, package in (("vllm", "vllm"), ("trtllm", "tensorrt_llm"), ("sglang", "sglang"))
    ),
    Layer(("kvbm.embedded.launch",), (*SHARED, "kvbm.config", "kvbm.sizing", "kvbm.embedded.presets"), never=ENGINES),
    Layer(
        ("kvbm.embedded.driver", "kvbm.embedded.worker_home"),
        (*SHARED, *PHYSICAL, *ORCHESTRATION, "kvbm.events", "kvbm.hashing", "kvbm.config", "kvbm.embedded"),
        never=ENGINES[2:],
    ),
    Layer(("kvbm.embedded",), (*SHARED, *PHYSICAL, "kvbm.hashing", "kvbm.config", "kvbm.embedded"), never=ENGINES[2:]),
    Layer(("kvbm_cli",), ("kvbm", "kvbm_cli"), lazily=(*ENGINES, "numpy")),
)


def within(name, packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


def imports_of(path, module):
    """Yield (line, imported name, whether it happens at import) for each import of one file."""
    tree = ast.parse(path.read_text())
    deferred = set()
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
        for name in names:
            yield node.lineno, name, id(node) not in deferred


def modules():
    for package in ("kvbm", "kvbm_cli"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def violations(module, path):
    layer = next((layer for layer in TABLE if within(module, layer.prefixes)), None)
    for line, name, at_import in imports_of(path, module):
        where = f"{path.relative_to(REPOSITORY)}:{line}: {module} imports {name}"
        if within(name, ("kvbm_cli",)) and not within(module, ("kvbm_cli",)):
            yield f"{where}, but the block manager never imports the command"
        elif layer is None:
            if module != "kvbm" or within(name, ("kvbm", *ENGINES)):
                yield f"{where}, and no layer of the table names {module}"
        elif within(name, ("kvbm",)) and not within(name, layer.inside):
            yield f"{where}, which its layer may not"
        elif within(name, layer.never):
            yield f"{where}, which its layer must never"
        elif at_import and within(name, layer.lazily):
            yield f"{where} at import, which belongs inside the function that needs it"


def test_every_import_follows_the_table():
    assert [line for module, path in modules() for line in violations(module, path)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvbm.core.store", "import numpy"),
        ("kvbm.core.store", "def f():\n    import threading"),
        ("kvbm.core.store", "from kvbm.transfer import pool"),
        ("kvbm.hashing", "from os import path"),
        ("kvbm.region", "import torch"),
        ("kvbm.region", "from kvbm import leader"),
        ("kvbm.transfer.pool", "from kvbm.core.store import BlockStore"),
        ("kvbm.disk.tier", "from kvbm.core.store import BlockStore"),
        ("kvbm.leader", "def f():\n    import torch"),
        ("kvbm.leader", "from kvbm.config.load import load"),
        ("kvbm.worker", "from kvbm.leader import Leader"),
        ("kvbm.config.schema", "from kvbm.core.store import BlockStore"),
        ("kvbm.vllm_integration.connector", "import sglang"),
        ("kvbm.vllm_integration.launch", "def f():\n    import vllm"),
        ("kvbm.embedded.engine", "from kvbm_cli import app"),
        ("kvbm.embedded.engine", "from kvbm.leader import Leader"),
        ("kvbm.embedded.driver", "from kvbm.core.store import BlockStore"),
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


def test_no_two_test_modules_have_one_name():
    """pytest imports them by their names alone, so that one would hide the other in a run of all."""
    names = [path.name for path in (REPOSITORY / "tests").rglob("test_*.py")]
    assert [name for name, count in Counter(names).items() if count > 1] == []
