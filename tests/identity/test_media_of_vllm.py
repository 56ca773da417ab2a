"""What names the blocks of requests with media, without vLLM. tests/vllm/test_media.py has a real model."""

import threading
import time
from collections import UserDict
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from kvbm.engines.vllm import media as module
from kvbm.engines.vllm import media_content
from kvbm.engines.vllm.media import MAX_IDENTIFIER_LENGTH, UNLIMITED, Identifier, Media
from kvbm.engines.vllm.media_content import UnreadableContent, digest_of

torch = pytest.importorskip("torch")
HASH = b"h" * 32
DEADLINE_S = 60


class Item(UserDict):
    """Like vLLM's MultiModalKwargsItem. It can hold a thread that digests it until `go` is set."""

    def __init__(self, *args, go=None, **kwargs):
        self.go = go
        self.reads = 0
        super().__init__(*args, **kwargs)

    def __iter__(self):
        if threading.current_thread() is not threading.main_thread():
            self.reads += 1
            if self.go is not None:
                assert self.go.wait(DEADLINE_S)
        return super().__iter__()


@dataclass
class Flat:
    slices: tuple
    dim: int = 0


@dataclass
class Element:
    data: object
    field: object = field(default_factory=lambda: Flat(()))


def picture(value, go=None):
    return Item({"pixel_values": Element(torch.full((2, 3), float(value)))}, go=go)


def feature(data, identifier="x", offset=40, length=20, mask=None, modality="image"):
    position = SimpleNamespace(offset=offset, length=length, is_embed=mask)
    return SimpleNamespace(data=data, identifier=identifier, mm_position=position, modality=modality)


def request(*features, name="r", resumable=False, params=None, adapter=None):
    return SimpleNamespace(
        request_id=name,
        mm_features=list(features),
        resumable=resumable,
        kv_transfer_params=params,
        lora_request=adapter,
    )


def adapter(name, number):
    return SimpleNamespace(lora_name=name, lora_int_id=number)


@pytest.fixture
def media():
    made = Media(32)
    yield made
    made.close()


def contents(found):
    return [one.content for one in found._media]  # a request shows only what follows from them


