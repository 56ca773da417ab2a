"""TensorRT-LLM, for the commands: its launch plan, its installation, and its defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvbm.config.engine import TrtllmArguments
from kvbm.config.installation import shown
from kvbm.config.trtllm_options import DEFAULT_BLOCK_TOKENS
from kvbm.engines.trtllm import launch
from kvbm.engines.trtllm.versions import CONTRACT_TESTED, INSTALL, TrtllmInstallation, is_known
from kvbm.errors import EnvironmentProblem
from kvbm_cli.engine.engine_kind import ServerTraits, installation_problem, python_of, with_arguments
from kvbm_cli.engine.python_probe import find_trtllm

if TYPE_CHECKING:
    from kvbm.config.launch_plan import LaunchPlan
    from kvbm.config.schema import Profile

TITLE = "TensorRT-LLM"


class TrtllmKind:
    """See EngineKind.

    Its engines take a share of the free device memory: of two on one device, the second would get less.
    """

    traits = ServerTraits(
        TITLE,
        tokenizes=False,
        resets_cache=False,
        has_metrics=False,
        has_kvbm_metrics=False,
        shares_device=False,
        token_id_fields={"detokenize": False},
    )

    def launch_plan(
        self,
        profile: Profile,
        *,
        connector: bool,
        port: int,
        file: str = launch.OPTIONS_FILE,
        defaults: Mapping[str, object] = launch.NO_OPTIONS,
    ) -> LaunchPlan:
        """Pass `file` and `defaults` to `launch.plan`."""
        return launch.plan(
            _with_local_model(profile),
            connector=connector,
            port=port,
            installation=self._installation(profile),
            file=file,
            defaults=defaults,
        )

    def disaggregated_server(
        self, profile: Profile, *, port: int, prefill: Sequence[str], decode: Sequence[str]
    ) -> LaunchPlan:
        """Return the plan of TensorRT-LLM's server in front of engines at these addresses."""
        return launch.disaggregated_server(
            _with_local_model(profile),
            port=port,
            prefill=prefill,
            decode=decode,
            installation=self._installation(profile),
        )

    def installed(self, profile: Profile) -> TrtllmInstallation | None:
        return find_trtllm(python_of(profile))

    def _installation(self, profile: Profile) -> TrtllmInstallation | None:
        try:
            return self.installed(profile)
        except EnvironmentProblem:
            return None

    def problem(self, profile: Profile, *, has_cache: bool) -> EnvironmentProblem | None:
        python = python_of(profile)
        try:
            found = self.installed(profile)
        except EnvironmentProblem as error:
            return error
        if found is None:
            hint = f"run `{python} -m {INSTALL}`, or set `engine.python` to an interpreter that has it"
            return EnvironmentProblem(f"`{python}` has no {TITLE}", hint=hint)
        if not has_cache:
            return None
        if not found.has_interface:
            return EnvironmentProblem(
                f"`{python}` has {TITLE} {found.version}, which has no interface for KV cache connectors",
                hint=f"install {TITLE} 1.1 or later; `kvbm serve --baseline` starts this version without the cache",
            )
        tested = f"the interfaces of {shown(CONTRACT_TESTED)}"
        return installation_problem(python, TITLE, found, is_known=is_known(found.version), tested=tested)

    def block_tokens(self, profile: Profile) -> int:
        return int(_arguments(profile).cache.get("tokens_per_block") or DEFAULT_BLOCK_TOKENS)

    def knows_block_tokens(self, profile: Profile) -> bool:
        return True

    def has_prefix_caching(self, profile: Profile) -> bool:
        return True

    def runs_on_cpu(self, profile: Profile) -> bool:
        return False

    def with_device_blocks(self, profile: Profile, block_count: int) -> Profile:
        cache = _arguments(profile).cache
        tokens = max(block_count * self.block_tokens(profile), cache.get("max_tokens") or 0)
        return with_arguments(profile, kv_cache_config={**cache, "max_tokens": tokens})

    def caveats(self, profile: Profile) -> list[str]:
        return [
            f"not tested, because the server of {TITLE} does not report it: the tier that prompt tokens came from, the "
            "time in its queue, and log-probabilities"
        ]


def _with_local_model(profile: Profile) -> Profile:
    """Return the profile with the path of a local model, without `~`."""
    model = profile.engine.model
    engine = profile.engine.model_copy(update={"model": os.path.expanduser(model)})
    return profile.model_copy(update={"engine": engine})


def _arguments(profile: Profile) -> TrtllmArguments:
    assert isinstance(profile.engine.arguments, TrtllmArguments)
    return profile.engine.arguments
