"""WanderingEngine: an engine whose clients do what they like, one of which asks for answers that are compared."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Any

from engine_process import CALL_TIMEOUT_S, SteppedEngine
from traffic import Request
from vllm_server import Answer

LIMIT_S = CALL_TIMEOUT_S - 100
SALTS = ("one", "other")
HINTS = ({"retain_s": 30}, {"retain_s": 1, "session": "s"}, {"end": ["s"]}, {"lock": True}, 5)


class WanderingEngine(SteppedEngine):
    def wander(
        self,
        requests: Sequence[Request],
        seed: str,
        *,
        concurrency: int = 4,
        has_priorities: bool = False,
        embeddings: str = "",
    ) -> list[Answer]:
        """Greedy answers, as of `answer`. A seed chooses salts, hints and priorities, requests that are aborted after
        some steps, and resets. With `embeddings`, a file of the model, some prompts are given as embeddings."""
        source, table = Random(seed), _table(embeddings)
        waiting, live = deque(enumerate(requests)), {}
        strangers: deque[tuple[int, str]] = deque()  # with the step in which they leave
        answers: dict[int, Answer] = {}
        step, deadline = 0, time.monotonic() + LIMIT_S
        while waiting or live:
            while waiting and len(live) < concurrency:
                index, request = waiting.popleft()
                live[self._ask(request, source, has_priorities, table)] = index
                if source.random() < 0.15:
                    stranger = Request(request.prompt[: source.randrange(1, len(request.prompt))], 50)
                    strangers.append((step + source.randrange(6), self._ask(stranger, source, has_priorities, None)))
            for request_id, answer in self._step():
                if request_id in live:
                    answers[live.pop(request_id)] = answer
            step += 1
            while strangers and strangers[0][0] <= step:
                self.abort(strangers.popleft()[1])
            if source.random() < 0.005:
                self._engine.reset_prefix_cache(reset_connector=source.random() < 0.1)
            assert time.monotonic() < deadline, f"not answered: {self._states(live)}; {self.totals()}"
        for _, name in strangers:
            self.abort(name)
        return [answers[index] for index in range(len(requests))]

    def _ask(self, request: Request, source: Random, has_priorities: bool, table: Any) -> str:
        from vllm import SamplingParams

        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt)}
        if table is not None and source.random() < 0.3:
            prompt = {"prompt_embeds": table[list(request.prompt)]}
        if source.random() < 0.3:
            prompt["cache_salt"] = source.choice(SALTS)
        extra = {"kv_transfer_params": {"kvbm": source.choice(HINTS)}} if source.random() < 0.3 else None
        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=0,
            ignore_eos=True,
            logprobs=2,
            detokenize=False,
            extra_args=extra,
        )
        self._number += 1
        name = str(self._number)
        self._engine.add_request(name, prompt, params, priority=source.randrange(3) if has_priorities else 0)
        return name


def _table(path: str) -> Any:
    if not path:
        return None
    from safetensors.torch import load_file

    return load_file(path)["model.embed_tokens.weight"].float()
