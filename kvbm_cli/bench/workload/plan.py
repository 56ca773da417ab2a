"""Plan: the requests of a run, byte for byte, with their launch times; equal for all arms.

A request is launched at `intended_s`, or when all requests in `after` have ended and `delay_s` has passed, whichever is
later. At a fixed interval (open loop), `after` is empty: a slow engine does not slow down its own load. With
`concurrency`, the first request of a session also waits until fewer sessions are in flight. Bodies are encoded shortly
before the launch, because those of a long trace do not fit into memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from kvbm.engines.engine_kind import RETURN_TOKEN_IDS
from kvbm_cli.bench.workload.script import AnswerOf, Content, Image, Part, Phase, Script, ScriptedRequest

Group = list["PlannedRequest"]

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PATHS = {"completions": COMPLETIONS, "chat": CHAT, "responses": RESPONSES}  # by the name of the endpoint
WARMUP_ANSWER_TOKENS = 2
_PLAIN = (
    *("index", "session", "turn", "intended_s", "after", "delay_s"),
    *("prompt_tokens", "answer_tokens", "path"),
)
SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
IMAGE = "image"  # of a part; its message is that of the user's text after it


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the server understands beyond OpenAI's API. All arms of a run get the same bodies.

    `token_id_fields` make it answer with token ids and their log-probabilities, if it has them; chats have only the
    latter. `path` is the endpoint of all prompts.
    """

    model: str
    has_token_ids: bool = True
    has_chat_logprobs: bool = True
    has_ignore_eos: bool = True
    has_usage: bool = True
    token_id_fields: Mapping[str, object] = field(default_factory=lambda: RETURN_TOKEN_IDS)
    path: str = COMPLETIONS

    def fields(self, answer_tokens: int | None) -> dict[str, Any]:
        """Return the fields of a greedy, streamed request without its prompt."""
        fields: dict[str, Any] = {"model": self.model, "temperature": 0.0, "stream": True}
        if self.path == RESPONSES:  # OpenAI's fields only; its last event always has the usage
            return fields if answer_tokens is None else {**fields, "max_output_tokens": answer_tokens}
        if self.has_usage:
            fields["stream_options"] = {"include_usage": True}
        if answer_tokens is not None:
            fields["max_tokens"] = answer_tokens
            if self.has_ignore_eos:
                fields |= {"min_tokens": answer_tokens, "ignore_eos": True}
        if self.has_token_ids:
            fields |= self.token_id_fields
        elif self.path == CHAT and self.has_chat_logprobs:
            fields["logprobs"] = True
        return fields


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """An answer of the recording: token ids, or text from a server without them. `logprobs` has one value per token, or
    none if the engine sends none."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    text: str = ""

    @property
    def content(self) -> Content:
        return self.token_ids or self.text


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request, sent once per run. `intended_s` counts from the start of the run, `None` in a closed loop.

    `parts` are the prompt; `prompt_tokens` is its exact length, `None` for text. `answer` is the recorded one, if any.
    `roles` has one role per part, if the parts are sent as messages.
    """

    index: int
    session: int
    turn: int
    phase: Phase
    intended_s: float | None
    after: tuple[int, ...]
    delay_s: float
    prompt_tokens: int | None
    answer_tokens: int | None
    answer: RecordedAnswer | None
    path: str
    parts: tuple[Content, ...]
    fields: tuple[tuple[str, object], ...]
    roles: tuple[str, ...] = ()

    @property
    def prompt(self) -> Sequence[int] | str:
        if any(isinstance(part, str) for part in self.parts):
            texts = [part for part in self.parts if isinstance(part, str)]
            assert len(texts) == len(self.parts), "a prompt is text or token ids"
            return "".join(texts)
        return [token for part in self.parts for token in part if isinstance(token, int)]

    def encode(self) -> bytes:
        """Return the body. It takes about a millisecond for 10,000 tokens."""
        name = "input" if self.path == RESPONSES else "messages" if self.roles else "prompt"
        prompt = {name: self.messages() if self.roles else self.prompt} if self.parts else {}
        return json.dumps({**prompt, **dict(self.fields)}, separators=(",", ":")).encode()

    def messages(self) -> list[dict[str, Any]]:
        """Return the parts as messages; parts in a row with one role are one message."""
        found: list[tuple[str, list[str], list[str]]] = []  # role, images, texts
        for role, part in zip(self.roles, self.parts, strict=True):
            assert isinstance(part, str), "messages are text"
            if role == IMAGE:
                found.append((USER, [part], []))
            elif found and found[-1][0] == role:
                found[-1][2].append(part)
            elif part:
                found.append((role, [], [part]))
        return [{"role": role, "content": self._content(images, "".join(texts))} for role, images, texts in found]

    def _content(self, images: Sequence[str], text: str) -> str | list[dict[str, Any]]:
        if not images:
            return text
        if self.path == RESPONSES:
            return [
                *({"type": "input_image", "image_url": one} for one in images),
                {"type": "input_text", "text": text},
            ]
        return [*({"type": "image_url", "image_url": {"url": one}} for one in images), {"type": "text", "text": text}]

    def to_json(self, contents: Mapping[int, int]) -> dict[str, Any]:
        """`contents` has the number of each part by its identity."""
        answer = self.answer and [self.answer.token_ids, self.answer.logprobs, self.answer.text]
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "phase": self.phase.value,
            "answer": answer,
            "parts": [contents[id(part)] for part in self.parts],
            "fields": dict(self.fields),
            **({"roles": self.roles} if self.roles else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], contents: Sequence[Content]) -> PlannedRequest:
        plain = {name: data[name] for name in _PLAIN}
        return cls(
            **{**plain, "after": tuple(data["after"])},
            phase=Phase(data["phase"]),
            answer=_answer(data["answer"]),
            parts=tuple(contents[number] for number in data["parts"]),
            fields=tuple(data["fields"].items()),
            roles=tuple(data.get("roles", ())),
        )


