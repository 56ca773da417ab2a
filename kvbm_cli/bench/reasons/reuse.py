"""How many prompt tokens of a plan repeat an earlier prompt: what a cache of unlimited size would find."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_cli.bench.workload.content import Content
from kvbm_cli.bench.workload.plan import Plan, PlannedRequest
from kvbm_cli.bench.workload.script import length_of


@dataclass(frozen=True, slots=True)
class Reuse:
    """`repeated_tokens` begin a prompt that was sent before; `block_tokens` of them are in whole blocks.

    The last token of a prompt is always computed, so its block is not among the whole ones.
    """

    prompt_tokens: int
    repeated_tokens: int
    block_tokens: int

    @property
    def repeated_share(self) -> float:
        return self.repeated_tokens / self.prompt_tokens

    @property
    def block_share(self) -> float:
        return self.block_tokens / self.prompt_tokens


def reuse_of(plan: Plan, block_size: int) -> Reuse | None:
    """`None` if a request has a fixed body, whose tokens are not known."""
    if not all(request.parts for request in plan.requests):
        return None
    prefixes, prompt, repeated, in_blocks = _SentPrefixes(), 0, 0, 0
    for request in plan.requests:
        length = sum(map(length_of, request.parts))
        old = prefixes.add(request)
        prompt += length
        repeated += old
        in_blocks += max(0, min(old, length - 1)) // block_size * block_size
    return Reuse(prompt, repeated, in_blocks) if prompt else None


class _SentPrefixes:
    """All prompts and answers so far, as chains of equal parts."""

    def __init__(self) -> None:
        self._numbers: dict[Content, int] = {}
        self._by_identity: dict[int, int] = {}
        self._children: dict[tuple[int, int], int] = {}

    def add(self, request: PlannedRequest) -> int:
        """Tokens of the prompt that were sent before. Then the prompt and its recorded answer count as sent."""
        answer = () if request.answer is None else (request.answer.content,)
        node, old = 0, 0
        for position, part in enumerate((*request.parts, *answer)):
            if not part:
                continue
            key = (node, self._number(part))
            if key not in self._children:
                self._children[key] = len(self._children) + 1
            elif position < len(request.parts):
                old += length_of(part)
            node = self._children[key]
        return old

    def _number(self, part: Content) -> int:
        """Equal for equal parts. The plan keeps its parts alive, so an identity is never used twice."""
        found = self._by_identity.get(id(part))
        if found is None:
            found = self._by_identity[id(part)] = self._numbers.setdefault(part, len(self._numbers))
        return found
