"""SizeRequest: what the options of `kvbm size` ask for, as a profile and as questions about it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.config.document import plain_scalar
from kvbm.config.engine import DEFAULT_KIND, ENGINE_KINDS
from kvbm.config.sizes import parse_size
from kvbm.config.values import count_of, count_value
from kvbm.engines.model_facts import read_config, weight_bytes
from kvbm.engines.table import KINDS
from kvbm.errors import UsageError
from kvbm.sizing import Wanted
from kvbm.sizing.gpu import DEFAULT_UTILIZATION, GPUS, Gpu, MemoryEstimate
from kvbm_cli.profile.resolve import resolve
from kvbm_cli.size.measured_speeds import MeasuredSpeeds

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile

_KEYS = {"--host": "tiers.host.capacity", "--disk": "tiers.disk.capacity"}


@dataclass(frozen=True, slots=True)
class SizeRequest:
    """`options` has the text of each option that was given, by its name with dashes."""

    profiles: Sequence[str]
    model: str | None
    overrides: Sequence[str]
    options: Mapping[str, str]

    def resolve(self) -> ResolvedProfile:
        """Return the profile. A model without a profile has the settings of the shipped profile of its engine."""
        if not self.profiles and self.model is None:
            raise UsageError("`kvbm size` requires a model or a profile", hint="try `kvbm size Qwen/Qwen3-8B`")
        engine = self.options.get("--engine", DEFAULT_KIND)
        known_sizes = {name: by for name in ENGINE_KINDS if (by := KINDS[name].sized_by) is not None}
        if engine not in known_sizes:
            known = ", ".join(f"`{name}`" for name in known_sizes)
            raise UsageError(f"`--engine` must be one of {known}, not `{engine}`")
        if self.profiles and "--engine" in self.options:
            raise UsageError("`--engine` and `--profile` cannot be combined: a profile names its engine")
        sized_by = known_sizes[engine]
        given = [f"engine.model={self._model}"] if self._model is not None else []
        if (layout := self.options.get("--layout")) is not None:
            if not sized_by.layouts:
                raise UsageError(f"`--layout` is supported only with {KINDS[DEFAULT_KIND].traits.title}")
            if layout.upper() not in sized_by.layouts:
                raise UsageError(f"`--layout` must be one of {', '.join(sized_by.layouts)}, not `{layout}`")
            given.append(f"engine.environment.{sized_by.layout_variable}={layout.upper()}")
        of_cache = {"--block-size": sized_by.block_size, "--kv-cache-dtype": sized_by.cache_type}
        of_engine = {"--tp": sized_by.ranks, "--pp": sized_by.stages, **of_cache}
        keys = {**_KEYS, **{name: f"engine.arguments.{key}" for name, key in of_engine.items()}}
        asked = {key: (name, self.options[name]) for name, key in keys.items() if name in self.options}
        nested = [key for key in asked if key.count(".") > 2]  # in a section that declares no keys
        given += [f"{key}={asked.pop(key)[1]}" for key in nested]
        return resolve(*(self.profiles or (sized_by.profile,)), overrides=[*given, *self.overrides], options=asked)

    @property
    def _model(self) -> str | None:
        """The model, or the directory of a `config.json`."""
        path = None if self.model is None else Path(os.path.expanduser(self.model))
        return str(path.parent) if path is not None and path.name == "config.json" and path.is_file() else self.model

    def facts(self) -> Mapping[str, object] | None:
        """Return the configuration in a file of another name, None if MODEL is not a file."""
        path = None if self._model is None else Path(os.path.expanduser(self._model))
        return read_config(path) if path is not None and path.is_file() else None

    def wanted(self, resolved: ResolvedProfile) -> Wanted:
        gpu = self._gpu()
        return Wanted(
            sequence_tokens=self.count("--length"),
            memory=None if gpu is None else self._memory(gpu, resolved),
            capability=gpu.capability if gpu is not None else None,
        )

    def demand(self) -> tuple[int, int] | None:
        """Return the number of sequences to hold, and the tokens of each; None without such options."""
        per_user = [self.count(name) for name in ("--users", "--turns", "--turn-tokens")]
        tokens = self.count("--tokens")
        if tokens is not None and any(part is not None for part in per_user):
            raise UsageError("use either `--tokens`, or `--users`, `--turns` and `--turn-tokens`")
        if tokens is not None:
            return 1, tokens
        if all(part is None for part in per_user):
            return None
        users, turns, turn_tokens = per_user
        if users is None or turns is None or turn_tokens is None:
            raise UsageError("`--users`, `--turns` and `--turn-tokens` must be used together")
        return users, turns * turn_tokens

    def speeds(self) -> MeasuredSpeeds | None:
        """Return the speeds in the file of `--doctor`, None without the option."""
        name = self.options.get("--doctor")
        return None if name is None else MeasuredSpeeds.read(Path(name))

    def count(self, option: str) -> int | None:
        """Return the whole number of an option, None if it was not given; `2M` is 2 million. UsageError names the
        option."""
        if (text := self.options.get(option)) is None:
            return None
        try:
            counted = count_value(plain_scalar(text))
        except ValueError:
            counted = None
        value = count_of(counted) if isinstance(counted, int | str) else None
        if value is None or value < 1:
            raise UsageError(
                f"`{option}` must be a whole number of at least 1, not `{text}`", hint=f"for example `{option} 200`"
            )
        return value

    def _size(self, option: str) -> int | None:
        if (text := self.options.get(option)) is None:
            return None
        try:
            return parse_size(text)
        except ValueError as error:
            raise UsageError(f"`{option}` {error}") from None

    def _gpu(self) -> Gpu | None:
        """Return the GPU of `--gpu` with the memory of `--gpu-memory`, None without both."""
        name, memory_bytes = self.options.get("--gpu"), self._size("--gpu-memory")
        if name is None:
            return None if memory_bytes is None else Gpu(memory_bytes, None)
        if name.lower() not in GPUS:
            raise UsageError(
                f"`--gpu` must be one of {', '.join(GPUS)}, not `{name}`",
                hint="for another GPU, give its memory: `--gpu-memory 48GiB`",
            )
        gpu = GPUS[name.lower()]
        return gpu if memory_bytes is None else Gpu(memory_bytes, gpu.capability)

    def _memory(self, gpu: Gpu, resolved: ResolvedProfile) -> MemoryEstimate:
        engine = resolved.profile.engine
        if engine.kind != DEFAULT_KIND:
            title = KINDS[DEFAULT_KIND].traits.title
            raise UsageError(f"`--gpu` and `--gpu-memory` are supported only with {title}")
        weights = self._size("--weights")
        if weights is None:
            weights = weight_bytes(engine.model)
        if weights is None:
            raise UsageError(
                f"`--gpu` requires the size of the weights, and those of `{engine.model}` are not on this machine",
                hint="add it, for example `--weights 16GB`",
            )
        utilization = (engine.arguments.model_extra or {}).get("gpu_memory_utilization", DEFAULT_UTILIZATION)
        return MemoryEstimate(gpu.memory_bytes, weights, float(utilization))
