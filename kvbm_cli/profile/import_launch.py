"""Launch: one start of an engine as a foreign file describes it, and what `flags.yaml` knows of its flags.

Readers (`import_shell.py`, `import_yaml.py`) make launches, and `import_profile.py` translates one to a profile. No
reader runs anything: a text that only a run would show is `unknown`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from kvbm.config.flags import flag_name
from kvbm.engines.trtllm.options import SAME_OPTION
from kvbm.engines.vllm.flags import TIER

MAX_DEPTH = 60  # levels of a value
MARKS = "\ue000\ue001"  # around what is not resolved
READS = (
    "it reads a command line, a script, a Dockerfile, a unit of systemd or a page of Markdown with `vllm serve`, "
    "`dynamo.vllm`, `trtllm-serve` or `sglang.launch_server`, a manifest of Kubernetes, values of production-stack, a "
    "Compose file, an env file with `DYN_KVBM_*` variables, and options of TensorRT-LLM or vLLM in YAML"
)


def _start(gap: str) -> str:
    """Return the pattern of the words that start an engine. `gap` is what stands between two words."""
    other_servers = rf"(?!{gap}(?:disaggregated|mm_embedding_serve))"
    return (
        rf"(?:(?:vllm|sglang){gap}serve|trtllm-serve(?:{gap}serve)?{other_servers}|vllm/entrypoints/openai/api_server\.py"
        rf"|-m{gap}(?:vllm\.entrypoints\.(?:openai\.api_server|cli\.main{gap}serve)|sglang\.launch_server"
        r"|dynamo\.(?:vllm|trtllm|sglang)))"
    )


_IN_TEXT, _IN_LINE, _IN_LIST, _IN_WORDS = map(_start, (r"\s+", r"[ \t]+", r"[\"']\s*,\s*[\"']", "\0"))
STARTS = re.compile(rf"(?<![\w.-]){_IN_TEXT}(?![\w-])|vllm/vllm-openai")
STARTS_IN_LISTS = re.compile(rf"[\"'](?:[\w./-]*/)?{_IN_LIST}[\"']")  # of Python and JSON
START_OF_LINE = rf"(?:(?:[\w./~-]*/)?{_IN_LINE}|(?:docker|podman|nerdctl)[ \t]+(?:run|create))(?![\w-])"
_STARTS_IN_WORDS = re.compile(rf"(?:(?<=\0)|^)(?:[^\0]*/)?{_IN_WORDS}(?=\0|$)")
_IMAGE = re.compile(r"(?:^|/)(?:vllm[\w.-]*|llm-d-(?:cuda|dev|rocm|xpu|cpu|hpu|aws|gke|tpu)[\w.-]*)(?=[:@]|$)")
_IMAGE_OF_ANOTHER = re.compile(r"router|proxy|sidecar|sim\b|lmstack|runtime")
_MODEL = re.compile(r"(?!/(?:usr|bin|sbin|opt)/|[\w./-]*\.(?:sh|py)$)[\w.~-]*/[\w./~-]+|\ue000.*")  # behind an image
_ONLY_OF_VLLM = re.compile(r"--(?:max[-_]model[-_]len|gpu[-_]memory[-_]utilization)(?:=.*)?", re.DOTALL)
_SINGULARITY = frozenset({"singularity", "apptainer"})
_TOOLS = _SINGULARITY | {"docker", "podman", "nerdctl"}
_CLEANS = re.compile(r"--(?:cleanenv|containall|compat)|-[acfinpsuwx]*+[eC][acCefinpsuwx]*+")  # no variable gets in
_VALUE = re.compile(r"(--[^=]+|-[ditqPC]*[a-zA-Z])=?(.*)", re.DOTALL)  # of another option
_OF_SINGULARITY = re.compile("(?:SINGULARITY|APPTAINER)ENV_")  # variables that become some of the container
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=")
_NO_VALUE = re.compile(r"(?:no|enable|disable|enforce|trust|is|skip|return|use)_\w+|help")  # unless the table has it


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


@dataclass(frozen=True, slots=True)
class Left:
    """What a profile cannot take over, and why."""

    what: str
    reason: str
    line: int = 0

    def text(self) -> str:
        return f"`{self.what}`{f' (line {self.line})' if self.line else ''}: {self.reason}"


COMMAND = "command line"  # the name of a command, in place of that of a file
NOT_SHOWN = "its value is not in this file"
OTHER_FILES = "other files are not read"


@dataclass(frozen=True, slots=True)
class Launch:
    """`words` are the arguments of the engine, `environment` its variables. `options` are settings of the engine that
    a file has as keys. `files` are texts of the file, by name."""

    name: str
    kind: str | None
    words: tuple[Word, ...] = ()
    environment: Mapping[str, Word] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    left: tuple[Left, ...] = ()
    line: int = 0
    files: Mapping[str, str] = field(default_factory=dict)
    is_of_dynamo: bool = False  # which reads flags of its own
    is_elsewhere: bool = False  # in a container or on another machine

    @property
    def has_kvbm(self) -> bool:
        """Whether it starts the engine with a block manager of this name."""
        is_ours = any(f'"{name}"' in word for word in self.words for name in ("DynamoConnector", "PdConnector", TIER))
        return "kvbm" in self.words or is_ours or "DYN_KVBM_CPU_CACHE_GB" in self.environment


@dataclass(frozen=True, slots=True)
class Container:
    """A container that a command starts: its variables, its image, what runs in it, and what is not in the file.
    `image` is empty if its entry point does not run. `inherits` is the pattern of the variables that it has of the
    process that starts it."""

    given: dict[str, Word]
    image: str
    words: tuple[Word, ...]
    left: tuple[Left, ...]
    inherits: str

    def environment(self, outside: Mapping[str, Word]) -> dict[str, Word]:
        """Return its variables. `outside` has those of the process that starts it."""
        names = [name for name in outside if re.fullmatch(self.inherits, name)]
        names.sort(key=lambda name: _OF_SINGULARITY.match(name) is not None)  # these win
        return {_OF_SINGULARITY.sub("", name): outside[name] for name in names} | self.given


def started(words: Sequence[Word], image: str = "") -> Launch | None:
    """Return the engine that this command starts, wherever its name stands, with the words behind its start; None for
    another command. `image` is the container, whose entry point may be the engine."""
    joined = "\0".join(words)
    for match in _STARTS_IN_WORDS.finditer(joined):
        at = joined.count("\0", 0, match.start())
        if at and words[at - 1] == "--entrypoint":
            continue
        kind = next((kind for kind in ("sglang", "trtllm") if kind in match[0].rpartition("/")[2]), "vllm")
        behind = tuple(words[at + 1 + match[0].count("\0") :])
        is_of_dynamo = "-m\0dynamo." in match[0]
        return Launch("", kind.replace("trtllm", "tensorrt-llm"), behind, is_of_dynamo=is_of_dynamo)
    is_engine = _IMAGE.search(image) is not None and _IMAGE_OF_ANOTHER.search(image) is None
    has_model = not words or words[0].startswith("-") or _MODEL.fullmatch(words[0])
    has_flags = bool(image and words) and words[0].startswith("--") and any(map(_ONLY_OF_VLLM.fullmatch, words))
    return Launch("", "vllm", tuple(words)) if (is_engine and has_model) or has_flags else None


def contained(words: Sequence[Word]) -> Container | None:
    """Return the container that `docker run` or a tool like it starts; None for another command."""
    tool = next((at for at, one in enumerate(words) if one.rpartition("/")[2] in _TOOLS), len(words))
    at = next((at for at in range(tool + 1, min(tool + 4, len(words))) if words[at] in ("run", "create", "exec")), 0)
    if not at:
        return None
    verb, at = words[at], at + 1
    is_singularity = words[tool].rpartition("/")[2] in _SINGULARITY
    of_tool = table("alone")["singularity" if is_singularity else "docker"]
    alone = re.compile(rf"--(?:{'|'.join(of_tool['long'].split())})|-[{of_tool['short']}]+|-")
    given: dict[str, Word] = {}
    left: list[Left] = []
    entry: list[Word] = []
    inherits = ".*" if is_singularity else "(?!)"
    while at < len(words) and words[at].startswith("-"):
        word, at = words[at], at + 1
        if is_singularity and _CLEANS.fullmatch(word):
            inherits = f"{_OF_SINGULARITY.pattern}.*"
        match = None if alone.fullmatch(word) else _VALUE.fullmatch(word)
        if match is not None and not match[2] and at < len(words):
            word, at = words[at], at + 1
        elif match is not None:
            word = Word(match[2], word.line)
        option = "" if match is None else match[1]
        if option == "--entrypoint":
            entry = [word] if word else []
        elif option == "--env-file":
            left.append(Left(f"--env-file {word}", OTHER_FILES, word.line))
        elif option == "--env" or re.fullmatch("-[a-zA-Z]*e", option):
            for pair in word.split(",") if is_singularity else [word]:
                given |= (found := assignments([Word(pair, word.line)]))
                left += [] if found else [Left(pair.partition("=")[0], NOT_SHOWN, word.line)]
    if at < len(words) and words[at].startswith(MARKS[0]):  # options that are not shown, or the image
        at = next((there for there in range(at, len(words)) if _IMAGE.search(words[there])), at)
    image = "" if entry or verb == "exec" else str(words[at]) if at < len(words) else ""
    return Container(given, image, (*entry, *words[at + 1 :]), tuple(left), inherits)


def assignments(words: Sequence[Word]) -> dict[str, Word]:
    """Return the variables that words set, as those of `env` and of `srun --export` do."""
    return {str(name): value for name, value in exports(words) if value is not None}


def exports(words: Sequence[Word]) -> Iterator[tuple[Word, Word | None]]:
    """Yield the names and values of the variables that words set; None for one of `--export` that the caller has."""
    for at, word in enumerate(words):
        option, _, several = word.partition("=")
        given = several if option == "--export" else word
        is_list = option == "--export" or (at and words[at - 1] == "--export")
        for one in given.split(",") if is_list else [given]:
            if match := _ASSIGNED.match(one):
                yield Word(match[1], word.line), Word(one[match.end() :], word.line)
            elif is_list and one not in ("", "ALL", "NIL", "NONE"):
                yield Word(one, word.line), None


@cache
def table(section: str) -> Mapping[str, Any]:
    """Return a section of the file."""
    sections: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("flags.yaml").read_text())
    return sections[section]


def name_of(written: str) -> str:
    """Return the name of a flag as it is written, empty for what is none or not known."""
    short, dot, inside = written.partition(".")
    name = flag_name(written[2:]) if written.startswith("--") else ""
    if short in names_of("vllm") and written[:3] != "-O.":  # which vLLM refuses
        name = f"{names_of('vllm')[short]}{dot}{inside}"
    return str(table("other_names").get(name, name))


def names_of(engine: str) -> Mapping[str, str]:
    """Return the name in a profile of each flag that has another one."""
    if engine == "tensorrt-llm":
        return SAME_OPTION
    names: Mapping[str, str] = table(engine)["names"] if engine in ("vllm", "sglang") else {}
    return names


def value_count(name: str, engine: str) -> int:
    """Return how many values a flag has at most; a large number for any."""
    of_engine = table("sglang" if engine == "sglang" else "vllm")
    for kind, count in (("one", 1), ("many", sys.maxsize), ("none", 0)):
        if name in of_engine[kind].split():
            return count
    return 0 if _NO_VALUE.fullmatch(name) else 1


def reason_to_leave(section: str, name: str, readers: set[str]) -> str | None:
    """Return why a profile cannot have this flag or variable, None if it can. `readers` are the programs that read
    it."""
    rows = table(section)["rows"]
    return next((why for who, pattern, why in rows if who in readers and re.fullmatch(pattern, name)), None)
