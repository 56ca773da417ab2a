"""The server in front of the real engine, as a process: many clients at once, some of whom leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine_process import WAIT_S, engine
from server_rig import ADMIN_TOKEN, events_of

from kvbm.config.schema import Profile
from kvbm.engines.launch_plan import ADMIN_HEADER

pytest.importorskip("torch")

GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
TOKEN = {ADMIN_HEADER: ADMIN_TOKEN}
Use = Callable[[aiohttp.ClientSession], Awaitable[None]]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine whose G1 holds about half of what the tests ask for at once."""
    with engine(tmp_path_factory.mktemp("engine") / "log", "--num-blocks", "160") as (_, address):
        yield address


def use(address: str, use: Use) -> None:
    async def run() -> None:
        async with asyncio.timeout(WAIT_S), aiohttp.ClientSession(address) as session:
            await use(session)

    asyncio.run(run())


def in_a_session(test: Use) -> Callable[[str], None]:
    """A test that is a coroutine, with a session of the engine of this module."""

    def run(address: str) -> None:
        use(address, test)

    return run


async def complete(session: aiohttp.ClientSession, prompt: str, **wanted: Any) -> dict[str, Any]:
    async with session.post("/v1/completions", json={"prompt": prompt, **GREEDY, **wanted}) as response:
        assert response.status == 200, await response.text()
        body: dict[str, Any] = await response.json()
        return body


async def stream(session: aiohttp.ClientSession, prompt: str, **wanted: Any) -> tuple[str, list[int], dict[str, Any]]:
    """Text, token ids and usage of a streamed completion."""
    body = {"prompt": prompt, **GREEDY, "stream": True, "stream_options": {"include_usage": True}, **wanted}
    async with session.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        *chunks, last = events_of(await response.read())
    choices = [chunk["choices"][0] for chunk in chunks]
    token_ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    return "".join(choice["text"] for choice in choices), token_ids, last["usage"]


@asynccontextmanager
async def begun(session: aiohttp.ClientSession, prompt: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """A long stream of which the first token has arrived."""
    body = {"prompt": prompt, **GREEDY, "stream": True, "max_tokens": 1000}
    async with session.post("/v1/completions", json=body) as response:
        await response.content.readuntil(b"\n\n")
        yield response


async def requests_in_engine(session: aiohttp.ClientSession) -> float:
    async with session.get("/metrics") as response:
        found = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (.*)$", await response.text(), re.M)
    return sum(map(float, found))


def prompt_of(user: int) -> str:
    return f"{user}: " + " ".join(str(user * 100 + word) for word in range(80))


@in_a_session
async def test_eight_streams_at_once_give_what_each_gives_alone(session: aiohttp.ClientSession) -> None:
    alone = [await complete(session, prompt_of(user), max_tokens=40) for user in range(8)]
    together = await asyncio.gather(*(stream(session, prompt_of(user), max_tokens=40) for user in range(8)))
    for body, (text, token_ids, usage) in zip(alone, together, strict=True):
        assert token_ids == body["choices"][0]["token_ids"]
        assert text == body["choices"][0]["text"]
        assert usage["completion_tokens"] == 40
    assert sum(usage["prompt_tokens_details"]["cached_tokens"] for _, _, usage in together) > 0


@in_a_session
async def test_clients_that_leave_free_the_engine_for_those_who_stay(session: aiohttp.ClientSession) -> None:
    expected = await complete(session, prompt_of(1), max_tokens=60)
    async with contextlib.AsyncExitStack() as stack:
        leaving = [await stack.enter_async_context(begun(session, prompt_of(user))) for user in range(10, 14)]
        staying = asyncio.ensure_future(stream(session, prompt_of(1), max_tokens=60))
        await asyncio.sleep(0.05)
        for response in leaving:
            response.close()
        _, token_ids, _ = await staying
    assert token_ids == expected["choices"][0]["token_ids"]
    while await requests_in_engine(session):
        await asyncio.sleep(0.02)


@in_a_session
async def test_a_stop_string_gives_the_beginning_of_the_unstopped_text(session: aiohttp.ClientSession) -> None:
    whole = (await complete(session, "Once", max_tokens=40))["choices"][0]["text"]
    wanted = next(text for text in (whole[i : i + 2] for i in range(10, 38)) if "�" not in text)
    text, token_ids, usage = await stream(session, "Once", max_tokens=40, stop=wanted)
    assert text == whole.split(wanted)[0]
    assert usage["completion_tokens"] == len(token_ids)
    assert (await complete(session, "Once", max_tokens=40, stop=[wanted]))["choices"][0]["text"] == text
    while await requests_in_engine(session):
        await asyncio.sleep(0.02)


@in_a_session
async def test_the_same_seed_samples_the_same_answer(session: aiohttp.ClientSession) -> None:
    wanted = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 7, "max_tokens": 20}
    answers = [await complete(session, "Once", **wanted) for _ in range(2)]
    other = await complete(session, "Once", **{**wanted, "seed": 8})
    tokens = [body["choices"][0]["token_ids"] for body in (*answers, other)]
    assert tokens[0] == tokens[1] != tokens[2]


