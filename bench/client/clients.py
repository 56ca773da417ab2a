"""The load loops that overhead.py compares, each run in a process of its own: `clients.py NAME --url URL ...`.

Each keeps `--in-flight` requests in flight until `--requests` have ended, and prints one JSON object: CPU seconds of
its process for all of them, seconds of wall clock, and the time to first token of each request by its X-Request-Id.

    kvbm, kvbm-2      `drive` of kvbm_cli.bench.load with a plan; everything that a run does is included;
                      in one process, or in two
    aiohttp           a bare loop on aiohttp: a prepared body, iter_any, json.loads and a stamp for each event
    aiohttp-unparsed  the same, but nothing is parsed: the least that a client on aiohttp can do
    openai            AsyncOpenAI of the installed version, as LMBenchmark uses it
    httpx             one AsyncClient, aiter_lines
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

PROMPT = " ".join(f"word{number}" for number in range(200))
FIELDS = {
    "model": "mock",
    "prompt": PROMPT,
    "max_tokens": 20,
    "temperature": 0.0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
Ttfts = dict[str, float]


async def of_aiohttp(url: str, requests: int, in_flight: int, *, has_parser: bool = True) -> Ttfts:
    import aiohttp

    body, ttfts = json.dumps(FIELDS).encode(), {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def one(name: str) -> None:
            headers = {"Content-Type": "application/json", "X-Request-Id": name}
            start = time.perf_counter()
            async with session.post(url + "/v1/completions", data=body, headers=headers) as response:
                first = await (parse if has_parser else skip)(response.content)
            ttfts[name] = first - start

        await keep_in_flight(one, requests, in_flight)
    return ttfts


async def parse(content: aiohttp.StreamReader) -> float:
    """Parse every event at once and keep the text and the times, as the clients of engines do. Returns the first."""
    rest, texts, stamps = b"", [], []
    async for data in content.iter_any():
        now = time.perf_counter()
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            payload = event.removeprefix(b"data: ")
            if payload != b"[DONE]":
                choices = json.loads(payload)["choices"]
                if choices and choices[0]["text"]:
                    texts.append(choices[0]["text"])
                    stamps.append(now)
    return stamps[0]


async def skip(content: aiohttp.StreamReader) -> float:
    first = 0.0
    async for _ in content.iter_any():
        first = first or time.perf_counter()
    return first


async def of_openai(url: str, requests: int, in_flight: int) -> Ttfts:
    import openai

    ttfts = {}
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", timeout=None) as client:

        async def one(name: str) -> None:
            start = time.perf_counter()
            stream = await client.completions.create(**FIELDS, extra_headers={"X-Request-Id": name})
            async for event in stream:
                if name not in ttfts and event.choices and event.choices[0].text:
                    ttfts[name] = time.perf_counter() - start

        await keep_in_flight(one, requests, in_flight)
    return ttfts


async def of_httpx(url: str, requests: int, in_flight: int) -> Ttfts:
    import httpx

    ttfts = {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:

        async def one(name: str) -> None:
            start = time.perf_counter()
            headers = {"X-Request-Id": name}
            async with client.stream("POST", url + "/v1/completions", json=FIELDS, headers=headers) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        if name not in ttfts and event["choices"]:
                            ttfts[name] = time.perf_counter() - start

        await keep_in_flight(one, requests, in_flight)
    return ttfts


async def of_kvbm(url: str, requests: int, in_flight: int, *, workers: int = 1) -> Ttfts:
    from kvbm_cli.bench.load.drive import drive
    from kvbm_cli.bench.load.request import Target
    from kvbm_cli.bench.workload.plan import Launches, Plan, PlannedRequest
    from kvbm_cli.bench.workload.script import Phase

    fields = tuple((name, value) for name, value in FIELDS.items() if name != "prompt")
    planned = tuple(
        PlannedRequest(
            index=index,
            session=index,
            turn=1,
            phase=Phase.COLD,
            intended_s=None,
            after=(),
            delay_s=0.0,
            prompt_tokens=None,
            answer_tokens=20,
            answer=None,
            path="/v1/completions",
            parts=(PROMPT,),
            fields=fields,
        )
        for index in range(requests)
    )
    plan = Plan(planned, Launches(concurrency=in_flight), 60.0, None, 0, planned[0])
    target = Target("r", "kvbm", "cell", 1, url)
    result = await drive(plan, [target], on_record=lambda record: None, workers=workers)
    records = result.records["r"]
    assert all(record.is_ok and record.output_tokens == 20 for record in records), records[0]
    return {f"r-{record.index}": record.ttft_from_launch_ms / 1e3 for record in records}


async def keep_in_flight(one: Callable[[str], Awaitable[None]], requests: int, in_flight: int) -> None:
    numbers: Iterator[int] = iter(range(requests))

    async def work() -> None:
        for number in numbers:
            await one(f"r-{number}")

    await asyncio.gather(*(work() for _ in range(in_flight)))


CLIENTS = {
    "kvbm": of_kvbm,
    "kvbm-2": partial(of_kvbm, workers=2),
    "aiohttp": of_aiohttp,
    "aiohttp-unparsed": partial(of_aiohttp, has_parser=False),
    "openai": of_openai,
    "httpx": of_httpx,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("--url", required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--in-flight", type=int, required=True)
    given = parser.parse_args()
    run = CLIENTS[given.client]
    asyncio.run(run(given.url, 2 * given.in_flight, given.in_flight))  # imports, and code that runs once
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    ttfts = asyncio.run(run(given.url, given.requests, given.in_flight))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert len(ttfts) == given.requests, f"{len(ttfts)} of {given.requests} requests have a time"
    print(json.dumps({"cpu_s": cpu, "wall_s": wall, "ttft_s": ttfts}))


if __name__ == "__main__":
    main()
