"""How often one kind of message is logged."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "disk"))

from test_client import opened

from kvbm.process.log_limit import INTERVAL_S, MAX_KINDS, RepeatFilter


def passed(limit: RepeatFilter, text: str, *arguments: object, level: int = logging.WARNING) -> str | None:
    record = logging.LogRecord("kvbm.disk", level, "file", 1, text, arguments, None)
    return record.getMessage() if limit.filter(record) else None


def test_of_many_messages_of_one_kind_one_passes_and_the_next_one_counts_the_others() -> None:
    now_s = [0.0]
    limit = RepeatFilter(lambda: now_s[0])
    assert [passed(limit, "block %d", number) for number in range(10_000)] == ["block 0", *[None] * 9999]
    assert passed(limit, "another") == "another"
    assert passed(limit, "block %d", 1, level=logging.ERROR) == "block 1"
    now_s[0] = INTERVAL_S
    assert passed(limit, "block %d", 7) == "block 7 (9999 similar messages dropped)"
    now_s[0] += INTERVAL_S
    assert passed(limit, "block %d", 8) == "block 8"


def test_kinds_without_number_take_no_memory_without_limit() -> None:
    limit = RepeatFilter(lambda: 0.0)
    for number in range(3 * MAX_KINDS):
        assert passed(limit, f"kind {number}")
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
