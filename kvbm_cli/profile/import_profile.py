"""Translates a launch into a profile. What a profile cannot take over is listed with the reason.

The rules of profiles decide: the draft is checked as `kvbm profile check` does. A key that is refused is removed and
listed with the message of the check; what is missing then is listed too. A secret is never copied, only named.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from kvbm.config.document import Document, Entry, Mistake, Source, entry_at, parse_document, plain_scalar, plain_values
from kvbm.config.engine import ENGINE_KINDS
from kvbm.config.findings import remove
from kvbm.config.flags import flag_name
from kvbm.config.interpolation import is_interpolated
from kvbm.config.layers import ARGUMENTS, merge
from kvbm.config.sizes import exact_size
from kvbm.config.variables import STORE_VARIABLES, drop_unused, put, read_variables, valid_variables, variable_names
from kvbm.engines.embedded.engine.synthetic_models import SYNTHETIC
from kvbm.engines.make_model import MODELS
from kvbm.engines.model_facts import SYNTHETIC_PREFIX, preset_facts
from kvbm.engines.sglang.options import STORAGE as SGLANG_STORAGE
from kvbm.engines.table import examine_written
from kvbm.engines.vllm.flags import CONNECTOR, CONNECTOR_MODULE, TIER
from kvbm.errors import ProfileError, UsageError
from kvbm.text.outside import MAX_SHOWN, shown
from kvbm.text.reading import parse_json
from kvbm_cli.profile.import_launch import (
    COMMAND,
    MAX_DEPTH,
    OTHER_FILES,
    Launch,
    Left,
    Word,
    name_of,
    names_of,
    reason_to_leave,
    table,
    value_count,
)
from kvbm_cli.profile.import_secrets import NO_SECRETS, has_secret, hidden_in, names_secret, tokens_hidden
from kvbm_cli.profile.import_yaml import options_in
from kvbm_cli.profile.text import scalar
from kvbm_cli.terminal.printable import commentable

WIDTH = 118
MAX_OTHERS = 10
MAX_KEY = 500  # characters; YAML has at most 1024 in front of a colon
SERVER_PORT = 8000  # the default of `server.port`
OF_TRTLLM = ("DYN_KVBM_TRTLLM_ZMQ_PORT", "DYN_KVBM_NCCL_MLA_MODE", "DYN_KVBM_NCCL_MAX_CTAS")
_KEYS = {  # of flags that are no argument
    "model": "engine.model",
    "host": "server.host",
    "port": "server.port",
    "kv_offloading_size": "tiers.host.capacity",
}
_TRANSFER = "kv_transfer_config"
_OF_TIER = ("kv_connector", "kv_role", "spec_name")
_STORAGE = "hicache_storage_backend_extra_config"
_READ_BY_SGLANG = ("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token")  # of these entries
_OPTIONS_FILES = ("extra_llm_api_options", "extra_engine_args", "config")
# Those of one engine: of vLLM and TensorRT-LLM, and of SGLang.
_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "tp_size", "pp_size")
_NUMBER = re.compile(r"\d{1,18}(?:\.\d{1,9})?")
_OF_STORE = "a profile holds no address and no credentials of a store; set it in the environment of `kvbm serve`"
_FIRST = ("engine", "server", "engine.kind", "engine.model")  # of their section


def kind_of(engine: str | None, model: str | None, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the kind of engine for this model and these variables, and the reason if a variable decided. UsageError
    for an unknown `engine`, ProfileError for an unknown synthetic model."""
    if engine is not None:
        if engine not in ENGINE_KINDS:
            kinds = ", ".join(f"`{kind}`" for kind in ENGINE_KINDS)
            raise UsageError(f"`--engine {engine}` is not a kind of engines", hint=f"kinds are {kinds}")
        return engine, ""
    if model is not None and model.startswith(SYNTHETIC_PREFIX):
        if model.removeprefix(SYNTHETIC_PREFIX) in SYNTHETIC:
            return "embedded", ""
        preset_facts(model, MODELS)
        return "vllm", ""
    found = [name for name in OF_TRTLLM if name in environment]
    return ("tensorrt-llm", f"{found[0]} is a variable for TensorRT-LLM") if found else ("vllm", "")


