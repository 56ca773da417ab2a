"""Images and sounds in chat requests to `kvbm serve`: every answer is that of the same vLLM without kvbm.

Each scenario starts an engine several times, or two at once on one store. Names that clients give to media stand for
another content in every engine. Some requests repeat those of earlier engines, and must hit. `nox -s soak` runs all;
with KVBM_WRITE_RESULTS=1 the counts are written to bench/results/<machine>-media.json.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from random import Random
from typing import Any

import httpx
import pytest
from kept_results import KeptResults, row_of
from media_contents import FORMS
from media_models import media_adapter, media_model
from media_serving import Ask, served
from traffic import assert_equal
from vllm_server import EXTERNAL_HITS, wait_until_old

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(0)]
COUNTED = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}  # vLLM then numbers the media
TRUTH = COUNTED | {"num_gpu_blocks_override": 100}
ON_WHITE = {"media_io_kwargs": {"image": {"rgba_background_color": [255, 255, 255]}}}
FREE = {"trust_request_mm_kwargs": True}
PICTURES = tuple(f"{form} {seed}" for form in FORMS for seed in (1, 2))
SOUNDS = tuple(f"16000 {seed}" for seed in range(9))  # vLLM requires torchaudio for other sampling rates
NAMES = ("short", "0a" * 32, "renderer0-mm-1-image-0", "f" * 128, "")
OPTIONS = ("", "", '{"do_normalize": false}', '{"image_mean": [0.1, 0.2, 0.3]}')
BETWEEN_S = 0.2


@dataclass(frozen=True)
class Scenario:
    """`arguments` change answers, so the reference has them too; `own` are of the tested engine. `tail` in words."""

    modality: str = "image"
    is_shared: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    contents: tuple[str, ...] = PICTURES
    options: tuple[str, ...] = ("",)
    models: tuple[str, ...] = ("m",)
    starts: int = 2
    concurrency: int = 3
    at_once: int = 1
    tail: int = 40
    hits: bool = True  # of repeats, in later engines
    leaves: bool = False  # requests are given up, and others are under way when the engine stops


SCENARIOS = {
    "names": Scenario(arguments=FREE, options=OPTIONS, starts=3, leaves=True),
    "numbered": Scenario(arguments=ON_WHITE, own=COUNTED),
    "named, with options": Scenario(arguments=ON_WHITE),
    "numbered, prefixes cached": Scenario(arguments=FREE, own={"mm_processor_cache_gb": 0}),
    "no prefix caching": Scenario(arguments=FREE, own={"enable_prefix_caching": False}),
    "two engines on a store": Scenario(arguments=FREE, is_shared=True, at_once=2, tail=250),
    "two engines on a store, numbered": Scenario(arguments=FREE, is_shared=True, at_once=2, tail=250, own=COUNTED),
    "shared memory": Scenario(arguments=FREE, own={"mm_processor_cache_type": "shm"}, hits=False),
    # One request at a time: vLLM 0.32 on a CPU applies an adapter to requests without one in the same batch.
    "adapters": Scenario(arguments={"adapters": "text"}, models=("m", "a", "b"), starts=1, concurrency=1),
    "adapters of the encoder": Scenario(
        arguments={"adapters": "vision"}, models=("m", "a", "b"), starts=1, concurrency=1
    ),
    "sounds": Scenario("audio", contents=SOUNDS),
    "sounds, numbered": Scenario("audio", contents=SOUNDS, own=COUNTED),
}


def requests_of(name: str, scenario: Scenario, engine: int) -> tuple[list[Ask], list[Ask]]:
    """Return those that every engine gets first, in this order, and 24 of this engine alone.

    In one engine, a name stands for one content: vLLM itself answers wrong otherwise."""
    source = Random(name)
    same = [_ask(source, scenario, -1, number) for number in range(6)]
    source = Random(f"{name} {engine}")
    return same, [_ask(source, scenario, engine, number) for number in range(24)]


def _ask(source: Random, scenario: Scenario, engine: int, number: int) -> Ask:
    contents = list(scenario.contents)
    first = source.choice(contents)
    media = (first, source.choice(contents))[: 1 + number % 2]
    if number % 4 == 3:
        media = media[::-1]
    names = tuple(_name(scenario, one, engine, number) for one in media)
    options = source.choice(scenario.options)
    model = scenario.models[number % len(scenario.models)]
    return Ask(number % 3, media, names, scenario.modality, scenario.tail, options, model)


def _name(scenario: Scenario, content: str, engine: int, number: int) -> str:
    """Content 5 has in engine 1 the name that content 6 has in engine 0."""
    kind = NAMES[number % len(NAMES)]
    if not kind or engine < 0:
        return kind and f"same {content}"
    place = (scenario.contents.index(content) + engine) % len(scenario.contents)
    return f"{kind}{place:02x}"[-128:] if kind != "0a" * 32 else f"{place:02x}" * 32


def tiers_of(scenario: Scenario, directory) -> dict[str, Any]:
    if "adapters" in scenario.arguments:  # KV of adapters does not outlive the engine
        return {"tiers": {"host": {"blocks": 600}}}
    if scenario.is_shared:
        shared = {"url": f"file://{directory}/objects"}
        return {"tiers": {"host": {"blocks": 400}, "shared": shared}, "offload": {"to_shared": "always"}}
    disk = {"blocks": 3000, "directory": f"{directory}/disk"}
    return {"tiers": {"host": {"blocks": 100}, "disk": disk}, "offload": {"to_disk": "always"}}


@pytest.fixture(scope="module")
def results():
    return KeptResults("media", "nox -s vllm -- tests/vllm/test_media_over_http.py -m soak", key="scenario")


@pytest.fixture(scope="module")
def arguments_of(tmp_path_factory) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What vLLM is started with."""
    root = tmp_path_factory.mktemp("adapters")
    for kind in ("text", "vision"):
        for name in "ab":
            media_adapter(f"{kind} {name}", root / kind / name, covers_vision=kind == "vision")
    wait_until_old(media_model("image"), media_model("audio"), root)

    def translate(arguments):
        rest = {name: value for name, value in arguments.items() if name != "adapters"}
        if (kind := arguments.get("adapters")) is not None:
            modules = [f"{name}={root / kind / name}" for name in "ab"]
            rest |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "lora_modules": modules}
            rest |= {"enable_tower_connector_lora": True} if kind == "vision" else {}
        return rest

    return translate


