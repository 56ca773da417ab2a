"""Engines of models that see or hear, in one child process, and requests with media for them."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_process import SteppedEngine
from media_contents import SAMPLING_RATE, embeddings, picture, sound
from media_models import PLACE, media_model


@dataclass(frozen=True, slots=True)
class MediaRequest:
    """A prompt of text with media in it: `media` are contents, `names` what a client calls them, if it does.
    A number is the seed of a usual content.

    `text` is a seed too: requests with the same one have the same tokens, apart from the number of media. `tail` is the
    number of words behind each medium. `has_options`: whether it is read with options, which vLLM hashes with its name.
    """

    text: int
    media: tuple[int | str, ...]
    names: tuple[str, ...] = ()
    modality: str = "image"
    tail: int = 20
    has_options: bool = False
    max_tokens: int = 6

    @property
    def prompt(self) -> tuple[int, ...]:
        """What the report of a wrong answer counts."""
        return (self.text, *self.media)


class MediaEngine(SteppedEngine):
    """`start` takes `image` or `audio` for a model."""

    def model(self, preset: str) -> Path:
        return media_model(preset)

    def start(self, preset: str, **arguments: Any) -> None:
        super().start(preset, **{"skip_tokenizer_init": False, "limit_mm_per_prompt": {preset: 4}} | arguments)

    def slow_digests(self, seconds: float) -> None:
        """From now on, each digest takes so long, in all engines."""
        from kvbm.engines.vllm import media_content

        digest_of = media_content.digest_of

        def slow(data: Any, modality: str) -> bytes:
            time.sleep(seconds)
            return digest_of(data, modality)

        vars(media_content)["digest_of"] = slow

    def prompt(self, request: MediaRequest) -> dict[str, Any]:
        source = random.Random(f"text {request.text}")
        parts = [_words(source, 40)]
        for _ in request.media:
            parts += [PLACE[request.modality], _words(source, request.tail)]
        prompt: dict[str, Any] = {"prompt": " ".join(parts)}
        if request.media:
            prompt["multi_modal_data"] = {request.modality: [_medium(request.modality, seed) for seed in request.media]}
        if request.has_options:  # as the chat endpoint passes `--media-io-kwargs` on
            prompt["media_io_kwargs"] = {"image": {"rgba_background_color": [255, 255, 255]}}
        if request.names:
            prompt["multi_modal_uuids"] = {request.modality: list(request.names)}
        return prompt


def _words(source: random.Random, count: int) -> str:
    return " ".join("".join(source.choices("bdfgklmnprst", k=1) + source.choices("aeiou", k=1)) for _ in range(count))


def _medium(modality: str, content: int | str) -> Any:
    if str(content).startswith("embeds "):
        return embeddings(content)
    if modality == "audio":
        return sound(int(content)), SAMPLING_RATE
    return picture(content if isinstance(content, str) else f"rgb {content}")
