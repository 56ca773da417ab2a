"""Makes the modules importable that these tests share with others. Without SGLang, one skip is left."""

import importlib.util
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TELLS = "test_real_sglang.py"
sys.path[:0] = [str(TESTS / name) for name in ("sglang_engine", "vllm", "chaos", "embedded", "sglang")]
found = importlib.util.find_spec("sglang")  # tests/sglang is one too, without an origin
has_sglang = found is not None and found.origin is not None
collect_ignore = (
    [] if has_sglang else [one.name for one in Path(__file__).parent.glob("test_*.py") if one.name != TELLS]
)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The directory of a small dense model; its weights are random and always the same."""
    from sglang_server import make_model

    return make_model("vllm-25m", tmp_path_factory.mktemp("models"))