@dataclass(frozen=True, slots=True)
class Launches:
    """When requests are launched: at `interval_s`, or `concurrency` sessions in flight with `think_s` between turns.

    With `ramp_to_s`, the rate changes linearly to one request per `ramp_to_s` at the last launch. `burstiness` and
    `seed` make the interval random. These three are not in the digest of a plan, which has every time.
    """

    interval_s: float | None = None
    concurrency: int | None = None
    think_s: float = 0.0
    duration_s: float | None = None
    burstiness: float | None = field(default=None, repr=False)
    seed: int = field(default=0, repr=False)
    ramp_to_s: float | None = field(default=None, repr=False)

    def times_s(self, count: int) -> list[float]:
        """Return the launch times of `count` requests. Random ones take as long in total as equal ones."""
        if self.burstiness is None or count < 2:
            return [self._time_s(index, count - 1) for index in range(count)]
        generator = random.Random(self.seed)
        gaps = [generator.gammavariate(self.burstiness, 1.0) for _ in range(count - 1)]
        scale = (count - 1) / (sum(gaps) or 1.0)
        return [self._time_s(place * scale, count - 1) for place in accumulate(gaps, initial=0.0)]

    def _time_s(self, place: float, last: int) -> float:
        """Return the time of a place between launch 0 and launch `last`.

        A rate that is linear in time, from `first` to `final`, has its square linear in the launches so far.
        """
        assert self.interval_s is not None
        if self.ramp_to_s is None or not last:
            return round(place * self.interval_s, 6)
        first, final = 1 / self.interval_s, 1 / self.ramp_to_s
        rate = math.sqrt(first**2 + (final**2 - first**2) * min(place / last, 1.0))
        return round(2 * place / (first + rate), 6)


