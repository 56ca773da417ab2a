"""ModelFacts: reads a model's configuration; SizeUnknown for a model that only the engine can size."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from kvbm.errors import KvbmError, ProfileError
from kvbm.text.outside import shown_json

READER = "vLLM"  # whose reading of a configuration the families follow
# Facts that describe caches. A configuration that has one which its reader does not know is refused.
_CACHE_FACTS = re.compile(
    r"linear_attn|sparse_attention|^attn_layer_|attn_type_list|^mamba_|^ssm_|^kda_|^compress_|block_configs"
    r"|attention_chunk_size|^swa_|^hybrid_|use_cla|num_attention_groups|multi_query|^index_topk|indexer_types"
    r"|kv_shared_layers|global_head_dim|num_global|full_attention_interval|layers_block_type|^state_size"
    r"|kv_lora_rank|sliding_window|layer_types|cla_share_factor|share_kv|attention_other_setting|^rswa|dual_chunk|^n_head_kv|^num_kv_heads|hidden_size_per_head"
)
DEFAULTS_FILE = Path(__file__).with_name("defaults.json")
_HARMLESS_FACTS = {
    "mamba_hidden_act",
    "mlp_layer_types",
    "mtp_layers_block_type",
    "ssm_in_multiplier",
    "ssm_multipliers",
    "ssm_out_multiplier",
}


class SizeUnknown(KvbmError):
    """Not a mistake: only the engine knows the size of a block, after it has started."""


@cache
def family_defaults() -> Mapping[str, Mapping[str, object]]:
    """Return the defaults of transformers' configuration classes, by model type. `null` follows from other facts."""
    defaults: Mapping[str, Mapping[str, object]] = json.loads(DEFAULTS_FILE.read_bytes())
    return defaults


class ModelFacts(Mapping[str, object]):
    """The facts of a language model: those given, and defaults for those left out. It notes which facts were read."""

    def __init__(self, given: Mapping[str, object], defaults: Mapping[str, object] | None = None) -> None:
        self._given, self._facts = given, {**(defaults or {}), **given}
        self._read: set[str] = set()

    @classmethod
    def of(cls, model_config: Mapping[str, object]) -> ModelFacts:
        """Return the facts of the language model of a configuration, with the defaults of its model type."""
        given = text_facts(model_config)
        return cls(given, family_defaults().get(str(given.get("model_type"))))

    @property
    def model_type(self) -> str:
        return str(self._facts.get("model_type"))

    def __getitem__(self, name: str) -> object:
        self._read.add(name)
        return self._facts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)

    def number(self, name: str, *, default: int | None = None) -> int:
        """Return a positive whole number. ProfileError for anything else, SizeUnknown for a missing one."""
        if default is None and name not in self:
            raise SizeUnknown(f"the model's configuration has no `{name}`, and only the engine knows the default")
        return count(self, name, default=default)

    def numbers(self, *names: str, default: int) -> int:
        """Return the first of these facts that the configuration has."""
        name = next((name for name in names if self.get(name) is not None), names[0])
        return count(self, name, default=default)

    def either(self, alias: str, name: str) -> int:
        """Return a positive whole number; transformers stores `alias`, if it is given, as `name`."""
        self.get(name)
        return self.number(alias if self.get(alias) is not None else name)

    def texts(self, name: str) -> list[str] | None:
        """Return a list of words, None if there is none."""
        value = self.get(name)
        return [str(item) for item in value] if isinstance(value, list) else None

    def flag(self, name: str) -> bool:
        return bool(self.get(name))

    def section(self, name: str) -> ModelFacts:
        """Return a section of the configuration. SizeUnknown if there is none."""
        value = self.get(name)
        if not isinstance(value, Mapping):
            raise SizeUnknown(f"the model's configuration has no section `{name}`")
        return ModelFacts(value)

    def require_known(self) -> None:
        """Refuse a fact about caches that nothing has read. SizeUnknown names it."""
        for name, value in self._given.items():
            if value and name not in self._read | _HARMLESS_FACTS and _CACHE_FACTS.search(name):
                raise SizeUnknown(f"for a model with `{name}`, only the engine knows the size of a block")


def text_facts(model_config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the part of a configuration that describes the language model."""
    text_config = model_config.get("text_config")
    return text_config if isinstance(text_config, Mapping) else model_config


# A list of layers is made from these numbers, so a huge one would fill the memory. Models have at most a few hundred.
_LAYER_COUNTS = frozenset({"num_hidden_layers", "n_layers", "n_layer"})
MAX_LAYERS, MAX_NUMBER = 4096, 2**31 - 1


def count(facts: Mapping[str, object], name: str, *, default: int | None = None) -> int:
    """Return a positive whole number within its limit. ProfileError if the configuration has none of that name."""
    value = facts.get(name)
    value = default if value is None else value
    limit = MAX_LAYERS if name in _LAYER_COUNTS else MAX_NUMBER
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        wanted = f"it must be a whole number from 1 to {limit}, not `{shown_json(value)}`"
        found = "it is missing" if value is None else wanted
        raise ProfileError(f"the model's configuration has no valid `{name}`: {found}")
    return value


def positions(model_config: Mapping[str, object]) -> int | None:
    """Return `max_position_embeddings`, None if the configuration has none. ProfileError like `count`."""
    facts = ModelFacts.of(model_config)
    return None if facts.get("max_position_embeddings") is None else count(facts, "max_position_embeddings")
