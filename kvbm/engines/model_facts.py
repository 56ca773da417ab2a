"""Configuration of a profile's model: a synthetic preset, a local directory, or a name on Hugging Face.

Every mistake is a ProfileError about `engine.model`; `size_of` adds its place in the profile. Nothing is downloaded: a
name is looked up in the local Hugging Face cache, then in the catalogue of well-known models; if it is in neither,
SizeUnknown is raised.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from kvbm.config.engine import kinds_that
from kvbm.config.sizes import MAX_BYTES
from kvbm.errors import ProfileError, reason_of
from kvbm.sizing import SizeUnknown
from kvbm.sizing.catalogue import catalogue
from kvbm.text.reading import LFS_HINT, MAX_CONFIG_BYTES, is_lfs_pointer, read_at_most

SYNTHETIC_PREFIX = "synthetic:"
_CONTENTS = "a model directory contains `config.json`, weights and a tokenizer in the Hugging Face format"
# Words of a name that leave the KV as it is: how the weights are quantized, and what the model was trained for.
_VARIANT = re.compile(
    r"awq|gptq|(nv|mx)?fp[48]|int[48]|bnb|gguf|mlx|exl[23]|quantized(\.w\d+a\d+)?|dynamic|block|unsloth|autoround|\d+bit|w\d+(a\d+)?"
    r"|instruct|chat|it|base|pt|hf|thinking|meta|qat"
)
_SAME_KV = (
    "A variant that differs only in training or quantization has the same KV per token, unless its configuration asks "
    "for a narrower KV cache."
)
_HUB_ADDRESS = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+?)(?:\.git)?/?(?:[/?#].*)?")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def model_facts(model: str, presets: Mapping[str, Mapping[str, object]], suggested: str = "") -> Mapping[str, object]:
    """Return the content of a Hugging Face config.json for an engine that loads models from the hub. `presets` are the
    synthetic models that are made for it, `suggested` is the one to try.

    Raises ProfileError for a missing or unsupported model, SizeUnknown for one that only the engine can find.
    """
    if model.startswith(SYNTHETIC_PREFIX):
        return preset_facts(model, presets) if presets else _no_preset(model)
    return _of_hub(model, suggested)


def _no_preset(model: str) -> NoReturn:
    raise ProfileError(
        f"`engine.model`: `{model}` requires `engine.kind` {kinds_that(lambda form: form.has_presets)}",
        hint="use a local directory or a name on Hugging Face",
    )


def _of_hub(model: str, suggested: str) -> Mapping[str, object]:
    directory = model_directory(model)
    if directory is not None:
        return _with_quantization(directory, read_config(directory / "config.json"))
    if model in catalogue():
        return catalogue()[model]
    if not _HUB_NAME.fullmatch(model):
        if address := _HUB_ADDRESS.fullmatch(model):
            message = f"`engine.model`: `{model}` is an address, not a name"
            raise ProfileError(message, hint=f"write `{address[1]}`")
        if suggested:
            preset = f"`{SYNTHETIC_PREFIX}{suggested}`"
            hint = f"use a local directory, a name on Hugging Face, or {preset}, which requires no download"
        else:
            hint = "use a local directory or a name on Hugging Face"
        raise no_directory(model, hint)
    raise SizeUnknown(
        f"`{model}` is not on this machine yet, so the size of its blocks is unknown",
        hint=_suggestion(model, catalogue())
        or "`kvbm size --list` lists the models that require no download; for other models, download "
        "`config.json` and give its directory, or start the model once: the engine downloads it",
    )


def _suggestion(model: str, names: Iterable[str]) -> str | None:
    """Return a hint with the name of a known model: in other letters, trained or quantized otherwise, or similar."""
    by_name = {_last(name): name for name in names}
    wanted = _last(model)
    if wanted in by_name:
        return f"did you mean `{by_name[wanted]}`?"
    plain = {_plain(name): name for name in by_name.values()}
    if (name := plain.get(_plain(model))) is not None:
        return f"did you mean `{name}`? {_SAME_KV}"
    # A model of another size or version has another cache.
    alike = [name for name in by_name if re.findall(r"\d+", name) == re.findall(r"\d+", wanted)]
    near = difflib.get_close_matches(wanted, alike, n=1, cutoff=0.8)
    return f"did you mean `{by_name[near[0]]}`?" if near else None


def _last(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _plain(name: str) -> str:
    return "-".join(word for word in re.split("[-_]", _last(name)) if not _VARIANT.fullmatch(word))


def preset_facts(model: str, presets: Mapping[str, Mapping[str, object]]) -> Mapping[str, object]:
    """Return the configuration of `synthetic:...`. ProfileError for an unknown one."""
    name, names = model.removeprefix(SYNTHETIC_PREFIX), list(presets)
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1)
        shown = ", ".join(f"`{SYNTHETIC_PREFIX}{name}`" for name in names)
        hint = f"did you mean `{SYNTHETIC_PREFIX}{nearest[0]}`?" if nearest else f"use one of {shown}"
        raise ProfileError(f"`engine.model`: unknown model `{model}`", hint=hint)
    return presets[name]


def model_directory(model: str) -> Path | None:
    """Return the directory of a model for vLLM: a local one, or a snapshot in the Hugging Face cache."""
    return local_directory(model) or _downloaded(model)


def weight_bytes(model: str) -> int | None:
    """Bytes of the weights of a model on this machine: of its index, or of its files. None if there are none."""
    directory = model_directory(model)
    if directory is None:
        return None
    index = directory / "model.safetensors.index.json"
    if index.is_file() and index.stat().st_size <= MAX_CONFIG_BYTES:
        try:
            metadata = read_config(index).get("metadata")
        except ProfileError:
            return None
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if not isinstance(total, int | float) or isinstance(total, bool) or not 1 <= total <= MAX_BYTES:
            return None
        return int(total)
    return sum(file.stat().st_size for file in directory.glob("*.safetensors")) or None


def config_file(model: str) -> Path | None:
    """Return the file of a model's configuration: in its directory, or `model` itself; None without a local file."""
    directory = model_directory(model)
    path = Path(os.path.expanduser(model)) if directory is None else directory / "config.json"
    return path if os.path.isfile(path) else None  # `Path.is_file` raises if a directory above denies access


