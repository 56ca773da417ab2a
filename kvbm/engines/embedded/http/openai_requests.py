"""OpenAI requests: parses the JSON bodies of the OpenAI API into plain values, or raises `RequestError`.

Fields that clients commonly send and that do not change the tokens are ignored. Unsupported fields that would change
the tokens are accepted only with the value that means "off". `prompt.py` makes the checks that depend on the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from kvbm.engines.embedded.engine.request import SamplingParams
from kvbm.engines.embedded.http.request_fields import Body, RequestError, read_body, shown, wrong, wrong_value

COMPLETION_TOKENS = 16  # default of `max_tokens` for completions in the OpenAI API
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 32
MAX_CHOICES = 128  # also the highest `n` of the OpenAI API
LOWEST_TEMPERATURE = 1e-5
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


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


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    model: str | None
    prompt: Prompt
    return_token_strings: bool


# -- fields ------------------------------------------------------------------------------------------------------------


def _off(*values: object) -> AfterValidator:
    """Return the check of an unsupported field: it must be absent or have one of the values that change nothing."""

    def check(value: object) -> object:
        if value is not None and not any(type(value) is type(one) and value == one for one in values):
            raise wrong_value(" or ".join(["absent", *map(shown, values)]) + "; this engine supports nothing else")
        return value

    return AfterValidator(check)


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise wrong_value("a non-empty string, or a list of such strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise wrong_value(f"a list of at most {MAX_STOP_STRINGS} strings")
    return stops


def _prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts of a string, a list of token ids, or a list of several of these."""
    prompts = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if not all(prompt and (isinstance(prompt, str) or _is_token_list(prompt)) for prompt in prompts):
        raise wrong_value("a string or a list of token ids, not empty, or a list of several of these")
    return prompts


def _is_token_list(value: object) -> bool:
    """Return whether all elements are integers and none is a boolean. A set of types is fast for a long prompt."""
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _token_list(value: Any) -> Any:
    if not _is_token_list(value):
        raise wrong_value("a list of token ids")
    return value


def _text(value: Any) -> str:
    """Return the content of a message, joined if it has several parts."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    ):
        raise wrong_value(
            'a string, or a list of parts such as {"type": "text", "text": "..."}; no others are supported'
        )
    return "".join(part["text"] for part in parts)


Flag = bool | None
Integer = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
Positive = Annotated[int, Field(ge=1, le=INT64_MAX)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Zero = Annotated[Any, _off(0, 0.0)]
One = Annotated[Any, _off(1, 1.0)]
No = Annotated[Any, _off(False)]
Yes = Annotated[Any, _off(True)]
NoList = Annotated[Any, _off([])]
NoTool = Annotated[Any, _off("none", "auto")]


class StreamOptions(Body):
    include_usage: Flag = None
    continuous_usage_stats: Flag = None
    include_obfuscation: Any = None


class GenerationBody(Body):
    """What both completion endpoints take."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Positive | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = None
    seed: Integer | None = None
    stop: Annotated[Any, AfterValidator(_stops)] = ()
    ignore_eos: Flag = None
    stream: Flag = None
    stream_options: StreamOptions | None = None
    return_token_ids: Flag = None
    skip_special_tokens: Flag = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    min_p: Zero = None
    repetition_penalty: One = None
    length_penalty: One = None
    echo: No = None
    include_stop_str_in_output: No = None
    return_tokens_as_token_ids: No = None
    use_beam_search: No = None
    spaces_between_special_tokens: Yes = None
    logit_bias: Annotated[Any, _off({})] = None
    bad_words: NoList = None
    stop_token_ids: NoList = None
    priority: Annotated[Any, _off(0)] = None

    metadata: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: Any = None


class CompletionBody(GenerationBody):
    prompt: Annotated[Any, AfterValidator(_prompts)]
    add_special_tokens: Flag = None
    logprobs: Logprobs | None = None
    best_of: Annotated[Any, _off(1)] = None
    suffix: Annotated[Any, _off("")] = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Any, AfterValidator(_text)]
    tool_calls: NoList = None
    function_call: NoList = None
    audio: NoList = None
    refusal: Any = None
    annotations: Any = None
    name: Any = None


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class ChatTemplate(Body):
    add_generation_prompt: Flag = None
    chat_template_kwargs: dict[str, Any] | None = None

    def prompt_of(self, messages: list[Message]) -> ChatPrompt:
        contents = [{"role": message.role, "content": message.content} for message in messages]
        return ChatPrompt(contents, self.add_generation_prompt is not False, self.chat_template_kwargs or {})


