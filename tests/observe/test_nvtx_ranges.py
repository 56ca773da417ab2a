"""NVTX ranges: which methods open which range, in order, and that nothing is replaced without the package."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbm.observe import nvtx_ranges
from kvbm.observe.nvtx_ranges import COPIES, RANK_HOOKS, SCHEDULER_HOOKS, annotate

KVBM = Path(nvtx_ranges.__file__).parents[1]


class Engine:
    def match(self, first: int, *, second: int) -> int:
        return first + second

    def settle(self) -> None:
        raise ValueError("as it is")


class Domain:
    """A stand-in for a domain of the package that a profiler listens to: records what begins and ends."""

    def __init__(self, name: str) -> None:
        self.name, self.recorded, self._open = name, [], []

    def get_event_attributes(self, *, message: str) -> str:
        return f"{self.name}: {message}"

    def push_range(self, attributes: str) -> None:
        self._open.append(attributes)
        self.recorded.append(f"{attributes} begins")

    def pop_range(self) -> None:
        self.recorded.append(f"{self._open.pop()} ends")


@pytest.fixture
def package(monkeypatch):
    """Put a stand-in for the package in its place; return what installs it with a domain."""

    def install(domain: object) -> None:
        module = domain and SimpleNamespace(Domain=Domain, get_domain={"kvbm": domain}.__getitem__)
        monkeypatch.setitem(sys.modules, "nvtx", module)

    # It is imported once in a process.
    nvtx_ranges._domain.cache_clear()
    yield install
    # It is imported once in a process.
    nvtx_ranges._domain.cache_clear()


def test_a_method_opens_its_range_and_answers_as_before(package):
    domain, engine = Domain("kvbm"), Engine()
    package(domain)
    annotate(engine, {"match": "kvbm.match", "settle": "kvbm.settle"})
    assert engine.match(1, second=2) == 3
    with pytest.raises(ValueError, match="as it is"):
        engine.settle()
    began = [f"kvbm: kvbm.{name} {what}" for name in ("match", "settle") for what in ("begins", "ends")]
    assert domain.recorded == began
    assert Engine().match(1, second=2) == 3
    assert domain.recorded == began


@pytest.mark.parametrize(
    ("domain", "said"),
    [
        (None, "kvbm: `metrics.nvtx` has no effect: `pip install nvtx`"),
        (SimpleNamespace(), "kvbm: no profiler receives NVTX ranges"),
    ],
    ids=["no package", "no profiler"],
)
def test_nothing_is_replaced_without_package_or_profiler(package, caplog, domain, said):
    caplog.set_level("INFO")
    package(domain)
    engine = Engine()
    annotate(engine, {"match": "kvbm.match"})
    annotate(engine, {"settle": "kvbm.settle"})
    assert vars(engine) == {}
    (line,) = [line for line in caplog.messages if "NVTX" in line or "nvtx" in line]
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("engines/vllm/scheduler_side.py", SCHEDULER_HOOKS),
        ("engines/vllm/worker_side.py", RANK_HOOKS),
        ("device/copier.py", COPIES),
    ],
)
def test_every_range_is_that_of_a_method(path, names):
    """Read from the source: vLLM is not there."""
    tree = ast.parse((KVBM / path).read_text())
    assert set(names) <= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
