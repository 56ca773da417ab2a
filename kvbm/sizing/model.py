"""Reads single facts of a model's configuration; SizeUnknown for a model that only the engine can size."""

from __future__ import annotations

from collections.abc import Mapping

from kvbm.errors import KvbmError, ProfileError


class SizeUnknown(KvbmError):
    """Not a mistake: only the engine knows the size of a block, after it has started."""


def text_facts(model_config: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the part of a configuration that describes the language model."""
    text_config = model_config.get("text_config")
    return text_config if isinstance(text_config, Mapping) else model_config


def count(facts: Mapping[str, object], name: str, *, default: int | None = None) -> int:
    """Returns a positive whole number. ProfileError if the configuration has none of that name."""
    value = facts.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ProfileError(
            f"the model's configuration has no valid `{name}`: {'it is missing' if value is None else repr(value)}"
        )
    return value
