"""Setup of all tests: modules next to this file are importable, torch computes in one thread, and whole folders run in
several worker processes (pytest-xdist).
"""

import logging
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import hypothesis  # its plugin would load it at the end of a run, where Python 3.11 may fail to compile it
import pytest

from kvbm_cli.runs import memory_claims

WORKERS = 4  # on two cores, because many tests wait for programs
WITH_DEADLINES = ("bench", "cli", "doctor")  # folders whose tests start programs and limit their time
os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is imported, here and in every child process
STATE = tempfile.mkdtemp(prefix="kvbm-tests-")  # of this process: the runs of its user change what commands print
os.environ["XDG_STATE_HOME"] = STATE
memory_claims.DIRECTORY = Path(STATE, "missing")  # engines of other tests that start take no memory from this one
hypothesis.settings.register_profile("no_clock", deadline=None)  # an example is not wrong because a machine is busy
hypothesis.settings.load_profile("no_clock")
sys.path.insert(0, str(Path(__file__).parent))


def pytest_sessionstart(session):
    """Signals that whoever started pytest ignores (`nohup`, a background job) would be ignored by children too."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_unconfigure():
    shutil.rmtree(STATE, ignore_errors=True)


def pytest_xdist_auto_num_workers(config):
    """For `-n auto`: no worker processes for single files, since they take longer to start than a file takes to run."""
    paths = [Path(argument.partition("::")[0]) for argument in config.args]
    return 0 if all(path.is_file() for path in paths) else WORKERS


@pytest.fixture(autouse=True)
def log_of_kvbm():
    """Undo what a connector does to the log: with its queue, a later test would see each message twice."""
    yield
    log = logging.getLogger("kvbm")
    log.handlers, log.propagate = [], True


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items):
    """Repeat a failed test of a program once, because the machine may have been busy. The summary shows `rerun`. Tests
    of the block manager are never repeated: an answer that is wrong once is wrong.

    Of the cases of a test with the marker `sampled(n)`, every nth is an ordinary test; the others are soak tests."""
    tests = Path(__file__).parent
    counts = Counter()
    for item in items:
        if (sampled := item.get_closest_marker("sampled")) is not None:
            number = counts[item.path, item.originalname]
            counts[item.path, item.originalname] += 1
            if number % sampled.args[0]:
                item.add_marker(pytest.mark.soak)
    for item in items:
        if any(tests / folder in item.path.parents for folder in WITH_DEADLINES):
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(terminalreporter):
    """Print why a test was repeated: pytest prints only its name."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"why {report.nodeid} was repeated")
        terminalreporter.write_line(report.longreprtext[-4000:])