@in_a_session
async def test_another_cache_salt_finds_nothing(session: aiohttp.ClientSession) -> None:
    for salt, cached in [("a", 0), ("a", 96), ("b", 0)]:
        body = await complete(session, "x" * 100, max_tokens=1, cache_salt=salt)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


@in_a_session
async def test_emptying_the_cache_is_seen_by_the_next_request(session: aiohttp.ClientSession) -> None:
    for cached in (0, 96):
        body = await complete(session, "y" * 100, max_tokens=1)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"] == {
            "device": cached,
            "host": 0,
            "disk": 0,
            "shared": 0,
        }
    async with session.post("/reset_prefix_cache?reset_external=true", headers=TOKEN) as response:
        assert response.status == 200
    body = await complete(session, "y" * 100, max_tokens=1)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@in_a_session
async def test_logprobs_of_the_greedy_token_are_the_highest(session: aiohttp.ClientSession) -> None:
    found = (await complete(session, "Once", max_tokens=5, logprobs=3))["choices"][0]["logprobs"]
    for chosen, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
        assert chosen == max(top.values()) < 0


def test_a_client_on_a_bare_socket_reads_a_whole_stream(address: str) -> None:
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "Once", "max_tokens": 7, **GREEDY, "stream": True}).encode()
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        answer = b"".join(iter(lambda: connection.recv(7), b""))
    head, content = answer.split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.0 200 OK\r\n")
    assert len(events_of(content)) == 7


@pytest.mark.soak
@pytest.mark.parametrize("worker_process", [False, True])
def test_with_the_block_manager_host_memory_answers_what_g1_has_lost(tmp_path: Path, worker_process: bool) -> None:
    profile = Profile.model_validate({"engine": {"model": "synthetic:tiny"}, "tiers": {"host": {"blocks": 200}}})
    flags = ["--num-blocks", "40", "--connector", profile.model_dump_json()]
    with engine(tmp_path / "log", *flags, *(["--worker-process"] if worker_process else [])) as (_, address):

        async def turns(session: aiohttp.ClientSession) -> None:
            first = [await complete(session, prompt_of(user), max_tokens=8) for user in range(4)]
            again = [await complete(session, prompt_of(user), max_tokens=8) for user in range(4)]
            assert [body["choices"] for body in again] == [body["choices"] for body in first]
            tiers = [body["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"] for body in again]
            assert all(tier["host"] > 100 for tier in tiers), tiers
            async with session.get("/metrics") as response:
                text = await response.text()
            onboarded = re.search(r"^kvbm_onboard_blocks_h2d (.*)$", text, re.M)
            assert onboarded is not None
            assert float(onboarded[1]) * 16 == sum(tier["host"] for tier in tiers)

        use(address, turns)
