"""The counts of the frequency filter: what raises them, what takes them away, and how many there may be."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvbm.core.admission import FrequencyFilter


def blocks(text):
    return [letter.encode() * 16 for letter in text]


def make(threshold=2, max_entries=100):
    return FrequencyFilter(threshold=threshold, max_entries=max_entries)


def test_a_block_is_let_through_at_its_first_hit_after_registration():
    admitting = make()
    assert admitting.register(blocks("ab")) == []
    assert admitting.hit(blocks("a")) == blocks("a")
    assert admitting.hit(blocks("a")) == []  # it was let through before
    assert [admitting.count(block) for block in blocks("ab")] == [4, 1]


def test_a_block_that_decayed_needs_its_hits_again():
    admitting = make()
    admitting.register(blocks("a"))
    admitting.hit(blocks("a"))
    admitting.decay()
    assert admitting.hit(blocks("a")) == blocks("a")
    for _ in range(2):
        admitting.decay()
    assert admitting.count(blocks("a")[0]) == 0
    assert admitting.hit(blocks("a")) == []


def test_a_block_that_comes_back_while_its_count_lives_is_let_through_at_once():
    admitting = make()
    admitting.register(blocks("a"))
    admitting.hit(blocks("a"))
    assert admitting.register(blocks("ab")) == blocks("a")


def test_the_threshold_decides():
    admitting = make(threshold=4)
    admitting.register(blocks("a"))
    assert [admitting.hit(blocks("a")) for _ in range(3)] == [[], blocks("a"), []]
    assert make(threshold=1).register(blocks("a")) == blocks("a")


def test_of_too_many_the_one_not_asked_for_longest_is_forgotten():
    admitting = make(max_entries=2)
    admitting.register(blocks("ab"))
    admitting.hit(blocks("a"))
    admitting.register(blocks("c"))
    assert [admitting.count(block) for block in blocks("abc")] == [2, 0, 1]


def test_what_has_decayed_leaves_the_table():
    admitting = make()
    admitting.register(blocks("abcdefgh"))
    admitting.decay()
    admitting.register(blocks("z"))
    assert len(admitting._ends) == 1


@given(st.lists(st.one_of(st.just("decay"), st.tuples(st.sampled_from("rh"), st.sampled_from("abcd"))), max_size=40))
def test_counts_are_those_of_a_table_that_decays_entry_by_entry(actions):
    admitting, counts = make(), Counter()
    for action in actions:
        if action == "decay":
            admitting.decay()
            counts = Counter({name: count - 1 for name, count in counts.items() if count > 1})
            continue
        kind, name = action
        before = counts[name]
        counts[name] = max(1, before) if kind == "r" else max(1, 2 * before)
        let_through = (admitting.register if kind == "r" else admitting.hit)(blocks(name))
        assert bool(let_through) == (counts[name] >= 2 and (kind == "r" or before < 2))
        assert {name: admitting.count(blocks(name)[0]) for name in "abcd"} == {name: counts[name] for name in "abcd"}
