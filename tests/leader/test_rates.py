"""Measured rates, and the decision between reading and computing that follows from them."""

from __future__ import annotations

import pytest

from kvbm.metrics import Counters
from kvbm.tiers.disk.known_rates import TOKENS_PER_S
from kvbm.tiers.rates import KnownRates, Rates
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


def test_the_lowest_rates_that_are_read_can_be_used():
    rates = Rates(Counters(), block_tokens=16, clock=lambda: 0.0)
    rates.begin_with(KnownRates(TOKENS_PER_S[0], 0.0))
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
    assert (counters.disk.declined_blocks, counters.shared.declined_blocks) == (2, 5)
    assert rates.worthwhile([(Tier.SHARED, 2), (Tier.DISK, 2)]) == 3
    assert (counters.disk.declined_blocks, counters.shared.declined_blocks) == (3, 5)
