"""Requests of real load clients: what each one sends, and that the answer has the fields of vLLM's answer.

`client_requests.json` was recorded with a proxy between the clients and vLLM 0.32 or the embedded engine. `requests`
has the bodies as they were sent, with shorter prompts. `answers` has the fields of vLLM's answers and their types; a
stream has one entry for each kind of chunk.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine_process import engine
from server_rig import events_of

RECORDED = json.loads(Path(__file__).with_name("client_requests.json").read_text())
TYPES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "list"}

# Fields that vLLM sends and this engine does not: they describe vLLM itself.
ONLY_OF_VLLM = {"system_fingerprint", "usage.prompt_tokens_details.created_cache_tokens"}
# Fields that this engine adds: OpenAI sends `usage: null` and the refusal of logprobs, too.
ADDED = re.compile(
    r"usage|.*\.cached_tokens_by_tier\.(device|host|disk|shared)|choices\[\]\.(stop_reason|logprobs\.refusal|message\.refusal)"
)

Fields = dict[str, str]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with engine(tmp_path_factory.mktemp("engine") / "log", "--num-blocks", "160") as (_, address):
        yield address


def post(address: str, path: str, body: dict[str, Any]) -> bytes:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        content: bytes = response.read()
    return content


def fields(value: Any, name: str = "") -> Fields:
    """Every field of a body with its type. Alternatives of a completion's logprobs are all called `*`."""
    found: Fields = {}
    if isinstance(value, dict):
        for key, inner in value.items():
            key = "*" if name.endswith("logprobs.top_logprobs[]") else key
            found |= fields(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and value:
        for inner in value:
            found |= fields(inner, f"{name}[]")
    else:
        found[name] = TYPES[type(value)]
    return found


def kind_of_chunk(chunk: dict[str, Any]) -> str:
    if not chunk["choices"]:
        return "usage"
    (choice,) = chunk["choices"]
    if choice["finish_reason"] is not None:
        return "end"
    return "opening" if "role" in choice.get("delta", {}) else "text"


def check_fields(sent: dict[str, Any], of_vllm: Fields) -> None:
    """A field that is null in vLLM's answer may be absent; no other may, and none may have another type."""
    found = fields(sent)
    expected = {name: kind for name, kind in of_vllm.items() if kind != "null" and name not in ONLY_OF_VLLM}
    assert {name: found.get(name) for name in expected} == expected
    assert [name for name in found if name not in of_vllm and not ADDED.fullmatch(name)] == []


def check_choice(text: str, choice: dict[str, Any], body: dict[str, Any]) -> None:
    assert isinstance(text, str)
    assert choice["finish_reason"] in ("stop", "length")
    if "ignore_eos" in body:
        assert choice["finish_reason"] == "length"


def check_usage(usage: dict[str, Any], body: dict[str, Any]) -> None:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None:
        assert usage["completion_tokens"] <= limit
        assert usage["completion_tokens"] == limit or "ignore_eos" not in body
    if isinstance(body.get("prompt"), str):
        assert usage["prompt_tokens"] == len(body["prompt"].encode())  # the byte tokenizer


def check_head(answer: dict[str, Any], kind: str, prefix: str) -> None:
    assert (answer["object"], answer["model"]) == (kind, "synthetic:tiny")
    assert re.fullmatch(prefix + r"-[0-9a-f]{24}", answer["id"])
    assert abs(answer["created"] - time.time()) < 60


def name_of(request: dict[str, Any]) -> str:
    return "-".join(re.findall(r"[\w.]+", f"{request['client']} {request['answer']}"))


@pytest.mark.parametrize("recorded", RECORDED["requests"], ids=map(name_of, RECORDED["requests"]))
def test_what_a_real_client_sends_gets_an_answer_with_the_fields_of_vllm(
    address: str, recorded: dict[str, Any]
) -> None:
    body, of_vllm = recorded["body"], RECORDED["answers"][recorded["answer"]]
    is_chat = recorded["path"] == "/v1/chat/completions"
    kind, prefix = ("chat.completion", "chatcmpl") if is_chat else ("text_completion", "cmpl")
    content = post(address, recorded["path"], body)
    if not body.get("stream"):
        answer = json.loads(content)
        check_head(answer, kind, prefix)
        check_fields(answer, of_vllm["whole"])
        (choice,) = answer["choices"]
        assert choice["index"] == 0
        check_choice(choice["message"]["content"] if is_chat else choice["text"], choice, body)
        check_usage(answer["usage"], body)
        return
    chunks = events_of(content)
    for chunk in chunks:
        check_head(chunk, f"{kind}.chunk" if is_chat else kind, prefix)
        check_fields(chunk, of_vllm[kind_of_chunk(chunk)])
    assert len({chunk["id"] for chunk in chunks}) == 1
    kinds = [kind_of_chunk(chunk) for chunk in chunks]
    has_usage = "stream_options" in body
    assert kinds[:1] == (["opening"] if is_chat else ["text"])
    assert kinds[-2 if has_usage else -1 :] == (["end", "usage"] if has_usage else ["end"])
    assert set(kinds[1 : -2 if has_usage else -1]) == {"text"}
    ending = chunks[-2 if has_usage else -1]["choices"][0]
    parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    text = "".join(part["delta"]["content"] if is_chat else part["text"] for part in parts)
    check_choice(text, ending, body)
    if has_usage:
        check_usage(chunks[-1]["usage"], body)


def test_every_kind_of_client_is_in_the_recording() -> None:
    found = {request["client"].split()[0] for request in RECORDED["requests"]}
    assert found == {"openai", "LMBenchmark", "aiperf", "guidellm", "vllm"}
