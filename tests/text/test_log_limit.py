"""How often one kind of message is logged."""

from __future__ import annotations

import logging
import sys
from itertools import count
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "disk"))

from test_client import opened

from kvbm.text.log_limit import BUDGET, BURST, INTERVAL_S, MAX_KINDS, Lines, LogLimit


def passed(limit: LogLimit, text: str, *arguments: object, level: int = logging.WARNING) -> str | None:
    record = logging.LogRecord("kvbm.tiers.disk", level, "file", 1, text, arguments, None)
    return record.getMessage() if limit.filter(record) else None


def test_of_many_messages_of_one_kind_one_passes_and_the_next_one_counts_the_others() -> None:
    now_s = [0.0]
    limit = LogLimit(lambda: now_s[0], burst=1)
    assert [passed(limit, "block %d", number) for number in range(10_000)] == ["block 0", *[None] * 9999]
    assert passed(limit, "another") == "another"
    assert passed(limit, "block %d", 1, level=logging.ERROR) == "block 1"
    now_s[0] = INTERVAL_S
    assert passed(limit, "block %d", 7) == "block 7 (9999 similar messages dropped)"
    now_s[0] += INTERVAL_S
    assert passed(limit, "block %d", 8) == "block 8"


def test_kinds_without_number_take_no_memory_without_limit() -> None:
    seconds = count()  # of which each one fills the budget again
    limit = LogLimit(lambda: next(seconds), burst=1)
    for number in range(3 * MAX_KINDS):
        assert passed(limit, f"kind {number}: %s", "")
    # The memory that it takes.
    assert len(limit._last) <= MAX_KINDS


def test_damaged_blocks_are_counted_each_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as rig:
        rig.write(range(16), range(16))
        (arena,) = tmp_path.glob("*/*/arena")
        with arena.open("r+b") as file:
            file.write(bytes(16 * rig.block_bytes))
        for number in range(16):
            assert rig.read([number], [number]).damaged == (0,)
        assert rig.tier.counters.checksum_misses == 16
    assert len([message for message in caplog.messages if "wrong checksum" in message]) == 1


def limited(limit: LogLimit, text: str, *arguments: object, raised: Exception | None = None) -> str | None:
    record = logging.LogRecord(
        "kvbm.x", logging.WARNING, "file", 1, text, arguments, (type(raised), raised, None) if raised else None
    )
    return logging.Formatter().format(record) if limit.filter(record) else None


def test_a_value_in_a_message_is_one_short_line() -> None:
    text = limited(LogLimit(), "bad `%s` of %d, %.1f", "\n" * 30_000_000, 7, 1.25)
    assert text is not None
    assert len(text) < 700
    assert "\n" not in text
    assert text.endswith(" of 7, 1.2")


def test_our_own_lines_and_tracebacks_stay_and_have_an_end() -> None:
    assert limited(LogLimit(), "%s", Lines("a\nb")) == "a\nb"
    text = limited(LogLimit(), "failed", raised=ValueError("x" * 30_000_000))
    assert text is not None
    assert "ValueError: xxx" in text
    assert len(text) < 1000


def test_secrets_do_not_reach_the_log() -> None:
    assert limited(LogLimit(), "cannot reach %s", "s3://me:secret@host") == "cannot reach s3://***@host"


def test_all_lines_together_have_a_budget_that_fills_again() -> None:
    now_s = [0.0]
    limit = LogLimit(lambda: now_s[0])
    written = [limited(limit, f"kind {chr(97 + n % 26) * (1 + n // 26)} " + "y" * 500) for n in range(5000)]
    assert sum(map(len, filter(None, written))) <= BUDGET
    assert written[0] is not None
    now_s[0] = 100.0
    assert "other messages dropped" in (limited(limit, "late") or "")


def test_lines_that_differ_in_numbers_alone_are_of_one_kind() -> None:
    limit = LogLimit(lambda: 0.0)
    passed_lines = [limited(limit, f"Task-{n} at 0x{n:x} failed") for n in range(1000)]
    assert len([line for line in passed_lines if line]) == BURST
