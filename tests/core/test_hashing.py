"""Sequence hashes name the tokens, all that came before them, and the world that they were computed in."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbm import hashing
from kvbm.errors import InvariantError

ROOT = hashing.root(hashing.namespace({"model": "m"}))
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def hashes_of(token_ids, *, block_size=4, root=ROOT):
    hashes = []
    hashing.extend(hashes, token_ids, block_size=block_size, root=root)
    return hashes


def test_hashes_are_of_128_bits_or_more():
    assert hashing.HASH_BYTES * 8 >= 128
    assert {len(sequence_hash) for sequence_hash in hashes_of(range(12))} == {hashing.HASH_BYTES}
    assert len(ROOT) == hashing.HASH_BYTES


def test_only_full_blocks_have_a_hash():
    assert [len(hashes_of(range(count))) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_hashes_do_not_change_between_versions():
    root = hashing.root(hashing.namespace({"model": "m", "block": [16, None]}), salt="tenant")
    assert [sequence_hash.hex() for sequence_hash in hashes_of(range(8), root=root)] == [
        "ea1d33467579119ee49839fef036d8b7",
        "7f04b677444293a01877a8f7a0157c9e",
    ]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tokens, st.lists(st.integers(0, 40), max_size=4), st.integers(1, 5))
def test_hashing_in_steps_equals_hashing_at_once(token_ids, cuts, block_size):
    hashes = []
    for cut in [*sorted(cuts), len(token_ids)]:
        hashing.extend(hashes, token_ids[:cut], block_size=block_size, root=ROOT)
    assert hashes == hashes_of(token_ids, block_size=block_size)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tokens, tokens)
def test_equal_hashes_mean_equal_prefixes(first, second):
    for position, (one, other) in enumerate(zip(hashes_of(first), hashes_of(second), strict=False)):
        end = 4 * (position + 1)
        assert (one == other) == (first[:end] == second[:end])


def test_same_tokens_at_another_position_have_another_hash():
    hashes = hashes_of([7, 7, 7, 7] * 5)
    assert len(set(hashes)) == 5
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 8])[1] != hashes_of([9, 2, 3, 4, 5, 6, 7, 8])[1]


def test_salt_isolates():
    namespace = hashing.namespace({"model": "m"})
    roots = [hashing.root(namespace, salt=salt) for salt in (None, "", "a", "b", "\ud800")]
    first_hashes = [hashes_of(range(8), root=root) for root in roots]
    assert len({sequence_hash for hashes in first_hashes for sequence_hash in hashes}) == 10


def test_tenant_is_named_by_its_salt_without_giving_it_away():
    salts = [None, "", "a", "b", "\ud800"]
    tenants = [hashing.tenant(salt) for salt in salts]
    assert len(set(tenants)) == len(salts)
    assert tenants[0] == b""
    assert hashing.tenant("a" * 40) == hashing.tenant("a" * 40)
    assert b"aaaa" not in hashing.tenant("a" * 40)


def test_namespace_isolates_and_ignores_the_order_of_facts():
    assert hashing.namespace({"a": 1, "b": [2]}) == hashing.namespace({"b": [2], "a": 1})
    worlds = [{}, {"a": 1}, {"a": "1"}, {"a": True}, {"a": None}, {"a": 1.5}, {"a": [1]}, {"a": {"a": 1}}, {"b": 1}]
    assert len({hashes_of(range(4), root=hashing.root(hashing.namespace(facts)))[0] for facts in worlds}) == len(worlds)


@pytest.mark.parametrize("fact", [math.nan, math.inf, b"bytes", {1: "x"}, {"x": [{2, 3}]}, object()])
def test_what_is_not_json_is_refused(fact):
    with pytest.raises(InvariantError, match=r"facts\.model"):
        hashing.namespace({"model": fact})
