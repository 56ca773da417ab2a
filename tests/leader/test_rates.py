"""Measured rates, the decision between reading and computing that follows from them, and the file that keeps them."""

from __future__ import annotations

import pytest

from kvbm.leader.rates import WRITE_INTERVAL_S, KnownRates, Rates, RatesFile


def test_what_an_engine_has_learnt_judges_the_first_request_of_the_next():
    rates = Rates(block_tokens=16, clock=lambda: 0.0)
    assert rates.known() is None
    rates.note_step(1600, 10.0)
    assert rates.known() == KnownRates(160.0)
    rates.note_read(10, 0.5)
    following = Rates(block_tokens=16, clock=lambda: 0.0, known=rates.known())
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


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"tokens_per_s": 1', '{"tokens_per_s": NaN}', '{"tokens_per_s": -1.0}', '{"tokens_per_s": "9"}'],
)
def test_a_file_that_holds_no_rates_says_nothing(tmp_path, content):
    path = tmp_path / "rates.json"
    path.write_text(content)
    path.chmod(0o600)
    assert RatesFile(path, clock=lambda: 0.0).read() is None


def test_while_nothing_is_known_of_computing_a_read_has_a_fifth_of_a_second():
    rates = Rates(block_tokens=16, clock=lambda: 0.0)
    assert not rates.is_hopeless(waited_s=0.15, blocks=0, of_blocks=100)
    assert rates.is_hopeless(waited_s=0.25, blocks=99, of_blocks=100)


def test_of_a_mixed_chain_the_part_is_loaded_that_saves_most():
    rates = Rates(block_tokens=16, clock=lambda: 0.0)
    rates.note_step(1600, 10.0)  # 0.1 s a block
    rates.note_read(10, 3.0)  # 0.3 s a block
    assert rates.worthwhile([(False, 10), (True, 5)]) == 10
    assert rates.worthwhile([(False, 10), (True, 5), (False, 100)]) == 115
    assert rates.worthwhile([(True, 5), (False, 5)]) == 0


def test_small_steps_say_nothing_of_how_fast_prompts_are_computed():
    rates = Rates(block_tokens=16, clock=lambda: 0.0)
    rates.note_step(1, 1.0)
    assert rates.tokens_per_s == 0.0


def test_recent_work_counts_most():
    rates = Rates(block_tokens=16, clock=lambda: 0.0)
    for _ in range(20):
        rates.note_read(10, 1.0)
    for _ in range(10):
        rates.note_read(10, 50.0)
    assert rates.blocks_per_s < 0.3
