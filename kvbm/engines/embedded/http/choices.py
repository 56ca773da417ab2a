"""Choices: the answers to one HTTP request. There is one for each prompt of the request, times `n`.

    prompts  A, B with n = 2      choices  0: A   1: A   2: B   3: B

Every choice is a request of its own in the engine. Prompt tokens count once per prompt, as in the OpenAI API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvbm.engines.embedded.http.completion import Completion
from kvbm.engines.embedded.http.openai_responses import AnswerPart, Usage


class Choices:
    """The completions of one HTTP request, in the order of their indices. All of them set `news`."""

    def __init__(self, completions: Sequence[Completion], *, per_prompt: int, news: asyncio.Event) -> None:
        self._completions = completions
        self._per_prompt = per_prompt
        self._news = news

    async def next_parts(self) -> list[AnswerPart]:
        """Wait for new output of any choice and return it. Returns an empty list once all answers are complete.

        Raises CompletionFailed as soon as one choice has failed.
        """
        while not all(completion.is_answered for completion in self._completions):
            await self._news.wait()
            self._news.clear()
            parts = [part for completion in self._completions for part in completion.take()]
            if parts:
                return parts
        return []

    def prompt_tokens(self, index: int) -> int:
        return len(self._completions[index].prompt_token_ids)

    async def usage(self) -> Usage:
        """Wait for the last output of every request. Raises CompletionFailed."""
        usages = [await completion.usage() for completion in self._completions]
        return Usage.sum(usages[:: self._per_prompt], completion_tokens=sum(each.completion_tokens for each in usages))