@dataclass(frozen=True, slots=True)
class Plan:
    """All requests of a run; `requests[i].index` is i. `warmup` is sent before, unmeasured."""

    requests: tuple[PlannedRequest, ...]
    launches: Launches
    request_timeout_s: float
    working_set_tokens: int
    total_tokens: int
    warmup: PlannedRequest

    @classmethod
    def make(
        cls,
        script: Script,
        launches: Launches,
        dialect: Dialect,
        *,
        answers: Sequence[RecordedAnswer] = (),
        request_timeout_s: float,
    ) -> Plan:
        """`answers[i]` is the recorded answer to request i; empty if no request of the script repeats an answer."""
        times_s = [] if launches.interval_s is None else launches.times_s(len(script.requests))
        planned = (
            _planned(index, one, launches, times_s, dialect, answers) for index, one in enumerate(script.requests)
        )
        requests = tuple(_within(planned, launches.duration_s))
        warmup = unplanned(dialect, (script.warmup,), WARMUP_ANSWER_TOKENS)
        return cls(requests, launches, request_timeout_s, script.working_set_tokens, script.total_tokens, warmup)

    @property
    def is_closed_loop(self) -> bool:
        """Whether answers decide when some requests are launched. The lines of a trace have times of their own."""
        return any(request.intended_s is None for request in self.requests)

    @property
    def duration_s(self) -> float | None:
        """Time from the first launch to one interval after the last; `None` in a closed loop."""
        times = [request.intended_s for request in self.requests]
        if any(time is None for time in times):
            return self.launches.duration_s
        return max(time or 0.0 for time in times) + (self.launches.ramp_to_s or self.launches.interval_s or 0.0)

    @property
    def session_count(self) -> int:
        return len({request.session for request in self.requests})

    @property
    def turns(self) -> int:
        return max(request.turn for request in self.requests)

    @property
    def digest(self) -> str:
        """Hash of all bodies and launch rules: two runs with equal digests sent equal requests."""
        total = hashlib.sha256(f"{self.launches}\n".encode())
        for request in self.requests:
            body = request.encode()
            launch = "-" if request.intended_s is None else f"{request.intended_s:.6f}"
            total.update(f"{launch} {request.after} {request.delay_s} {request.path} {len(body)}\n".encode())
            total.update(body)
        return total.hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Everything needed to repeat the run. A prompt is the sequence of its `parts`, numbers into `contents`."""
        contents: dict[int, int] = {}
        texts: list[object] = []
        for request in (self.warmup, *self.requests):
            for part in request.parts:
                if id(part) not in contents:
                    contents[id(part)] = len(texts)
                    texts.append(part)
        return {
            "digest": self.digest,
            "launches": {name: getattr(self.launches, name) for name in Launches.__dataclass_fields__},
            "request_timeout_s": self.request_timeout_s,
            "working_set_tokens": self.working_set_tokens,
            "total_tokens": self.total_tokens,
            "contents": texts,
            "warmup": self.warmup.to_json(contents),
            "requests": [request.to_json(contents) for request in self.requests],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """KeyError, TypeError or ValueError if the data is not of a plan."""
        contents = [part if isinstance(part, str) else tuple(part) for part in data["contents"]]
        return cls(
            requests=tuple(PlannedRequest.from_json(one, contents) for one in data["requests"]),
            launches=Launches(**data["launches"]),
            request_timeout_s=data["request_timeout_s"],
            working_set_tokens=data["working_set_tokens"],
            total_tokens=data["total_tokens"],
            warmup=PlannedRequest.from_json(data["warmup"], contents),
        )


def unplanned(
    dialect: Dialect, parts: tuple[Content, ...], answer_tokens: int | None, roles: tuple[str, ...] = ()
) -> PlannedRequest:
    """Return a request outside a schedule. `roles` has one role per part; see `roles_of`."""
    has_text = any(isinstance(part, str) for part in parts)
    return PlannedRequest(
        index=0,
        session=0,
        turn=0,
        phase=Phase.COLD,
        intended_s=0.0,
        after=(),
        delay_s=0.0,
        prompt_tokens=None if has_text else sum(map(len, parts)),
        answer_tokens=answer_tokens,
        answer=None,
        path=dialect.path,
        parts=parts,
        fields=tuple(dialect.fields(answer_tokens).items()),
        roles=() if dialect.path == COMPLETIONS else roles or roles_of(parts),
    )


def roles_of(parts: Sequence[Part], *, has_system: bool = True) -> tuple[str, ...]:
    """Return the role of each part of a prompt: the first of several is the system's, answers are the assistant's."""
    roles = [ASSISTANT if isinstance(part, AnswerOf) else IMAGE if isinstance(part, Image) else USER for part in parts]
    return tuple([SYSTEM, *roles[1:]] if has_system and len(parts) > 1 else roles)


def _answer(data: list[Any] | None) -> RecordedAnswer | None:
    return None if data is None else RecordedAnswer(tuple(data[0]), tuple(data[1]), data[2])


def _planned(
    index: int,
    one: ScriptedRequest,
    launches: Launches,
    times_s: Sequence[float],
    dialect: Dialect,
    answers: Sequence[RecordedAnswer],
) -> PlannedRequest:
    """`times_s` are the launch times of an open loop, else empty."""
    parts = tuple(answers[part.request].content if isinstance(part, AnswerOf) else part for part in one.parts)
    request = unplanned(dialect, parts, one.answer_tokens, roles_of(one.parts, has_system=one.has_system))
    if one.body is not None:
        fields = {"model": dialect.model, **dict(one.body)}
        request = replace(request, path=one.path, parts=(), roles=(), prompt_tokens=None, fields=tuple(fields.items()))
    after = () if launches.interval_s is not None and one.at_s is None else one.after
    return replace(
        request,
        index=index,
        session=one.session,
        turn=one.turn,
        phase=one.phase,
        intended_s=one.at_s if one.at_s is not None else times_s[index] if times_s else None,
        after=after,
        delay_s=one.delay_s + launches.think_s if after else 0.0,
        answer=answers[index] if answers else None,
        fields=tuple({**dict(request.fields), **dict(one.extra)}.items()),
    )


def _within(requests: Iterable[PlannedRequest], duration_s: float | None) -> Iterable[PlannedRequest]:
    """Only requests that are intended within the duration. In a closed loop, the client observes the duration."""
    for request in requests:
        if duration_s is None or request.intended_s is None or request.intended_s < duration_s:
            yield request


def slot_groups(requests: Sequence[PlannedRequest]) -> list[Group]:
    """Each session, together with sessions that it awaits after its first request, as an agent awaits its helpers.

    Such a session would otherwise keep its slot while it waits for a session that gets none.
    """
    session_of = {request.index: request.session for request in requests}
    started: set[int] = set()
    links = []
    for request in requests:
        if request.session in started:
            links += [(request.session, session_of[index]) for index in request.after]
        started.add(request.session)
    return _groups(requests, links)


def linked_groups(requests: Sequence[PlannedRequest]) -> list[Group]:
    """Sessions of which no request awaits one of another group."""
    session_of = {request.index: request.session for request in requests}
    return _groups(requests, [(request.session, session_of[index]) for request in requests for index in request.after])


def _groups(requests: Sequence[PlannedRequest], links: Iterable[tuple[int, int]]) -> list[Group]:
    """In the order of their first requests."""
    parents = {request.session: request.session for request in requests}

    def root(session: int) -> int:
        while parents[session] != session:
            parents[session] = session = parents[parents[session]]
        return session

    for one, other in links:
        parents[root(one)] = root(other)
    groups: dict[int, Group] = {}
    for request in requests:
        groups.setdefault(root(request.session), []).append(request)
    return list(groups.values())