def known(found):
    """Wait until every digest of a request is known."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not all(one.is_known for one in contents(found)):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    return found


def add(media, *features, **facts):
    return known(media.add(request(*features, **facts)))


# -- the content -------------------------------------------------------------------------------------------------------

BASE = {"pixel_values": torch.arange(6, dtype=torch.float32).reshape(2, 3), "sizes": [torch.tensor([7, 8])]}
OTHERS = {
    "one bit": BASE | {"pixel_values": torch.tensor([[0.0, 1, 2], [3, 4, 5.0000005]])},
    "the shape": BASE | {"pixel_values": BASE["pixel_values"].reshape(3, 2)},
    "the type of the same bytes": BASE | {"pixel_values": BASE["pixel_values"].view(torch.int32)},
    "the type": BASE | {"pixel_values": BASE["pixel_values"].double()},
    "a name": {"pixel_value": BASE["pixel_values"], "sizes": BASE["sizes"]},
    "one more": BASE | {"grid": torch.zeros(1)},
    "one more that is empty": BASE | {"grid": torch.zeros(0)},
    "less": {"pixel_values": BASE["pixel_values"]},
    "the nesting": BASE | {"sizes": torch.tensor([[7, 8]])},
    "where a list ends": BASE | {"sizes": [torch.tensor([7]), torch.tensor([8])]},
    "one more in a list": BASE | {"sizes": [torch.tensor([7, 8]), torch.tensor([9])]},
    "the last of a list": BASE | {"sizes": [torch.tensor([7, 8]), torch.tensor([10])]},
    "exchanged": {"pixel_values": BASE["sizes"], "sizes": BASE["pixel_values"]},
    "an array": BASE | {"pixel_values": BASE["pixel_values"].numpy()},
    "a number": BASE | {"fps": 2.0},
    "another number": BASE | {"fps": 2},
    "a text": BASE | {"fps": "2"},
    "the sign of zero": BASE | {"pixel_values": torch.tensor([[-0.0, 1, 2], [3, 4, 5]])},
    "its way of joining": BASE | {"sizes": Element(BASE["sizes"][0])},
    "its dimension of joining": BASE | {"sizes": Element(BASE["sizes"][0], Flat((), dim=1))},
}


def test_two_contents_that_differ_anywhere_have_different_digests():
    digests = {name: digest_of(data, "image") for name, data in {"base": BASE, **OTHERS}.items()}
    digests["the modality"] = digest_of(BASE, "audio")
    assert len(set(digests.values())) == len(digests)


def test_equal_contents_have_the_same_digest_however_they_lie_in_memory():
    wide = torch.zeros(2, 6)
    wide[:, ::2] = BASE["pixel_values"]
    other = Item({"sizes": (torch.tensor([7, 8]),), "pixel_values": wide[:, ::2]})
    assert digest_of(other, "image") == digest_of(BASE, "image")


def test_the_neighbours_of_a_medium_in_its_request_are_no_part_of_its_content():
    one, other = (Element(torch.ones(2), Flat(slices)) for slices in (((0, 2),), ((0, 2), (2, 9))))
    assert digest_of({"pixel_values": one}, "image") == digest_of({"pixel_values": other}, "image")


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"pixel_values": None},
        {"pixel_values": torch.zeros(0)},
        {"address": Element(4096), "monotonic_id": Element(3), "signature": Element([1, 2])},
        {"address": Element(4096), "pixel_values": torch.ones(2)},
        {"pixel_values": torch.ones(2, device="meta")},
        {"pixel_values": torch.ones(2, 2).to_sparse()},
        {"pixel_values": np.array([object()])},
        {"pixel_values": torch.ones(2), "more": object()},
        {"pixel_values": torch.ones(2), 7: torch.ones(2)},
    ],
)
def test_data_that_is_not_there_or_cannot_be_read_has_no_digest(data):
    with pytest.raises(UnreadableContent):
        digest_of(data, "image")


def test_data_that_contains_itself_has_no_digest():
    data = {"pixel_values": torch.ones(1)}
    data["more"] = data
    with pytest.raises(UnreadableContent, match="deeply"):
        digest_of(data, "image")


# -- names -------------------------------------------------------------------------------------------------------------


def test_blocks_in_front_of_the_first_medium_keep_their_names(media):
    found = add(media, feature(picture(1), offset=40))
    assert found.name(HASH, 32) == found.name(HASH, 40) == HASH
    assert found.name(HASH, 41) != HASH
    assert media.add(request()) is None


@pytest.mark.parametrize("identifier", ["x", "my picture", "0a" * 32, "renderer0-mm-1-image-0"])
def test_blocks_behind_a_medium_are_named_by_its_content_whatever_it_is_called(identifier):
    """Two engines, or two starts of one."""
    names = []
    for value in (1, 2, 1):
        media = Media(32)
        found = add(media, feature(picture(value), identifier))
        assert found.certain_tokens() == UNLIMITED
        names.append(found.name(HASH, 64))
        media.close()
    assert names[0] == names[2]
    assert len({*names, HASH}) == 3
    assert {len(name) for name in names} == {32}


def test_names_cover_the_place_of_a_medium_and_every_one_before(media):
    def name(*features, end=200):
        return add(media, *features).name(HASH, end)

    one, two = picture(1), picture(2)
    names = [
        name(feature(one)),
        name(feature(one, offset=41)),
        name(feature(one, length=21)),
        name(feature(one, mask=torch.ones(20, dtype=torch.bool))),
        name(feature(one, mask=torch.zeros(20, dtype=torch.bool))),
        name(feature(one), feature(two, "y", offset=70)),
        name(feature(two, "y"), feature(one, offset=70)),
        name(feature(one, modality="audio", identifier="z")),
    ]
    assert len(set(names)) == len(names)
    assert name(feature(one), feature(two, "y", offset=70), end=70) == names[0]
    assert name(feature(two, "y", offset=70), feature(one)) == names[5]


@pytest.mark.parametrize("hash_bytes", [16, 32, 64])
def test_names_have_the_length_of_the_hashes_of_vllm(hash_bytes):
    media = Media(hash_bytes)
    assert len(add(media, feature(picture(1))).name(b"h" * hash_bytes, 64)) == hash_bytes
    media.close()


# -- what is certain ---------------------------------------------------------------------------------------------------


def test_a_medium_without_its_content_keeps_only_what_is_in_front_of_it(media):
    for data in (None, Item({"address": Element(1)}), Item({"pixel_values": object()})):
        found = add(media, feature(picture(1), "good"), feature(data, f"bad {data}", offset=80))
        assert found.certain_tokens() == 80
        assert not found.is_waiting(media.now_s())


def test_an_identifier_with_two_contents_is_certain_for_neither_and_stays_so(media):
    first = add(media, feature(picture(1)))
    same = add(media, feature(picture(1)))
    assert first.certain_tokens() == same.certain_tokens() == UNLIMITED
    other = add(media, feature(picture(2)))
    again = add(media, feature(picture(1)))
    assert [one.certain_tokens() for one in (first, same, other, again)] == [40] * 4
    assert not again.is_waiting(media.now_s())
    assert add(media, feature(picture(1), "y")).certain_tokens() == UNLIMITED


def test_an_identifier_whose_first_content_is_unknown_is_not_certain_with_the_second_one(media):
    assert add(media, feature(None)).certain_tokens() == 40
    assert add(media, feature(picture(1))).certain_tokens() == 40


def test_an_identifier_with_two_contents_in_one_request_is_not_certain(media):
    found = add(media, feature(picture(1)), feature(picture(2), offset=70))
    assert found.certain_tokens() == 40


def test_while_a_digest_is_missing_nothing_is_certain_and_the_request_waits_for_a_time():
    now, go = [100.0], threading.Event()
    media = Media(32, clock=lambda: now[0])
    first = add(media, feature(picture(1)))
    slow = media.add(request(feature(picture(1, go))))
    assert first.certain_tokens() == slow.certain_tokens() == 40
    assert slow.is_waiting(now[0])
    assert not slow.is_waiting(now[0] + module.PATIENCE_S)
    go.set()
    known(slow)
    assert first.certain_tokens() == slow.certain_tokens() == UNLIMITED
    assert not slow.is_waiting(now[0])
    media.close()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (None, adapter("a", 1)),  # a client without adapter calls its image `a:x`
        (adapter("a:x", 2), adapter("a", 1)),
        (adapter("a", 1), adapter("a", 3)),  # loaded again, maybe with other weights
    ],
)
def test_an_identifier_with_one_content_and_two_encoders_is_not_certain(media, first, second):
    """vLLM caches encodings by `adapter:name`, if an adapter covers the encoder."""
    text = "a:x:y"
    before = add(media, feature(picture(1), text), adapter=first)
    assert before.certain_tokens() == UNLIMITED
    assert add(media, feature(picture(1), text), adapter=second).certain_tokens() == 40
    assert before.certain_tokens() == 40


def test_adapters_that_do_not_cover_the_encoder_share_an_identifier(media):
    for one in (None, adapter("a", 1), adapter("b", 2)):
        assert add(media, feature(picture(1), "0a" * 32), adapter=one).certain_tokens() == UNLIMITED


def test_a_digest_that_becomes_known_while_it_is_asked_for_is_not_lost():
    class Late:
        reads = 0
        digest = b"other"

        @property
        def is_known(self):
            self.reads += 1
            return self.reads > 1

    found = Identifier(digest=b"first")
    found.add(Late())
    assert not found.is_certain()
    assert not found.is_certain()
    assert found.is_doubtful


def test_a_request_does_not_wait_behind_a_medium_that_stays_uncertain(media):
    go = threading.Event()
    media.add(request(feature(None, "bad")))
    found = media.add(request(feature(picture(1), "bad"), feature(picture(2, go), "slow", offset=90)))
    assert not found.is_waiting(media.now_s())
    go.set()


def test_equal_objects_are_digested_once_and_changed_ones_again(media):
    data = picture(1)
    name = add(media, feature(data)).name(HASH, 64)
    reads = data.reads
    assert reads
    assert add(media, feature(data)).name(HASH, 64) == name
    assert data.reads == reads
    data["pixel_values"].data[0, 0] = 5
    assert add(media, feature(data)).certain_tokens() == 40
    assert data.reads == 2 * reads


def test_an_object_is_forgotten_with_the_last_use_of_it(media):
    add(media, feature(picture(1)))
    deadline_s = time.monotonic() + DEADLINE_S
    while media._digests._known:  # the thread lets it go after the digest is known
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_more_data_than_may_wait_gets_no_digest(media, monkeypatch):
    monkeypatch.setattr(media_content, "MAX_WAITING_BYTES", 100)
    go = threading.Event()
    waiting = [media.add(request(feature(picture(value, go), f"{value}"))) for value in range(5)]  # 24 bytes each
    more = media.add(request(feature(picture(9), "9")))
    assert contents(more)[0].is_known
    assert more.certain_tokens() == 40
    go.set()
    for found in waiting:
        assert known(found).certain_tokens() == UNLIMITED
    assert add(media, feature(picture(8), "8")).certain_tokens() == UNLIMITED


def test_without_threads_no_medium_is_certain(media, monkeypatch, caplog):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert media.add(request(feature(picture(1)))).certain_tokens() == 40
    assert "cannot start a thread" in caplog.text
    monkeypatch.undo()
    assert add(media, feature(picture(2), "next")).certain_tokens() == UNLIMITED


def test_media_that_another_engine_encodes_or_computes_are_not_certain(media):
    elsewhere = Media(32, encodes_here=False)
    assert add(elsewhere, feature(picture(1))).certain_tokens() == 40
    assert add(media, feature(picture(1), "a"), params={"do_remote_prefill": True}).certain_tokens() == 40
    assert add(media, feature(picture(1), "a")).certain_tokens() == 40
    assert add(media, feature(picture(1), "b"), params={"do_remote_decode": True}).certain_tokens() == UNLIMITED
    found = add(media, feature(picture(1), "c"))
    found.distrust()
    assert add(media, feature(picture(1), "c")).certain_tokens() == 40


def test_media_that_a_session_gets_later_are_noticed(media):
    session = request(feature(picture(1), "first"), name="s", resumable=True)
    known(media.add(session))
    later = add(media, feature(picture(1), "later"))
    media.look_again()
    assert later.certain_tokens() == UNLIMITED
    session.mm_features.append(feature(picture(2), "later", offset=90))
    media.look_again()
    assert later.certain_tokens() == 40
    last = add(media, feature(picture(1), "last"))
    session.mm_features.append(feature(picture(2), "last", offset=190))
    media.end(session)
    media.look_again()
    assert last.certain_tokens() == 40


def test_an_identifier_that_has_left_the_table_is_not_certain_again(media, monkeypatch):
    monkeypatch.setattr(module, "MAX_IDENTIFIERS", 3)
    old = add(media, feature(picture(1), "old"))
    for value in range(3):
        assert add(media, feature(picture(value), f"new {value}")).certain_tokens() == UNLIMITED
    assert old.certain_tokens() == 40
    assert add(media, feature(picture(1), "old")).certain_tokens() == 40
    assert len(media._identifiers) == 3  # memory, which nothing shows


def test_the_identifier_that_was_used_last_stays_in_the_table(media, monkeypatch):
    monkeypatch.setattr(module, "MAX_IDENTIFIERS", 3)
    for value in range(20):
        add(media, feature(picture(value), f"new {value}"))
        assert add(media, feature(picture(77), "often")).certain_tokens() == UNLIMITED


def test_an_identifier_of_any_length_is_handled_and_a_long_one_is_not_certain(media):
    for identifier in ("", "x" * MAX_IDENTIFIER_LENGTH, "\ud800"):
        assert add(media, feature(picture(1), identifier)).certain_tokens() == UNLIMITED
    assert add(media, feature(picture(1), "x" * 30_000_000)).certain_tokens() == 40
    assert len(media._identifiers) == 3  # memory, which nothing shows
