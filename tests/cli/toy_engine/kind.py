"""The toy engine, for the commands."""

from pathlib import Path

from kvbm.engines.engine_kind import EngineKind, ServerTraits, SizedBy, Unusable, with_arguments
from kvbm.engines.installation import Installation
from kvbm.engines.launch_plan import LaunchPlan, served_at
from kvbm.sizing.tiers import Device

PROFILE = Path(__file__).with_name("toy.yaml")


class ToyKind(EngineKind):
    traits = ServerTraits("Toy", has_kvbm_metrics=False)
    sized_by = SizedBy(str(PROFILE), "leaf_tokens", "leaf_type", ranks="ring")
    supported = tested = "tested with Toy 1"

    def imported(self, profile):
        return ["json"]

    def installed(self, profile):
        return Installation("1.0", "toy", script=None, has_kvbm=True)

    def launch_plan(self, profile, *, connector, port):
        given = ("--kvbm",) if connector else ()
        argv = ("toy-serve", profile.engine.model, "--port", str(port), *given)
        return LaunchPlan(argv, profile.engine.environment, served_at(profile.server.host, port), profile.engine.model)

    def unstorable_arguments(self, profile):
        if profile.engine.arguments.ring > 8:
            yield Unusable("ring", "a ring of Toy has at most 8 ranks", "lower `engine.arguments.ring`")

    def block_tokens(self, profile):
        return profile.engine.arguments.leaf_tokens

    def with_device_blocks(self, profile, block_count):
        return with_arguments(profile, leaf_count=block_count)

    def device(self, profile, model_config, place, wanted):
        arguments = profile.engine.arguments
        return Device(
            block_tokens=arguments.leaf_tokens,
            rank_block_bytes=(1024 * arguments.leaf_tokens,) * arguments.ring,
            block_count=arguments.leaf_count,
            set_by="engine.arguments.leaf_count",
            token_bytes=1024 * arguments.ring,
            sequence_tokens=arguments.longest,
            sequence_blocks=-(-arguments.longest // arguments.leaf_tokens),
        )

    def check_model(self, profile, model_config):
        pass