def imported(
    launch: Launch,
    name: str,
    *,
    model: tuple[str, str] | None,
    engine: tuple[str, str],
    others: Sequence[Launch] = (),
) -> Imported:
    """Translate the launch. `model` overrides that of the launch; both have a comment with their origin."""
    left = [replace(one, what=shown(hidden_in(one.what))) for one in launch.left]
    found = Imported(name, launch, others, engine[0], left)
    found.put("engine.kind", *engine)
    found.take_launch()
    if model is not None:
        found.put("engine.model", *model)
    found.take_variables_of_kvbm()
    found.check()
    return found


def _commented(title: str, texts: Sequence[str]) -> Iterator[str]:
    """Yield a list as a comment; nothing if it is empty."""
    if texts:
        yield f"# {title}"
        for text in texts:
            item = commentable(text.replace("` has no effect: ", "`: ", 1))
            yield from textwrap.wrap(
                item, WIDTH, initial_indent="# - ", subsequent_indent="#   ", break_on_hyphens=False
            )
        yield ""


def _sections(document: Mapping[str, Entry], path: str = "") -> Iterator[str]:
    """Yield the lines of a profile without its head."""
    indent = "  " * path.count(".")
    for name, entry in sorted(document.items(), key=lambda item: f"{path}{item[0]}" not in _FIRST):
        here, comment = f"{path}{name}", _comment(entry.source)
        is_flag = here.startswith(ARGUMENTS)
        if entry.section is None or (is_flag and not entry.section):
            yield f"{indent}{scalar(name)}: {scalar(_escaped(here, entry.value))}{comment}"
        elif lines := [*_sections(entry.section, f"{here}.")]:
            is_alone = is_flag and not any(_comment(one.source) for one in entry.section.values())
            yield f"{indent}{scalar(name)}:{comment if is_alone else ''}"
            yield from lines
            if not path:
                yield ""


def _comment(source: Source) -> str:
    line = f"line {source.line}" if source.line else ""
    text = ", ".join(filter(None, (shown(commentable(source.text)), line)))
    return f"  # {text}" if text else ""


def _escaped(path: str, value: object) -> object:
    """Return a value in which no variable is replaced when the profile is read."""
    if isinstance(value, str):
        return value.replace("$", "$$") if is_interpolated(path) else value.replace("${", "$${")
    if isinstance(value, list):
        return [_escaped(path, one) for one in value]
    return {name: _escaped(path, one) for name, one in value.items()} if isinstance(value, dict) else value


