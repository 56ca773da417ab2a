"""Request bodies: what is accepted, and the words of every refusal."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from terminal import assert_said, given_in

from kvbm.engines.embedded.http.openai_requests import (
    ChatBody,
    CompletionBody,
    TokenizeBody,
)
from kvbm.engines.embedded.http.request_fields import Body, RequestError, read_body


def completion(**fields: Any) -> CompletionBody:
    return read_body(CompletionBody, json.dumps({"prompt": "Hello", **fields}).encode())


def chat(**fields: Any) -> ChatBody:
    return read_body(ChatBody, json.dumps({"messages": [{"role": "user", "content": "Hello"}], **fields}).encode())


def refusal(parse: Callable[..., Any], *arguments: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(*arguments, **fields)
    return caught.value


def what_counts(body: CompletionBody | ChatBody) -> tuple[object, ...]:
    usage = body.usage_in_stream
    answer = (body.token_limit, body.stream, usage.include_usage)
    return (body.model, body.sampling, body.return_token_ids, body.skip_special_tokens, *answer)


def test_a_bare_completion_gets_the_defaults_of_the_api() -> None:
    request = completion()
    assert request.model is None
    assert request.prompt == "Hello"
    assert request.add_special_tokens
    sampling = request.sampling
    assert (request.token_limit, sampling.min_tokens, sampling.temperature) == (None, 0, 1.0)
    assert request.default_max_tokens == 16
    assert (sampling.top_p, sampling.top_k, sampling.seed) == (1.0, 0, None)
    assert (sampling.stop, sampling.logprobs, request.stream) == ((), None, False)


def test_a_chat_without_max_tokens_is_not_limited() -> None:
    assert chat().token_limit is None
    assert chat().default_max_tokens is None


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]])
def test_a_prompt_may_be_token_ids(prompt: list[Any]) -> None:
    assert completion(prompt=prompt).prompt == [1, 2, 3]


def test_a_single_prompt_may_come_in_a_list() -> None:
    assert completion(prompt=["Hello"]).prompt == "Hello"


def test_text_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    contents = chat(messages=[{"role": "user", "content": parts}]).prompt.contents
    assert contents == [{"role": "user", "content": "one two"}]


def test_null_means_absent() -> None:
    absent = completion(max_tokens=None, stop=None, seed=None, n=None, echo=None)
    assert what_counts(absent) == what_counts(completion())


def test_what_clients_send_by_routine_is_ignored() -> None:
    routine = {"user": "u", "n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "metadata": {}}
    assert what_counts(completion(**routine)) == what_counts(completion())
    routine = {"store": False, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}}
    assert what_counts(chat(**routine)) == what_counts(chat())
    of_vllm = {"use_beam_search": False, "length_penalty": 1.0, "priority": 0, "bad_words": [], "stop_token_ids": []}
    of_vllm |= {"include_stop_str_in_output": False, "spaces_between_special_tokens": True}
    assert what_counts(completion(**of_vllm)) == what_counts(completion())
    assert what_counts(chat(include_reasoning=True, continue_final_message=False)) == what_counts(chat())


def test_the_newer_name_of_max_tokens_counts_for_chats() -> None:
    assert chat(max_completion_tokens=7).token_limit == 7
    assert chat(max_completion_tokens=7, max_tokens=7).token_limit == 7


@pytest.mark.parametrize("name", ["completion", "chat"])
def test_a_refusal_names_field_value_and_what_would_be_right(name: str) -> None:
    """Each line that is given is refused by the words of the line at the same place below."""
    said = []
    for line in given_in("server/refusals")[name].splitlines():
        error = refusal({"completion": completion, "chat": chat}[name], **json.loads(line))
        assert error.status == 400
        said.append(f"{error.param}: {error.message}")
    assert_said("server/refusals", name, "\n".join(said))


@pytest.mark.parametrize(
    ("body", "beginning"),
    [
        (b"", "the body is not JSON: "),
        (b"{", "the body is not JSON: "),
        (b"[1]", "the body is [1]: it must be an object"),
        (b'{"prompt": "\xff"}', "the body is not JSON: invalid unicode code point"),
        (b'{"prompt": "\\ud800"}', "the body is not JSON: "),
        (b'{"prompt": "a", "temperature": NaN}', "`temperature` is NaN: it must be a finite number"),
        (b'{"prompt": "a", "temperature": -Infinity}', "`temperature` is -Infinity: it must be a finite number"),
        (b'{"prompt": "a", "temperature": 1e999}', "`temperature` is Infinity: it must be a finite number"),
        (b'{"prompt": "a", "temperature": %s}' % (b"9" * 5000), "the body is not JSON: number out of range"),
        (b'{"prompt": "a", "temperature": %s}' % (b"9" * 400), "`temperature` is a number of about 400 digits"),
        (b'{"prompt": ' + b"[" * 100_000, "the body is not JSON: recursion limit exceeded"),
    ],
)
def test_a_body_that_is_no_proper_json_is_refused(body: bytes, beginning: str) -> None:
    assert refusal(read_body, CompletionBody, body).message.startswith(beginning)


@pytest.mark.parametrize("depth", [50, 200, 300, *range(900, 1000, 7)])
def test_any_depth_of_nesting_ends_as_a_refusal(depth: int) -> None:
    body = b'{"prompt": %s1%s}' % (b'[{"a":' * depth, b"}]" * depth)
    assert refusal(read_body, CompletionBody, body).status == 400


def test_tokenize_takes_a_prompt_or_messages() -> None:
    request = read_body(TokenizeBody, b'{"model": "m", "prompt": "", "add_special_tokens": false}')
    assert (request.prompt, request.add_special_tokens) == ("", False)
    conversation = read_body(TokenizeBody, b'{"messages": [{"role": "user", "content": "a"}]}')
    assert conversation.contents == [{"role": "user", "content": "a"}]
    for body in (b"{}", b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}'):
        assert refusal(read_body, TokenizeBody, body).message == "exactly one of `prompt` and `messages` is required"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)
FIELDS = [
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p"),
    *(
        "top_k",
        "seed",
        "stop",
        "logprobs",
        "top_logprobs",
        "stream",
        "stream_options",
        "n",
        "echo",
        "tools",
        "cache_salt",
    ),
    *("kv_transfer_params", "chat_template_kwargs", "response_format", "return_token_ids", "user", "wibble"),
]


@given(form=st.sampled_from([CompletionBody, ChatBody]), body=st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_whatever_a_client_sends_is_a_request_or_a_refusal(form: type[Body], body: dict[str, Any]) -> None:
    valid = {"prompt": "a"} if form is CompletionBody else {"messages": [{"role": "user", "content": "a"}]}
    with contextlib.suppress(RequestError):
        read_body(form, json.dumps({**valid, **body}).encode())
