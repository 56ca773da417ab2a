"""TensorRT-LLM, for the commands: its launch plan, its installation, and its defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvbm.config.engine import TrtllmArguments
from kvbm.engines.engine_kind import (
    EngineKind,
    Place,
    ServerTraits,
    SizedBy,
    with_arguments,
)
from kvbm.engines.installation import shown
from kvbm.engines.synthetic_directory import with_local_model
from kvbm.engines.token_pools import TokenPools
from kvbm.engines.trtllm import launch, versions
from kvbm.engines.trtllm.disaggregated import fleet
from kvbm.engines.trtllm.options import CONNECTOR, DEFAULT_BLOCK_TOKENS, SIGNS, refused_options
from kvbm.engines.trtllm.versions import CONTRACT_TESTED, INSTALL, PACKAGE
from kvbm.errors import EnvironmentProblem
from kvbm.sizing.families.facts import ModelFacts, SizeUnknown

if TYPE_CHECKING:
    from kvbm.config.schema import Profile
    from kvbm.engines.disaggregated import Fleet
    from kvbm.engines.installation import Installation
    from kvbm.engines.launch_plan import LaunchPlan
    from kvbm.sizing.tiers import Device
    from kvbm.sizing.wanted import Wanted

TITLE = "TensorRT-LLM"
_CACHE_BYTES = {"fp8": 1, "float16": 2, "bfloat16": 2, "float32": 4}  # of one element


class TrtllmKind(EngineKind):
    """Its engines take a share of the free device memory: of two on one device, the second would get less."""

    package = PACKAGE
    refused = staticmethod(refused_options)
    signs = SIGNS
    sized_by = SizedBy("trtllm", "kv_cache_config.tokens_per_block", "kv_cache_config.dtype")
    is_known = staticmethod(versions.is_known)
    supported = f"the interfaces of {shown(CONTRACT_TESTED)}"
    tested = f"not run; the connector is tested against {supported}"
    traits = ServerTraits(
        TITLE,
        tokenizes=False,
        resets_cache=False,
        has_metrics=False,
        has_kvbm_metrics=False,
        shares_device=False,
        token_id_fields={"detokenize": False},
    )

    def imported(self, profile: Profile) -> list[str]:
        return [CONNECTOR["connector_module"]]

    def launch_plan(self, profile: Profile, *, connector: bool, port: int) -> LaunchPlan:
        return launch.plan(
            with_local_model(profile),
            connector=connector,
            port=port,
            installation=self.found(profile),
        )

    def fleet(self, profile: Profile, ports: Iterator[int], environment: Mapping[str, str]) -> Fleet:
        return fleet(with_local_model(profile), self.found(profile), ports, environment)

    def front(self, profile: Profile, fleet: Fleet, port: int) -> LaunchPlan:
        return launch.disaggregated_server(
            with_local_model(profile),
            port=port,
            prefill=_addresses(fleet.prefill),
            decode=_addresses(fleet.decode),
            installation=self.found(profile),
        )

    def install(self, profile: Profile) -> str:
        return INSTALL

    def problem_of_cache(self, python: str, found: Installation) -> EnvironmentProblem | None:
        if not found.has_interface:
            return EnvironmentProblem(
                f"`{python}` has {TITLE} {found.version}, which has no interface for KV cache connectors",
                hint=f"install {TITLE} 1.1 or later; `kvbm serve --baseline` starts this version without the cache",
            )
        return super().problem_of_cache(python, found)

    def block_tokens(self, profile: Profile) -> int:
        return int(_arguments(profile).cache.get("tokens_per_block") or DEFAULT_BLOCK_TOKENS)

    def with_device_blocks(self, profile: Profile, block_count: int) -> Profile:
        cache = _arguments(profile).cache
        tokens = max(block_count * self.block_tokens(profile), cache.get("max_tokens") or 0)
        return with_arguments(profile, kv_cache_config={**cache, "max_tokens": tokens})

    def device(self, profile: Profile, model_config: Mapping[str, object], place: Place, wanted: Wanted) -> Device:
        """TensorRT-LLM's `auto` follows a quantized checkpoint, or else the type of the model."""
        arguments, key = _arguments(profile), "kv_cache_config.dtype"
        pools = TokenPools(
            TITLE,
            block_tokens=self.block_tokens(profile),
            ranks=arguments.tensor_parallel_size or 1,
            max_tokens=arguments.cache.get("max_tokens"),
            set_by="engine.arguments.kv_cache_config",
            longest=wanted.sequence_tokens or arguments.max_seq_len,
        )
        hint = f"set `engine.arguments.{key}`, for example to"
        named = pools.named_bytes(key, arguments.cache.get("dtype"), _CACHE_BYTES, model_config, f"{hint} `fp8`")
        facts = ModelFacts.of(model_config)
        is_open = named is None and arguments.dtype in (None, "auto")
        if is_open and "float32" in (facts.get("dtype"), facts.get("torch_dtype")):
            raise SizeUnknown(
                f"the model is in 32 bits, so only {TITLE} knows the data type of its KV cache",
                hint=f"{hint} `bfloat16`",
            )
        return pools.device(model_config, named or _CACHE_BYTES.get(arguments.dtype or "auto", 2))

    def caveats(self, profile: Profile) -> list[str]:
        return [
            f"not tested, because the server of {TITLE} does not report it: the tier that prompt tokens came from, the "
            "time in its queue, and log-probabilities"
        ]


def _addresses(plans: Sequence[LaunchPlan]) -> list[str]:
    return [plan.base_url.removeprefix("http://") for plan in plans]


def _arguments(profile: Profile) -> TrtllmArguments:
    assert isinstance(profile.engine.arguments, TrtllmArguments)
    return profile.engine.arguments
