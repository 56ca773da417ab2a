"""Requests and the whole answers of the server to them, against an engine whose answers are written.

An entry of `tests/cli/snapshots/server/exchanges.txt` names the text that the engine answers with, and the requests. It
shows each answer, what the engine got, and how many of these requests were aborted.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from terminal import assert_said, given_in

pytest.importorskip("transformers")

from server_rig import Client, Submitted, WrittenEngine, byte_codec, events_of, eventually, serve

from kvbm.engines.embedded.engine.request import SamplingParams


def shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def without_times(value: dict[str, Any]) -> dict[str, Any]:
    return {key: value[key] for key in value if key != "created"}


async def answer_of(client: Client, method: str, path: str, body: str = "") -> str:
    """A line for each key of the answer, or for each event of a stream."""
    headers = {"X-Request-Id": "mine"}
    async with client.session.request(method, path, data=body.encode(), headers=headers) as response:
        content = await response.read()
        if "event-stream" in response.headers["Content-Type"]:
            same = ("id", "object", "created", "model")
            events = [{key: event[key] for key in event if key not in same} for event in events_of(content)]
            return "".join(f"event {shown(event)}\n" for event in events)
        answer = json.loads(content, object_hook=without_times)
        return "".join([f"{response.status}\n", *(f"{key}: {shown(value)}\n" for key, value in answer.items())])


def what_came(request: Submitted) -> str:
    """The prompt that the engine got, and the parameters that are not the default."""
    given, default = dataclasses.asdict(request.params), dataclasses.asdict(SamplingParams())
    params = {name: value for name, value in given.items() if value != default[name]}
    prompt = byte_codec().decode(request.prompt_token_ids, skip_special_tokens=False)
    return f"the engine got {shown(prompt)} with {shown(params)}\n"


@pytest.mark.parametrize("name", given_in("server/exchanges"))
def test_exchange(name: str) -> None:
    first, *requests = given_in("server/exchanges")[name].splitlines()
    engine = WrittenEngine(first.removeprefix("the engine answers ").encode())
    said: list[str] = []

    async def use(client: Client) -> None:
        for line in requests:
            said.append(await answer_of(client, *line.split(" ", 2)))
        await eventually(lambda: not client.service.running)

    serve(engine, use)
    said += [what_came(request) for request in engine.submitted.values()]
    said += [f"aborted: {len(engine.aborted)}\n"] if engine.aborted else []
    assert_said("server/exchanges", name, "".join(said).rstrip("\n"))
