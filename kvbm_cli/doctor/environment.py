"""The `DYN_KVBM_*` variables around: unknown names, values that mean nothing, and those that mean something else here.

A mistake here is what every other command of `kvbm` stops at; the doctor names them all, and goes on without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from kvbm.config.variables import PREFIX, VARIABLES, Effect, Form, Variable, drop_idle_disk, read_variables
from kvbm.errors import ProfileError
from kvbm_cli.doctor.result import Check, failure, ok, warning

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import Tiers

PRESENCE_ONLY = frozenset({f"{PREFIX}DISK_ZEROFILL_FALLBACK", f"{PREFIX}DISK_DISABLE_O_DIRECT"})
FALSE = frozenset({"0", "false", "no", "off"})


def lint(environment: Mapping[str, str]) -> tuple[list[Check], dict[str, str]]:
    """What is found, and the variables that are without a mistake."""
    names = sorted(name for name in environment if name.startswith(PREFIX))
    found: list[Check] = []
    usable: dict[str, str] = {}
    for name in names:
        try:
            _, warnings = read_variables({name: environment[name]})
        except ProfileError as error:
            found.append(failure(name, error.message.splitlines()[0], error.hint or f"`unset {name}`"))
            continue
        usable[name] = environment[name]
        found += [warning(name, text.partition(": ")[2], f"`unset {name}`") for text in warnings]
        found += _misread(name, environment[name])
    return found, usable


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
    idle = [_idle(text) for text in drop_idle_disk(document)]
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
    idle = [_idle(text) for text in resolved.warnings if "there is no disk tier" in text]
    return [*idle, *_priority(resolved.profile.offload.min_priority, failure)]


def _priority(threshold: int, say: Callable[[str, str, str], Check]) -> Iterator[Check]:
    if threshold:
        finding = f"`offload.min_priority` is {threshold}: an engine that sends no priorities offloads nothing"
        yield say("priorities", finding, "`offload.min_priority: 0`")


def _idle(text: str) -> Check:
    name = text.split("`")[1]
    return warning(name, text.partition(": ")[2], f"`unset {name}`")


def _misread(name: str, value: str) -> Iterator[Check]:
    """What NVIDIA's block manager made of the same text, where that was something else."""
    variable = next((variable for variable in VARIABLES if variable.name == name), None)
    if variable is None or variable.effect is not Effect.HONOURED:
        return
    if name in PRESENCE_ONLY and value.strip().lower() in FALSE:
        finding = f"`{value}` is off here; NVIDIA's block manager switched it on, whatever the value"
        yield warning(name, finding, f"`unset {name}`")
    elif _is_fraction(variable, value):
        finding = f"`{value}` is {value} GB here; a part of NVIDIA's block manager took a fraction for no tier at all"
        yield warning(name, finding, f"nothing to do, or `{variable.key}` in a profile")


def _is_fraction(variable: Variable, value: str) -> bool:
    return variable.form is Form.GIGABYTES and "." in value and float(value) != int(float(value))
