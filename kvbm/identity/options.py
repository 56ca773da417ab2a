"""Options of an engine as text that is equal on all machines with equal content.

    what an option holds                   what counts
    configuration object of the engine     all its fields, except those that the caller omits for its class
    configuration of Hugging Face          all values, except names of places and of the version that wrote it
    path below the model's directory       the path relative to it; the files count as the content of the model
    another file, another model directory  its content
    any other directory                    unidentified
    an object without a text form          unidentified

A field that is not known here counts: an option that a later version adds costs hits, never answers.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Set
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvbm.identity.description import Hashed, digest, settled
from kvbm.identity.digests import Unidentified
from kvbm.identity.loading import FileContent, loaded
from kvbm.text.reading import MAX_CONFIG_BYTES, read_at_most

# Of a configuration of Hugging Face: where it came from, what wrote it, and what an engine notes in it.
NOT_OF_A_MODEL = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "_attn_implementation", "max_model_len"}
)
ROPES_BY_LENGTH = frozenset({"longrope", "su", "dynamic"})  # their angles depend on the longest sequence allowed
MODELS_BY_LENGTH = ("llama4",)  # scales queries if the longest sequence allowed exceeds a limit
MAX_LEVELS = 32  # of nesting
MODEL_PLACE = "<model>"


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Digests of options of the engine that loads the model in the directory `model`, None if it has none.

    `omitted` names fields that change no KV, by the name of their class.
    """

    model: Path | None = None
    omitted: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)

    def digest(self, value: object) -> str | Hashed:
        """Return a digest of a value, or what it will be a digest of. Raises Unidentified or OSError."""
        return digest(self._plain(value))

    def _plain(self, value: object, level: int = 0) -> object:
        """Return a value that JSON can represent, except the contents of files."""
        if level > MAX_LEVELS:
            raise Unidentified("an option is nested too deeply")
        if isinstance(value, Enum):
            return f"{type(value).__name__}.{value.name}"
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str | os.PathLike):
            return self._of_text(os.fspath(value))
        if isinstance(value, Set):
            return sorted(json.dumps(settled(self._plain(item, level + 1)), sort_keys=True) for item in value)
        if isinstance(value, list | tuple):
            return [self._plain(item, level + 1) for item in value]
        if (named := self._named(value)) is not None:
            return {str(name): self._plain(item, level + 1) for name, item in named.items()}
        return _represented(value)

    def _named(self, value: object) -> Mapping[Any, Any] | None:
        """Return the named parts of a mapping or of a configuration, None for another object."""
        if isinstance(value, Mapping):
            return value
        if (to_dict := getattr(value, "to_dict", None)) is not None and not isinstance(value, type):
            return without_places(to_dict())
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            omitted = self.omitted.get(type(value).__name__, frozenset())
            names = (field.name for field in dataclasses.fields(value))
            return {name: getattr(value, name, None) for name in names if name not in omitted}
        if (dump := getattr(value, "model_dump", None)) is not None:
            return dict(dump())
        return vars(value) if isinstance(value, SimpleNamespace) else None

    def _of_text(self, text: str) -> str | FileContent:
        """Return a text, or what it stands for if it is a path."""
        if os.sep not in text or "\0" in text:
            return text
        path = os.path.abspath(text)
        if self.model is not None:
            for root in {os.path.abspath(self.model), os.path.realpath(self.model)}:
                if path == root or path.startswith(root + os.sep):
                    return MODEL_PLACE + path[len(root) :]
        if path == os.sep or not os.path.exists(path):
            return text
        return _content_of(Path(path))


def without_places(configuration: Mapping[str, object]) -> dict[str, object]:
    """Return a configuration of Hugging Face without values that differ between equal models."""
    return {
        name: without_places(value) if isinstance(value, Mapping) else value
        for name, value in configuration.items()
        if name not in NOT_OF_A_MODEL
    }


def configuration_of(directory: Path) -> Mapping[str, Any]:
    """Return a model's configuration, empty without one. Raises Unidentified or OSError."""
    try:
        found = json.loads(read_at_most(directory / "config.json", MAX_CONFIG_BYTES))
    except (FileNotFoundError, ValueError):
        return {}
    except RecursionError as error:
        raise Unidentified(f"`{directory}/config.json` is nested too deeply") from error
    return found if isinstance(found, Mapping) else {}


def depends_on_length(configuration: Mapping[str, object]) -> bool:
    """Return whether the longest sequence that an engine allows changes the KV of shorter ones."""
    if str(configuration.get("model_type", "")).startswith(MODELS_BY_LENGTH):
        return True
    if {str(configuration.get(name)) for name in ("rope_type", "type")} & ROPES_BY_LENGTH:
        return True
    return any(depends_on_length(value) for value in configuration.values() if isinstance(value, Mapping))


def _represented(value: object) -> str:
    text = repr(value)
    if " at 0x" in text:  # the default form contains the object's address
        raise Unidentified(f"an argument of type `{type(value).__name__}` has no text form")
    return text


def _content_of(path: Path) -> FileContent:
    """Return the content of a file or of a model directory that an option names. Raises Unidentified or OSError."""
    if not (path.is_file() or (path / "config.json").is_file()):
        raise Unidentified(f"an option names the directory {path}, whose files kvbm does not know")
    return loaded(path)
