"""Which files a process has open for writing."""

import os
import warnings

from kvbm_cli.system.open_files import writes


def test_a_search_that_ends_early_closes_the_directory(tmp_path):
    with (tmp_path / "log").open("w") as log, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert writes(os.getpid(), tmp_path / "log")
        assert not writes(os.getpid(), tmp_path / "other")
    assert log.closed
    assert [str(warning.message) for warning in found] == []
