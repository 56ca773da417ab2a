"""Engine identity: the values that determine the bytes and the hashes of SGLang's pages.

Other engines, on this machine or on others, load pages of an engine with the same identity. SGLang's own key of a page
covers the tokens, the salt and the extra key of a request, and nothing of the model. So the identity has the content of
the model's files, all options of SGLang except those that cannot change KV, versions, the layout of the host pool, and
which part of the model this rank has. It contains no path. Whatever is in doubt is not kept for the next start.

SGLang sorts its options by what they are about. Sections that cannot change KV are left out as a whole; an option that
kvbm does not know counts in every other section. identity.yaml has their names.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvbm.engines.engine_code import device_name
from kvbm.engines.sglang.launch import STAND_INS_VARIABLE
from kvbm.engines.sglang.loads import OURS, content_of
from kvbm.identity.code import code_of, plugins, registered
from kvbm.identity.description import Hashed
from kvbm.identity.digests import Unidentified
from kvbm.identity.loading import require_format, with_weights
from kvbm.identity.machine import precision_variables, release_of, version_of
from kvbm.identity.options import Options, configuration_of, depends_on_length
from kvbm.identity.snapshot import snapshot_of

DISTRIBUTIONS = ("sglang", "torch", "transformers")
_NAMES = yaml.safe_load(Path(__file__).with_name("identity.yaml").read_text())
LOAD_FORMATS = frozenset(_NAMES["load_formats"].split())  # that read the files in the directory of the model
_NOT_KV_SECTIONS = frozenset(_NAMES["sections"].split())
_NOT_KV = frozenset(_NAMES["options"].split())
_KV_OF_SCHEDULE = frozenset({"page_size", "c128_page_size"})  # the rest says when a request runs
_OTHER_WEIGHTS = tuple(_NAMES["other_weights"].split())
# Registries of classes and functions that compute KV. Quantisation by vLLM's classes counts as SGLang's own.
_REGISTRIES = (
    ("sglang.srt.models.registry", "ModelRegistry.models"),
    ("sglang.srt.layers.attention.attention_registry", "ATTENTION_BACKENDS"),
    ("sglang.srt.layers.quantization", "QUANTIZATION_METHODS"),
)
# Variables of addresses, ranks, logs, limits, places, and of one start.
_OTHER_VARIABLES = re.compile(
    "_(HOST|PORT|IP|ADDR|ADDRESS|RANK|RUN_ID|LOG|LOGGING|LOGGER|DEBUG|TRACE|PROFILE|PROFILER|TIMEOUT|INTERVAL|DIR|PATH)(_|$)"
    "|^SGLANG_(PLUGINS|PLATFORM|TEST|HICACHE|ENABLE_HEALTH)(_|$)"
)
_NOT_SET: tuple[object, ...] = (None, False, "", "off", [])


def identity(storage: Any, pool: dict[str, object]) -> tuple[dict[str, object], str]:
    """Return values for `describe`, and why pages must not outlive the engine, empty if they may.

    `storage` is SGLang's configuration of the backend, `pool` the facts of the host pool.
    """
    facts: dict[str, object] = {
        "engine": "sglang",
        "versions": [release_of(version_of(name)) for name in DISTRIBUTIONS],
        "device": device_name(),
        "stand_ins": os.environ.get(STAND_INS_VARIABLE, ""),
        "pool": pool,
        "zero_copy": True,  # SGLang's older interface, which kvbm supported, orders the bytes of a page in another way
        "part": part_of(storage),
    }
    try:
        options, counting = _options()
        facts["model"] = str(options["model_path"])
        directory = snapshot_of(str(options["model_path"]), options.get("revision"), options.get("download_dir"))
        require_format(str(getattr(options.get("load_format"), "value", options.get("load_format"))), LOAD_FORMATS)
        facts["weights"] = with_weights(content_of(directory, every=bool(options.get("trust_remote_code"))))
        if code := code_of(_roots(), "sglang"):
            facts["code"] = code
        facts["options"] = Options(directory).digest(counting)
        facts["environment"] = _environment(Options(directory))
        configuration = configuration_of(directory)
        facts["length"] = int(options.get("context_length") or 0) if depends_on_length(configuration) else 0
    except (Unidentified, OSError) as error:
        return facts, f"the engine cannot be identified: {error}"
    return facts, _doubt(options, configuration)


def is_attached() -> bool:
    """Return whether SGLang was started without kvbm's storage."""
    try:
        arguments = importlib.import_module("sglang.srt.runtime_context").get_server_args()
    except (ImportError, AttributeError, ValueError):
        return True
    return OURS not in str(getattr(arguments, "hicache_storage_backend_extra_config", None))