def _with_quantization(directory: Path, facts: Mapping[str, object]) -> Mapping[str, object]:
    """Add what ModelOpt wrote into a file of its own, which vLLM reads if `config.json` has no such section."""
    path = directory / "hf_quant_config.json"
    if facts.get("quantization_config") is not None or not path.is_file():
        return facts
    return {**facts, "quantization_config": read_config(path)}


def local_directory(model: str) -> Path | None:
    directory = os.path.expanduser(model)
    return Path(directory) if os.path.isdir(directory) else None


def no_directory(model: str, hint: str) -> ProfileError:
    try:
        os.stat(os.path.expanduser(model))
        reason = "it is not a directory"
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return ProfileError(f"`engine.model`: there is no directory `{model}`", hint=hint)
        reason = reason_of(error)
    except ValueError as error:  # a NUL character
        reason = str(error)
    return ProfileError(f"`engine.model`: cannot use `{model}`: {reason}", hint=hint)


def _downloaded(model: str) -> Path | None:
    """Return the snapshot of the main branch in the Hugging Face cache, None if there is none."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))
    repository = cache / f"models--{model.replace('/', '--')}"
    try:
        snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except (OSError, ValueError):  # no such file, not UTF-8, or a null byte in the name
        return None
    return snapshot if os.path.isfile(snapshot / "config.json") else None


def read_config(path: Path) -> Mapping[str, object]:
    """Return the content of a `config.json`. ProfileError if it is not one."""
    try:
        facts = json.loads(read_at_most(path, MAX_CONFIG_BYTES))
    except OSError as error:
        reason = reason_of(error)
        raise ProfileError(f"`engine.model`: cannot read `{path}`: {reason}", hint=_CONTENTS) from None
    except (ValueError, RecursionError) as error:
        if is_lfs_pointer(path):
            what = "is a Git LFS pointer, not the file that it stands for"
            raise ProfileError(f"`engine.model`: `{path}` {what}", hint=LFS_HINT) from None
        raise ProfileError(f"`engine.model`: `{path}` is not JSON: {error}", hint=_CONTENTS) from None
    if not isinstance(facts, dict):
        raise ProfileError(f"`engine.model`: `{path}` is not a model configuration", hint=_CONTENTS)
    return facts
