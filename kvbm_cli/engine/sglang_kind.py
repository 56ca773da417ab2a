"""SGLang, for the commands: its launch plan with a local model, its installation, and its defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbm.config.engine import SglangArguments, SglangEngine
from kvbm.config.values import count_of
from kvbm.engines.sglang import launch
from kvbm.engines.sglang.versions import INSTALL, TESTED, SglangInstallation, is_known
from kvbm.errors import EnvironmentProblem
from kvbm_cli.engine.engine_kind import RETURN_TOKEN_IDS, ServerTraits, installation_problem, python_of, with_arguments
from kvbm_cli.engine.python_probe import find_sglang
from kvbm_cli.engine.synthetic_directory import with_local_model

if TYPE_CHECKING:
    from kvbm.config.launch_plan import LaunchPlan
    from kvbm.config.schema import Profile


class SglangKind:
    """See EngineKind."""

    traits = ServerTraits(
        "SGLang",
        has_kvbm_metrics=False,
        shares_device=False,
        token_id_fields={**RETURN_TOKEN_IDS, "return_cached_tokens_details": True},
    )

    def launch_plan(self, profile: Profile, *, connector: bool, port: int) -> LaunchPlan:
        """Do not require `make_model` to have run either."""
        return launch.plan(with_local_model(profile), connector=connector, port=port)

    def installed(self, profile: Profile) -> SglangInstallation | None:
        return find_sglang(python_of(profile))

    def problem(self, profile: Profile, *, has_cache: bool) -> EnvironmentProblem | None:
        python = python_of(profile)
        try:
            found = self.installed(profile)
        except EnvironmentProblem as error:
            return error
        if found is None:
            hint = f"run `{python} -m {INSTALL}`, or set `engine.python` to an interpreter that has it"
            return EnvironmentProblem(f"`{python}` has no SGLang", hint=hint)
        needs_kvbm = has_cache or (isinstance(profile.engine, SglangEngine) and profile.engine.cpu_stand_ins)
        if not needs_kvbm:
            return None
        return installation_problem(
            python, "SGLang", found, is_known=is_known(found.version), tested=" and ".join(TESTED)
        )

    def block_tokens(self, profile: Profile) -> int:
        return _arguments(profile).page_size

    def knows_block_tokens(self, profile: Profile) -> bool:
        return True

    def has_prefix_caching(self, profile: Profile) -> bool:
        return True

    def runs_on_cpu(self, profile: Profile) -> bool:
        return isinstance(profile.engine, SglangEngine) and profile.engine.cpu_stand_ins

    def with_device_blocks(self, profile: Profile, block_count: int) -> Profile:
        arguments = _arguments(profile)
        tokens = max(block_count * arguments.page_size, count_of(arguments.max_total_tokens) or 0)
        return with_arguments(profile, max_total_tokens=tokens)

    def caveats(self, profile: Profile) -> list[str]:
        on_cpu = "SGLang computes on a CPU, with plain torch in place of its kernels: its times on a GPU are different"
        return [on_cpu] if self.runs_on_cpu(profile) else []


def _arguments(profile: Profile) -> SglangArguments:
    assert isinstance(profile.engine.arguments, SglangArguments)
    return profile.engine.arguments
