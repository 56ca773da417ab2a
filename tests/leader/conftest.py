"""Closes every rig of a test when the test has ended."""

import pytest
from rig import OPEN


@pytest.fixture(autouse=True)
def _closes_rigs():
    yield
    while OPEN:
        OPEN[-1].close()
