"""Code from outside an engine's package that can compute KV: what counts with it, and what is in doubt."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest

from kvbm.identity import code
from kvbm.identity.description import describe
from kvbm.identity.digests import Unidentified

HOUR_NS = 3_600_000_000_000
NAMES = ("own_model", "own_helper", "own_package", "own_data", "own_main", "numbers_of")


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A directory of modules. The process starts in an hour, so that no file is newer."""
    monkeypatch.setattr(code, "process_start_ns", lambda pid=None: time.time_ns() + HOUR_NS)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))
    yield directory
    for name in [name for name in sys.modules if name.startswith(NAMES)]:
        del sys.modules[name]


def write(home, **sources):
    for name, text in sources.items():
        path = home / f"{name.replace('__', os.sep)}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    importlib.invalidate_caches()


def found(*roots):
    facts, doubt = describe({"code": code.code_of(roots, "engine")}, "").result()
    assert doubt == ""
    return facts["code"]


def test_code_of_the_engine_alone_adds_nothing(home):
    assert (
        code.code_of(["engine.models", "engine.worker.Worker", dict, "kvbm.x", "transformers_modules.m"], "engine")
        == {}
    )


def test_what_the_engine_requires_is_not_read(home):
    for name, requires in (("the_engine", "Numbers.Of>=1"), ("numbers_of", "")):
        info = home / f"{name}-1.dist-info"
        info.mkdir()
        lines = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1\n{lines}Requires-Dist: own_helper; extra == 'x'\n")
        (info / "top_level.txt").write_text("engine\n" if requires else "numbers_of\n")
    write(home, engine="", numbers_of="", own_helper="", own_model="import engine, numbers_of, os, own_helper, no_such")
    assert found("own_model").keys() == {"own_model", "own_helper"}


@pytest.mark.parametrize(
    "text",
    [
        "import own_helper",
        "def f():\n    from own_helper import x",
        "from own_helper.deep import x",
        "import importlib\nimportlib.import_module('own_helper.deep')",
        "import importlib\nimportlib.import_module(f'own_helper.{1}')",
    ],
)
def test_a_module_that_a_root_imports_counts(home, text):
    write(home, own_model=text, own_helper="x = 1")
    before = found("own_model:Model".partition(":")[0])
    write(home, own_helper="x = 2")
    assert found("own_model") != before


def test_every_file_of_a_package_counts_and_compiled_copies_do_not(home):
    write(home, own_package____init__="", own_package__models="")
    seen = [found("own_package.models.Model")]
    for name in ("kernels.cu", "kernels.so", ".hidden"):
        (home / "own_package" / name).write_bytes(b"1")
        seen.append(found("own_package.models.Model"))
    assert all(one != other for one, other in pairwise(seen))
    (home / "own_package" / "__pycache__").mkdir()
    (home / "own_package" / "__pycache__" / "models.pyc").write_bytes(b"1")
    assert found("own_package") == seen[-1]


def test_equal_code_elsewhere_is_equal(home, tmp_path, monkeypatch):
    write(home, own_model="import own_helper", own_helper="")
    before = found("own_model")
    monkeypatch.syspath_prepend(str(home.rename(tmp_path / "elsewhere")))
    assert found("own_model") == before


def test_a_class_stands_for_the_modules_of_all_its_bases(home):
    write(
        home,
        own_model="class Base:\n    def f(self): ...",
        own_helper="def derive(base): return type('D', (base,), {})",
    )
    bases = importlib.import_module("own_model").Base
    derived = importlib.import_module("own_helper").derive(bases)
    assert found(derived).keys() == {"own_helper", "own_model"}


def doubt(*roots):
    with pytest.raises(Unidentified) as raised:
        code.code_of(roots, "engine")
    return str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "exec('1')",
        "import importlib, sys\nimportlib.import_module(sys.argv[0])",
        "import importlib, sys\nimportlib.import_module(f'{sys.argv[0]}.x')",
        "import ctypes\nctypes.CDLL('/opt/kernels.so')",
        "import torch\ntorch.ops.load_library('/opt/kernels.so')",
        "import importlib.util\nimportlib.util.spec_from_file_location('a', '/opt/a.py')",
    ],
)
def test_code_that_runs_code_from_somewhere_is_in_doubt(home, text):
    write(home, own_model="import own_helper", own_helper=text)
    assert "own_helper.py:" in doubt("own_model")


def test_calls_that_look_alike_are_not_in_doubt(home):
    write(home, own_model="import importlib\nself.exec()\nmodel.eval()\nimportlib.import_module('.x', __name__)")
    assert found("own_model")


def test_a_module_without_a_file_is_in_doubt(home, monkeypatch):
    monkeypatch.setitem(sys.modules, "own_model", ModuleType("own_model"))
    assert "code of `own_model`: it has no file" in doubt("own_model.Model")
    assert "code of `no_such_module`: it has no file" in doubt("no_such_module")


def test_a_class_whose_functions_have_no_file_is_in_doubt(home):
    write(home, own_model="")
    names = vars(importlib.import_module("own_model"))
    exec("class Model:\n    def forward(self): ...", names)
    assert "`Model.forward` has no file" in doubt(names["Model"])


def test_a_script_counts_and_one_from_standard_input_is_in_doubt(home, monkeypatch):
    write(home, own_main="x = 1")
    script = SimpleNamespace(__spec__=None, __file__=str(home / "own_main.py"))
    monkeypatch.setitem(sys.modules, "__main__", script)
    first = found("__main__.Model")
    assert found("__mp_main__.Model") == first
    write(home, own_main="x = 2")
    assert found("__main__") != first
    del script.__file__
    assert "code of `__main__`: it has no file" in doubt("__main__")


def test_code_that_changed_after_the_start_is_in_doubt(home, monkeypatch):
    write(home, own_model="")
    monkeypatch.setattr(code, "process_start_ns", lambda pid=None: time.time_ns() - HOUR_NS)
    assert "code of `own_model`" in doubt("own_model")
    assert "changed after the engine was started" in doubt("own_model")


def test_code_that_changed_after_the_start_of_the_parent_is_in_doubt(home, monkeypatch):
    """A process that was forked has the modules that its parent had imported."""
    write(home, own_model="")
    later = {None: HOUR_NS, 4711: -HOUR_NS}
    monkeypatch.setattr(code, "process_start_ns", lambda pid=None: time.time_ns() + later[pid])
    assert found("own_model")
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=4711))
    assert "changed after the engine was started" in doubt("own_model")


def test_large_compiled_code_is_in_doubt(home):
    write(home, own_package____init__="")
    with open(home / "own_package" / "kernels.cpython-311.so", "wb") as file:
        file.truncate(code.MAX_COMPILED_BYTES + 1)
    assert "larger than 64 MiB" in doubt("own_package")


def test_plugins_that_are_not_allowed_are_not_loaded(home):
    info = home / "own-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: own\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[group.of_tests]\none = own_model:register\n")
    assert code.plugins("group.of_tests", None) == ["own_model"]
    assert code.plugins("group.of_tests", ["one"]) == ["own_model"]
    assert code.plugins("group.of_tests", ["other"]) == []


def test_a_registry_that_is_not_there_holds_nothing(monkeypatch):
    assert code.registered("no.such.module", "models") == []
    monkeypatch.setitem(sys.modules, "own_registry", SimpleNamespace(all=SimpleNamespace(models={"a": int})))
    assert code.registered("own_registry", "all.models") == [int]
    assert code.registered("own_registry", "all.others") == []