@dataclass(slots=True)
class Imported:
    """The profile of a launch. `name` is what messages call the file, which also starts the `others`.

    `document` is what the profile contains, `left` what it does not have. `warnings` are about DYN_KVBM_* variables
    without effect, `missing` is what `kvbm profile check` still requires. `connector` is the configuration of a
    connector that it replaces, with its secrets, None without one.
    """

    name: str
    launch: Launch
    others: Sequence[Launch]
    engine: str
    left: list[Left]
    document: Document = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    connector: object = None
    unknown_flags: set[str] = field(default_factory=set)

    @property
    def text(self) -> str:
        """The profile, without secrets."""
        source = shown(commentable(self.name))
        lines = [
            f"# Written by `kvbm profile import` from {source}.",
            *(f"# {commentable(line)}" for line in self.choice()),
            f"description: {scalar(f'imported from {source}'.replace('${', '$${'))}",
            "",
            *_sections(self.document),
            *_commented("Missing:", self.missing),
            *_commented("Not carried over:", [one.text() for one in self.left]),
            *_commented("Variables without effect:", self.warnings),
        ]
        return "\n".join(lines).rstrip("\n") + "\n"

    def choice(self) -> list[str]:
        """Return which engine of the file was taken, and how to choose another one; nothing if it has one."""
        if not self.others:
            return []
        names = ", ".join(f"`{shown(one.name)}` (line {one.line})" for one in self.others[:MAX_OTHERS])
        more = f" and {len(self.others) - MAX_OTHERS} more" if len(self.others) > MAX_OTHERS else ""
        first = f"The file starts {len(self.others) + 1} engines. This is `{shown(self.launch.name)}`"
        return [f"{first} (line {self.launch.line}).", f"The others: {names}{more}. `--select NAME` chooses one."]

    def notes(self) -> list[str]:
        """Return what the profile does not have, each with the reason. It is listed on the terminal. A command of one
        line needs no line."""
        is_one_line = self.name == COMMAND and all(one.line <= 1 for one in self.left)
        left = [replace(one, line=0) for one in self.left] if is_one_line else self.left
        return [*self.missing, *(f"not carried over: {one.text()}" for one in left)]

    def put(self, key: str, value: object, text: str = "", line: int = 0) -> None:
        """Set a key. Its comment is the text and the line."""
        text = "" if key.endswith(f".{text}") else text  # a key of the file has the same name
        names = key.split(".")
        try:
            entry = _entry(value, Source("", text, line=line or None), len(names) if len(key) <= MAX_KEY else MAX_KEY)
        except ValueError as error:
            self.leave(text or key, str(error), line)
            return
        for depth in range(1, len(names)):
            holder = entry_at(self.document, names[:depth])
            if holder is not None and holder.section is None:
                remove(self.document, names[:depth])
        before = entry_at(self.document, names)
        if entry.section is not None and before is not None:  # two flags set one section
            entry = replace(entry, value={**(before.section or {}), **entry.section})
        put(self.document, names, entry)

    def leave(self, what: str, reason: str, line: int = 0) -> None:
        self.left.append(Left(shown(hidden_in(what)), tokens_hidden(reason), line))

    def take_launch(self) -> None:
        for name, value in self.launch.options.items():
            if isinstance(value, Word) and self._is_unknown(name, value):
                self._forget(flag_name(name))
            else:
                value = _parsed(value) if isinstance(value, Word) and self.engine == "vllm" else _plain(value)
                self._take(flag_name(name), value, Word(name, getattr(name, "line", 0)))
        for name, value, written in self._flags():
            self._take(name, value, written)
        self._replace_connector()
        for name, word in self.launch.environment.items():
            self._take_variable(name, word)

    def _is_unknown(self, name: str, word: Word) -> bool:
        if has_secret(word.unknown.strip("$(){}"), word.unknown):
            self.leave(name or "a word", NO_SECRETS, word.line)
        elif word.unknown:
            unknown = None if word.unknown == word else f"`{shown(word.unknown)}`"
            if self.name == COMMAND:
                reason = f"the command does not set {unknown or 'it'}"
            else:
                reason = f"the file does not show {f'the value of {unknown}' if unknown else 'its value'}"
            self.leave(f"{name} {word}".strip(), reason, word.line)
        return bool(word.unknown)

    def _forget(self, name: str) -> None:
        """Remove the flag, whose value is not known."""
        name = names_of(self.engine).get(name, name)
        self.unknown_flags.add(name)
        remove(self.document, _KEYS.get(name, f"{ARGUMENTS}{name}").split("."))

    def _flags(self) -> Iterator[tuple[str, Any, Word]]:
        """Yield the flags of the command with their values, and how they are written."""
        words = deque(self.launch.words)
        has_model = any(name_of(word.partition("=")[0]) == "model" for word in words)
        follows_short = False  # so that a word may be the value of a flag that is not known here
        if words and not words[0].startswith("-"):
            words.appendleft(Word("--model", words[0].line))
            has_model = True
        while words:
            word = words.popleft()
            written, _, inline = word.partition("=")
            name = name_of(written)
            if not name:
                is_short = word.startswith("-")
                if words and is_short and names_secret(word):
                    words.popleft()
                has_model = has_model or _value(self.document, "engine", "model") is not None  # of a file of options
                if self.engine != "vllm" or has_model or is_short or follows_short or word.unknown:
                    if not self._is_unknown("", word):
                        self.leave(word, "it is neither a long flag nor the value of one", word.line)
                else:
                    has_model = True
                    yield "model", str(word), Word(f"--model {word}", word.line)
                follows_short = is_short and not inline
                continue
            follows_short = False
            values = [Word(inline, word.line, unknown=word.unknown)] if inline else []
            limit = 0 if inline else min(len(words), value_count(name, self.engine))
            while words and len(values) < limit and not re.match(r"-(?![\d.])", words[0]):
                values.append(words.popleft())
            if names_secret(name):
                self.leave(written, NO_SECRETS, word.line)
            elif values == [""]:  # as a script has it for a flag that it does not always use
                self.leave(written, "its value is empty", word.line)
            elif any(self._is_unknown(written, one) for one in values):
                self._forget(name)
            else:
                value = [_parsed(one) for one in values] or [True]
                text = Word(f"{written} {' '.join(values)}".strip(), word.line)
                yield name, value[0] if len(value) == 1 else value, text

    def _take(self, name: str, value: Any, written: Word) -> None:
        """Take over one flag or option of the engine."""
        line = written.line
        if name.startswith("no_") and value is True:
            name, value = name.removeprefix("no_"), False
        name = names_of(self.engine).get(name, name)
        if self.engine == "sglang" and name == _STORAGE and isinstance(value, dict):
            value = {key: one for key, one in value.items() if key not in SGLANG_STORAGE}
        readers = {self.engine, "dynamo" if self.launch.is_of_dynamo else ""}
        if has_secret(name, value):
            self.connector = value if name == _TRANSFER else self.connector
            self.leave(written.partition(" ")[0], NO_SECRETS, line)
        elif (reason := reason_to_leave("left_flags", name, readers)) is not None:
            if (name, value) != ("connector", "kvbm"):
                self.leave(written, table("pairs")["reason"] if "nixl" in str(value) else reason, line)
        elif name == _STORAGE and isinstance(value, dict):
            self._take_storage(value, line)
        elif name == "model":
            self.put("engine.model", str(value).removeprefix("hf://"), written, line)
        elif name == "kv_offloading_size":
            self.put(_KEYS[name], f"{value}GiB", written, line)
        elif name in _KEYS:
            self.put(_KEYS[name], value, written, line)
        elif name in _OPTIONS_FILES and isinstance(value, str):
            text = self.launch.files.get(value.rpartition("/")[2])
            if text is None:
                self.leave(written, f"{OTHER_FILES}; import it too", line)
                self.unknown_flags.update(_RANKS)
            for option, inside in options_in(text or "").items():
                if isinstance(inside, Word) and self._is_unknown(option, Word(inside, line, unknown=inside.unknown)):
                    self._forget(flag_name(option))
                else:
                    self._take(flag_name(option), _plain(inside), Word(option, line))
        else:
            if name == "kv_cache_config" and isinstance(value, dict) and (size := value.pop("host_cache_size", 0)):
                self._take_size(table("connector")["cpu_bytes_to_use"], size, f"host_cache_size: {size}", line)
            text = written.partition(" ")[0] if isinstance(value, dict) and name != _TRANSFER else written
            self.put(f"{ARGUMENTS}{name}", value, text, line)

    def _replace_connector(self) -> None:
        """Take over what kvbm does not set itself of the connector, and the sizes and the directory of another one."""
        entry = entry_at(self.document, ("engine", "arguments", _TRANSFER))
        if entry is None:
            return
        remove(self.document, f"{ARGUMENTS}{_TRANSFER}".split("."))
        line = entry.source.line or 0
        value = entry.value if entry.section is None else plain_values(entry.section)
        self.connector = value
        leaves = list(_leaves(value))
        by_name = dict(leaves)
        for name, one in leaves:
            if name == TIER:
                self._take_sections(one, line)
                self.put("tiers.host.managed_by", "engine", line=line)
            elif name in table("connector"):
                self._take_size(
                    table("connector")[name], one, f"{name}: {one}", line, block_size=by_name.get("block_size")
                )
            elif TIER in by_name and name not in _OF_TIER:
                self.leave(f"{name}: {one}", "`kvbm serve` configures vLLM's connector itself", line)
        names = [str(one) for name, one in leaves if name == "kv_connector"]
        if names == [CONNECTOR] and isinstance(value, dict):
            ours = {"kv_connector": CONNECTOR, "kv_connector_module_path": CONNECTOR_MODULE, "kv_role": "kv_both"}
            if rest := {name: one for name, one in value.items() if ours.get(name) != one}:
                self.put(f"{ARGUMENTS}{_TRANSFER}", rest, line=line)
            return
        of_pair = not {*names}.isdisjoint(table("pairs")["names"])
        reason = table("pairs")["reason"] if of_pair else "kvbm replaces this connector"
        if TIER not in by_name:
            what = ", ".join(dict.fromkeys(names)) or json.dumps(value)
            self.leave(f"--kv-transfer-config with {what}", reason, line)

    def _take_size(self, place: Sequence[str], value: Any, text: str, line: int, *, block_size: object = None) -> None:
        """Set the size or the directory of a tier from one of another cache, or list it with the reason. `place` is
        the key and the unit."""
        key, unit = place
        number = Decimal(str(value)) if _NUMBER.fullmatch(str(value)) else Decimal(0)
        of_engine, ranks = _value(self.document, "engine", "arguments", "block_size"), self._rank_count()
        if entry_at(self.document, key.split(".")) is not None:
            self.leave(text, f"`{key}` is set already", line)
        elif unit == "text" and isinstance(value, str):
            self.put(key, value.removeprefix("file://"), text, line)
        elif unit == "text":
            self.leave(text, "it must be a text", line)
        elif number <= 0 or (unit != "GB per rank" and number % 1):
            self.leave(text, f"it must be a {'' if unit == 'GB per rank' else 'whole '}number above 0", line)
        elif unit == "GB per rank" and ranks:  # a tier of kvbm is for all ranks
            text = f"{text} for each of {ranks} ranks" if ranks > 1 else text
            self.put(key, f"{(number * ranks).normalize():f}GB", text, line)
        elif unit == "GB per rank":
            self.leave(text, "LMCache counts it per rank, and the file does not show the number of ranks", line)
        elif unit == "bytes":
            self.put(key, exact_size(int(number)), text, line)
        elif block_size is None:
            self.put(key, int(number), text, line)
        elif type(block_size) is int and type(of_engine) is int and of_engine > 0 and block_size % of_engine == 0:
            self.put(key, int(number) * block_size // of_engine, f"{text} of {block_size} tokens", line)
        else:
            self.leave(text, f"`block_size: {block_size}` is no multiple of `--block-size` of the engine", line)

    def _rank_count(self) -> int:
        """Return the number of ranks; 0 if it is unknown."""
        counts = [_value(self.document, "engine", "arguments", name) for name in _RANKS]
        if self.unknown_flags & set(_RANKS) or any(type(one) not in (int, type(None)) for one in counts):
            return 0
        return math.prod(one for one in counts if isinstance(one, int))

    def _take_storage(self, value: dict[str, Any], line: int) -> None:
        """Take over what SGLang reads of its storage's configuration, and the configuration of kvbm if it is that."""
        of_sglang = {name: value[name] for name in _READ_BY_SGLANG if name in value}
        if of_sglang:
            self.put(f"{ARGUMENTS}{_STORAGE}", of_sglang, line=line)
        self._take_sections(value.get("kvbm"), line)
        others = [name for name in value if name not in {*of_sglang, "kvbm"}]
        if others:
            self.leave(f"{_STORAGE} with {', '.join(map(str, others))}", "kvbm replaces this storage", line)

    def _take_sections(self, given: object, line: int) -> None:
        """Take over the part of a profile that a configuration of kvbm has."""
        for name, section in given.items() if isinstance(given, dict) else ():
            self.put(str(name), section, line=line)

    def _take_variable(self, name: str, word: Word) -> None:
        reason = reason_to_leave("left_variables", name, {""})
        of_lmcache = table("lmcache").get(name)
        if has_secret(name, str(word)):
            reason = NO_SECRETS
        if name in STORE_VARIABLES:
            self.leave(name, _OF_STORE, word.line)
        elif variable_names({name: ""}) or (of_lmcache and word.unknown):
            self._is_unknown(name, word)
        elif of_lmcache and word not in ("", "0") and reason != NO_SECRETS:
            self._take_size(of_lmcache, str(word), f"{name}={word}", word.line)
        elif reason is not None:
            self.leave(name, reason, word.line)
        elif not self._is_unknown(name, word):
            self.put(f"engine.environment.{name}", str(word), line=word.line)

    def take_variables_of_kvbm(self) -> None:
        """Merge the keys of the DYN_KVBM_* variables, which win."""
        words = self.launch.environment
        given = {name: str(words[name]) for name in variable_names(words) if not words[name].unknown}
        valid, mistakes = valid_variables(given)
        for mistake in mistakes:
            name = mistake.source.label if isinstance(mistake, Mistake) and mistake.source is not None else ""
            self.leave(name, _reason(mistake), words[name].line if name in words else 0)
        secrets = [name for name, value in valid.items() if name not in STORE_VARIABLES and has_secret("", value)]
        for name in secrets:
            self.leave(name, NO_SECRETS, words[name].line)
        valid = {name: value for name, value in valid.items() if name not in secrets}
        found, warnings = read_variables(valid)
        self.warnings = (*warnings, *drop_unused(found, valid))
        self.document = merge(self.document, found)
        is_taken = _value(self.document, "metrics", "serve") and _value(self.document, "metrics", "port") == SERVER_PORT
        if is_taken and _value(self.document, "server", "port") is None:
            self.put("server.port", SERVER_PORT + 1, f"{SERVER_PORT} is used for metrics")

    def check(self) -> None:
        """Remove what is refused, and find what is missing."""
        while True:
            written, unread = parse_document("\n".join(_sections(self.document)), label="")
            mistakes = [*unread, *examine_written(Path("imported.yaml"), written, directories=[]).mistakes]
            removed = [self._is_removed(one) for one in mistakes]
            if not any(removed):
                self.missing = tuple(map(_reason, mistakes))
                return

    def _is_removed(self, mistake: ProfileError) -> bool:
        if not isinstance(mistake, Mistake) or mistake.key in ("", "engine.kind", "tiers"):
            return False
        entry = entry_at(self.document, mistake.key.split("."))
        source = entry.source if entry is not None else Source("", "")
        if not remove(self.document, mistake.key.split(".")):
            return False
        self.leave(source.text or mistake.key.removeprefix(ARGUMENTS), _reason(mistake), source.line or 0)
        return True


def _entry(value: object, source: Source, depth: int) -> Entry:
    """Return the entry of a value in `depth` sections. ValueError for one that a profile cannot hold."""
    names = value if isinstance(value, dict) else ()
    if depth > MAX_DEPTH or any(len(str(name)) > MAX_KEY for name in names):
        raise ValueError(f"more than {MAX_DEPTH} levels, or more than {MAX_KEY} characters of a key")
    for one in value if isinstance(value, list) else ():
        _entry(one, source, depth + 1)
    if isinstance(value, dict):
        value = {str(name): _entry(one, Source("", ""), depth + 1) for name, one in value.items()}
    return Entry(source, source, value)


def _value(document: Document, *names: str) -> object:
    entry = entry_at(document, names)
    return None if entry is None else entry.value


def _reason(mistake: ProfileError) -> str:
    if isinstance(mistake, Mistake) and mistake.key == "engine.model":
        return "`engine.model` is missing; name it with `--model`"
    text = mistake.text if isinstance(mistake, Mistake) else mistake.message
    hint = mistake.hint if mistake.hint is not None and not mistake.hint.startswith("remove it") else None
    return shown(f"{text}; {hint}" if hint else text, 2 * MAX_SHOWN)


def _parsed(word: Word) -> Any:
    """Return the value of a flag: JSON, a number that is written in the usual way, or the text."""
    text = str(word)
    if text[:1] in ("{", "["):
        try:
            return parse_json(text)
        except ValueError:
            return text
    value = plain_scalar(text)
    is_same = word.is_plain if isinstance(value, bool) else type(value) in (int, float) and str(value) == text
    return value if is_same else text


def _plain(value: Any) -> Any:
    """Return a value of YAML with its numbers, booleans and nulls."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return plain_scalar(str(value)) if isinstance(value, Word) and value.is_plain else value


def _leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys that have no section, at any depth, without those of tiers of another type than `fs`;
    of kvbm's tier, its type and its configuration."""
    if isinstance(value, dict) and value.get("type") == TIER:
        yield TIER, value.get("kvbm")
    for name, one in value.items() if isinstance(value, dict) and value.get("type", "fs") == "fs" else ():
        inside = one if isinstance(one, list) else [one]
        if not any(isinstance(two, dict) for two in inside):
            yield name, one
        for two in inside:
            yield from _leaves(two)
