"""Launch: one start of an engine as a foreign file describes it.

Readers (`import_shell.py`, `import_yaml.py`) make launches, and `import_profile.py` translates one to a profile. No
reader runs anything: a text that only a run would show is `unknown`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbm.config.document import plain_scalar

MODULES = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.cli.main": "vllm",
    "dynamo.vllm": "vllm",
    "dynamo.trtllm": "tensorrt-llm",
    "dynamo.sglang": "sglang",
    "sglang.launch_server": "sglang",
}
STARTS = re.compile(
    r"\bvllm(?:\s+serve\b|/vllm-openai)|\bsglang\s+serve\b|\btrtllm-serve\b|vllm/entrypoints/openai"
    r"|-m\s+(?:vllm\.entrypoints\.|sglang\.launch_server|dynamo\.)"
)
START_OF_LINE = (
    r"(?:(?:vllm|sglang)[ \t]+serve|trtllm-serve|(?:docker|podman|nerdctl)[ \t]+run|-m[ \t]+(?:vllm|sglang|dynamo)\.)"
)
STARTS_IN_LISTS = re.compile(  # of words, as Python and JSON write them
    r"[\"'](?:[\w./-]*/)?(?:(?:vllm|sglang)[\"']\s*,\s*[\"']serve|trtllm-serve)[\"']"
    r"|[\"']-m[\"']\s*,\s*[\"'](?:vllm\.entrypoints|sglang\.launch_server|dynamo\.)"
)
READS = (
    "it reads a command line, a script, a Dockerfile, a unit of systemd or a page of Markdown with `vllm serve`, "
    "`dynamo.vllm`, `trtllm-serve` or `sglang.launch_server`, a manifest of Kubernetes, values of production-stack or "
    "llm-d, a Compose file, an env file with `DYN_KVBM_*` variables, and options of TensorRT-LLM or vLLM in YAML"
)
_OTHER_SERVERS = ("disaggregated", "mm_embedding_serve", "disaggregated_mpi_worker")  # subcommands of trtllm-serve
_IMAGE = re.compile(r"(?:^|/)(?:vllm[\w.-]*|llm-d-(?:cuda|dev|rocm|xpu|cpu|hpu|aws|gke|tpu)[\w.-]*)(?=[:@]|$)")
_IMAGE_OF_ANOTHER = re.compile(r"router|proxy|sidecar|sim\b|lmstack|runtime")
_MODEL = re.compile(r"(?!/(?:usr|bin|sbin|opt)/|[\w./-]*\.(?:sh|py)$)[\w.~-]*/[\w./~-]+|\ue000.*")  # behind an image
_TOOLS = frozenset({"docker", "podman", "nerdctl", "singularity", "apptainer"})
_SWITCHES = re.compile(  # of `docker run` and tools like it; all other options have a value
    r"--(?:detach|init|interactive|privileged|quiet|read-only|rm|tty|publish-all|no-\w+|replace|oom-kill-disable"
    r"|sig-proxy|rmi|tls-verify|disable-\w+|nv|rocm|cleanenv|contain|containall|writable|writable-tmpfs|compat|fakeroot)"
)
_SHORT = re.compile(r"-[ditqPC]*(?:([a-zA-Z])(.*))?", re.DOTALL)
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
    of the command, whose first words are `command`, and runs in `image`. `files` are texts of the file, by name."""

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
    command: tuple[str, ...] = ()
    image: str = ""

    @property
    def is_of_dynamo(self) -> bool:
        """Whether Dynamo runs the engine, and reads flags of its own."""
        return any(one.startswith("dynamo.") for one in self.command)

    @property
    def has_kvbm(self) -> bool:
        """Whether it starts the engine with a block manager of this name."""
        return "kvbm" in self.words or any(map(_OURS.search, self.words)) or "DYN_KVBM_CPU_CACHE_GB" in self.environment


