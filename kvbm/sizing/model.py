"""Single facts of a model's configuration, and the error for a model about which too little is known."""

from __future__ import annotations

from collections.abc import Mapping

from kvbm.errors import KvbmError, ProfileError


class SizeUnknown(KvbmError):
    """Nothing is wrong, but only the engine can tell how much a block weighs, once it has started."""


def text_facts(model_config: Mapping[str, object]) -> Mapping[str, object]:
    """The part of a configuration that is about the language model."""
    text_config = model_config.get("text_config")
    return text_config if isinstance(text_config, Mapping) else model_config


def count(facts: Mapping[str, object], name: str, *, default: int | None = None) -> int:
    """A positive whole number; ProfileError if the configuration has none of that name."""
    value = facts.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ProfileError(f"the model's configuration has no usable `{name}`: {value!r}")
    return value
