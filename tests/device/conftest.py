import pytest
from late_rig import WAYS

from kvbm.device import cuda


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Which copies are direct, and which call of the driver copies."""
    has_batch_copy, shortest = WAYS[request.param]
    monkeypatch.setattr(cuda, "MIN_DIRECT_BYTES", shortest)
    return {"has_batch_copy": has_batch_copy}
