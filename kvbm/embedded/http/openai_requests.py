"""OpenAI requests: parses the JSON bodies of the OpenAI API into plain values, or raises `RequestError`.

Fields that clients commonly send and that do not change the tokens are ignored. Unsupported fields that would change
the tokens are accepted only with the value that means "off". `prompt.py` makes the checks that depend on the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbm.embedded.engine.request import SamplingParams
from kvbm.embedded.http.request_fields import Fields, RequestError, is_unicode, read_json, wrong

COMPLETION_TOKENS = 16  # default of `max_tokens` for completions in the OpenAI API
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 32
MAX_CHOICES = 128  # also the highest `n` of the OpenAI API
LOWEST_TEMPERATURE = 1e-5
PROMPT_RIGHT = "a string or a list of token ids"

IGNORED = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Generation:
    """Generation and response options that both completion endpoints share.

    `max_tokens` is None if the client set no limit; `sampling` has none yet. `choices_per_prompt` is the field `n`.
    """

    sampling: SamplingParams
    choices_per_prompt: int
    max_tokens: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    skip_special_tokens: bool


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt as text."""

    text: str
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt as messages for the model's chat template. `variables` are passed to the template."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    variables: dict[str, Any]


Prompt = TextPrompt | ChatPrompt | list[int]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """`default_max_tokens` applies if the client set no limit; None means up to the model's maximum length."""

    model: str | None
    prompts: list[Prompt]
    generation: Generation
    default_max_tokens: int | None


def parse_completion(body: bytes) -> CompletionRequest:
    fields = Fields(read_json(body))
    model = fields.text("model")
    prompts = _completion_prompts(fields)
    logprobs = fields.integer("logprobs", minimum=0, maximum=MAX_LOGPROBS)
    max_tokens = fields.integer("max_tokens", minimum=1)
    generation = _generation(fields, max_tokens=max_tokens, logprobs=logprobs)
    fields.only("best_of", 1)
    fields.only("echo", False)
    fields.only("suffix", "")
    fields.finish()
    _check_choices(len(prompts), generation.choices_per_prompt)
    return CompletionRequest(model, prompts, generation, default_max_tokens=COMPLETION_TOKENS)


def parse_chat(body: bytes) -> CompletionRequest:
    fields = Fields(read_json(body))
    model = fields.text("model")
    prompt = _conversation(fields)
    generation = _generation(fields, max_tokens=_chat_max_tokens(fields), logprobs=_chat_logprobs(fields))
    _refuse_tools(fields)
    fields.only("modalities", ["text"])
    fields.only("response_format", {"type": "text"})
    fields.only("echo", False)
    fields.only("continue_final_message", False)
    fields.ignore("include_reasoning")
    fields.finish()
    return CompletionRequest(model, [prompt], generation, default_max_tokens=None)


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    model: str | None
    prompt: Prompt
    return_token_strings: bool


def parse_tokenize(body: bytes) -> TokenizeRequest:
    fields = Fields(read_json(body))
    model = fields.text("model")
    prompt: Prompt
    if fields.has("messages"):
        prompt = _conversation(fields)
    else:
        text = fields.text("prompt")
        if text is None:
            fields.missing("prompt", "the text to tokenize, or `messages`")
        prompt = TextPrompt(text, add_special_tokens=fields.boolean("add_special_tokens", True))
    request = TokenizeRequest(model, prompt, fields.boolean("return_token_strs", False))
    fields.finish()
    return request


def parse_detokenize(body: bytes) -> tuple[str | None, list[int]]:
    """Return the model's name and the tokens."""
    fields = Fields(read_json(body))
    model, tokens = fields.text("model"), fields.take("tokens")
    if not _is_token_list(tokens):
        raise wrong("tokens", tokens, "a list of token ids")
    fields.finish()
    return model, tokens


