"""SGLang, for the commands: its launch plan with a local model, its installation, and its defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kvbm.config.engine import SglangArguments, SglangEngine
from kvbm.config.values import count_of
from kvbm.engines.engine_kind import (
    RETURN_TOKEN_IDS,
    EngineKind,
    OwnMemory,
    Place,
    ServerTraits,
    SizedBy,
    Unusable,
    with_arguments,
)
from kvbm.engines.make_model import MODELS
from kvbm.engines.sglang import launch, versions
from kvbm.engines.sglang.options import LAYOUTS, STORAGE, refused_flags
from kvbm.engines.sglang.versions import INSTALL, PACKAGE, TESTED, TO_COMPILE
from kvbm.engines.synthetic_directory import with_local_model
from kvbm.engines.token_pools import TokenPools
from kvbm.errors import EnvironmentProblem
from kvbm.sizing.families.facts import SizeUnknown

if TYPE_CHECKING:
    from kvbm.config.schema import Profile
    from kvbm.engines.launch_plan import LaunchPlan
    from kvbm.sizing.tiers import Device
    from kvbm.sizing.wanted import Wanted

_CACHE_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2, "bf16": 2}  # of one element
_WITHOUT_KVBM = "remove it, or start SGLang without kvbm: `kvbm serve --baseline`"


class SglangKind(EngineKind):
    package = PACKAGE
    refused = staticmethod(refused_flags)
    presets = MODELS
    suggested_preset = "vllm-81m"
    sized_by = SizedBy("sglang", "page_size", "kv_cache_dtype", ranks="tp_size", stages="pp_size")
    tested = f"tested with {' and '.join(TESTED)}, on a CPU with stand-ins for its kernels"
    is_known = staticmethod(versions.is_known)
    supported = " and ".join(TESTED)
    to_compile = TO_COMPILE
    traits = ServerTraits(
        "SGLang",
        has_kvbm_metrics=False,
        shares_device=False,
        token_id_fields={**RETURN_TOKEN_IDS, "return_cached_tokens_details": True},
    )

    def imported(self, profile: Profile) -> list[str]:
        """On a CPU, SGLang cannot be imported without stand-ins."""
        stand_ins = [launch.CPU_MODULE] if self.runs_on_cpu(profile) else []
        return [*stand_ins, str(STORAGE["module_path"])]

    def launch_plan(self, profile: Profile, *, connector: bool, port: int) -> LaunchPlan:
        """Do not require `make_model` to have run either."""
        return launch.plan(with_local_model(profile), connector=connector, port=port)

    def install(self, profile: Profile) -> str:
        return INSTALL

    def problem(self, profile: Profile, *, has_cache: bool) -> EnvironmentProblem | None:
        """Require kvbm also without the cache if it has the stand-ins for a CPU."""
        return super().problem(profile, has_cache=has_cache or self.runs_on_cpu(profile))

    def block_tokens(self, profile: Profile) -> int:
        return _arguments(profile).page_size

    def runs_on_cpu(self, profile: Profile) -> bool:
        return isinstance(profile.engine, SglangEngine) and profile.engine.cpu_stand_ins

    def with_device_blocks(self, profile: Profile, block_count: int) -> Profile:
        arguments = _arguments(profile)
        tokens = max(block_count * arguments.page_size, count_of(arguments.max_total_tokens) or 0)
        return with_arguments(profile, max_total_tokens=tokens)

    def copies(self, profile: Profile) -> int:
        return _arguments(profile).dp_size or 1

    def serving_ranks(self, profile: Profile) -> int:
        arguments = _arguments(profile)
        return (arguments.tp_size or 1) * (arguments.pp_size or 1)

    def unstorable_arguments(self, profile: Profile) -> Iterator[Unusable]:
        """Return those with which SGLang would end, but only after it has loaded the model."""
        arguments = _arguments(profile)
        given = {**arguments.model_dump(), **(arguments.hicache_storage_backend_extra_config or {})}
        layout = given.get("hicache_mem_layout", LAYOUTS[0])
        for name, is_refused, reason in (
            (
                "enable_hierarchical_cache",
                not arguments.enable_hierarchical_cache,
                "it stores pages of SGLang's host memory",
            ),
            ("hicache_mem_layout", layout not in LAYOUTS, f"it can store {', '.join(f'`{one}`' for one in LAYOUTS)}"),
            ("dcp_size", given.get("dcp_size", 1) != 1, "it does not support decode context parallelism of SGLang"),
            ("tp_lcm_size", "tp_lcm_size" in given, "it does not split pages for engines with another number of ranks"),
        ):
            if is_refused:
                place = "hicache_storage_backend_extra_config" if name == "tp_lcm_size" else name
                message = f"`{name}: {str(given[name]).lower()}` cannot be used with kvbm: {reason}"
                yield Unusable(place, message, _WITHOUT_KVBM)

    def device(self, profile: Profile, model_config: Mapping[str, object], place: Place, wanted: Wanted) -> Device:
        """SGLang's `auto` uses the type of the model, unless the checkpoint is quantized."""
        arguments = _arguments(profile)
        if (arguments.pp_size or 1) > 1:
            raise SizeUnknown("with pipeline stages, only SGLang knows the size of a block")
        pools = TokenPools(
            "SGLang",
            block_tokens=arguments.page_size,
            ranks=arguments.tp_size or 1,
            max_tokens=count_of(arguments.max_total_tokens),
            set_by="engine.arguments.max_total_tokens",
            longest=wanted.sequence_tokens or count_of(arguments.context_length),
        )
        hint = "add `--kv-cache-dtype`, for example `fp8_e4m3`"
        named = pools.named_bytes("kv_cache_dtype", arguments.kv_cache_dtype, _CACHE_BYTES, model_config, hint)
        return pools.device(model_config, named or (4 if arguments.dtype in ("float", "float32") else 2))

    def own_memory(self, profile: Profile, device_bytes: int | None) -> OwnMemory:
        arguments, copies = _arguments(profile), self.copies(profile)
        needed = (arguments.hicache_size or 0) * 10**9 * self.serving_ranks(profile) * copies or None
        if needed is None and device_bytes is not None:
            needed = int((arguments.hicache_ratio or launch.DEFAULT_RATIO) * device_bytes) * copies
        left = launch.CPU_RESERVE_BYTES if self.runs_on_cpu(profile) else launch.RESERVE_BYTES
        return OwnMemory(needed, left, "lower `engine.arguments.hicache_size` or `hicache_ratio`")

    def caveats(self, profile: Profile) -> list[str]:
        on_cpu = "SGLang computes on a CPU, with plain torch in place of its kernels: its times on a GPU are different"
        return [on_cpu] if self.runs_on_cpu(profile) else []


def _arguments(profile: Profile) -> SglangArguments:
    assert isinstance(profile.engine.arguments, SglangArguments)
    return profile.engine.arguments
