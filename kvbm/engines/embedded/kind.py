"""The embedded engine, for the commands. Its own process checks it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvbm.config.engine import EmbeddedArguments
from kvbm.engines.embedded import sizing
from kvbm.engines.embedded.engine.supported_models import supported_facts
from kvbm.engines.engine_kind import EngineKind, Place, ServerTraits, with_arguments

if TYPE_CHECKING:
    from kvbm.config.schema import Profile
    from kvbm.engines.launch_plan import LaunchPlan
    from kvbm.sizing.tiers import Device
    from kvbm.sizing.wanted import Wanted


class EmbeddedKind(EngineKind):
    traits = ServerTraits("the embedded engine")

    def imported(self, profile: Profile) -> list[str]:
        return ["kvbm.engines.embedded.driver", "kvbm.engines.embedded.engine.engine", "transformers"]

    def launch_plan(self, profile: Profile, *, connector: bool, port: int) -> LaunchPlan:
        from kvbm.engines.embedded import launch

        return launch.plan(profile, connector=connector, port=port)

    def block_tokens(self, profile: Profile) -> int:
        return _arguments(profile).block_size

    def has_prefix_caching(self, profile: Profile) -> bool:
        return _arguments(profile).prefix_caching

    def uses_host_memory(self, profile: Profile) -> bool:
        return _arguments(profile).device != "cuda"

    def with_device_blocks(self, profile: Profile, block_count: int) -> Profile:
        return with_arguments(profile, num_blocks=max(block_count, _arguments(profile).num_blocks), prefix_caching=True)

    def device(self, profile: Profile, model_config: Mapping[str, object], place: Place, wanted: Wanted) -> Device:
        return sizing.device(_arguments(profile), model_config, sequence_tokens=wanted.sequence_tokens)

    def model_facts(self, model: str) -> Mapping[str, object]:
        return supported_facts(model)

    def check_model(self, profile: Profile, model_config: Mapping[str, object]) -> None:
        sizing.bytes_per_token(model_config, element_bytes=1)

    def caveats(self, profile: Profile) -> list[str]:
        return ["the embedded engine is a reference implementation: compare the arms with each other only"]


def _arguments(profile: Profile) -> EmbeddedArguments:
    assert isinstance(profile.engine.arguments, EmbeddedArguments)
    return profile.engine.arguments
