"""NVTX ranges: which methods open which range, in order, and that nothing is replaced without the package."""

from __future__ import annotations

import ast
import sys
from contextlib import contextmanager
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


@pytest.fixture
def ranges(monkeypatch):
    """A stand-in for the package that records what begins and ends."""
    recorded: list[str] = []

    @contextmanager
    def recording(name: str, *, domain: str):
        recorded.append(f"{domain}: {name} begins")
        try:
            yield
        finally:
            recorded.append(f"{name} ends")

    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=recording))
    nvtx_ranges._package.cache_clear()
    yield recorded
    nvtx_ranges._package.cache_clear()


def test_a_method_opens_its_range_and_answers_as_before(ranges):
    engine = Engine()
    annotate(engine, {"match": "kvbm.match", "settle": "kvbm.settle"})
    assert engine.match(1, second=2) == 3
    with pytest.raises(ValueError, match="as it is"):
        engine.settle()
    assert ranges == ["kvbm: kvbm.match begins", "kvbm.match ends", "kvbm: kvbm.settle begins", "kvbm.settle ends"]
    assert Engine().match(1, second=2) == 3
    assert len(ranges) == 4


def test_nothing_is_replaced_without_the_package(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    nvtx_ranges._package.cache_clear()
    engine = Engine()
    annotate(engine, {"match": "kvbm.match"})
    annotate(engine, {"settle": "kvbm.settle"})
    assert vars(engine) == {}
    assert [line for line in caplog.messages if "nvtx" in line] == [
        "kvbm: `metrics.nvtx` has no effect: `pip install nvtx`"
    ]
    nvtx_ranges._package.cache_clear()


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("vllm_integration/scheduler_side.py", SCHEDULER_HOOKS),
        ("vllm_integration/worker_side.py", RANK_HOOKS),
        ("device/copier.py", COPIES),
    ],
)
def test_every_range_is_that_of_a_method(path, names):
    """Read from the source: vLLM is not there."""
    tree = ast.parse((KVBM / path).read_text())
    assert set(names) <= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
