"""Uses the `openai` package as a program does: python openai_client.py BASE_URL MODEL. Runs with any version from 1.0.

Prints one JSON object with the version and the number of checks. A failed check ends it with a traceback.
"""

import asyncio
import json
import sys

import openai

BASE_URL, MODEL = sys.argv[1:]
MESSAGES = [{"role": "user", "content": "Hello, 世界 🎉"}]
client = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key="none", max_retries=0)


def models():
    assert client.models.list().data[0].id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


def completions():
    whole = client.completions.create(model=MODEL, prompt="Hello", max_tokens=5, temperature=0)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    options = {"include_usage": True}
    chunks = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=5, temperature=0, stream=True, stream_options=options
    )
    *parts, last = chunks
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def chats():
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=5, temperature=0)
    assert whole.choices[0].message.role == "assistant"
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_completion_tokens=5, temperature=0, stream=True
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content for delta in deltas) == whole.choices[0].message.content
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=2000) as stream:
        assert stream.get_final_completion().choices[0].finish_reason == "stop"


def logprobs():
    found = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=2
    ).choices[0]
    assert [len(token.top_logprobs) for token in found.logprobs.content] == [2, 2]
    found = client.completions.create(model=MODEL, prompt="a", logprobs=2, max_tokens=2).choices[0]
    assert len(found.logprobs.token_logprobs) == 2


def raised(kind, **fields):
    try:
        client.completions.create(prompt="a", **fields)
    except kind as error:
        return error
    raise AssertionError(f"{fields} must raise {kind.__name__}")


def errors():
    assert raised(openai.NotFoundError, model="nope").param == "model"
    assert raised(openai.BadRequestError, model=MODEL, max_tokens=10**6).param == "max_tokens"


def extensions():
    fields = {"ignore_eos": True, "min_tokens": 4}
    found = client.completions.create(model=MODEL, prompt="a", max_tokens=4, extra_body=fields)
    assert found.usage.completion_tokens == 4


def many_at_once():
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key="none", max_retries=0) as many:
            asked = [many.completions.create(model=MODEL, prompt=f"{number}", max_tokens=5) for number in range(20)]
            return await asyncio.gather(*asked)

    assert len(asyncio.run(run())) == 20


CHECKS = (models, completions, chats, logprobs, errors, extensions, many_at_once)
for check in CHECKS:
    check()
print(json.dumps({"version": openai.__version__, "checks": len(CHECKS)}))
