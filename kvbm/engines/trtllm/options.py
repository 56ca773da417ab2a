"""Rules for single options in `engine.arguments` of TensorRT-LLM: what kvbm sets, and what it cannot work with.

TensorRT-LLM's interface for connectors has limits. An option beyond one of them is refused here, before a start of
minutes: TensorRT-LLM would refuse it, or the connector would disable itself. options.json has the limits, the names,
and what to write instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvbm.config.document import Document, Entry, Mistake, entry_at
from kvbm.config.engine import flags_of_others
from kvbm.config.flags import NAME, refused_by
from kvbm.config.spelling import snake_case

CONNECTOR = {
    "connector_module": "kvbm.trtllm_integration.connector",
    "connector_scheduler_class": "DynamoKVBMConnectorLeader",
    "connector_worker_class": "DynamoKVBMConnectorWorker",
}
DEFAULT_BLOCK_TOKENS = 32

_NAMES = json.loads(Path(__file__).with_name("options.json").read_text())
SIGNS: frozenset[str] = frozenset(_NAMES["signs"])  # keys of a file of options that are not keys of other files
KVBM_SETS: Mapping[str, str] = _NAMES["kvbm_sets"]
# Names of other engines and of options of the command line, and the option in the file.
SAME_OPTION: Mapping[str, str] = _NAMES["same_option"]
# Flags of other engines that TensorRT-LLM does not have.
_OF_OTHERS = flags_of_others("tensorrt-llm") - {"seed", "device", "pipeline_parallel_size"}


@dataclass(frozen=True, slots=True)
class Limit:
    """The value of `option` must be `required`, for this reason. If that is None, the option must not be set."""

    option: str
    required: object
    reason: str

    def is_kept(self, value: object) -> bool:
        return value == self.required and isinstance(value, bool) == isinstance(self.required, bool)

    def message(self, value: object) -> str:
        name = f"`engine.arguments.{self.option}`"
        if self.required is None:
            return f"{name} is not supported: {self.reason}"
        return f"{name} must be `{_shown(self.required)}`, not `{_shown(value)}`: {self.reason}"


LIMITS = tuple(Limit(**one) for one in _NAMES["limits"])
_AS_IN_TRTLLM = "write the name as in TensorRT-LLM, such as `max_seq_len: 8192`"
_COUNTS = ("kv_cache_config.tokens_per_block", "kv_cache_config.max_tokens")  # kvbm computes sizes from them


def refused_options(document: Document) -> Iterator[Mistake]:
    """Yield a mistake for each option that kvbm sets, that no option is, or whose value kvbm cannot work with."""
    yield from refused_by(document, _reason_against)
    for limit in LIMITS:
        found = _option(document, limit.option)
        if found is not None and not limit.is_kept(found.value):
            yield _refused(limit.option, limit.message(found.value), found)
    for option in _COUNTS:
        found = _option(document, option)
        if found is not None and not (type(found.value) is int and found.value >= 1):
            text = f"`engine.arguments.{option}` must be a whole number of at least 1, not `{_shown(found.value)}`"
            yield _refused(option, text, found)


def _reason_against(name: str, entry: Entry) -> tuple[str, str] | None:
    if not NAME.fullmatch(name):
        meant = snake_case(name)
        hint = f"write `{SAME_OPTION.get(meant, meant)}`" if NAME.fullmatch(meant) else _AS_IN_TRTLLM
        return f"`{name}` is not a valid option name", hint
    if name in KVBM_SETS:
        return f"`{name}` is set by kvbm", KVBM_SETS[name]
    if name in SAME_OPTION:
        return f"`{name}` is not an option of the LLM API of TensorRT-LLM", f"use `{SAME_OPTION[name]}`"
    if name in _OF_OTHERS:
        return f"`{name}` is not an option of the LLM API of TensorRT-LLM", "remove it"
    return None


def _option(document: Document, option: str) -> Entry | None:
    found = entry_at(document, ["engine", "arguments", *option.split(".")])
    return None if found is None or found.value is None else found


def _refused(option: str, message: str, entry: Entry) -> Mistake:
    place = entry.key if entry.section is not None else entry.source
    return Mistake(message, place, hint="remove it", key=f"engine.arguments.{option}")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