@pytest.fixture(scope="module")
def truth(tmp_path_factory, arguments_of):
    """What vLLM says without kvbm and without any cache. Asked of one server for all scenarios with its arguments."""
    known: dict[str, dict[Ask, Any]] = {}

    def tell(scenario, asked):
        key = f"{scenario.modality} {scenario.arguments}"
        if key not in known:
            alike = {n: s for n, s in SCENARIOS.items() if f"{s.modality} {s.arguments}" == key}
            wanted = {
                ask.without_names()
                for name, one in alike.items()
                for engine in range(one.starts * one.at_once)
                for some in requests_of(name, one, engine)
                for ask in some
            }
            directory = tmp_path_factory.mktemp("truth")
            with served(directory, None, scenario.modality, **arguments_of(scenario.arguments), **TRUTH) as client:
                known[key] = {ask: client.ask_media(ask) for ask in sorted(wanted, key=repr)}
        return {ask: known[key][ask.without_names()] for ask in asked}

    return tell


def talk(scenario, client, asked) -> dict[Ask, Any]:
    """The answers to all, each of `same` alone, others at the same time, and twice, so that G1 forgets meanwhile."""
    same, others = asked
    said = {ask: client.ask_media(ask) for ask in same}
    with ThreadPoolExecutor(scenario.concurrency) as pool:
        said |= zip(others, pool.map(client.ask_media, others), strict=True)
    if scenario.leaves:
        for number, ask in enumerate(others[:8]):
            with contextlib.suppress(httpx.TimeoutException):
                client.http.post("/v1/chat/completions", json=ask.body(), timeout=0.01 * (1 + number))
    again = [replace(ask, max_tokens=5) for ask in (*same, *others)]
    repeated = [client.ask_media(ask) for ask in again]
    for ask, second in zip((*same, *others), repeated, strict=True):
        said[replace(ask, max_tokens=5)] = second
    return said


