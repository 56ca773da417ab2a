"""What the log of an engine shows of an error of kvbm: engines print a traceback and know no hints."""

import logging
import traceback

import pytest

from kvbm.errors import EnvironmentProblem, ProfileError


@pytest.mark.parametrize("kind", [EnvironmentProblem, ProfileError])
def test_a_traceback_shows_the_hint(kind):
    lines = traceback.format_exception(kind("too little memory", hint="lower `tiers.host.capacity`"))
    assert "".join(lines).endswith("too little memory\nhint: lower `tiers.host.capacity`\n")


def test_without_a_hint_there_is_none(caplog):
    logging.getLogger("kvbm").error("kvbm", exc_info=EnvironmentProblem("too little memory"))
    assert "hint" not in caplog.text
