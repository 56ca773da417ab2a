"""OpenAI requests: the JSON bodies of the OpenAI API. `read_body` parses them, or raises `RequestError`.

Fields that clients commonly send and that do not change the tokens are ignored. Unsupported fields that would change
the tokens are accepted only with the value that means "off". `prompt.py` makes the checks that depend on the engine.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from kvbm.engines.embedded.engine.request import SamplingParams
from kvbm.engines.embedded.http.request_fields import Body, Off, RequestError, wrong, wrong_value

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 32
LOWEST_TEMPERATURE = 1e-5
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise wrong_value("a non-empty string, or a list of such strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise wrong_value(f"a list of at most {MAX_STOP_STRINGS} strings")
    return stops


def _prompt(value: Any) -> str | list[int]:
    """Return a string or a list of token ids, also of a list that has nothing else."""
    is_wrapped = isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list)
    prompt: str | list[int] = value[0] if is_wrapped else value
    if not prompt or not (isinstance(prompt, str) or _is_token_list(prompt)):
        raise wrong_value("one string or list of token ids, not empty")
    return prompt


def _is_token_list(value: object) -> bool:
    """Return whether all elements are integers and none is a boolean. A set of types is fast for a long prompt."""
    return isinstance(value, list) and set(map(type, value)) <= {int}


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


Integer = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
Natural = Annotated[int, Field(ge=0, le=INT64_MAX)]
Positive = Annotated[int, Field(ge=1, le=INT64_MAX)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(Body):
    IGNORED = ("include_obfuscation",)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """What both completion endpoints take.

    `default_max_tokens` applies if the client set no limit; None means up to the model's maximum length.
    """

    default_max_tokens: ClassVar[int | None] = None
    OFF: ClassVar[Off] = {
        **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p"), (0, 0.0)),
        **dict.fromkeys(("repetition_penalty", "length_penalty"), (1, 1.0)),
        **dict.fromkeys(("echo", "include_stop_str_in_output", "return_tokens_as_token_ids"), (False,)),
        **dict.fromkeys(("bad_words", "stop_token_ids"), ([],)),
        "use_beam_search": (False,),
        "spaces_between_special_tokens": (True,),
        "n": (1,),
        "priority": (0,),
        "logit_bias": ({},),
    }
    IGNORED: ClassVar[Collection[str]] = (
        *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store"),
        "user",
    )

    model: str | None = None
    max_tokens: Positive | None = None
    min_tokens: Natural = 0
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT64_MAX)] = 0
    seed: Integer | None = None
    stop: Annotated[Any, AfterValidator(_stops)] = ()
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _streams_what_it_configures(self) -> Self:
        if self.stream_options is not None and not self.stream:
            given = self.stream_options.model_dump(exclude_unset=True)
            raise wrong("stream_options", given, "absent unless `stream` is true")
        return self

    @property
    def usage_in_stream(self) -> StreamOptions:
        return self.stream_options or StreamOptions()

    def _sampling(self, logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            min_tokens=self.min_tokens,
            # dividing logits by a lower one could overflow
            temperature=self.temperature if self.temperature >= LOWEST_TEMPERATURE else 0.0,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            stop=tuple(self.stop),
            logprobs=logprobs,
            cache_salt=self.cache_salt,
            kv_transfer_params=self.kv_transfer_params,
        )


class CompletionBody(GenerationBody):
    default_max_tokens = 16  # of the OpenAI API
    OFF: ClassVar[Off] = {**GenerationBody.OFF, "best_of": (1,), "suffix": ("",)}

    prompt: Annotated[Any, AfterValidator(_prompt)]
    add_special_tokens: bool = True
    logprobs: Logprobs | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def sampling(self) -> SamplingParams:
        """Return the parameters, without a limit of tokens."""
        return self._sampling(self.logprobs)


class Message(Body):
    OFF: ClassVar[Off] = dict.fromkeys(("tool_calls", "function_call", "audio"), ([],))
    IGNORED = ("refusal", "annotations", "name")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Any, AfterValidator(_text)]


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class Conversation(Body):
    """A prompt as messages for the model's chat template, which gets `chat_template_kwargs` too."""

    messages: Messages | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def contents(self) -> list[dict[str, str]]:
        return [{"role": message.role, "content": message.content} for message in self.messages or ()]


class ChatBody(GenerationBody, Conversation):
    """`max_completion_tokens` is the newer name of `max_tokens`. The template adds special tokens."""

    OFF: ClassVar[Off] = {
        **GenerationBody.OFF,
        **dict.fromkeys(("tools", "functions"), ([],)),
        **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
        "modalities": (["text"],),
        "response_format": ({"type": "text"},),
        "continue_final_message": (False,),
    }
    IGNORED = (*GenerationBody.IGNORED, "parallel_tool_calls", "include_reasoning")
    add_special_tokens: ClassVar[bool] = False

    messages: Messages
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: Logprobs = 0

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        older, newer = self.max_tokens, self.max_completion_tokens
        if older is not None and newer is not None and older != newer:
            raise wrong("max_tokens", older, f"absent, or equal to `max_completion_tokens`, which is {newer}")
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", self.top_logprobs, "absent unless `logprobs` is true")
        return self

    @property
    def prompt(self) -> Conversation:
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def sampling(self) -> SamplingParams:
        """Return the parameters, without a limit of tokens."""
        return self._sampling(self.top_logprobs if self.logprobs else None)


class TokenizeBody(Conversation):
    OFF: ClassVar[Off] = {**Conversation.OFF, "return_token_strs": (False,)}

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("exactly one of `prompt` and `messages` is required", param="prompt")
        return self


Prompt = str | Conversation | list[int]
AnswerBody = CompletionBody | ChatBody
