"""Rewrites remedies for an engine without a profile: each profile key becomes the variable that sets it."""

from __future__ import annotations

import re

from kvbm.config.form import Form
from kvbm.config.sizes import parse_size
from kvbm.config.variables import VARIABLES, Variable

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
