"""The `DYN_KVBM_*` variables around: unknown names, values that mean nothing, and those that mean something else here.

A mistake here is what every other command of `kvbm` stops at; the doctor names them all, and goes on without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from kvbm.config.form import Form
from kvbm.config.variables import PREFIX, named, read_variables, settle, variable_of
from kvbm.errors import ProfileError
from kvbm_cli.doctor.result import Check, failure, ok, warning

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import Tiers

PRESENCE_ONLY = frozenset({f"{PREFIX}DISK_ZEROFILL_FALLBACK", f"{PREFIX}DISK_DISABLE_O_DIRECT"})
NUMA = f"{PREFIX}ENABLE_NUMA"
METRICS, METRICS_HOST = f"{PREFIX}METRICS", f"{PREFIX}METRICS_HOST"
FALSE = frozenset({"0", "false", "no", "off"})


def lint(environment: Mapping[str, str]) -> tuple[list[Check], dict[str, str]]:
    """What is found, and the variables that are without a mistake."""
    found: list[Check] = []
    usable: dict[str, str] = {}
    for name in named(environment):
        try:
            _, warnings = read_variables({name: environment[name]})
            read_variables({**usable, name: environment[name]})
        except ProfileError as error:
            found.append(failure(name, error.message.splitlines()[0], error.hint or f"`unset {name}`"))
            continue
        usable[name] = environment[name]
        found += [warning(name, text.partition(": ")[2], f"`unset {name}`") for text in warnings]
    return [*found, *(check for name in usable for check in _misread(name, usable))], usable


def all_or_none(found: list[Check], count: int) -> list[Check]:
    """What is found, or that nothing is, in `count` variables."""
    shown = f"{count} of DYN_KVBM_*, all with a meaning" if count else "no DYN_KVBM_*"
    return found or [ok("variables", shown)]


def tiers(variables: Mapping[str, str]) -> tuple[Tiers | None, list[Check]]:
    """The tiers of an engine that is started by its own command line, None if there are none; and what is wrong."""
    from pydantic import ValidationError

    from kvbm.config.document import plain_values
    from kvbm.config.mistakes import FileKind, mistakes_in
    from kvbm.config.schema import ConnectorConfig, keys

    document, _ = read_variables(variables)
    try:
        idle = [_idle(text) for text in settle(document)]
    except ProfileError as error:
        return None, [failure("tiers", error.message.splitlines()[0], error.hint or "another value")]
    if "tiers" not in document:
        return None, idle
    try:
        config = ConnectorConfig.model_validate(plain_values(document))
    except ValidationError as error:
        mistakes = mistakes_in(error, document, "variables", FileKind("configuration", keys(ConnectorConfig), {}))
        return None, [*idle, *(failure("values", one.text, one.hint or "another value") for one in mistakes)]
    return config.tiers, [*idle, *_priority(config.offload.min_priority, warning)]


def beside(resolved: ResolvedProfile) -> list[Check]:
    """What has no effect, or a bad one, with this profile. No engine that it could name sends priorities."""
    told = ("` has no effect: there", "` has no effect: the", "` wins over `")
    idle = [_idle(text) for text in resolved.warnings if any(words in text for words in told)]
    return [*idle, *_priority(resolved.profile.offload.min_priority, failure)]


def _priority(threshold: int, say: Callable[[str, str, str], Check]) -> Iterator[Check]:
    if threshold:
        finding = f"`offload.min_priority` is {threshold}: an engine that sends no priorities offloads nothing"
        yield say("priorities", finding, "`offload.min_priority: 0`")


def _idle(text: str) -> Check:
    name = _name_in(text)
    finding = text.partition(" has no effect: ")[2] or text.partition("; `unset ")[0]
    return warning(name, finding, f"`unset {name}`")


def _is_of_honoured(text: str) -> bool:
    """Whether a warning is about one that has an effect elsewhere; `lint` has told of the others."""
    variable = variable_of(_name_in(text))
    return variable is not None and variable.is_honoured


def _name_in(text: str) -> str:
    return text.split("`")[1].partition("=")[0]


def _misread(name: str, usable: Mapping[str, str]) -> Iterator[Check]:
    """What NVIDIA's block manager made of the same text, where that was something else."""
    value, variable = usable[name].strip(), variable_of(name)
    if variable is None or not variable.is_honoured:
        return
    if name in PRESENCE_ONLY and value.lower() in FALSE:
        finding = f"`{value}` is off here; NVIDIA's block manager switched it on, whatever the value"
        yield warning(name, finding, f"nothing to do, or `unset {name}`")
    elif variable.form is Form.GIGABYTES and _is_fraction(value):
        finding = f"`{value}` is {value} GB here; a part of NVIDIA's block manager took a fraction for no tier at all"
        yield warning(name, finding, f"nothing to do, or `{variable.key}` in a profile")
    elif name == NUMA and value.lower() in FALSE:
        finding = f"`{value}` is off here; to NVIDIA's block manager it meant nothing"
        yield warning(name, finding, f"`unset {name}`")
    elif name == METRICS and value.lower() not in FALSE and METRICS_HOST not in usable:
        finding = "served on 127.0.0.1 or `server.host` here; NVIDIA's block manager listened on every address"
        yield warning(name, finding, f"`{METRICS_HOST}=0.0.0.0`, for a Prometheus on another machine")


def _is_fraction(value: str) -> bool:
    return "." in value and float(value) != int(float(value))
