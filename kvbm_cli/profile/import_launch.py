"""Launch: one start of an engine as a foreign file describes it.

Readers (`import_shell.py`, `import_yaml.py`) make launches, and `import_profile.py` translates one to a profile. No
reader runs anything: a text that only a run would show is `unknown`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbm.config.document import plain_scalar

MODULES = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "dynamo.vllm": "vllm",
    "dynamo.trtllm": "tensorrt-llm",
    "dynamo.sglang": "sglang",
    "sglang.launch_server": "sglang",
}
READS = (
    "it reads a command line or a script with `vllm serve`, `dynamo.vllm`, `trtllm-serve` or `sglang.launch_server`, a "
    "manifest of Kubernetes, values of production-stack or llm-d, a Compose file, an env file with `DYN_KVBM_*` "
    "variables, and options of TensorRT-LLM or vLLM in YAML"
)
_OTHER_SERVERS = ("disaggregated", "mm_embedding_serve", "disaggregated_mpi_worker")  # subcommands of trtllm-serve
_NO_START = frozenset({"echo", "printf", "pkill", "pgrep", "grep", "which", "trap"})
_IMAGE = re.compile(r"(?:^|/)(?:vllm[\w.-]*|llm-d-(?:cuda|dev|rocm|xpu|cpu|hpu|aws|gke|tpu)[\w.-]*)(?=[:@]|$)")
_IMAGE_OF_ANOTHER = re.compile(r"router|proxy|sidecar|sim\b|lmstack|runtime")
MAX_DEPTH = 60  # levels of a value
MAX_KEY = 500  # characters; YAML has at most 1024 in front of a colon
_OURS = re.compile(r'"DynamoConnector"|"PdConnector"')


class Word(str):
    """A text of the file. `line` is its line, `unknown` the part that only a run would show; `is_plain` without
    quotes in YAML."""

    line: int
    unknown: str
    is_plain: bool

    def __new__(cls, text: str, line: int = 0, *, unknown: str = "", is_plain: bool = False) -> Word:
        word = super().__new__(cls, text)
        word.line, word.unknown, word.is_plain = line, unknown, is_plain
        return word


def plain(value: Any) -> Any:
    """Return a value of YAML with its numbers, booleans and nulls."""
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return plain_scalar(str(value)) if isinstance(value, Word) and value.is_plain else value


def is_writable(value: Any) -> bool:
    """Whether the keys of a profile can hold this value: its levels and its keys are limited."""
    inside = [value]
    for _ in range(MAX_DEPTH):
        if any(len(str(key)) > MAX_KEY for one in inside if isinstance(one, dict) for key in one):
            return False
        parts = [one.values() if isinstance(one, dict) else one for one in inside if isinstance(one, dict | list)]
        inside = [two for part in parts for two in part]
    return not inside


@dataclass(frozen=True, slots=True)
class Left:
    """What a profile cannot take over, and why."""

    what: str
    reason: str
    line: int = 0

    def text(self) -> str:
        return f"`{self.what}`{f' (line {self.line})' if self.line else ''}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Launch:
    """`words` are the arguments of the engine, `environment` its variables. `options` are settings of the engine that
    a file has as keys, `settings` are keys of a profile, and those per rank are numbers of GB. `model` is named outside
    of the command. `files` are texts that the file contains, by name."""

    name: str
    kind: str | None
    words: tuple[Word, ...] = ()
    environment: Mapping[str, Word] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    settings: Mapping[str, Word] = field(default_factory=dict)
    settings_per_rank: Mapping[str, Word] = field(default_factory=dict)
    left: tuple[Left, ...] = ()
    model: Word | None = None
    line: int = 0
    files: Mapping[str, str] = field(default_factory=dict)
    is_of_dynamo: bool = False

    @property
    def has_kvbm(self) -> bool:
        """Whether it starts the engine with a block manager of this name."""
        return "kvbm" in self.words or any(map(_OURS.search, self.words)) or "DYN_KVBM_CPU_CACHE_GB" in self.environment


def started(words: Sequence[Word], image: str = "") -> tuple[str, tuple[Word, ...], bool] | None:
    """Return the kind of the engine that this command starts, its arguments, and whether Dynamo runs it; None for
    another command. `image` is the container, whose entry point may be the engine."""
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else ""
        name = word.rpartition("/")[2]
        if index == 0 and name in _NO_START:
            return None
        if name in ("vllm", "sglang") and following == "serve":
            return str(name), tuple(words[index + 2 :]), False
        if word == "-m" and following in MODULES:
            return MODULES[following], tuple(words[index + 2 :]), following.startswith("dynamo.")
        if name == "trtllm-serve" and following not in _OTHER_SERVERS:
            return "tensorrt-llm", tuple(words[index + 1 + (following == "serve") :]), False
    if _IMAGE.search(image) and not _IMAGE_OF_ANOTHER.search(image) and (not words or words[0].startswith("-")):
        return "vllm", tuple(words), False
    return None
