"""Images and sounds in a real model: no name decides what is loaded, and honest repeats hit.

One process starts engines one after the other on the same disk directory or the same shared directory, which is what a
restart and a second engine do. Every answer is compared with that of an engine without any cache.
"""

import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from engine_process import EngineProcess
from media_engine import MediaEngine, MediaRequest
from media_models import media_model
from pairs import Faults
from traffic import assert_equal
from vllm_server import CONNECTOR, wait_until_old

pytestmark = pytest.mark.timeout(600)
SIZE = 32  # tokens of a block
ENGINE = {"dtype": "float32", "block_size": SIZE, "max_model_len": 1024, "num_gpu_blocks_override": 60}
COUNTED = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}  # vLLM then numbers the media
HEX = "0a" * 32
A, B = 1, 2  # images
ASK = MediaRequest(7, (A,))


@pytest.fixture(scope="module")
def media_process(tmp_path_factory):
    wait_until_old(media_model("image"), media_model("audio"))
    directory = tmp_path_factory.mktemp("media")
    with EngineProcess(directory, Faults(directory).path, kind=MediaEngine) as engine:
        yield engine


@pytest.fixture(scope="module")
def truth(media_process):
    """What an engine without any cache says, by request without names and by arguments; each is asked once."""
    known = {}

    def tell(requests, modality="image", **arguments):
        key = modality, repr(arguments)
        asked = {replace(request, names=()) for request in requests}
        missing = sorted(asked - known.setdefault(key, {}).keys(), key=repr)
        if missing:
            media_process.start(modality, **ENGINE | arguments | COUNTED)
            known[key] |= dict(zip(missing, media_process.answer(missing, concurrency=1), strict=True))
            media_process.stop()
        return {request: known[key][replace(request, names=())] for request in requests}

    return tell


def on_disk(directory):
    disk = {"blocks": 400, "directory": str(directory)}
    return {
        "tiers": {"host": {"blocks": 200}, "disk": disk},
        "offload": {"to_disk": "always"},
        "onboard": {"policy": "always"},
    }


def on_store(directory):
    return {
        "tiers": {"host": {"blocks": 200}, "shared": {"url": f"file://{directory}/objects"}},
        "offload": {"to_shared": "always"},
        "onboard": {"policy": "always"},
    }


def objects_in(cache):
    """The files of the objects of a store; this file if there is no store."""
    url = cache["tiers"].get("shared", {}).get("url")
    if url is None:
        return [Path(__file__)]
    return [one for one in Path(url.removeprefix("file://")).rglob("*") if not one.suffix]


def asked(engine, cache, requests, modality="image", **arguments):
    """The answers of a new engine, one request after the other, and how many tokens kvbm loaded for them."""
    engine.start(modality, connector=CONNECTOR, cache=cache, **ENGINE | arguments)
    said = {}
    for request in requests:
        (said[request],) = engine.answer([request])
        engine.rest()
    deadline_s = time.monotonic() + 10
    while not any(map(Path.is_file, objects_in(cache))) and time.monotonic() < deadline_s and requests[0].tail > 100:
        engine.answer([requests[0]])  # steps bring blocks to the store
    totals = engine.totals()
    engine.stop()
    assert totals["faults"] == 0, totals
    return said, totals["hits"]


def repeated(engine, place, request, least, modality="image", **arguments):
    """Ask until an engine loads at least so many tokens: on a busy machine a tier may be off for a moment, or the
    engine before has ended before all was written."""
    for _ in range(4):
        said, hits = asked(engine, place, [request], modality, **arguments)
        if hits >= least:
            return said
    raise AssertionError(f"{hits} tokens are loaded, not {least}")


@pytest.mark.parametrize("place", [on_disk, on_store])
def test_an_honest_repeat_hits_behind_its_image_in_the_next_engine(media_process, truth, tmp_path, place):
    ask = replace(ASK, media=(A, B), tail=250 if place is on_store else 20)  # an object of the store has 256 tokens
    said, hits = asked(media_process, place(tmp_path), [ask])
    assert_equal(said, truth(said))
    assert hits == 0
    said = repeated(media_process, place(tmp_path), ask, 4 * SIZE)
    assert_equal(said, truth(said))
    other = replace(ask, media=(A, 3))
    said = repeated(media_process, place(tmp_path), other, 3 * SIZE)  # text and the first image are the same
    assert_equal(said, truth(said))


@pytest.mark.parametrize(
    ("place", "names", "arguments"),
    [
        (on_disk, (), COUNTED),
        (on_store, (), COUNTED),
        (on_disk, (HEX,), {}),
        (on_disk, ("short",), {}),
        (on_disk, ("identified",), {}),
    ],
)
def test_another_image_under_the_same_name_is_answered_right_by_the_next_engine(
    media_process, truth, tmp_path, place, names, arguments
):
    tail = 250 if place is on_store else 20
    for image in (A, B):
        ask = replace(ASK, media=(image,), names=names, tail=tail, has_options=names != (HEX,))
        if names == ("identified",):  # the name is in the image
            ask = replace(ask, media=(f"identified {image}",), names=())
        said, _ = asked(media_process, place(tmp_path), [ask], **arguments)
        assert_equal(said, truth(said))


