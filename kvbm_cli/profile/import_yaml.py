"""Reads the starts of engines from YAML: manifests of Kubernetes, values of Helm charts, Compose files, and files with
options of TensorRT-LLM or flags of vLLM.

A mapping with a command or arguments is a container, wherever it stands, so every kind of object with a pod in it is
read. It inherits the name and the variables of what surrounds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from kvbm.config.document import PlainLoader, yaml_problem
from kvbm.config.key_list import OWN
from kvbm.config.spelling import snake_case
from kvbm.engines.table import KINDS
from kvbm.errors import ProfileError
from kvbm_cli.profile.import_launch import MAX_DEPTH, NOT_SHOWN, STARTS, Launch, Left, Word, table
from kvbm_cli.profile.import_secrets import names_secret
from kvbm_cli.profile.import_shell import MAX_LAUNCHES, CommandText, finished, inserted, launches_of, marked
from kvbm_cli.profile.import_text import read_page

MAX_NODES = 50_000
MAX_VARIABLES = 1000
CHARACTERS_PER_VALUE = 100
MAX_ARGUMENT = 1 << 14  # characters; variables insert variables
_IN_ARGUMENT = re.compile(r"\$\((\w+)\)|\{\{[^{}]*\}\}")  # of Kubernetes, and of Helm
_COMMAND = ("entrypoint", "command", "args")
_NO_FLAGS = ("extraArgs", "prometheusMultiprocDir")  # of a `vllmConfig` of production-stack
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
    searches = [_EngineSearch(one) for one in documents]
    launches = [launch for search in searches for launch in search.launches()]
    if not launches:  # a text without arguments may be prose
        found = (launch for search in searches for launch in search.of_texts())
        launches = [launch for launch in found if launch.words]
    if len(launches) > MAX_LAUNCHES:
        raise ProfileError(f"more than {MAX_LAUNCHES} containers start an engine")
    left = (_NOT_FILLED_IN,) if _TEMPLATE.search(text) else ()
    return [replace(one, files={**files, **one.files}, left=(*one.left, *left)) for one in launches]


def options_in(text: str) -> Mapping[str, Any]:
    """Return the options of a file that another file contains; none if it is not a mapping."""
    first = next(iter(_documents(text)), None)
    return first if isinstance(first, dict) else {}


def _documents(text: str, line: int = 1) -> list[Any]:
    loader, count = PlainLoader(text), [0]
    loader.line = line - 1  # of all marks
    found: list[Any] = []
    try:
        while loader.check_node():
            found.append(_value(loader.get_node(), count))
        return found
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


@dataclass(slots=True)
class _EngineSearch:
    """Finds engines in the parts of a document. `texts` are texts and lists that are no commands of a container, with
    their variables."""

    document: Any
    texts: list[tuple[Word | list[Word], Mapping[str, Word]]] = field(default_factory=list)

    def launches(self) -> Iterator[Launch]:
        """Yield the engines that the keys of the document start."""
        names = {name.replace("-", "_") for name in self.document}
        engine = next((engine for engine, kind in KINDS.items() if names & kind.signs and not names & OWN), None)
        if engine is not None:
            yield Launch("options", engine, options=self.document)
        else:
            yield from self.below(self.document, Launch("", None))

    def of_texts(self) -> Iterator[Launch]:
        for one, environment in self.texts:
            yield from read_page(one, environment) if isinstance(one, Word) else launches_of(one, "", environment)

    @property
    def is_compose(self) -> bool:
        return "services" in self.document and "apiVersion" not in self.document

    def below(self, value: Any, scope: Launch, key: str = "") -> Iterator[Launch]:
        """Yield the engines in this part. `scope` has what the parents say about them."""
        if isinstance(value, list):
            words = [one for one in value if isinstance(one, Word)]
            if any(one.endswith("\n") for one in words):  # lines, as in a notebook
                value = [Word("".join(words), words[0].line)]
            elif STARTS.search(" ".join(words)):
                self.texts.append((words, scope.environment))
                value = [one for one in value if not isinstance(one, Word)]
            for one in value:
                yield from self.below(one, scope, key)
        elif isinstance(value, Word) and STARTS.search(value):
            self.texts.append((value, scope.environment))
        elif isinstance(value, dict):
            scope = self._within(value, scope)
            is_of_chart = "modelURL" in value
            found = list(self._of_model_spec(value, scope) if is_of_chart else self._of_container(value, scope, key))
            yield from found
            for name, inside in () if found else value.items():
                if name != "initContainers":
                    named = replace(scope, name=f"{scope.name}/{name}".strip("/"), line=name.line)
                    yield from self.below(inside, named if key == "services" else scope, name)

    def _within(self, value: Any, scope: Launch) -> Launch:
        """Add what this mapping says about the engines in it."""
        name = _word(_section(value, "metadata"), "name") if "kind" in value else None
        variables = {**scope.environment}
        left = [Left(str(key), why, _line(value, key)) for key, why in table("left_keys").items() if value.get(key)]
        for key in ("env", "envs", "environment"):
            for variable, one, line in _variables(value.get(key)):
                if one is None:
                    left.append(Left(variable, NOT_SHOWN, line))
                else:
                    variables[variable] = self._argument(one, variables)
        if len(variables) > MAX_VARIABLES:  # each mapping below copies them
            raise ProfileError(f"more than {MAX_VARIABLES:,} variables")
        return replace(scope, name=str(name or scope.name), environment=variables, left=(*scope.left, *left))

    def _of_container(self, container: Any, scope: Launch, place: str) -> Iterator[Launch]:
        is_container = place in ("containers", "mainContainer", "services")
        if not is_container and not any(key in container for key in _COMMAND):
            return
        words = [word for key in _COMMAND for word in self._words(container.get(key), scope.environment)]
        image = _word(container, "image") or _word(_section(container, "image"), "repository") or ""
        is_command = not self.is_compose and container.get("command") and words and not words[0].startswith("-")
        for launch in launches_of(words, "" if is_command or container.get("entrypoint") else image, scope.environment):
            yield replace(
                launch,
                name=scope.name or str(_word(container, "name") or "container"),
                is_elsewhere=True,
                left=(*launch.left, *scope.left),
                line=scope.line or _line(container),
            )

    def _of_model_spec(self, spec: Any, scope: Launch) -> Iterator[Launch]:
        """Yield the engine of production-stack."""
        config, cache = _section(spec, "vllmConfig"), _section(spec, "lmcacheConfig")
        scope, names = self._within(config, scope), table("of_model_spec")
        flags = {name: snake_case(name) for name in config if name not in _NO_FLAGS and name not in table("left_keys")}
        flags |= {name: names[name] for name in spec if name in names}
        of_cache = {name: _word(cache, name) for name in cache if name in table("lmcache")}
        is_on = cache.get("enabled") == "true"
        sizes = {name: size for name, size in of_cache.items() if is_on and size and size != "0"}
        yield Launch(
            str(_word(spec, "name") or "model"),
            "vllm",
            tuple(map(finished, self._words(config.get("extraArgs"), scope.environment))),
            {name: finished(one) for name, one in {**sizes, **scope.environment}.items()},
            options={Word(flag, name.line): {**spec, **config}[name] for name, flag in flags.items()},
            left=scope.left,
            line=_line(spec),
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


def _section(value: Any, name: str) -> dict[Any, Any]:
    return inside if isinstance(inside := value.get(name), dict) else {}


def _word(value: Any, name: str) -> Word | None:
    inside = value.get(name) if isinstance(value, dict) else None
    return inside if isinstance(inside, Word) else None


def _line(value: Any, key: str = "") -> int:
    """Return the line of the key, or that of the first one."""
    return next((name.line for name in value if isinstance(name, Word) and key in ("", name)), 0)
