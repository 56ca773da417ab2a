"""KV events without an engine: what routers make of them, whatever happens to the blocks."""

from __future__ import annotations

import hashlib
import time
from random import Random
from types import SimpleNamespace

import msgspec
import pytest

pytest.importorskip("vllm")

from routers import Dynamo, Llmd, as_arrays, decoded
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvbm.boundary import Boundary
from kvbm.config.schema import EventsSection
from kvbm.core.groups import Group, StateGroup
from kvbm.core.store import BlockStore
from kvbm.engines.vllm import announcer as module
from kvbm.engines.vllm import descriptions
from kvbm.engines.vllm.announcer import STEP_BLOCKS, Announcer
from kvbm.engines.vllm.cache_groups import TransferGroup
from kvbm.engines.vllm.descriptions import Descriptions, forms_of
from kvbm.events import BlocksRemoved, BlocksRestored, BlocksStored, TierCleared
from kvbm.types import Tier

SIZE = 4
PLAIN = TransferGroup(0, Group(SIZE), ("layer",), kind="full_attention")
WINDOW = TransferGroup(1, Group(SIZE, window_tokens=6), ("layer.1",), kind="sliding_window", sliding_window=6)
STATES = TransferGroup(2, StateGroup(2 * SIZE), ("layer.2",), kind="mamba")


def request_of(tokens, **facts):
    defaults = {"lora_request": None, "cache_salt": None, "mm_features": [], "prompt_embeds": None}
    return SimpleNamespace(all_token_ids=list(tokens), **{**defaults, **facts})


def chain_of(tokens, size=SIZE, suffix=b""):
    hashes, parent = [], b""
    for end in range(size, len(tokens) + 1, size):
        parent = hashlib.sha256(parent + repr(tokens[end - size : end]).encode()).digest()
        hashes.append(parent + suffix)
    return hashes


def prompt(name, blocks):
    random = Random(name)
    return [random.randrange(1000, 1 << 31) for _ in range(blocks * SIZE)]


def make(groups=(PLAIN,), *, clock=lambda: 0.0, expected_blocks=4096, **settings):
    forms = forms_of(groups, 32)
    return Announcer(Boundary(), EventsSection(**settings), forms, expected_blocks=expected_blocks, clock=clock)


def names(hashes):
    return {kv_cache_utils.maybe_convert_block_hash(one[:32]) for one in hashes}


def drained(announcer, *new):
    """Every event that comes until nothing is left to do."""
    found = announcer.take(new)
    while announcer.has_work():
        found += announcer.take([])
    return found


def published(found, *, is_map=True):
    """The batch as a router receives it."""
    batch = KVEventBatch(ts=0.0, events=found)
    return msgspec.msgpack.encode(batch if is_map else [0.0, as_arrays(found), None])


def described(announcer, tokens, *, request=None):
    hashes = chain_of(tokens)
    announcer.describe(request or request_of(tokens), 0, hashes, 0, len(hashes))
    return hashes


class Routers:
    """Both models, fed with what vLLM's encoder makes of the events, in both forms."""

    def __init__(self):
        self.dynamo, self.llmd, self.array_llmd = Dynamo(SIZE), Llmd(), Llmd()

    def accept(self, found):
        self.dynamo.accept_batch(published(found))
        self.llmd.accept_batch(published(found))
        self.array_llmd.accept_batch(published(found, is_map=False))

    def have(self, host, disk):
        for of_dynamo, of_llmd, expected in (("host", "cpu", names(host)), ("disk", "storage", names(disk))):
            assert self.dynamo.names(of_dynamo) == expected
            assert self.llmd.names(of_llmd) == self.array_llmd.names(of_llmd) == expected


# -- what a router learns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_map", [True, False])
def test_both_routers_find_a_prompt_in_host_memory_and_on_disk(is_map):
    announcer, tokens, dynamo, llmd = make(), prompt("a", 5), Dynamo(SIZE), Llmd()
    hashes = described(announcer, tokens)
    found = drained(announcer, BlocksStored(Tier.HOST, tuple(hashes[:3])), BlocksStored(Tier.DISK, tuple(hashes)))
    for router in (dynamo, llmd):
        router.accept_batch(published(found, is_map=is_map))
    assert dynamo.matched(tokens) == {"gpu": 0, "host": 3, "disk": 2}
    assert llmd.matched(tokens, SIZE) == [{"cpu", "storage"}] * 3 + [{"storage"}] * 2
    assert dynamo.dropped == llmd.dropped == {}