def test_a_request_that_gives_one_image_the_name_of_another_poisons_no_later_engine(media_process, truth, tmp_path):
    """The first engine may answer wrong, as vLLM does alone: its own caches go by the name."""
    asked(media_process, on_disk(tmp_path), [replace(ASK, media=(image,), names=(HEX,)) for image in (B, A)])
    said, _ = asked(media_process, on_disk(tmp_path), [replace(ASK, names=(HEX,))])
    assert_equal(said, truth(said))


def test_an_image_in_a_cache_in_shared_memory_is_not_kept_and_text_is(media_process, truth, tmp_path):
    for expected in (0, SIZE):
        said, hits = asked(media_process, on_disk(tmp_path), [ASK], mm_processor_cache_type="shm")
        assert_equal(said, truth(said))
        assert hits // SIZE <= 2
        assert hits >= expected


@pytest.mark.soak
def test_requests_that_end_before_their_digest_is_known_poison_nothing(media_process, truth, tmp_path):
    """A request is aborted, or the engine stops, while the digest of its image is computed."""
    asks = [replace(ASK, text=text, media=(A,), names=(f"{HEX}{text}",)) for text in range(6)]
    others = [replace(ask, media=(B,)) for ask in asks[:3]]
    media_process.slow_digests(0.3)
    try:
        media_process.start("image", connector=CONNECTOR, cache=on_disk(tmp_path), **ENGINE)
        aborted = [media_process.add(ask) for ask in others]
        media_process.step(2)
        for name in aborted:
            media_process.abort(name)
        answers = media_process.answer(asks[3:])
        said = dict(zip(asks[3:], answers, strict=True))
        for ask in asks[:3]:
            media_process.add(ask)
        media_process.step(4)
        media_process.stop()
    finally:
        media_process.slow_digests(0)
    said |= asked(media_process, on_disk(tmp_path), asks)[0]
    assert_equal(said, truth(said))
    said = repeated(media_process, on_disk(tmp_path), asks[4], 2 * SIZE)
    assert_equal(said, truth(said))


@pytest.mark.soak
def test_embeddings_of_a_client_hit_by_their_content_only(media_process, truth, tmp_path):
    ask = MediaRequest(7, ("embeds 1",), (HEX,), modality="audio")
    for request, least in ((ask, 0), (ask, 2 * SIZE), (replace(ask, media=("embeds 2",)), 0)):
        said = repeated(media_process, on_disk(tmp_path), request, least, "audio", enable_mm_embeds=True)
        assert_equal(said, truth(said, "audio", enable_mm_embeds=True))


def test_a_sound_hits_by_its_content_only(media_process, truth, tmp_path):
    ask = MediaRequest(7, (A,), (HEX,), modality="audio")
    for request, least in ((ask, 0), (ask, 3 * SIZE), (replace(ask, media=(B,)), 0)):
        said = repeated(media_process, on_disk(tmp_path), request, least, "audio")
        assert_equal(said, truth(said, "audio"))


# -- many --------------------------------------------------------------------------------------------------------------

MEDIA, STARTS = 9, 3
NAMES = ("short", HEX, "renderer0-mm-1-image-0", "f" * 128)


def requests_of(start, modality):
    """Names of one engine stand for one content each, and for another one in each engine."""
    source = Random(f"{start} {modality}")
    for number in range(20):
        content = source.randrange(MEDIA)
        media = (content, (content + 1) % MEDIA)[: 1 + number % 2]
        names = tuple(f"{NAMES[number % 4]}{(one + start) % MEDIA}"[-128:] for one in media)
        yield MediaRequest(number % 3, media, names if number % 5 else (), modality)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("modality", "place", "arguments"),
    [
        ("image", on_disk, {}),
        ("image", on_store, {}),
        ("image", on_disk, COUNTED),
        ("image", on_disk, {"mm_processor_cache_gb": 0}),
        ("image", on_disk, {"mm_processor_kwargs": {"do_normalize": True}}),
        ("image", on_disk, {"mm_processor_cache_type": "shm"}),
        ("audio", on_disk, {}),
        ("audio", on_store, COUNTED),
    ],
)
def test_many_media_under_changing_names_are_answered_right(media_process, truth, tmp_path, modality, place, arguments):
    found = 0
    for start in range(STARTS):
        said, hits = asked(media_process, place(tmp_path), list(requests_of(start, modality)), modality, **arguments)
        comparison = assert_equal(said, truth(said, modality))
        found += hits
        print(f"{modality} {place.__name__} {arguments} start {start}: {comparison}, {hits} tokens loaded")
    assert found or place is on_store