def stopped_while_busy(client, asks) -> None:
    """Begin requests that the stop of the engine finds under way."""

    def leave(ask):
        with contextlib.suppress(httpx.HTTPError, AssertionError):
            client.ask_media(replace(ask, max_tokens=200))

    for ask in asks:
        threading.Thread(target=leave, args=(ask,), daemon=True).start()
    time.sleep(BETWEEN_S)


@contextmanager
def engines_of(scenario, arguments_of, directory, start):
    """All engines of one start, at once. They stop in order at the end."""
    arguments = arguments_of(scenario.arguments) | scenario.own
    tiers = tiers_of(scenario, directory)
    with ExitStack() as stack, ThreadPoolExecutor(scenario.at_once) as pool:

        def open_engine(index):
            place = directory / f"{start} {index}"
            return stack.enter_context(served(place, tiers, scenario.modality, index, **arguments))

        yield list(pool.map(open_engine, range(scenario.at_once)))


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_answer_about_a_medium_is_that_of_vllm_alone(name, truth, results, arguments_of, tmp_path):
    scenario = SCENARIOS[name]
    if scenario.modality == "audio" and find_spec("soundfile") is None:
        pytest.skip("vLLM reads sounds of requests with `soundfile`")
    rows = []
    for start in range(scenario.starts):
        with engines_of(scenario, arguments_of, tmp_path, start) as clients:
            asked = [requests_of(name, scenario, start * scenario.at_once + at) for at in range(scenario.at_once)]
            with ThreadPoolExecutor(scenario.at_once) as pool:
                told = list(pool.map(partial(talk, scenario), clients, asked))
            for client, (same, _), said in zip(clients, asked, told, strict=True):
                rows.append(row_of(assert_equal(said, truth_of(truth, scenario, said))))
                rows[-1]["loaded"] = client.metrics()[EXTERNAL_HITS]
                rows[-1]["repeats"] = sum(said[ask].cached for ask in same)  # of what earlier engines have computed
                print(f"{name} {start}: {rows[-1]}", flush=True)
            if scenario.is_shared:
                settle(clients)
            if scenario.leaves:
                stopped_while_busy(clients[0], asked[0][1][:12])
    results.add(summary_of(name, rows))
    assert not scenario.hits or all(row["loaded"] for row in rows)
    if scenario.hits and scenario.starts > 1:
        assert all(row["repeats"] > rows[0]["repeats"] for row in rows[-scenario.at_once :])


def summary_of(name, rows):
    return {
        "scenario": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "engines": len(rows),
        **{key: sum(row[key] for row in rows) for key in ("requests", "tokens_compared", "wrong", "ties")},
        "largest_logprob_difference": max(row["largest_logprob_difference"] for row in rows),
        "loaded_tokens": [row["loaded"] for row in rows],
        "cached_tokens_of_repeats": [row["repeats"] for row in rows],
    }


def truth_of(truth, scenario, said):
    """Answers of fewer tokens are the beginnings of the longer ones."""
    whole = truth(scenario, {replace(ask, max_tokens=6) for ask in said})
    found = {}
    for ask in said:
        answer, count = whole[replace(ask, max_tokens=6)], ask.max_tokens
        cut = (answer.tokens[:count], answer.logprobs[:count], answer.margins[:count])
        found[ask] = replace(answer, tokens=cut[0], logprobs=cut[1], margins=cut[2])
    return found


def settle(clients) -> None:
    """Steps bring blocks to the store: ask for text until nothing is under way."""
    for _ in range(20):
        for client in clients:
            client.ask_media(Ask(9, ()))
        time.sleep(BETWEEN_S)
