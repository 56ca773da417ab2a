"""Reads the starts of engines from YAML: manifests of Kubernetes, values of Helm charts, Compose files, and files with
options of TensorRT-LLM or flags of vLLM.

A mapping with a command or arguments is a container, wherever it stands, so every kind of object with a pod in it is
read. It inherits what surrounds it: name, variables, model, parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from kvbm.config.document import PlainLoader, yaml_problem
from kvbm.config.key_list import OWN
from kvbm.config.spelling import snake_case
from kvbm.engines.table import KINDS
from kvbm.errors import ProfileError
from kvbm_cli.profile.import_launch import MAX_DEPTH, NOT_SHOWN, OTHER_FILES, STARTS, Launch, Left, Word, table
from kvbm_cli.profile.import_secrets import names_secret
from kvbm_cli.profile.import_shell import MAX_LAUNCHES, CommandText, finished, inserted, marked
from kvbm_cli.profile.import_text import read_page

MAX_NODES = 50_000
MAX_VARIABLES = 1000
CHARACTERS_PER_VALUE = 100
MAX_ARGUMENT = 1 << 14  # characters; variables insert variables
_IN_ARGUMENT = re.compile(r"\$\((\w+)\)|\{\{[^{}]*\}\}")  # of Kubernetes, and of Helm
_NAMED = frozenset({"prefill", "decode", "leaderTemplate", "workerTemplate", "worker", "predictor"})
_COMMAND = ("entrypoint", "command", "args")
_MORE_ARGUMENTS = "VLLM_ADDITIONAL_ARGS"  # of KServe
_ELSEWHERE = {
    **dict.fromkeys(("envFrom", "envFromSecret"), "the variables are not in this file"),
    "env_file": OTHER_FILES,
}
_TEMPLATE = re.compile(r"^[ \t]*\{\{", re.MULTILINE)
_TEMPLATE_LINE = re.compile(r"^[ \t]*\{\{[^{}\n]*\}\}[ \t]*$", re.MULTILINE)
_IN_TEMPLATE = re.compile(r"\{\{([^{}\n]*)\}\}")
_NOT_FILLED_IN = Left("{{", "templates are not filled in, and their conditions are not evaluated")
_TEMPLATE_HINT = "this is a template of Helm, not a profile; `helm template` shows the manifests that it makes"


def read_yaml(text: str, line: int = 1) -> list[Launch]:
    """Return every start of an engine in a text that begins in this line. ProfileError if the text is not YAML, or too
    large with its aliases."""
    documents = [one for one in _documents(text, line) if isinstance(one, dict)]
    maps = [_section(one, "data") for one in documents if one.get("kind") == "ConfigMap"]
    files = {str(name): str(inside) for data in maps for name, inside in data.items()}
    launches = [launch for one in documents for launch in _launches(one)]
    if not launches:
        found_in_texts = (_EngineSearch(one, with_texts=True).below(one, Launch("", None)) for one in documents)
        launches = [launch for found in found_in_texts for launch in found if launch.words]  # else it may be prose
    if len(launches) > MAX_LAUNCHES:
        raise ProfileError(f"more than {MAX_LAUNCHES} containers start an engine")
    left = (_NOT_FILLED_IN,) if _TEMPLATE.search(text) else ()
    return [replace(one, files={**files, **one.files}, left=(*one.left, *left)) for one in launches]


def options_in(text: str) -> Mapping[str, Any]:
    """Return the options of a file that another file contains; none if it is not a mapping."""
    first = next(iter(_documents(text)), None)
    return first if isinstance(first, dict) else {}


def _documents(text: str, line: int = 1) -> list[Any]:
    try:
        return list(_values(text, line))
    except yaml.MarkedYAMLError as error:
        if (plain_text := _without_templates(text)) != text:
            return _documents(plain_text, line)
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}: " if mark is not None else ""
        hint = _TEMPLATE_HINT if _TEMPLATE.search(text) else None
        raise ProfileError(f"{place}not valid YAML: {yaml_problem(error)}", hint=hint) from None
    except yaml.YAMLError as error:
        raise ProfileError(f"not valid YAML: {error}") from None
    except RecursionError:
        raise ProfileError("the YAML is nested too deeply") from None


def _values(text: str, line: int) -> Iterator[Any]:
    loader, count = PlainLoader(text), [0]
    loader.line = line - 1  # of all marks
    try:
        while loader.check_node():
            yield _value(loader.get_node(), count)
    finally:
        loader.dispose()


def _without_templates(text: str) -> str:
    """Return the text of a chart as YAML: lines of templates are empty, and others stand between two marks."""
    kept = _TEMPLATE_LINE.sub("", text)
    return _IN_TEMPLATE.sub(lambda found: "\ue002" + re.sub("[\"':#&,]", "`", found[1]) + "\ue003", kept)


def _value(node: Any, count: list[int], depth: int = 0) -> Any:
    """Convert a node. One that aliases repeat counts each time, and a long text as several."""
    count[0] += 1 + len(node.value) // CHARACTERS_PER_VALUE if isinstance(node, yaml.ScalarNode) else 1
    if count[0] > MAX_NODES:
        raise ProfileError(f"the YAML has more than {MAX_NODES:,} values when its aliases are followed")
    if depth > MAX_DEPTH:
        raise ProfileError(f"line {node.start_mark.line + 1}: the YAML is nested too deeply")
    if isinstance(node, yaml.SequenceNode):
        return [_value(one, count, depth + 1) for one in node.value]
    if not isinstance(node, yaml.MappingNode):
        text = node.value.replace("\ue002", "{{").replace("\ue003", "}}")
        unknown = text if "{{" in text else ""
        return Word(text, node.start_mark.line + 1, unknown=unknown, is_plain=node.style is None)
    found: dict[Word, Any] = {}
    for key, inside in node.value:
        value = _value(inside, count, depth + 1)
        if not isinstance(key, yaml.ScalarNode):
            raise ProfileError(f"line {key.start_mark.line + 1}: a key must be text")
        if key.value == "<<":
            merged = value if isinstance(value, list) else [value]
            found = {**{name: two for one in merged if isinstance(one, dict) for name, two in one.items()}, **found}
        else:
            found[Word(str(key.value), key.start_mark.line + 1)] = value
    return found


def _launches(document: Any) -> Iterator[Launch]:
    """Yield the engines that the keys of a document start."""
    names = {name.replace("-", "_") for name in document}
    engine = next((engine for engine, kind in KINDS.items() if names & kind.signs and not names & OWN), None)
    if specs := _list(document, "servingEngineSpec", "modelSpec"):
        left = table("left_of_model_spec")
        shared = {name: one for name, one in document["servingEngineSpec"].items() if name in left}
        yield from (_of_production_stack({**one, **shared}) for one in specs if isinstance(one, dict))
    elif engine is not None:
        yield Launch("options", engine, options=document)
    else:
        yield from _EngineSearch(document).below(document, Launch("", None))


@dataclass(slots=True)
class _EngineSearch:
    """Finds engines in the parts of a document, also in texts and lists that are no commands of a container."""

    document: Any
    with_texts: bool = False

    @property
    def is_compose(self) -> bool:
        return "services" in self.document and "apiVersion" not in self.document

    def below(self, value: Any, scope: Launch, key: str = "") -> Iterator[Launch]:
        """Yield the engines in this part. `scope` has what the parents say about them."""
        if isinstance(value, list):
            words = [one for one in value if isinstance(one, Word)] if self.with_texts else []
            if any(one.endswith("\n") for one in words):  # lines, as in a notebook
                value, words = [Word("".join(words), words[0].line)], []
            found = _found(words, "", scope.environment) if words else []
            yield from found
            for one in () if found else value:
                name = _word(one, "name") if _section(one, "podTemplate") else None  # of Dynamo
                yield from self.below(one, _named(scope, name) if name else scope, key)
        elif isinstance(value, Word) and self.with_texts and STARTS.search(value):
            yield from read_page(value, scope.environment)
        elif isinstance(value, dict):
            scope = self._within(value, scope)
            found = list(self._of_container(value, scope, key))
            yield from found
            for name, inside in () if found else value.items():
                if name != "initContainers":
                    is_named = name in _NAMED or key == "services"
                    at = "services" if name == "services" and isinstance(inside, dict) else name
                    yield from self.below(inside, _named(scope, name) if is_named else scope, at)

    def _within(self, value: Any, scope: Launch) -> Launch:
        """Add what this mapping says about the engines in it."""
        name, model = _word(value, "metadata", "name"), _word(value, "modelArtifacts", "name")
        places = (("model", "uri"), ("model", "storageUri"), ("modelArtifacts", "uri"))
        uri = next((uri for place in places if (uri := _word(value, *place))), model)
        if uri is not None and uri.unknown:  # llm-d inserts the name into the URI
            uri = model or uri
        ranks = [(flag, _word(value, "parallelism", flag)) for flag in ("tensor", "data", "pipeline")]
        words = [Word(f"--{flag}-parallel-size={size}", size.line) for flag, size in ranks if size and size != "1"]
        cache = _section(value, "kvCacheOffloading") or _section(value, "workload", "kvCacheOffloading")
        disks = [_word(one, "fileSystem", "emptyDir", "size") for one in _list(cache, "secondary")]
        tiers = {"tiers.host.capacity": _word(cache, "cpu"), "tiers.disk.capacity": next(iter(disks), None)}
        variables = {**scope.environment}
        left = [Left(str(key), reason, _line(value, key)) for key, reason in _ELSEWHERE.items() if value.get(key)]
        for key in ("env", "envs", "environment"):
            for variable, one, line in _variables(value.get(key)):
                if one is None:
                    left.append(Left(variable, NOT_SHOWN, line))
                else:
                    variables[variable] = self._argument(one, variables)
        if len(variables) > MAX_VARIABLES:  # each mapping below copies them
            raise ProfileError(f"more than {MAX_VARIABLES:,} variables")
        return replace(
            scope,
            name=str(name) if name is not None and "kind" in value else scope.name,
            model=_model(uri) if uri is not None else scope.model,
            words=(*scope.words, *words),
            settings={**scope.settings, **{key: Word(f"{size}B", size.line) for key, size in tiers.items() if size}},
            environment=variables,
            left=(*scope.left, *left),
        )

    def _of_container(self, container: Any, scope: Launch, place: str) -> Iterator[Launch]:
        is_place = place in ("containers", "mainContainer", "services")
        is_of_kserve = place == "model" and _at(container, "modelFormat", "name") in ("huggingface", "vllm")
        if not is_place and not is_of_kserve and not any(key in container for key in _COMMAND):
            return
        environment = dict(scope.environment)
        words = [word for key in _COMMAND for word in self._words(container.get(key), environment)]
        is_default = not words and scope.model is not None and "modelCommand" not in container and is_place
        if is_default or is_of_kserve or container.get("modelCommand") == "vllmServe":
            words = [Word("vllm"), Word("serve"), *words]
        more = self._words(environment.pop(_MORE_ARGUMENTS, None), environment)
        image = _word(container, "image") or _word(container, "image", "repository") or ""
        is_command = not self.is_compose and container.get("command") and words and not words[0].startswith("-")
        for launch in _found(words, "" if is_command or container.get("entrypoint") else image, environment):
            yield replace(
                launch,
                name=scope.name or str(_word(container, "name") or "container"),
                is_elsewhere=True,
                words=(*scope.words, *launch.words, *map(finished, more)),
                settings=scope.settings,
                left=(*launch.left, *scope.left),
                model=scope.model,
                line=scope.line or _line(container),
            )

    def _words(self, given: Any, environment: Mapping[str, Word]) -> list[Word]:
        """Return the words of a command: a list, or a text that a shell splits."""
        if isinstance(given, list):
            return [self._argument(one, environment) for one in given if isinstance(one, Word)]
        if isinstance(given, Word) and self.is_compose:
            return CommandText().words(given.replace("$$", "\\$"), given.line)
        text = self._argument(given, environment) if isinstance(given, Word) else Word("")
        return CommandText(environment).words(text, text.line)

    def _argument(self, word: Word, environment: Mapping[str, Word]) -> Word:
        """Insert variables as Kubernetes does, `$(NAME)`, or as Compose does. One that is not set is not resolved, and
        so are secrets, templates and what would become too long."""
        if self.is_compose:
            return inserted(word)
        names = [found[1] for found in _IN_ARGUMENT.finditer(word)]
        is_long = sum(len(environment.get(name, "")) for name in names) > MAX_ARGUMENT

        def text(found: re.Match[str]) -> str:
            value = environment.get(found[1])
            is_hidden = is_long or value is None or finished(value).unknown or names_secret(found[1])
            return marked(found[0]) if value is None or is_hidden else str(value)

        return Word(_IN_ARGUMENT.sub(text, word), word.line, is_plain=word.is_plain)


def _named(scope: Launch, key: Word) -> Launch:
    return replace(scope, name=f"{scope.name}/{key}".strip("/"), line=key.line)


def _found(words: list[Word], image: str, environment: Mapping[str, Word]) -> list[Launch]:
    script = CommandText(environment)
    script.find(words, image=image)
    return script.results()


def _of_production_stack(spec: Any) -> Launch:
    config, cache = _section(spec, "vllmConfig"), _section(spec, "lmcacheConfig")
    scope = _EngineSearch(spec)._within(spec, Launch("", None))
    named, reasons = table("of_model_spec"), table("left_of_model_spec")
    flags = {name: snake_case(name) for name in config if name not in ("extraArgs", "prometheusMultiprocDir")}
    flags |= {name: named[name] for name in spec if name in named}
    values = {**spec, **config}
    left = [Left(name, reasons[name], name.line) for name in values if name in reasons]
    is_on, model = cache.get("enabled") == "true", _word(spec, "modelURL")
    of_cache = {name: _word(cache, name) for name in cache if is_on and name in table("lmcache")}
    sizes = {name: finished(size) for name, size in of_cache.items() if size and size != "0"}
    return Launch(
        str(_word(spec, "name") or "model"),
        "vllm",
        tuple(map(finished, _EngineSearch(spec)._words(_list(config, "extraArgs"), scope.environment))),
        {**sizes, **{name: finished(one) for name, one in scope.environment.items()}},
        options={Word(flag, name.line): values[name] for name, flag in flags.items() if name not in reasons},
        left=(*scope.left, *left),
        model=_model(model) if model is not None else None,
        line=_line(spec),
    )


def _variables(given: Any) -> Iterator[tuple[str, Word | None, int]]:
    """Yield the names, values and lines of variables, None for a value that is elsewhere."""
    for one in given if isinstance(given, list) else ():
        if isinstance(one, Word):
            name, is_given, value = one.partition("=")
            yield name, Word(value, one.line) if is_given else None, one.line
        elif (variable := _word(one, "name")) is not None:
            yield str(variable), _word(one, "value"), variable.line
    for variable in given if isinstance(given, dict) else ():
        yield str(variable), _word(given, variable), variable.line


def _model(word: Word) -> Word:
    """Return the model of a URI. The files of a volume or a store have another path here."""
    scheme, separator, rest = word.partition("://")
    is_elsewhere = bool(separator) and scheme != "hf"
    return Word(
        rest if separator and not is_elsewhere else word, word.line, unknown=word if is_elsewhere else word.unknown
    )


def _at(value: Any, *names: str) -> Any:
    """Return what is at these keys, None for nothing."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _section(value: Any, *names: str) -> dict[Any, Any]:
    return inside if isinstance(inside := _at(value, *names), dict) else {}


def _list(value: Any, *names: str) -> list[Any]:
    return inside if isinstance(inside := _at(value, *names), list) else []


def _word(value: Any, *names: str) -> Word | None:
    return inside if isinstance(inside := _at(value, *names), Word) else None


def _line(value: Any, key: str = "") -> int:
    """Return the line of the key, or that of the first one."""
    return next((name.line for name in value if isinstance(name, Word) and key in ("", name)), 0)
