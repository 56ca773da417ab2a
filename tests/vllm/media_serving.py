"""A multimodal vLLM behind `kvbm serve`, with the cache or as its baseline, asked by chat requests with media."""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvbm_serve import QUIET, started
from media_contents import sound_file, url_of
from media_models import PLACE, media_model
from vllm_server import Answer, VllmClient, margin

STOP_TIMEOUT_S = 60
TEMPLATE = (
    "{%% for message in messages %%}{%% for part in message.content %%}"
    "{{ part.text if part.type == 'text' else '%s' }} {%% endfor %%}{%% endfor %%}"
)
ENGINE = {
    "served_model_name": "m",
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 1536,
    "num_gpu_blocks_override": 60,
    "kv_cache_memory_bytes": "256M",
    "enforce_eager": True,
    "chat_template_content_format": "openai",
    "max_logprobs": 2,
}


@dataclass(frozen=True, slots=True)
class Ask:
    """A chat request: text, and each medium followed by more text. `text` is a seed, `tail` a number of words.

    `names` are uuids, empty where there is none. `options` are `mm_processor_kwargs` in JSON.
    """

    text: int
    media: tuple[str, ...]
    names: tuple[str, ...] = ()
    modality: str = "image"
    tail: int = 40
    options: str = ""
    model: str = "m"
    max_tokens: int = 6

    @property
    def prompt(self) -> tuple[object, ...]:
        """What the report of a wrong answer counts."""
        return (self.text, *self.media)

    def without_names(self) -> Ask:
        return replace(self, names=())

    def body(self) -> dict[str, Any]:
        source = random.Random(f"text {self.text}")
        parts: list[dict[str, Any]] = [{"type": "text", "text": _words(source, 40)}]
        for index, content in enumerate(self.media):
            name = self.names[index] if self.names else ""
            parts.append(_part(self.modality, content) | ({"uuid": name} if name else {}))
            parts.append({"type": "text", "text": _words(source, self.tail)})
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 2,
            "return_tokens_as_token_ids": True,
            **({"mm_processor_kwargs": json.loads(self.options)} if self.options else {}),
        }


def _part(modality: str, content: str) -> dict[str, Any]:
    if modality == "image":
        return {"type": "image_url", "image_url": {"url": url_of(content)}}
    data = base64.b64encode(sound_file(content)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def _words(source: random.Random, count: int) -> str:
    return " ".join("".join(source.choices("bdfgklmnprst", k=1) + source.choices("aeiou", k=1)) for _ in range(count))


class ChatClient(VllmClient):
    def ask_media(self, ask: Ask) -> Answer:
        answer = self.http.post("/v1/chat/completions", json=ask.body())
        assert answer.status_code == 200, f"{answer.status_code} {answer.text[:1000]}\n{self.log_tail()}"
        body = answer.json()
        steps = body["choices"][0]["logprobs"]["content"]
        assert len(steps) == ask.max_tokens
        return Answer(
            tuple(int(step["token"].removeprefix("token_id:")) for step in steps),
            tuple(step["logprob"] for step in steps),
            tuple(margin([one["logprob"] for one in step["top_logprobs"]]) for step in steps),
            (body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )

    def stop(self, program: subprocess.Popen[str]) -> None:
        program.send_signal(signal.SIGTERM)
        program.wait(STOP_TIMEOUT_S)


@contextmanager
def served(
    directory: Path, tiers: Mapping[str, Any] | None, modality: str = "image", core: int = 0, **arguments: Any
) -> Iterator[ChatClient]:
    """A healthy server, which is stopped in order at the end. Without `tiers` it is the baseline."""
    write_profile(directory, tiers, modality, **arguments)
    with (
        started(directory, _environment(directory, core), *([] if tiers else ["--baseline"])) as (program, url),
        ChatClient(url, "m") as client,
    ):
        yield client
        client.stop(program)


def write_profile(directory: Path, tiers: Mapping[str, Any] | None, modality: str, **arguments: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    template = directory / "chat.jinja"
    template.write_text(TEMPLATE % PLACE[modality])
    engine = ENGINE | {"chat_template": str(template), "limit_mm_per_prompt": {modality: 4}} | arguments
    profile = {
        "engine": {"kind": "vllm", "model": str(media_model(modality)), "arguments": engine},
        "tiers": {"host": {"blocks": 400}},
        "onboard": {"policy": "always"},
        "server": {"port": "auto"},
    } | dict(tiers or {})
    path = directory / "mine.yaml"
    path.write_text(json.dumps(profile))
    return path


def _environment(directory: Path, core: int) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))
    core = cores[core % len(cores)]
    return {**os.environ, "HOME": str(directory), **QUIET, "VLLM_CPU_OMP_THREADS_BIND": str(core)}