@dataclass(frozen=True, slots=True)
class Start:
    """An engine that a command starts: its arguments, the words that start it, and their place in the command."""

    kind: str
    words: tuple[Word, ...]
    command: tuple[str, ...]
    at: int


@dataclass(frozen=True, slots=True)
class Container:
    """A container that a command starts: its variables, its image, what runs in it, and what is not in the file."""

    environment: dict[str, Word]
    image: str
    is_entered: bool  # at the entry point of the image
    words: tuple[Word, ...]
    left: tuple[Left, ...]


def started(words: Sequence[Word], image: str = "") -> Start | None:
    """Return the engine that this command starts, wherever its name stands; None for another command. `image` is the
    container, whose entry point may be the engine."""
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else ""
        name = word.rpartition("/")[2]
        if name in ("vllm", "sglang") and following == "serve":
            return Start(str(name), tuple(words[at + 2 :]), (str(name), "serve"), at)
        if word == "-m" and following in MODULES:
            is_main = following.endswith(".cli.main") and [*words[at + 2 : at + 3]] == ["serve"]
            if following.endswith(".cli.main") and not is_main:
                continue
            command = ("python3", "-m", str(following), *(["serve"] if is_main else []))
            behind = tuple(words[at + 2 + is_main :])
            return Start(MODULES[following], behind, command, at)
        if word.endswith("vllm/entrypoints/openai/api_server.py"):
            return Start("vllm", tuple(words[at + 1 :]), ("python3", "-m", "vllm.entrypoints.openai.api_server"), at)
        if name == "trtllm-serve" and following not in _OTHER_SERVERS:
            return Start("tensorrt-llm", tuple(words[at + 1 + (following == "serve") :]), ("trtllm-serve",), at)
    is_engine = _IMAGE.search(image) is not None and _IMAGE_OF_ANOTHER.search(image) is None
    if is_engine and (not words or words[0].startswith("-") or _MODEL.fullmatch(words[0])):
        return Start("vllm", tuple(words), ("vllm", "serve"), 0)
    return None


def contained(words: Sequence[Word]) -> Container | None:
    """Return the container that `docker run` or a tool like it starts; None for another command."""
    at = next((at for at, one in enumerate(words) if one.rpartition("/")[2] in _TOOLS), len(words))
    run = next((there for there in range(at + 1, min(at + 4, len(words))) if words[there] in ("run", "exec")), None)
    if run is None:
        return None
    environment: dict[str, Word] = {}
    left: list[Left] = []
    entry: list[Word] = []
    rest = deque(words[run + 1 :])
    while rest and rest[0].startswith("-"):
        option, value = _option(rest)
        if option in ("-e", "--env") and value is not None:
            name, is_given, text = value.partition("=")
            if is_given and name.isidentifier():
                environment[name] = Word(text, value.line)
            else:
                left.append(Left(name, "its value is not in this file", value.line))
        elif option == "--env-file" and value is not None:
            left.append(Left(f"--env-file {value}", "other files are not read", value.line))
        elif option == "--entrypoint" and value:
            entry = [value]
    if rest and rest[0].startswith("\ue000") and not _IMAGE.search(rest[0]):  # options that the file does not show
        image = next((one for one in rest if _IMAGE.search(one)), None)
        while image is not None and rest[0] is not image:
            rest.popleft()
    image = rest.popleft() if rest else Word("")
    is_entered = words[run] == "run" and not entry
    return Container(environment, str(image), is_entered, (*entry, *rest), tuple(left))


def _option(rest: deque[Word]) -> tuple[str, Word | None]:
    """Take an option with its value, if it has one."""
    word = rest.popleft()
    option, is_inline, inline = word.partition("=")
    short = None if word.startswith("--") else _SHORT.fullmatch(word)
    if short is not None:
        option, inline = f"-{short[1] or ''}", (short[2] or "").removeprefix("=")
        if not short[1] or inline:
            return option, Word(inline, word.line)
    elif is_inline or _SWITCHES.fullmatch(option):
        return option, Word(inline, word.line)
    return option, rest.popleft() if rest else None
