"""Measured rates, the decision between reading and computing that follows from them, and the file that keeps them."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from kvbm.leader.rates import WRITE_INTERVAL_S, KnownRates, Rates, RatesFile
from kvbm.metrics import Counters
from kvbm.types import Tier


def test_what_an_engine_has_learnt_judges_the_first_request_of_the_next():
    rates = Rates(Counters(), block_tokens=16, clock=lambda: 0.0)
    assert rates.known() is None
    rates.note_step(1600, 10.0)
    assert rates.known() == KnownRates(160.0)
    rates.note_read(10, 0.5)
    following = Rates(Counters(), block_tokens=16, clock=lambda: 0.0)
    following.begin_with(rates.known())
    assert following.tokens_per_s == pytest.approx(160.0)
    assert following.blocks_per_s == pytest.approx(20.0)
    assert following.is_hopeless(waited_s=1.1, blocks=0, of_blocks=100)
    following.note_step(1600, 1.0)
    assert following.tokens_per_s > 1200, "its own work counts more"


def test_rates_outlive_the_engine_in_a_file(tmp_path):
    path = tmp_path / "rates.json"
    now_s = [0.0]
    rates = RatesFile(path, clock=lambda: now_s[0])
    assert rates.read() is None
    rates.keep(None)
    for known in (KnownRates(160.0), KnownRates(170.0), KnownRates(170.0, 20.0)):
        rates.keep(known)
        rates._thread.join()
        now_s[0] += WRITE_INTERVAL_S
        kept = KnownRates(160.0) if known.blocks_per_s is None else known
        assert RatesFile(path, clock=lambda: 0.0).read() == kept, "what has hardly changed is not written again"


SPEED = '{"tokens_per_s": %s}'
RATE = '{"tokens_per_s": 100.0, "blocks_per_s": %s}'


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "[" * 4096, '{"a":' * 800, '{"tokens_per_s": 1', "null", "\0" * 100, "9" * 4096),
        *(SPEED % value for value in ("NaN", "-1.0", '"9"', "5e-324", "1e308", "Infinity", "[1.0]")),
        *(SPEED % value for value in ("1" + "0" * 400, "true", "null", "0.0", "{}")),
        *(RATE % value for value in ("NaN", "5e-324", "-0.1", "1e308", "-Infinity", '"a"', "true", "[[]]")),
        '{"tokens_per_s": 100.0}' + " " * (100 << 20),
    ],
    ids=lambda content: content[:40].strip() or "blank",
)
def test_a_file_that_holds_no_rates_says_nothing(tmp_path, content):
    path = tmp_path / "rates.json"
    path.write_text(content)
    path.chmod(0o600)
    assert RatesFile(path, clock=lambda: 0.0).read() is None


@pytest.mark.parametrize("kind", ["directory", "FIFO", "link", "socket", "of somebody else", "readable by others"])
def test_something_else_in_place_of_the_file_is_neither_read_nor_written(tmp_path, kind):
    path, target = tmp_path / "rates.json", tmp_path / "target"
    target.write_text('{"tokens_per_s": 100.0}')
    target.chmod(0o600)
    listener = socket.socket(socket.AF_UNIX)
    if kind == "directory":
        path.mkdir(0o700)
    elif kind == "FIFO":
        os.mkfifo(path, 0o600)
    elif kind == "link":
        path.symlink_to(target)
    elif kind == "socket":
        listener.bind(str(path))
    else:
        target.rename(path)
        path.chmod(0o600 if kind == "of somebody else" else 0o604)
        if kind == "of somebody else":
            if os.geteuid():
                pytest.skip("only root can give files away")
            os.chown(path, 65534, -1)
    before = [(file.name, file.lstat().st_mode, file.lstat().st_size) for file in tmp_path.iterdir()]
    file = RatesFile(path, clock=lambda: 0.0)
    assert file.read() is None
    file.keep(KnownRates(160.0))
    file._thread.join()
    assert [(file.name, file.lstat().st_mode, file.lstat().st_size) for file in tmp_path.iterdir()] == before
    listener.close()


def test_a_machine_without_threads_keeps_no_rates(tmp_path, monkeypatch):
    now_s = [0.0]
    file = RatesFile(tmp_path / "rates.json", clock=lambda: now_s[0])

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        file.keep(KnownRates(160.0))
    now_s[0] = WRITE_INTERVAL_S
    file.keep(KnownRates(160.0))
    file._thread.join()
    assert file.read() == KnownRates(160.0)


def test_the_lowest_rates_that_are_read_can_be_used(tmp_path):
    path = tmp_path / "rates.json"
    path.write_text('{"tokens_per_s": 0.001, "blocks_per_s": 0.0}')
    path.chmod(0o600)
    known = RatesFile(path, clock=lambda: 0.0).read()
    assert known == KnownRates(0.001, 0.0)
    rates = Rates(Counters(), block_tokens=16, clock=lambda: 0.0)
    rates.begin_with(known)
    assert rates.worthwhile([(Tier.HOST, 3), (Tier.DISK, 5)]) == 8, "a trial"
    assert not rates.is_hopeless(waited_s=100.0, blocks=1, of_blocks=5)


def test_while_nothing_is_known_of_computing_a_read_has_a_fifth_of_a_second():
    rates = Rates(Counters(), block_tokens=16, clock=lambda: 0.0)
    assert not rates.is_hopeless(waited_s=0.15, blocks=0, of_blocks=100)
    assert rates.is_hopeless(waited_s=0.25, blocks=99, of_blocks=100)


def test_of_a_mixed_chain_the_part_is_loaded_that_saves_most():
    rates = Rates(Counters(), block_tokens=16, clock=lambda: 0.0)
    rates.note_step(1600, 10.0)  # 0.1 s a block
    rates.note_read(10, 3.0)  # 0.3 s a block
    assert rates.worthwhile([(Tier.HOST, 10), (Tier.DISK, 5)]) == 10
    assert rates.worthwhile([(Tier.HOST, 10), (Tier.DISK, 5), (Tier.HOST, 100)]) == 115
    assert rates.worthwhile([(Tier.DISK, 5), (Tier.HOST, 5)]) == 0


def test_small_steps_say_nothing_of_how_fast_prompts_are_computed():
    rates = Rates(Counters(), block_tokens=16, clock=lambda: 0.0)
    rates.note_step(1, 1.0)
    assert rates.tokens_per_s == 0.0


def test_recent_work_counts_most():
    rates = Rates(Counters(), block_tokens=16, clock=lambda: 0.0)
    for _ in range(20):
        rates.note_read(10, 1.0)
    for _ in range(10):
        rates.note_read(10, 50.0)
    assert rates.blocks_per_s < 0.3


def test_declined_blocks_are_counted_in_the_tier_in_which_they_are():
    counters = Counters()
    rates = Rates(counters, block_tokens=16, clock=lambda: 0.0)
    rates._best = lambda spans: 3
    assert rates.worthwhile([(Tier.HOST, 1), (Tier.DISK, 4), (Tier.HOST, 2), (Tier.SHARED, 5)]) == 3
    assert (counters.disk_declined_blocks, counters.shared_declined_blocks) == (2, 5)
    assert rates.worthwhile([(Tier.SHARED, 2), (Tier.DISK, 2)]) == 3
    assert (counters.disk_declined_blocks, counters.shared_declined_blocks) == (3, 5)