def test_an_event_has_every_field_that_describes_its_blocks():
    announcer, tokens = make(), prompt("a", 3)
    hashes = described(announcer, tokens)
    (first,) = drained(announcer, BlocksStored(Tier.HOST, (hashes[0],)))
    (rest,) = drained(announcer, BlocksStored(Tier.DISK, tuple(hashes[1:])))
    assert first.parent_block_hash is None
    parent, *others = [kv_cache_utils.maybe_convert_block_hash(one) for one in hashes]
    assert decoded(published([rest])) == [
        {
            "type": "BlockStored",
            "block_hashes": others,
            "parent_block_hash": parent,
            "token_ids": tokens[SIZE:],
            "block_size": SIZE,
            "lora_id": None,
            "medium": "STORAGE",
            "lora_name": None,
            "extra_keys": [None, None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
            **({"locality": "LOCAL"} if "locality" in module.STORED_FIELDS else {}),
        }
    ]


def test_a_fork_and_a_gap_start_events_of_their_own():
    announcer, tokens = make(), prompt("a", 6)
    other = tokens[: 2 * SIZE] + prompt("b", 2)
    hashes, fork = described(announcer, tokens), described(announcer, other)
    found = drained(announcer, BlocksStored(Tier.HOST, (*hashes[:3], hashes[4], *fork[2:])))
    assert [len(event.block_hashes) for event in found] == [3, 1, 2]
    expected = [tokens[: 3 * SIZE], tokens[4 * SIZE : 5 * SIZE], other[2 * SIZE :]]
    assert [event.token_ids for event in found] == expected


def test_a_block_that_nothing_describes_is_not_announced():
    announcer, hashes = make(), chain_of(prompt("a", 2))
    assert drained(announcer, BlocksStored(Tier.DISK, tuple(hashes)), BlocksRemoved(Tier.DISK, tuple(hashes))) == []


def test_a_request_that_meets_a_known_prefix_describes_only_the_rest(monkeypatch):
    announcer, tokens, parts = make(), prompt("a", 9), []
    hashes = described(announcer, tokens[: 6 * SIZE])
    drained(announcer, BlocksStored(Tier.HOST, tuple(hashes)))
    of = Descriptions.of
    monkeypatch.setattr(Descriptions, "of", lambda self, *a: parts.append((a[1], len(a[2]))) or of(self, *a))
    described(announcer, tokens)
    described(announcer, tokens[: 4 * SIZE])
    drained(announcer)
    assert parts == [(6, 3)]


def test_descriptions_of_blocks_that_are_never_stored_do_not_accumulate():
    announcer = make(expected_blocks=8)
    for number in range(50):
        described(announcer, prompt(number, 4))
        drained(announcer)
    assert sum(map(len, announcer._described)) <= 16  # memory, which nothing shows
    hashes = described(announcer, prompt("last", 4))
    assert drained(announcer, BlocksStored(Tier.HOST, tuple(hashes)))


# -- the same as vLLM's own events -------------------------------------------------------------------------------------


def vllm_request(name, tokens, **facts):
    init_none_hash(sha256)
    return Request(
        name,
        tokens,
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(SIZE, sha256),
        **facts,
    )


ADAPTER = LoRARequest("adapter", 3, "path")
IMAGES = [
    MultiModalFeatureSpec(
        data=None, modality="image", identifier=name * 64, mm_position=PlaceholderRange(offset=offset, length=5)
    )
    for name, offset in (("a", 2), ("b", 9))
]


@pytest.mark.parametrize(
    "facts",
    [
        *({}, {"lora_request": ADAPTER}, {"cache_salt": "salt"}, {"mm_features": IMAGES}),
        {"lora_request": ADAPTER, "cache_salt": "salt", "mm_features": IMAGES},
    ],
    ids=["plain", "adapter", "salt", "images", "everything"],
)
@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("blocks", [5, 20])
def test_our_events_equal_those_of_vllm_except_the_place(facts, begin, blocks):
    request = vllm_request("r", prompt("a", blocks), **facts)
    pool = BlockPool(32, enable_caching=True, hash_block_size=SIZE, enable_kv_cache_events=True)
    pool.cache_full_blocks(request, pool.get_new_blocks(blocks), begin, blocks, SIZE, 0)
    (theirs,) = pool.take_events()
    announcer = make()
    announcer.describe(request, 0, request.block_hashes, begin, blocks)
    (ours,) = drained(announcer, BlocksStored(Tier.HOST, tuple(request.block_hashes[begin:])))
    same = [name for name in BlockStored.__struct_fields__ if name not in PLACE]
    our_fields, their_fields = ({name: getattr(event, name) for name in same} for event in (ours, theirs))
    wire = msgspec.msgpack.encode  # in which a list and a tuple are equal
    assert wire(our_fields) == wire(their_fields)


PLACE = ("medium", "locality", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")


def test_names_can_be_bytes(monkeypatch):
    monkeypatch.setattr(descriptions, "maybe_convert_block_hash", lambda one: one)
    announcer, tokens = make(), prompt("a", 10)
    hashes = described(announcer, tokens)
    (event,) = drained(announcer, BlocksStored(Tier.HOST, tuple(hashes[1:])))
    assert (event.parent_block_hash, list(event.block_hashes)) == (hashes[0], hashes[1:])
    assert event.token_ids == tokens[SIZE:]
    (gone,) = drained(announcer, BlocksRemoved(Tier.HOST, tuple(hashes[1:3])))
    assert list(gone.block_hashes) == hashes[1:3]


def test_fields_that_the_installed_version_lacks_are_left_out(monkeypatch):
    monkeypatch.setattr(module, "STORED_FIELDS", module.STORED_FIELDS - {"locality", "kv_cache_spec_kind"})
    monkeypatch.setattr(module, "REMOVED_FIELDS", module.REMOVED_FIELDS - {"locality"})
    announcer = make()
    hashes = described(announcer, prompt("a", 2))
    found = drained(announcer, BlocksStored(Tier.DISK, tuple(hashes)), BlocksRemoved(Tier.DISK, tuple(hashes)))
    assert [event.locality for event in found] == [None, None]
    assert found[0].kv_cache_spec_kind is None


# -- several KV cache groups -------------------------------------------------------------------------------------------


def test_blocks_of_several_groups_have_their_group_and_its_size():
    announcer, tokens = make((PLAIN, WINDOW, STATES)), prompt("a", 4)
    request = request_of(tokens)
    full, window = chain_of(tokens, suffix=b"\0"), chain_of(tokens, suffix=b"\1")
    states = chain_of(tokens, 2 * SIZE, suffix=b"\2")
    announcer.describe(request, 0, full, 0, 4)
    announcer.describe(request, 1, window, 2, 4)
    announcer.describe(request, 2, states, 1, 2)
    found = drained(announcer, BlocksStored(Tier.HOST, (*full, *window[2:], states[1])))
    described_as = [(one.group_idx, one.kv_cache_spec_kind, one.kv_cache_spec_sliding_window) for one in found]
    assert described_as == [(0, "full_attention", None), (1, "sliding_window", 6), (2, "mamba", None)]
    assert [one.block_size for one in found] == [SIZE, SIZE, 2 * SIZE]
    assert [one.token_ids for one in found] == [tokens, tokens[2 * SIZE :], tokens[2 * SIZE :]]
    assert found[2].parent_block_hash in names(states[:1])
    removed = drained(announcer, BlocksRemoved(Tier.HOST, (full[3], states[1])))
    assert [(one.group_idx, set(one.block_hashes)) for one in removed] == [(0, names(full[3:])), (2, names(states[1:]))]


# -- the shared tier ---------------------------------------------------------------------------------------------------


def test_blocks_that_every_engine_has_are_not_announced():
    announcer = make()
    new = BlocksStored(Tier.SHARED, tuple(described(announcer, prompt("a", 2))))
    assert drained(announcer, new, TierCleared(Tier.SHARED)) == []


# -- removal, clear, repetition ----------------------------------------------------------------------------------------


def test_a_large_clear_takes_many_steps_and_what_is_stored_meanwhile_stays():
    announcer, routers = make(), Routers()
    old = [described(announcer, prompt(number, 50)) for number in range(60)]
    for hashes in old:
        routers.accept(drained(announcer, BlocksStored(Tier.HOST, tuple(hashes))))
    kept = old[7]
    found = announcer.take([TierCleared(Tier.HOST), BlocksStored(Tier.HOST, tuple(kept))])
    steps = 1
    while announcer.has_work():
        assert sum(len(one.block_hashes) for one in found) < 2 * STEP_BLOCKS
        routers.accept(found)
        found, steps = announcer.take([]), steps + 1
    routers.accept(found)
    assert steps >= 60 * 50 // STEP_BLOCKS
    routers.have(kept, [])


def test_after_vllm_has_announced_that_everything_is_cleared_our_blocks_are_announced_again():
    announcer, routers = make(), Routers()
    chains = [described(announcer, prompt(number, 3)) for number in range(4)]
    for hashes in chains:
        routers.accept(drained(announcer, BlocksStored(Tier.HOST, tuple(hashes))))
    everything = [one for hashes in chains for one in hashes]
    for router in (routers.dynamo, routers.llmd, routers.array_llmd):
        router.accept([{"type": "AllBlocksCleared"}])
    announcer.announce_again()
    routers.accept(drained(announcer))
    routers.have(everything, [])


def test_a_router_that_connects_late_learns_everything_within_the_interval():
    now = [0.0]
    announcer, late = make(repeat_s=60.0, clock=lambda: now[0]), Routers()
    chains = [described(announcer, prompt(number, 6)) for number in range(5)]
    for hashes in chains:
        drained(announcer, BlocksStored(Tier.HOST, tuple(hashes)), BlocksStored(Tier.DISK, tuple(hashes[:2])))
    now[0] = 59.0
    assert drained(announcer) == []
    now[0] = 61.0
    late.accept(drained(announcer))
    everything = [one for hashes in chains for one in hashes]
    late.have(everything, [one for hashes in chains for one in hashes[:2]])
    assert late.llmd.dropped["parent"] == 0, "a parent must come before its children"
    assert drained(announcer) == []


def test_an_exception_loses_the_events_of_one_batch_and_no_later_ones(monkeypatch):
    announcer = make()
    hashes, more = described(announcer, prompt("a", 2)), described(announcer, prompt("b", 2))
    drained(announcer)
    with monkeypatch.context() as patch:
        patch.setattr(Descriptions, "extents", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            announcer.take([BlocksStored(Tier.HOST, tuple(hashes))])
    (event,) = drained(announcer, BlocksStored(Tier.HOST, tuple(more)))
    assert set(event.block_hashes) == names(more)
    assert not announcer.has_work()


# -- blocks on disk ----------------------------------------------------------------------------------------------------


def test_blocks_of_an_earlier_process_are_announced_from_their_notes():
    earlier, later, routers = make(), make(), Routers()
    tokens = prompt("a", 4)
    request = request_of(tokens, lora_request=ADAPTER)
    hashes = described(earlier, tokens, request=vllm_like(request))
    drained(earlier)
    notes = earlier.notes_of(hashes)
    (event,) = drained(later, BlocksRestored(Tier.DISK, tuple(hashes), tuple(notes), True))
    assert (event.token_ids, event.lora_name, event.lora_id) == (tokens, "adapter", None)
    assert event.extra_keys == [["adapter"]] * 4 or event.extra_keys[0] is not None
    routers.accept([event])
    routers.have([], hashes)
    (loaded,) = drained(later, BlocksStored(Tier.HOST, tuple(hashes)))
    assert loaded.token_ids == tokens
    assert later.notes_of(hashes) != notes, "the number of the adapter is one of the earlier process"


def left_on_disk(blocks=4):
    """The hashes of a chain, and what is written next to its blocks."""
    announcer = make()
    hashes = described(announcer, prompt("a", blocks))
    drained(announcer)
    return hashes, announcer.notes_of(hashes)


def restored(hashes, notes, *, is_last=True):
    return BlocksRestored(Tier.DISK, tuple(hashes), tuple(notes), is_last)


@pytest.mark.parametrize("part", [1, 2, 128])
@pytest.mark.parametrize("order", [[3, 2, 1, 0], [1, 0, 3, 2], [2, 3, 0, 1]])
def test_a_block_of_an_earlier_process_is_announced_after_its_parent(order, part, monkeypatch):
    monkeypatch.setattr(module, "PART_BLOCKS", part)
    (hashes, notes), announcer, routers = left_on_disk(), make(), Routers()
    written, described = [hashes[index] for index in order], [notes[index] for index in order]
    assert drained(announcer, restored(written[:3], described[:3], is_last=False)) == [], "others may be their parents"
    routers.accept(drained(announcer, restored(written[3:], described[3:])))
    assert not routers.llmd.without_parent
    routers.have([], hashes)


def test_an_orphan_of_an_earlier_process_is_announced_too():
    (hashes, notes), announcer = left_on_disk(), make()
    (event,) = drained(announcer, restored(hashes[1:], notes[1:]))
    assert set(event.block_hashes) == names(hashes[1:])


@pytest.mark.parametrize("end", [BlocksRemoved, TierCleared])
def test_what_leaves_the_disk_before_all_is_found_is_not_announced(end):
    (hashes, notes), announcer = left_on_disk(), make()
    gone = TierCleared(Tier.DISK) if end is TierCleared else BlocksRemoved(Tier.DISK, tuple(hashes))
    assert drained(announcer, restored(hashes, notes, is_last=False), gone) == []
    assert drained(announcer, restored([], [])) == []
    assert announcer.notes_of(hashes) == [b""] * len(hashes)


@pytest.mark.parametrize("steps", [0, 1, 3, 50])
def test_the_next_process_may_find_the_blocks_again_while_they_are_being_announced(steps, monkeypatch):
    monkeypatch.setattr(module, "PART_BLOCKS", 2)
    monkeypatch.setattr(module, "STEP_BLOCKS", 2)
    (hashes, notes), announcer, routers = left_on_disk(20), make(), Routers()
    routers.accept(announcer.take([restored(hashes, notes)]))
    for _ in range(steps):
        routers.accept(announcer.take([]))
    routers.accept(drained(announcer, TierCleared(Tier.DISK), restored(hashes, notes)))
    routers.have([], hashes)


@pytest.mark.parametrize("note", [b"\x91" * 2000 + b"\x01", b"\x93\x01\xa1a\xc0", b"\xff" * 30])
def test_a_damaged_note_of_one_block_leaves_the_others(note):
    (hashes, notes), announcer = left_on_disk(), make()
    notes[-1] += note
    found = drained(announcer, restored(hashes, notes))
    assert {name for event in found for name in event.block_hashes} >= names(hashes[:3])
    assert announcer.boundary.faults == 0


@pytest.mark.parametrize("length", [1, 8, 20_000])
def test_the_time_per_block_does_not_grow_with_what_is_left_on_disk(length):
    """20,000 blocks take a tenth of a second; with work that grows with the square, it was more than 10 s."""
    announcer = make()
    count = 20_000
    hashes = [number.to_bytes(32, "big") for number in range(1, count + 1)]
    tokens, root = bytes(4 * SIZE), announcer._forms.all[0]._form  # the first byte of a note
    notes = [
        bytes((root | (index % length > 0),)) + (hashes[index - 1][-8:] if index % length else bytes(8)) + tokens
        for index in range(count)
    ]
    began_s = time.process_time()
    assert sum(len(event.block_hashes) for event in drained(announcer, restored(hashes, notes))) == count
    assert time.process_time() - began_s < 5


def vllm_like(request):
    return SimpleNamespace(**vars(request))


@pytest.mark.parametrize("note", [b"", b"x", bytes(100), b"\x41" + bytes(24), b"\x43" + bytes(24)])
def test_a_note_of_another_form_is_not_believed(note):
    announcer, hashes = make(), chain_of(prompt("a", 1))
    is_ours = note[:1] == b"\x41"  # a parent with the name 0, and tokens 0: the right form
    assert len(drained(announcer, BlocksRestored(Tier.DISK, tuple(hashes), (note,), True))) == int(is_ours)


def test_damaged_extras_in_a_note_are_not_believed():
    form, tokens = Descriptions(PLAIN, 32), prompt("a", 1)
    (note,) = form.of(request_of(tokens), 0, chain_of(tokens), None)
    assert form.restored(note) == note
    for extras in (b"\xc1", msgspec.msgpack.encode(5), msgspec.msgpack.encode([1]), b"\x93"):
        assert form.restored(note + extras) is None


# -- any sequence of events --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_replayed_events_equal_what_each_tier_has(seed, monkeypatch):
    monkeypatch.setattr(module, "PART_BLOCKS", 3)
    monkeypatch.setattr(module, "STEP_BLOCKS", 8)
    random, tiers = Random(seed), Tiers()
    for _ in range(300):
        tiers.act(random)
        if random.random() < 0.3:
            tiers.take()
    tiers.rest()


def in_device_memory(tokens, hashes):
    """The event of vLLM itself. llm-d can name a block only if it has heard of its parent."""
    facts = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    engine_names = [kv_cache_utils.maybe_convert_block_hash(one) for one in hashes]
    return BlockStored(engine_names, None, tokens, SIZE, None, "GPU", None, **facts)


class Tiers:
    """Two real stores of a few blocks, conversations with common prefixes, and what routers think of them."""

    def __init__(self):
        self.announcer, self.routers = make(), Routers()
        self.host = BlockStore(12, tier=Tier.HOST, hash_bytes=32)
        self.disk = BlockStore(20, tier=Tier.DISK, hash_bytes=32)
        self.in_device_memory = set()
        self.tokens = {}

    def act(self, random):
        actions = [self.compute] * 5 + [self.write] * 4 + [self.load] * 3 + [self.clear, self.repeat, self.lose]
        random.choice(actions)(random)

    def conversation(self, random):
        tokens = prompt(random.randrange(3), 2) + prompt(f"end {random.randrange(6)}", random.randrange(1, 4))
        hashes = chain_of(tokens)
        parents = [None, *hashes]
        for index, one in enumerate(hashes):
            self.tokens[one] = (parents[index], tuple(tokens[index * SIZE : (index + 1) * SIZE]))
        return tokens, hashes

    def compute(self, random):
        """A request computes its prompt, which vLLM announces; what host memory lacks is stored there."""
        tokens, hashes = self.conversation(random)
        self.routers.accept([in_device_memory(tokens, hashes)])
        self.in_device_memory |= names(hashes)
        self.announcer.describe(request_of(tokens), 0, hashes, 0, len(hashes))
        self.put(self.host, [hashes[index] for index in self.host.missing(hashes)])

    def put(self, store, hashes):
        slots = store.allocate(len(hashes))
        if slots is not None:
            slots.register(hashes).release()

    def write(self, random):
        """Host memory's oldest blocks go to disk."""
        oldest = list(self.host.oldest(random.randrange(1, 6)))
        notes = self.announcer.notes_of(oldest)
        assert len(notes) == len(oldest)
        self.put(self.disk, [oldest[index] for index in self.disk.missing(oldest)])

    def load(self, random):
        tokens, hashes = self.conversation(random)
        count = self.disk.match(hashes)
        self.announcer.describe(request_of(tokens), 0, hashes, 0, count)
        with self.disk.pin_prefix(hashes[:count]):
            self.put(self.host, [hashes[index] for index in self.host.missing(hashes[:count])])

    def clear(self, random):
        random.choice((self.host, self.disk)).reset()

    def lose(self, random):
        store = random.choice((self.host, self.disk))
        store.forget(list(store.oldest(1)))

    def repeat(self, random):
        self.announcer.announce_again()

    def take(self):
        self.routers.accept(self.announcer.take(self.disk.take_events() + self.host.take_events()))

    def rest(self):
        self.take()
        while self.announcer.has_work():
            self.take()
        live = {tier: {one for one in self.tokens if store.contains(one)} for tier, store in self.stores()}
        self.routers.have(live["host"], live["disk"])
        for router in (self.routers.dynamo, self.routers.llmd):
            assert router.names("gpu") == self.in_device_memory, "a clear of ours is none of device memory"
        for tier, hashes in live.items():
            for one in hashes:
                parent, tokens = self.tokens[one]
                (name,) = names([one])
                known = None if parent is None else next(iter(names([parent])))
                assert self.routers.dynamo.tiers[tier][name] == (known, tokens)

    def stores(self):
        return ("host", self.host), ("disk", self.disk)
