"""Set-up that every test shares: modules beside this file are importable, and torch computes in one thread."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))


def pytest_sessionstart(session):
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
