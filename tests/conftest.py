"""Set-up that every test shares: modules beside this file are importable, and torch computes in one thread."""

import os
import signal
import sys
from pathlib import Path

import hypothesis  # its plugin would load it at the end of a run, where Python 3.11 may fail to compile it

os.environ.setdefault("OMP_NUM_THREADS", "1")
hypothesis.settings.register_profile("no_clock", deadline=None)  # an example is not wrong because a machine is busy
hypothesis.settings.load_profile("no_clock")
sys.path.insert(0, str(Path(__file__).parent))


def pytest_sessionstart(session):
    """Signals that whoever started pytest ignores (`nohup`, a background job) would be ignored by children too."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
