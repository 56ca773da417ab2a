"""The embedded engine, for the commands. Its own process checks it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbm.config.engine import EmbeddedArguments
from kvbm_cli.engine.engine_kind import ServerTraits, with_arguments

if TYPE_CHECKING:
    from kvbm.config.launch_plan import LaunchPlan
    from kvbm.config.schema import Profile


class EmbeddedKind:
    """See EngineKind."""

    traits = ServerTraits("the embedded engine")

    def launch_plan(self, profile: Profile, *, connector: bool, port: int) -> LaunchPlan:
        from kvbm.engines.embedded import launch

        return launch.plan(profile, connector=connector, port=port)

    def installed(self, profile: Profile) -> None:
        return None

    def problem(self, profile: Profile, *, has_cache: bool) -> None:
        return None

    def block_tokens(self, profile: Profile) -> int:
        return _arguments(profile).block_size

    def knows_block_tokens(self, profile: Profile) -> bool:
        return True

    def has_prefix_caching(self, profile: Profile) -> bool:
        return _arguments(profile).prefix_caching

    def runs_on_cpu(self, profile: Profile) -> bool:
        return False

    def with_device_blocks(self, profile: Profile, block_count: int) -> Profile:
        return with_arguments(profile, num_blocks=max(block_count, _arguments(profile).num_blocks), prefix_caching=True)

    def caveats(self, profile: Profile) -> list[str]:
        return ["the embedded engine is a reference implementation: compare the arms with each other only"]


def _arguments(profile: Profile) -> EmbeddedArguments:
    assert isinstance(profile.engine.arguments, EmbeddedArguments)
    return profile.engine.arguments
