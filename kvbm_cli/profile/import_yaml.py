"""Reads the starts of engines from YAML: manifests of Kubernetes, values of Helm charts, Compose files, and files with
options of TensorRT-LLM or flags of vLLM.

A container is found by its place (`containers`, `mainContainer`), so every kind of object with a pod in it is read. It
inherits what surrounds it: names, model, parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import yaml

from kvbm.config.document import PlainLoader, yaml_problem
from kvbm.config.key_list import OWN
from kvbm.config.spelling import snake_case
from kvbm.engines.table import KINDS
from kvbm.errors import ProfileError
from kvbm_cli.profile.import_launch import MAX_DEPTH, STARTS, Launch, Left, Word
from kvbm_cli.profile.import_secrets import NO_SECRETS, names_secret
from kvbm_cli.profile.import_shell import MAX_LAUNCHES, CommandText, finished, inserted, marked

MAX_NODES = 50_000
MAX_VARIABLES = 1000
CHARACTERS_PER_VALUE = 100
MAX_ARGUMENT = 1 << 14  # characters; variables insert variables
_IN_ARGUMENT = re.compile(r"\$\((\w+)\)|\{\{[^{}]*\}\}")  # of Kubernetes, and of Helm
_ROLES = ("prefill", "decode", "leaderTemplate", "workerTemplate", "worker", "predictor")
_MORE_ARGUMENTS = "VLLM_ADDITIONAL_ARGS"  # of KServe
_TEMPLATE = re.compile(r"^[ \t]*\{\{", re.MULTILINE)
_TEMPLATE_LINE = re.compile(r"^[ \t]*\{\{[^{}\n]*\}\}[ \t]*$", re.MULTILINE)
_IN_TEMPLATE = re.compile(r"\{\{([^{}\n]*)\}\}")
_NOT_FILLED_IN = Left("{{", "templates are not filled in, and their conditions are not evaluated")
_TEMPLATE_HINT = "this is a template of Helm, not a profile; `helm template` shows the manifests that it makes"
_ELSEWHERE = "the variables are not in this file"
_FILES = "other files are not read"
_OF_MODEL_SPEC = {  # of production-stack, and the flag
    "modelRevision": "revision",
    "enableLoRA": "enable_lora",
    "enableTool": "enable_auto_tool_choice",
    "toolCallParser": "tool_call_parser",
}
_LEFT_OF_MODEL_SPEC = {
    "hf_token": NO_SECRETS,
    "raySpec": "kvbm starts no cluster of Ray",
    "lmcacheConfig": "kvbm replaces LMCache; only its sizes are carried over",
    "chatTemplate": "the template is not in this file",
    **dict.fromkeys(("v0", "v1"), "it chooses an engine of an old vLLM"),
}


def read_yaml(text: str, line: int = 1) -> list[Launch]:
    """Return every start of an engine in a text that begins in this line. ProfileError if the text is not YAML, or too
    large with its aliases."""
    documents = [one for one in _documents(text, line) if isinstance(one, dict)]
    maps = [_section(one, "data") for one in documents if one.get("kind") == "ConfigMap"]
    files = {str(name): str(inside) for data in maps for name, inside in data.items()}
    found: dict[str, Launch] = {}
    launches = [launch for one in documents for launch in _launches(one)]
    for launch in launches or [launch for one in documents for launch in _anywhere(one, {})]:
        if len(found) == MAX_LAUNCHES:
            raise ProfileError(f"more than {MAX_LAUNCHES} containers start an engine")
        names = (launch.name, *(f"{launch.name}-{count}" for count in range(2, MAX_LAUNCHES + 2)))
        name = next(name for name in names if name not in found)
        left = (*launch.left, *([_NOT_FILLED_IN] if _TEMPLATE.search(text) else []))
        found[name] = replace(launch, name=name, files={**files, **launch.files}, left=left)
    return list(found.values())


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
    if specs := _list(_section(document, "servingEngineSpec"), "modelSpec"):
        yield from (_of_production_stack(one) for one in specs if isinstance(one, dict))
    elif "apiVersion" not in document and (services := _section(document, "services")):
        for service, inside in services.items():
            yield from _of_compose(service, inside)
    elif (engine := _engine_of_options(document)) is not None:
        yield Launch("options", engine, options=document)
    else:
        yield from _containers(document, Launch("", None))


def _engine_of_options(document: Any) -> str | None:
    """Return the engine whose options or flags the document has."""
    names = {name.replace("-", "_") for name in document}
    if names & OWN:
        return None
    return next((engine for engine, kind in KINDS.items() if names & kind.signs), None)


def _containers(value: Any, scope: Launch) -> Iterator[Launch]:
    """Yield the engines in this part of a document. `scope` has what the parents say about them."""
    if isinstance(value, list):
        for one in value:
            name = _word(one, "name") if _section(one, "podTemplate") else None  # of Dynamo
            yield from _containers(one, _below(scope, name) if name else scope)
    if not isinstance(value, dict):
        return
    scope = _within(value, scope)
    for key, inside in value.items():
        if key in ("containers", "mainContainer"):
            for one in inside if isinstance(inside, list) else [inside]:
                yield from _of_container(one, scope)
        elif key == "model" and _section(inside, "modelFormat").get("name") in ("huggingface", "vllm"):  # of KServe
            yield from _of_container({**inside, "command": [Word("vllm"), Word("serve")]}, scope)
        elif key == "services" and isinstance(inside, dict):
            for name, service in inside.items():
                yield from _containers(service, _below(scope, name))
        elif key != "initContainers":
            yield from _containers(inside, _below(scope, key) if key in _ROLES else scope)


def _below(scope: Launch, key: str) -> Launch:
    return replace(scope, name=f"{scope.name}/{key}".strip("/"))


def _within(value: Any, scope: Launch) -> Launch:
    """Add what this mapping says about the engines in it."""
    name, artifacts = _word(_section(value, "metadata"), "name"), _section(value, "modelArtifacts")
    uri = _word(_section(value, "model"), "uri") or _word(_section(value, "model"), "storageUri")
    uri = uri or _word(artifacts, "uri") or _word(artifacts, "name")
    if uri is not None and uri.unknown:  # llm-d inserts the name into the URI
        uri = _word(artifacts, "name") or uri
    ranks = [(flag, _word(_section(value, "parallelism"), flag)) for flag in ("tensor", "data", "pipeline")]
    words = [Word(f"--{flag}-parallel-size={size}", size.line) for flag, size in ranks if size and size != "1"]
    cache = _section(value, "kvCacheOffloading") or _section(_section(value, "workload"), "kvCacheOffloading")
    disks = [_word(_section(_section(one, "fileSystem"), "emptyDir"), "size") for one in _list(cache, "secondary")]
    tiers = {"tiers.host.capacity": _word(cache, "cpu"), "tiers.disk.capacity": next(iter(disks), None)}
    environment, left = _environment(_list(value, "envs"))
    if "envFromSecret" in value:
        left.append(Left("envFromSecret", _ELSEWHERE, _line(value, "envFromSecret")))
    return replace(
        scope,
        name=str(name) if name is not None and "kind" in value else scope.name,
        model=_model(uri) if uri is not None else scope.model,
        words=(*scope.words, *words),
        settings={**scope.settings, **{key: Word(f"{size}B", size.line) for key, size in tiers.items() if size}},
        environment={**scope.environment, **environment},
        left=(*scope.left, *left),
    )


def _of_container(container: Any, scope: Launch) -> Iterator[Launch]:
    if not isinstance(container, dict):
        return
    environment, left = _environment(_list(container, "env"))
    environment = {**scope.environment, **environment}
    if container.get("envFrom"):
        left.append(Left("envFrom", _ELSEWHERE, _line(container, "envFrom")))
    words = [_argument(one, environment) for name in ("command", "args") for one in _list(container, name)]
    for name in ("command", "args"):  # no list in some charts
        if isinstance(given := container.get(name), Word):
            words += _words(_argument(given, environment))
    is_default = not words and scope.model is not None and "modelCommand" not in container  # of KServe
    if is_default or container.get("modelCommand") == "vllmServe":
        words = [Word("vllm"), Word("serve"), *words]
    more = environment.pop(_MORE_ARGUMENTS, Word(""))
    image = _word(container, "image") or _word(_section(container, "image"), "repository") or ""
    is_replaced = container.get("command") and words and not words[0].startswith("-")  # the entry point of the image
    for launch in _found(words, "" if is_replaced else image, environment):
        yield replace(
            launch,
            name=scope.name or str(_word(container, "name") or "container"),
            words=(*scope.words, *launch.words, *map(finished, _words(more, environment))),
            settings=scope.settings,
            left=(*launch.left, *scope.left, *left),
            model=scope.model,
            line=_line(container),
        )


def _words(text: Word, environment: Mapping[str, Word] | None = None) -> list[Word]:
    return [word for command in CommandText(environment).commands(text, text.line) for word in command]


def _found(words: list[Word], image: str, environment: Mapping[str, Word]) -> list[Launch]:
    script = CommandText(environment)
    script.find(words, image=image)
    return script.results()


def _anywhere(value: Any, environment: Mapping[str, Word]) -> Iterator[Launch]:
    """Yield the engines that a text or a list in this document starts, where no container does."""
    if isinstance(value, dict):
        if isinstance(value.get("args") or value.get("command"), list):
            yield from _of_container(value, Launch("", None))
            return
        given = {**_section(value, "env"), **_section(value, "envs")}  # of SkyPilot and of workflows
        inner = {**environment, **{str(name): one for name, one in given.items() if isinstance(one, Word)}}
        if len(inner) > MAX_VARIABLES:  # each list below copies them
            raise ProfileError(f"more than {MAX_VARIABLES:,} variables")
        for inside in value.values():
            yield from _anywhere(inside, inner)
    elif isinstance(value, list):
        words = [one for one in value if isinstance(one, Word)]
        if any(one.endswith("\n") for one in words):  # lines, as in a notebook
            found = list(_anywhere(Word("".join(words), words[0].line), environment))
        else:
            found = _found(words, "", environment)
        yield from found
        for inside in () if found else value:
            yield from _anywhere(inside, environment)
    elif STARTS.search(value):
        yield from CommandText(environment).read(value, value.line)


def _of_compose(name: Word, service: Any) -> Iterator[Launch]:
    if not isinstance(service, dict):
        return
    given = service.get("environment")
    if isinstance(given, list):
        pairs = [(one.partition("="), one.line) for one in given if isinstance(one, Word)]
        given = {variable: Word(value, line) for (variable, _, value), line in pairs}
    variables = given.items() if isinstance(given, dict) else ()
    environment = {str(variable): inserted(one) for variable, one in variables if isinstance(one, Word)}
    words: list[Word] = []
    for one in (service.get("entrypoint"), service.get("command")):
        if isinstance(one, Word):
            words += _words(Word(one.replace("$$", "\\$"), one.line))
        words += [inserted(word) for word in one or () if isinstance(one, list) and isinstance(word, Word)]
    left = [Left("env_file", _FILES, _line(service, "env_file"))] if "env_file" in service else []
    image = None if service.get("entrypoint") else _word(service, "image")
    for launch in _found(words, image or "", environment):
        yield replace(launch, name=str(name), left=(*launch.left, *left), line=name.line)


def _of_production_stack(spec: Any) -> Launch:
    config, cache = _section(spec, "vllmConfig"), _section(spec, "lmcacheConfig")
    environment, left = _environment(_list(spec, "env"))
    names = {name: snake_case(name) for name in config if name not in ("extraArgs", "prometheusMultiprocDir")}
    flags = {**names, **{name: _OF_MODEL_SPEC[name] for name in spec if name in _OF_MODEL_SPEC}}
    values = {**spec, **config}
    left += [Left(name, _LEFT_OF_MODEL_SPEC[name], name.line) for name in values if name in _LEFT_OF_MODEL_SPEC]
    sizes = [("host", _word(cache, "cpuOffloadingBufferSize")), ("disk", _word(cache, "diskOffloadingBufferSize"))]
    is_on, model = cache.get("enabled") == "true", _word(spec, "modelURL")
    return Launch(
        str(_word(spec, "name") or "model"),
        "vllm",
        tuple(finished(_argument(one, environment)) for one in _list(config, "extraArgs")),
        {name: finished(one) for name, one in environment.items()},
        options={Word(flags[name], name.line): values[name] for name in flags if name not in _LEFT_OF_MODEL_SPEC},
        settings_per_rank={f"tiers.{tier}.capacity": size for tier, size in sizes if is_on and size and size != "0"},
        left=tuple(left),
        model=_model(model) if model is not None else None,
        line=_line(spec),
    )


def _environment(variables: list[Any]) -> tuple[dict[str, Word], list[Left]]:
    """Return the variables of a container, and those whose values are elsewhere."""
    found: dict[str, Word] = {}
    left = []
    for one in variables:
        name, value = _word(one, "name"), _word(one, "value")
        if name is not None and value is not None:
            found[str(name)] = _argument(value, found)
        elif name is not None:
            left.append(Left(name, "its value is not in this file", name.line))
    return found, left


def _argument(word: Any, environment: Mapping[str, Word]) -> Word:
    """Insert variables as Kubernetes does, `$(NAME)`. One that is not set is not resolved, and so are secrets,
    templates and what would become too long."""
    if not isinstance(word, Word):
        return Word("")
    names = [found[1] for found in _IN_ARGUMENT.finditer(word)]
    is_long = sum(len(environment.get(name, "")) for name in names) > MAX_ARGUMENT

    def text(found: re.Match[str]) -> str:
        value = environment.get(found[1])
        is_hidden = is_long or value is None or finished(value).unknown or names_secret(found[1])
        return marked(found[0]) if value is None or is_hidden else str(value)

    return Word(_IN_ARGUMENT.sub(text, word), word.line, is_plain=word.is_plain)


def _model(word: Word) -> Word:
    """Return the model of a URI. The files of a volume or a store have another path here."""
    scheme, separator, rest = word.partition("://")
    is_elsewhere = bool(separator) and scheme != "hf"
    return Word(
        rest if separator and not is_elsewhere else word, word.line, unknown=word if is_elsewhere else word.unknown
    )


def _section(value: Any, name: str) -> dict[Any, Any]:
    inside = value.get(name) if isinstance(value, dict) else None
    return inside if isinstance(inside, dict) else {}


def _list(value: Any, name: str) -> list[Any]:
    inside = value.get(name) if isinstance(value, dict) else None
    return inside if isinstance(inside, list) else []


def _word(value: Any, name: str) -> Word | None:
    inside = value.get(name) if isinstance(value, dict) else None
    return inside if isinstance(inside, Word) else None


def _line(value: Any, key: str = "") -> int:
    """Return the line of the key, or that of the first one."""
    return next((name.line for name in value if isinstance(name, Word) and key in ("", name)), 0)