class ChatBody(GenerationBody, ChatTemplate):
    messages: Messages
    max_completion_tokens: Positive | None = None
    logprobs: Flag = None
    top_logprobs: Logprobs | None = None
    tools: NoList = None
    functions: NoList = None
    tool_choice: NoTool = None
    function_call: NoTool = None
    modalities: Annotated[Any, _off(["text"])] = None
    response_format: Annotated[Any, _off({"type": "text"})] = None
    continue_final_message: No = None
    parallel_tool_calls: Any = None
    include_reasoning: Any = None


class TokenizeBody(ChatTemplate):
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: Flag = None
    messages: Messages | None = None
    return_token_strs: Flag = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[Any, AfterValidator(_token_list)]


# -- requests ----------------------------------------------------------------------------------------------------------


def parse_completion(body: bytes) -> CompletionRequest:
    fields = read_body(CompletionBody, body)
    special, choices = fields.add_special_tokens is not False, fields.n or 1
    prompts: list[Prompt] = [TextPrompt(one, special) if isinstance(one, str) else one for one in fields.prompt]
    if len(prompts) * choices > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with `n` {choices} are {len(prompts) * choices} answers: at most {MAX_CHOICES} "
            "are allowed in one request",
            param="prompt",
        )
    generation = _generation(fields, max_tokens=fields.max_tokens, logprobs=fields.logprobs)
    return CompletionRequest(fields.model, prompts, generation, default_max_tokens=COMPLETION_TOKENS)


def parse_chat(body: bytes) -> CompletionRequest:
    """`max_completion_tokens` is the newer name of `max_tokens`."""
    fields = read_body(ChatBody, body)
    older, newer, top = fields.max_tokens, fields.max_completion_tokens, fields.top_logprobs or 0
    if older is not None and newer is not None and older != newer:
        raise wrong("max_tokens", older, f"absent, or equal to `max_completion_tokens`, which is {newer}")
    if top and not fields.logprobs:
        raise wrong("top_logprobs", top, "absent unless `logprobs` is true")
    limit = older if newer is None else newer
    generation = _generation(fields, max_tokens=limit, logprobs=top if fields.logprobs else None)
    return CompletionRequest(fields.model, [fields.prompt_of(fields.messages)], generation, default_max_tokens=None)


def parse_tokenize(body: bytes) -> TokenizeRequest:
    fields = read_body(TokenizeBody, body)
    prompt: Prompt
    if fields.messages is not None and fields.prompt is None:
        prompt = fields.prompt_of(fields.messages)
    elif fields.prompt is not None and fields.messages is None:
        prompt = TextPrompt(fields.prompt, fields.add_special_tokens is not False)
    else:
        raise RequestError("exactly one of `prompt` and `messages` is required", param="prompt")
    return TokenizeRequest(fields.model, prompt, fields.return_token_strs or False)


def parse_detokenize(body: bytes) -> tuple[str | None, list[int]]:
    """Return the model's name and the tokens."""
    fields = read_body(DetokenizeBody, body)
    return fields.model, fields.tokens


def _generation(fields: GenerationBody, *, max_tokens: int | None, logprobs: int | None) -> Generation:
    options = fields.stream_options or StreamOptions()
    if fields.stream_options is not None and not fields.stream:
        raise wrong("stream_options", options.model_dump(exclude_none=True), "absent unless `stream` is true")
    temperature = 1.0 if fields.temperature is None else fields.temperature
    sampling = SamplingParams(
        min_tokens=fields.min_tokens or 0,
        # dividing logits by a lower one could overflow
        temperature=temperature if temperature >= LOWEST_TEMPERATURE else 0.0,
        top_p=fields.top_p or 1.0,
        top_k=max(0, fields.top_k or 0),
        seed=fields.seed,
        ignore_eos=fields.ignore_eos or False,
        stop=tuple(fields.stop),
        logprobs=logprobs,
        cache_salt=fields.cache_salt,
        kv_transfer_params=fields.kv_transfer_params,
    )
    return Generation(
        sampling=sampling,
        choices_per_prompt=fields.n or 1,
        max_tokens=max_tokens,
        stream=fields.stream or False,
        include_usage=options.include_usage or False,
        continuous_usage=options.continuous_usage_stats or False,
        return_token_ids=fields.return_token_ids or False,
        skip_special_tokens=fields.skip_special_tokens is not False,
    )
