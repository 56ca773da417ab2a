"""Everything here needs a real vLLM: `nox -s vllm` installs one and runs these tests. Without it one skip is left."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TELLS = "test_vllm_is_installed.py"


def has_vllm():
    """This directory is called vllm too, and is found as a package without an origin where there is no other."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None


collect_ignore = [] if has_vllm() else [path.name for path in HERE.glob("test_*.py") if path.name != TELLS]
sys.path.insert(0, str(HERE))


def pytest_configure(config):
    """Makes the model before the workers start. In a rig, the worker is the engine, and files that are not quiet when
    its process starts are in doubt."""
    if hasattr(config, "workerinput") or not has_vllm():
        return
    from vllm_server import wait_until_old

    from kvbm.engines.make_model import materialise

    wait_until_old(materialise("vllm-25m"), has_code=True)


@pytest.fixture(scope="session")
def plain():
    """A vLLM with neither connector nor cache, and with the adapters of the model, for all who want to know what it
    says; maybe not healthy yet. It rests when nobody asks, and spares every such module the start of its own.
    """
    from pairs import MAX_MODEL_LEN, NO_CACHE, adapters_of
    from vllm_server import VllmServer

    from kvbm.engines.make_model import materialise

    model = materialise("vllm-25m")
    with VllmServer(model, NO_CACHE, *adapters_of("ab"), max_model_len=MAX_MODEL_LEN, wait=False) as server:
        yield server


@pytest.fixture(scope="session")
def process(tmp_path_factory):
    """A process for engines one after the other, and the orders to their copier. All tests that use it run in the same
    worker, because importing vLLM takes most of a start."""
    from engine_process import EngineProcess
    from pairs import Faults
    from vllm_server import wait_until_old

    from kvbm.engines.make_model import materialise

    wait_until_old(materialise("vllm-25m"))  # of the tests in which an engine loads what an earlier one has stored
    directory = tmp_path_factory.mktemp("engine")
    faults = Faults(directory)
    with EngineProcess(directory, faults.path) as engine:
        yield engine, faults


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """Tests that share a server or a process run in the same worker: those with `plain`, those with `process`, and
    otherwise those of a file."""
    for item in items:
        if item.path.parent == HERE:
            group = next((name for name in ("plain", "process") if name in item.fixturenames), item.path.stem)
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A failing test shows the end of the log of every server that runs."""
    report = yield
    if report.failed and has_vllm():
        from vllm_server import RUNNING

        for server in RUNNING:
            report.sections.append((f"vLLM on port {server.port}", server.log_tail()))
    return report