def part_of(storage: Any) -> list[int]:
    """Return which part of each page's KV this rank has. With MLA, all tensor-parallel ranks have the same."""
    is_split = not storage.is_mla_model
    tensor = [storage.tp_rank, storage.tp_size] if is_split else [0, 1]
    return [*tensor, storage.pp_rank, storage.pp_size, storage.attn_cp_rank, storage.attn_cp_size]


def _doubt(options: dict[str, Any], configuration: Mapping[str, Any]) -> str:
    for name in _OTHER_WEIGHTS:
        if options.get(name) not in _NOT_SET:
            return f"with `{name}`, the weights are not those of the model's files"
    if options.get("enable_lora"):
        return "a page's key covers the number of an adapter, not its content"
    if options.get("disaggregation_mode") == "decode":
        return "another engine computes the prompts, and its weights are unknown"
    if _has_media(options, configuration):
        return "SGLang names images and audio by 64 bits of a hash"
    return ""


def _options() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return SGLang's options with the values that are in effect, and those of them that may change KV. Raises
    Unidentified."""
    try:
        arguments = importlib.import_module("sglang.srt.runtime_context").get_server_args()
        value_of = importlib.import_module("sglang.srt.arg_groups.overrides").resolution_result
        sections = importlib.import_module("sglang.srt.arg_groups.arg_utils").namespace_of(type(arguments))
        options = {name: value_of(arguments, name) for name in sections}
    except (ImportError, AttributeError, ValueError) as error:
        raise Unidentified(f"the options of this version of SGLang are unknown ({error})") from error
    counting = {
        name: value
        for name, value in options.items()
        if name not in _NOT_KV
        and (section := sections[name].partition(".")[0]) not in _NOT_KV_SECTIONS
        and (section != "schedule" or name in _KV_OF_SCHEDULE)
    }
    return options, counting


def _environment(options: Options) -> str | Hashed:
    """Return a digest of the variables that can change how SGLang computes."""
    names = {name for name in os.environ if name.startswith("SGLANG_") and not _OTHER_VARIABLES.search(name)}
    return options.digest({name: os.environ[name] for name in names} | precision_variables())


def _roots() -> Iterator[object]:
    """Yield classes, functions and names of modules that may compute KV, those of SGLang itself too."""
    for registry in _REGISTRIES:
        yield from (
            found for found in registered(*registry) if not str(getattr(found, "__module__", "")).startswith("vllm.")
        )
    allowed = os.environ.get("SGLANG_PLUGINS")
    yield from plugins("sglang.srt.plugins", None if allowed is None else allowed.split(","))
    if package := os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"):
        yield package


def _has_media(options: dict[str, Any], configuration: Mapping[str, Any]) -> bool:
    """Return whether requests may have images, audio or video; True if that is unknown."""
    if options.get("enable_multimodal") is False or options.get("language_model_only"):
        return False
    try:
        is_multimodal = importlib.import_module("sglang.srt.configs.model_config").is_multimodal_model
    except (ImportError, AttributeError):
        return True
    return bool(is_multimodal(list(configuration.get("architectures") or [])))