def _generation(fields: Fields, *, max_tokens: int | None, logprobs: int | None) -> Generation:
    stream = fields.boolean("stream", False)
    include_usage, continuous_usage = _stream_options(fields, stream=stream)
    sampling = SamplingParams(
        min_tokens=fields.integer("min_tokens", minimum=0) or 0,
        temperature=_temperature(fields),
        top_p=fields.number(
            "top_p", 1.0, is_right=lambda value: 0 < value <= 1, right="a number above 0 and at most 1 (1 is off)"
        ),
        top_k=max(0, fields.integer("top_k", minimum=-1) or 0),
        seed=fields.integer("seed"),
        ignore_eos=fields.boolean("ignore_eos", False),
        stop=_stop(fields),
        logprobs=logprobs,
        cache_salt=_cache_salt(fields),
        kv_transfer_params=_object(fields, "kv_transfer_params"),
    )
    generation = Generation(
        sampling=sampling,
        choices_per_prompt=fields.integer("n", minimum=1, maximum=MAX_CHOICES) or 1,
        max_tokens=max_tokens,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=fields.boolean("return_token_ids", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
    )
    _refuse_other_sampling(fields)
    fields.ignore(*IGNORED)
    return generation


def _refuse_other_sampling(fields: Fields) -> None:
    for name in ("frequency_penalty", "presence_penalty", "min_p"):
        fields.only(name, 0, 0.0)
    for name in ("repetition_penalty", "length_penalty"):
        fields.only(name, 1, 1.0)
    for name in ("include_stop_str_in_output", "return_tokens_as_token_ids", "use_beam_search"):
        fields.only(name, False)
    fields.only("spaces_between_special_tokens", True)
    fields.only("logit_bias", {})
    for name in ("bad_words", "stop_token_ids"):
        fields.only(name, [])
    fields.only("priority", 0)


def _check_choices(prompts: int, choices_per_prompt: int) -> None:
    if prompts * choices_per_prompt > MAX_CHOICES:
        raise RequestError(
            f"{prompts} prompts with `n` {choices_per_prompt} are {prompts * choices_per_prompt} answers: at most "
            f"{MAX_CHOICES} are allowed in one request",
            param="prompt",
        )


def _stream_options(fields: Fields, *, stream: bool) -> tuple[bool, bool]:
    """Return (include_usage, continuous_usage_stats)."""
    options = _object(fields, "stream_options")
    if options is None:
        return False, False
    if not stream:
        raise wrong("stream_options", options, "absent unless `stream` is true")
    inner = Fields(options, path="stream_options.")
    result = inner.boolean("include_usage", False), inner.boolean("continuous_usage_stats", False)
    inner.ignore("include_obfuscation")
    inner.finish()
    return result


def _temperature(fields: Fields) -> float:
    """Return the temperature; one so low that dividing logits by it could overflow counts as 0."""
    value = fields.number(
        "temperature", 1.0, is_right=lambda value: 0 <= value <= 100, right="a number from 0 (greedy) to 100"
    )
    return value if value >= LOWEST_TEMPERATURE else 0.0


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop and is_unicode(stop) for stop in stops):
        raise wrong("stop", value, "a non-empty string, or a list of such strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(f"`stop` has {len(stops)} strings: at most {MAX_STOP_STRINGS} are allowed", param="stop")
    return tuple(stops)


def _cache_salt(fields: Fields) -> str | None:
    salt = fields.text("cache_salt")
    if salt == "":
        raise wrong("cache_salt", salt, "a non-empty string")
    return salt


def _object(fields: Fields, name: str) -> dict[str, Any] | None:
    value = fields.take(name)
    if value is not None and not isinstance(value, dict):
        raise wrong(name, value, "an object")
    return value


def _completion_prompts(fields: Fields) -> list[Prompt]:
    """Parse a string, a list of token ids, or a list of several of these."""
    add_special_tokens = fields.boolean("add_special_tokens", True)
    if not fields.has("prompt"):
        fields.missing("prompt", PROMPT_RIGHT)
    value = fields.take("prompt")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        return [_completion_prompt(each, f"prompt[{index}]", add_special_tokens) for index, each in enumerate(value)]
    return [_completion_prompt(value, "prompt", add_special_tokens)]


def _completion_prompt(value: object, name: str, add_special_tokens: bool) -> Prompt:
    if isinstance(value, str) and value and is_unicode(value):
        return TextPrompt(value, add_special_tokens)
    if _is_token_list(value) and value:
        return value  # type: ignore[return-value]
    raise wrong(name, value, f"{PROMPT_RIGHT}, not empty")


def _is_token_list(value: object) -> bool:
    """Return whether all elements are integers and none is a boolean. A set of types is fast for a long prompt."""
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _conversation(fields: Fields) -> ChatPrompt:
    messages = fields.take("messages")
    if messages is None:
        fields.missing("messages", "a list of messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", messages, "a list of messages, not empty")
    return ChatPrompt(
        messages=[_message(message, index) for index, message in enumerate(messages)],
        add_generation_prompt=fields.boolean("add_generation_prompt", True),
        variables=_object(fields, "chat_template_kwargs") or {},
    )


def _message(message: object, index: int) -> dict[str, Any]:
    name = f"messages[{index}]"
    if not isinstance(message, dict):
        raise wrong(name, message, "an object with `role` and `content`")
    fields = Fields(message, path=f"{name}.")
    role = fields.take("role")
    if role not in ROLES:
        raise wrong(f"{name}.role", role, f"one of {', '.join(ROLES)}")
    content = _content(fields.take("content"), f"{name}.content")
    for unsupported in ("tool_calls", "function_call", "audio"):
        fields.only(unsupported, [])
    fields.ignore("refusal", "annotations", "name")
    fields.finish()
    return {"role": role, "content": content}


def _content(content: object, name: str) -> str:
    if isinstance(content, list):
        content = "".join(_text_part(part, f"{name}[{index}]") for index, part in enumerate(content))
    if not isinstance(content, str) or not is_unicode(content):
        raise wrong(name, content, "a string, or a list of parts of type text")
    return content


def _text_part(part: object, name: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise wrong(name, part, 'an object such as {"type": "text", "text": "..."}; this engine supports text only')


def _chat_max_tokens(fields: Fields) -> int | None:
    """Read `max_tokens` or its newer name `max_completion_tokens`."""
    older = fields.integer("max_tokens", minimum=1)
    newer = fields.integer("max_completion_tokens", minimum=1)
    if older is not None and newer is not None and older != newer:
        raise wrong("max_tokens", older, f"absent, or equal to `max_completion_tokens`, which is {newer}")
    return older if newer is None else newer


def _chat_logprobs(fields: Fields) -> int | None:
    requested = fields.boolean("logprobs", False)
    count = fields.integer("top_logprobs", minimum=0, maximum=MAX_LOGPROBS)
    if count and not requested:
        raise wrong("top_logprobs", count, "absent unless `logprobs` is true")
    return count or 0 if requested else None


def _refuse_tools(fields: Fields) -> None:
    fields.only("tools", [])
    fields.only("functions", [])
    fields.only("tool_choice", "none", "auto")
    fields.only("function_call", "none", "auto")
    fields.ignore("parallel_tool_calls")
