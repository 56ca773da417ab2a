"""Settings of vLLM that decide which states of a model kvbm can keep and load: facts in, findings out.

vLLM keeps the state of a sequence only at some block boundaries, those that `prefix_cache_retention_interval` selects.
kvbm stores each of them as a snapshot. With some settings there is no snapshot at all, and kvbm is disabled. With
others vLLM refuses to start, fails at the first long prompt, or finds no hits. Sources: vLLM 0.32, and runs of its CPU
build.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvbm.config.engine import VllmArguments
from kvbm.config.values import count_of
from kvbm.engines.vllm.models import ALIGN, KINDS_OF_STATES, MODE, NO_STATES, disabled_by
from kvbm.sizing.findings import StateFinding, StateLevel

PREFIX = "engine.arguments."
RETENTION = "prefix_cache_retention_interval"
CPU_BLOCK_TOKENS = 128  # of a CPU build if `block_size` is not set
GDN, MAMBA2 = "GDN", "Mamba-2"
_OF_ENDS = (
    "it keeps a snapshot at the end of each prompt, and where two prompts have shared a prefix. This suits chats and "
    "agents; for long shared prefixes, set a number of tokens"
)


@dataclass(frozen=True, slots=True)
class StateSettings:
    """The facts. `families.state_kind` gives `state_kind`. `block_tokens` is None if only vLLM knows them.
    `is_block_certain` is false if they assume a kind of GPU, or a vLLM that is not installed."""

    arguments: VllmArguments
    state_kind: str
    block_tokens: int | None
    is_block_certain: bool
    on_cpu: bool

    def findings(self) -> list[StateFinding]:
        if self.state_kind not in KINDS_OF_STATES:
            return [_disabled("engine.model", unsupported(self.state_kind))]
        if (reason := disabling_argument(self.arguments)) is not None:
            name, why = reason
            return [_disabled(f"{PREFIX}{name}", f"this model keeps states, so kvbm is disabled: {why}")]
        return [*self._mode(), *self._retention(), *(self._on_cpu() if self.on_cpu else ())]

    def _mode(self) -> Iterator[StateFinding]:
        if (self.arguments.model_extra or {}).get(MODE) == NO_STATES:
            key = f"{PREFIX}{MODE}"
            message = f"`{key}: {NO_STATES}` has no effect: vLLM 0.32 uses `{ALIGN}` while prefix caching is on"
            yield StateFinding(StateLevel.NOTE, key, message)

    def _retention(self) -> Iterator[StateFinding]:
        key, interval = f"{PREFIX}{RETENTION}", self.arguments.prefix_cache_retention_interval
        if interval is None:
            start = f"`{key}` is not set, so vLLM uses 0:"
            yield StateFinding(StateLevel.NOTE, key, f"{start} {_OF_ENDS}")
        elif interval == 0:
            yield StateFinding(StateLevel.NOTE, key, f"`{key}: 0`: {_OF_ENDS}")
        elif self.block_tokens is not None and interval % self.block_tokens:
            yield self._no_multiple(key, interval, self.block_tokens)
        else:
            yield StateFinding(StateLevel.NOTE, key, self._of_interval(key, interval))

    def _of_interval(self, key: str, interval: int) -> str:
        blocks = ""
        if self.block_tokens is not None:
            count = interval // self.block_tokens
            blocks = f" ({count:,} block{'s' * (count != 1)})"
        return (
            f"`{key}: {interval}`: vLLM keeps a snapshot every {interval:,} tokens{blocks}, at the end of each prompt, "
            "and where two prompts have shared a prefix. This suits long shared prefixes. For chats and agents, 0 "
            "needs less host memory"
        )

    def _no_multiple(self, key: str, interval: int, block_tokens: int) -> StateFinding:
        below = interval // block_tokens * block_tokens
        nearest = " or ".join(f"`{RETENTION}: {value}`" for value in (below, below + block_tokens) if value)
        if self.is_block_certain:
            message = f"`{key}: {interval}` is not a multiple of the block size of {block_tokens:,} tokens"
            return StateFinding(StateLevel.MISTAKE, key, message, f"vLLM would not start; use {nearest}, or 0")
        message = (
            f"`{key}: {interval}` is not a multiple of {block_tokens:,} tokens, the likely block size, and vLLM then "
            f"does not start: use {nearest}, or 0"
        )
        return StateFinding(StateLevel.WARNING, key, message)

    def _on_cpu(self) -> Iterator[StateFinding]:
        """vLLM 0.32 on a CPU; both were run."""
        key, tokens = f"{PREFIX}block_size", self.block_tokens
        if self.arguments.block_size is None and tokens != CPU_BLOCK_TOKENS:
            size = (
                f"to {tokens:,} tokens" if tokens is not None else "(log: `Setting attention block size to N tokens`)"
            )
            message = (
                f"`{key}` is not set: on a CPU, vLLM enlarges the block {size}, but its scheduler continues with "
                f"{CPU_BLOCK_TOKENS} tokens. The second request of a prompt then has no hit; set "
                f"`block_size: {tokens or 'N'}`"
            )
            yield StateFinding(StateLevel.WARNING, key, message)
        batched = count_of(self.arguments.max_num_batched_tokens)
        wanted = tokens or self.arguments.block_size
        if self.state_kind == MAMBA2 and (batched is None or batched != wanted):
            key = f"{PREFIX}max_num_batched_tokens"
            given = "is not set" if batched is None else f"is {batched}"
            message = (
                f"`{key}` {given}: on a CPU, vLLM 0.32 fails at the first prompt of a {MAMBA2} model that is longer "
                f"than a block; set `max_num_batched_tokens: {wanted or 'N'}`, the block size"
            )
            yield StateFinding(StateLevel.WARNING, key, message)


def unsupported(state_kind: str) -> str:
    return f"kvbm is disabled for models with {state_kind} states, which have never been run with it"


def _disabled(key: str, why: str) -> StateFinding:
    return StateFinding(StateLevel.WARNING, key, f"`{key}`: {why}", disables=True)


def without_effect() -> list[StateFinding]:
    """Return the findings for an interval and a model with neither states nor sliding windows: vLLM 0.32 raises
    ValueError."""
    key = f"{PREFIX}{RETENTION}"
    message = f"`{key}` is only for models with states or sliding windows, and this model has neither"
    return [StateFinding(StateLevel.MISTAKE, key, message, "vLLM would not start; remove it, or set it to 0")]


def disabling_argument(arguments: VllmArguments) -> tuple[str, str] | None:
    """Return the argument for which kvbm disables itself with a model that has states, and why; None without one."""
    extra = arguments.model_extra or {}
    given = extra.get(MODE, ALIGN)
    has_prefixes = arguments.enable_prefix_caching is not False
    found = disabled_by(
        mode=(ALIGN if given == NO_STATES else str(given)) if has_prefixes else NO_STATES,
        pipeline_parallel_size=arguments.pipeline_parallel_size or 1,
        speculates=extra.get("speculative_config") not in (None, False),
        replays=extra.get("use_replayssm") not in (None, False),
    )
    if found is not None and found[0] == "speculative_config" and not arguments.prefix_cache_retention_interval:
        return found[0], f"{found[1]}. With `{RETENTION}: 0`, vLLM's default, EAGLE and MTP have no hits in G1 either"
    return found
