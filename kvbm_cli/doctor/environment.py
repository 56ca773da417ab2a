"""Checks of the `DYN_KVBM_*` variables: unknown names, invalid values, values that NVIDIA's kvbm reads differently.

Every other command stops at the first such mistake. The doctor reports all of them and continues without the variables
that are wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from kvbm.config.document import plain_values
from kvbm.config.form import Form
from kvbm.config.key_list import keys
from kvbm.config.mistakes import FileKind, mistakes_in
from kvbm.config.schema import ConnectorConfig, Tiers
from kvbm.config.sizes import parse_size
from kvbm.config.variables import (
    PREFIX,
    VARIABLES,
    Variable,
    drop_unused,
    read_variables,
    valid_variables,
    variable_names,
    variable_of,
)
from kvbm_cli.profile.machine_check import Check, failure, ok, warning

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile

PRESENCE_ONLY = frozenset({f"{PREFIX}DISK_ZEROFILL_FALLBACK", f"{PREFIX}DISK_DISABLE_O_DIRECT"})
NUMA = f"{PREFIX}ENABLE_NUMA"
METRICS, METRICS_HOST = f"{PREFIX}METRICS", f"{PREFIX}METRICS_HOST"
FALSE = frozenset({"0", "false", "no", "off"})


def check_variables(environment: Mapping[str, str]) -> tuple[list[Check], dict[str, str]]:
    """Return the checks, and the variables that are valid."""
    valid, mistakes = valid_variables(environment)
    wrong = [name for name in variable_names(environment) if name not in valid]  # one mistake each, in this order
    found = [
        failure(name, mistake.message.splitlines()[0], mistake.hint or f"`unset {name}`")
        for name, mistake in zip(wrong, mistakes, strict=True)
    ]
    found += [_ineffective(text) for text in read_variables(valid)[1] if not _is_about_supported(text)]
    return [*found, *(check for name in valid for check in _misread(name, valid))], valid


def or_all_valid(found: list[Check], count: int) -> list[Check]:
    """Return `found`, or one passed check for `count` variables."""
    shown = f"{count} DYN_KVBM_* variables, all valid" if count else "no DYN_KVBM_* variables"
    return found or [ok("variables", shown)]


def tiers(variables: Mapping[str, str]) -> tuple[Tiers | None, list[Check]]:
    """Return the tiers of an engine that is started by its own command, None if it has none, and the checks."""
    from pydantic import ValidationError

    document, _ = read_variables(variables)
    ineffective = [_ineffective(text) for text in drop_unused(document, variables)]
    if "tiers" not in document:
        return None, ineffective
    try:
        config = ConnectorConfig.model_validate(plain_values(document))
    except ValidationError as error:
        mistakes = mistakes_in(error, document, "variables", FileKind("configuration", keys(ConnectorConfig), {}))
        wrong = [failure("values", one.text, one.hint or "choose another value") for one in mistakes]
        return None, [*ineffective, *wrong]
    return config.tiers, [*ineffective, *_priority(config.offload.min_priority, warning)]


def check_with_profile(resolved: ResolvedProfile) -> list[Check]:
    """Return a check for each setting that this profile makes ineffective. None of its engines sends priorities."""
    ineffective = [_ineffective(text) for text in resolved.warnings if _is_about_supported(text)]
    return [*ineffective, *_priority(resolved.profile.offload.min_priority, failure)]


def _priority(threshold: int, check: Callable[[str, str, str], Check]) -> Iterator[Check]:
    if threshold:
        finding = f"`offload.min_priority` is {threshold}, but the engine sends no priorities: it would offload nothing"
        yield check("priorities", finding, "set `offload.min_priority: 0`")


def _ineffective(text: str) -> Check:
    name = _name_in(text)
    finding = text.partition(" has no effect: ")[2] or text.partition("; `unset ")[0]
    return warning(name, finding, f"`unset {name}`")


def _is_about_supported(text: str) -> bool:
    """Return False for a variable that never has an effect; `check_variables` has reported it."""
    variable = variable_of(_name_in(text))
    return variable is not None and variable.is_supported


def _name_in(text: str) -> str:
    return text.split("`")[1].partition("=")[0]


def _misread(name: str, valid: Mapping[str, str]) -> Iterator[Check]:
    """Yield a warning for a value that NVIDIA's block manager read differently."""
    value, variable = valid[name].strip(), variable_of(name)
    if variable is None or not variable.is_supported:
        return
    if name in PRESENCE_ONLY and value.lower() in FALSE:
        finding = f"`{value}` means off; NVIDIA's block manager treated any value as on"
        yield warning(name, finding, f"no action needed, or `unset {name}`")
    elif variable.form is Form.GIGABYTES and _is_fraction(value):
        finding = f"`{value}` means {value} GB; parts of NVIDIA's block manager treated a fraction as no tier"
        yield warning(name, finding, f"no action needed, or set `{variable.key}` in a profile")
    elif name == NUMA and value.lower() in FALSE:
        finding = f"`{value}` means off; NVIDIA's block manager ignored it"
        yield warning(name, finding, f"`unset {name}`")
    elif name == METRICS and value.lower() not in FALSE and METRICS_HOST not in valid:
        finding = "served on 127.0.0.1 or `server.host`; NVIDIA's block manager listened on every address"
        yield warning(name, finding, f"`{METRICS_HOST}=0.0.0.0` if Prometheus runs on another machine")


def _is_fraction(value: str) -> bool:
    return "." in value and float(value) != int(float(value))


_KEY = re.compile(r"`((?:tiers|offload|onboard|transfer)\.[a-z_.]+)(?:: ([^`]+))?`")
_SWITCHES = {("tiers.disk.o_direct", "false"): "true", ("tiers.disk.o_direct", "true"): "false"}


def with_variables(remedy: str) -> str:
    """Replace keys by variables. A key without a variable stays, marked as a key of a profile."""
    return _KEY.sub(_as_variable, remedy)


def _as_variable(found: re.Match[str]) -> str:
    key, value = found.groups()
    variable = next((variable for variable in VARIABLES if variable.key == key), None)
    if variable is None:
        return f"{found[0]} in a profile"
    return f"`{variable.name}`" if value is None else f"`{variable.name}={_value(variable, value)}`"


def _value(variable: Variable, value: str) -> str:
    if variable.form is Form.GIGABYTES:
        return f"{parse_size(value) / 1e9:g}"
    return _SWITCHES.get((variable.key or "", value), value)
