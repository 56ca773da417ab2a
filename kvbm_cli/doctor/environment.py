"""The `DYN_KVBM_*` variables around: unknown names, values that mean nothing, and those that mean something else here.

A mistake here is what every other command of `kvbm` stops at; the doctor names them all, and goes on without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvbm.config.variables import PREFIX, VARIABLES, Effect, Form, Variable, read_variables
from kvbm.errors import ProfileError
from kvbm_cli.doctor.result import Check, failure, ok, warning

PRESENCE_ONLY = frozenset({f"{PREFIX}DISK_ZEROFILL_FALLBACK", f"{PREFIX}DISK_DISABLE_O_DIRECT"})
FALSE = frozenset({"0", "false", "no", "off"})
PRIORITY = f"{PREFIX}HOST_OFFLOAD_PREFIX_MIN_PRIORITY"


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
    if not found:
        found = [ok("variables", f"{len(names)} of DYN_KVBM_*, all with a meaning" if names else "no DYN_KVBM_*")]
    return found, usable


def _misread(name: str, value: str) -> Iterator[Check]:
    """What NVIDIA's block manager made of the same text, where that was something else."""
    variable = next((variable for variable in VARIABLES if variable.name == name), None)
    if variable is None or variable.effect is not Effect.HONOURED:
        return
    if name in PRESENCE_ONLY and value.strip().lower() in FALSE:
        finding = f"`{value}` is off here; NVIDIA's block manager switched it on, whatever the value"
        yield warning(name, finding, f"`unset {name}`")
    elif _is_fraction(variable, value):
        finding = f"`{value}` is {value} GB here; NVIDIA's block manager took a fraction for no tier at all in places"
        yield warning(name, finding, f"nothing to do, or `{variable.key}` in a profile")


def _is_fraction(variable: Variable, value: str) -> bool:
    return variable.form is Form.GIGABYTES and "." in value and float(value) != int(float(value))
