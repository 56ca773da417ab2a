"""vLLM, for the commands: its launch plan with a local model, its installation, and its defaults."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kvbm.config.engine import VllmArguments
from kvbm.engines.engine_kind import (
    EngineKind,
    Place,
    ServerTraits,
    SizedBy,
    Unusable,
    with_arguments,
)
from kvbm.engines.installation import shown
from kvbm.engines.make_model import MODELS
from kvbm.engines.synthetic_directory import with_local_model
from kvbm.engines.vllm import sizing, versions
from kvbm.engines.vllm.findings import latent_findings, state_findings
from kvbm.engines.vllm.flags import CONNECTOR, CONNECTOR_MODULE, SIGNS, refused_flags
from kvbm.engines.vllm.versions import (
    CONTRACT_TESTED,
    INSTALL,
    INSTALL_FOR_CPU,
    PACKAGE,
    RUN,
    hashes_lookahead,
    is_cpu,
    lacks,
)
from kvbm.errors import EnvironmentProblem
from kvbm.sizing.families.facts import SizeUnknown

if TYPE_CHECKING:
    from kvbm.config.schema import Profile
    from kvbm.engines.disaggregated import Fleet
    from kvbm.engines.launch_plan import LaunchPlan
    from kvbm.sizing.findings import StateFinding
    from kvbm.sizing.tiers import Device
    from kvbm.sizing.wanted import Wanted

LOOKAHEAD = (
    "with an EAGLE or MTP drafter, vLLM from 0.33 on finds the last block of a hit in G1 only without a connector "
    "(`num_hash_lookahead_tokens`): per hit, one block less comes from G1 with kvbm than with the baseline, and kvbm "
    "loads it"
)

DEV_MODE = "VLLM_SERVER_DEV_MODE"
NEAR = 0.8  # similarity of names of flags
_OTHER_CONNECTOR = "remove it, or keep it and start vLLM without kvbm: `kvbm serve --baseline`"
_PD_HINT = "remove it; `disaggregated: {prefill: 1, decode: 1}` starts engines with `PdConnector` and `NixlConnector`"
_CONNECTOR_HINTS = {
    "PdConnector": _PD_HINT,
    "NixlConnector": _PD_HINT,
    "MultiConnector": "a profile has one connector; `MultiConnector` with `DynamoConnector` works with vLLM's own "
    "command line: `vllm serve MODEL --kv-transfer-config JSON`, see docs/guide/vllm.md",
}


class VllmKind(EngineKind):
    package = PACKAGE
    refused = staticmethod(refused_flags)
    presets = MODELS
    suggested_preset = "vllm-81m"
    sized_by = SizedBy(
        "vllm",
        "block_size",
        "kv_cache_dtype",
        ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"),
        sizing.LAYOUT_VARIABLE,
    )
    judges_states = True
    signs = SIGNS
    reserved_blocks = 1
    tested = f"tested with {shown(RUN)}"
    is_known = staticmethod(versions.is_known)
    supported = shown(CONTRACT_TESTED)
    traits = ServerTraits("vLLM", shares_device=False, variables={DEV_MODE: "1"})  # which can reset

    def imported(self, profile: Profile) -> list[str]:
        return [CONNECTOR_MODULE]

    def launch_plan(self, profile: Profile, *, connector: bool, port: int) -> LaunchPlan:
        """Do not require `make_model` to have run either."""
        from kvbm.engines.vllm import launch

        return launch.plan(
            with_local_model(profile),
            connector=connector,
            port=port,
            installation=self.found(profile),
            environment=dict(os.environ),
        )

    def fleet(self, profile: Profile, ports: Iterator[int], environment: Mapping[str, str]) -> Fleet:
        from kvbm.engines.vllm import disaggregated

        installation = self.found(profile)
        on_cpu = installation is not None and is_cpu(installation)
        return disaggregated.fleet(profile, self.launch_plan, ports, environment, on_cpu=on_cpu)

    def problem_of_fleet(self, profile: Profile) -> EnvironmentProblem | None:
        from kvbm.engines.vllm import disaggregated

        return disaggregated.lacks_nixl(profile)

    def problem_of_address(self, profile: Profile) -> EnvironmentProblem | None:
        """vLLM's development mode lets every client call methods of the engine."""
        mode = {**os.environ, **profile.engine.environment}.get(DEV_MODE, "0")
        if mode in ("", "0"):
            return None
        return EnvironmentProblem(
            f"{DEV_MODE} serves vLLM's debug endpoints, and `server.host: {profile.server.host}` is not a loopback "
            "address",
            hint=f"unset {DEV_MODE}, or set `server.host: 127.0.0.1`",
        )

    def install(self, profile: Profile) -> str:
        return INSTALL_FOR_CPU if self.runs_on_cpu(profile) else INSTALL

    def unknown_arguments(self, profile: Profile) -> Iterator[Unusable]:
        if (found := self.found(profile)) is None:
            return
        for name in profile.engine.arguments.model_dump(exclude_none=True):
            if not lacks(found, name):
                continue
            alike = [flag for flag in found.flags if flag.startswith("disable_") == name.startswith("disable_")]
            near = difflib.get_close_matches(name, alike, n=1, cutoff=NEAR)
            hint = f"did you mean `{near[0]}`?" if near else "remove it, or start vLLM with it: `kvbm serve --force`"
            yield Unusable(name, f"vLLM {found.version} has no flag `{name}`", hint)

    def unstorable_arguments(self, profile: Profile) -> Iterator[Unusable]:
        """Return the connector of another cache, which vLLM can only run without kvbm."""
        transfer = _arguments(profile).kv_transfer_config or {}
        for name, ours in (("kv_connector", CONNECTOR), ("kv_connector_module_path", CONNECTOR_MODULE)):
            value = transfer.get(name, ours)
            if value != ours:
                message = f"`kv_transfer_config.{name}` must be `{ours}`, not `{value}`"
                hint = _CONNECTOR_HINTS.get(str(transfer.get("kv_connector")), _OTHER_CONNECTOR)
                yield Unusable("kv_transfer_config", message, hint)

    def block_tokens(self, profile: Profile) -> int:
        """vLLM's default depends on the platform of its build."""
        return sizing.default_block_tokens(_arguments(profile), on_cpu=self.runs_on_cpu(profile))

    def knows_block_tokens(self, profile: Profile) -> bool:
        """Return whether the block size is certain. It is a guess if vLLM is not installed."""
        return _arguments(profile).block_size is not None or self.found(profile) is not None

    def has_prefix_caching(self, profile: Profile) -> bool:
        return _arguments(profile).enable_prefix_caching is not False

    def runs_on_cpu(self, profile: Profile) -> bool:
        """Whether it is a CPU build; if vLLM is missing, whether the variables indicate it."""
        installation = self.found(profile)
        if installation is not None:
            return is_cpu(installation)
        return "VLLM_CPU_KVCACHE_SPACE" in {**os.environ, **profile.engine.environment}

    def with_device_blocks(self, profile: Profile, block_count: int) -> Profile:
        blocks = max(block_count + 1, _arguments(profile).num_gpu_blocks_override or 0)
        return with_arguments(profile, num_gpu_blocks_override=blocks, enable_prefix_caching=True)

    def copies(self, profile: Profile) -> int:
        return _arguments(profile).data_parallel_size or 1

    def device(self, profile: Profile, model_config: Mapping[str, object], place: Place, wanted: Wanted) -> Device:
        return sizing.device(
            sizing.Model(_arguments(profile), model_config, _setting(profile, place, wanted)),
            sequence_tokens=wanted.sequence_tokens,
            memory=wanted.memory,
            shares_equal_kv=profile.transfer.share_equal_kv,
        )

    def check_model(self, profile: Profile, model_config: Mapping[str, object]) -> None:
        sizing.check(_arguments(profile), model_config)

    def findings(
        self, profile: Profile, model_config: Mapping[str, object], place: Place, wanted: Wanted
    ) -> list[StateFinding]:
        found = state_findings(_arguments(profile), model_config, _setting(profile, place, wanted), place.is_installed)
        with contextlib.suppress(SizeUnknown):
            found += latent_findings(_arguments(profile), model_config, _setting(profile, place, wanted))
        return found

    def caveats(self, profile: Profile) -> list[str]:
        found = ["vLLM computes on a CPU: the speed-up on a GPU is different"] if self.runs_on_cpu(profile) else []
        installation, speculates = (
            self.found(profile),
            "speculative_config" in (_arguments(profile).model_extra or {}),
        )
        if speculates and installation is not None and hashes_lookahead(installation):
            found.append(LOOKAHEAD)
        return found


def _setting(profile: Profile, place: Place, wanted: Wanted) -> sizing.Setting:
    variables = {**place.environment, **profile.engine.environment}
    return sizing.Setting(variables, place.on_cpu, wanted.capability, wanted.cpu)


def _arguments(profile: Profile) -> VllmArguments:
    assert isinstance(profile.engine.arguments, VllmArguments)
    return profile.engine.arguments
