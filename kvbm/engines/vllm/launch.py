"""Launch plan: turns a profile into the command line of `vllm serve`. Imports no vLLM and reads no environment.

kvbm adds the following to the flags of the profile, with and without the connector, so that both engines differ in
nothing else:

    --shutdown-timeout               by default vLLM kills its scheduler process, with the connector, immediately
    --enable-prompt-tokens-details   a response contains the number of cached prompt tokens
    PYTHONHASHSEED                   before 0.29, required for equal block hashes in all processes
    VLLM_CPU_NUM_OF_RESERVED_CPU     on a CPU, vLLM with a connector reserves one more core per rank

A variable that the profile or the caller sets is not changed. Without kvbm's connector, vLLM runs with another one if
the profile names it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from math import ceil

from kvbm.config.engine import MAX_SHUTDOWN_TIMEOUT_S, VllmArguments, VllmEngine
from kvbm.config.schema import Profile
from kvbm.engines.installation import Installation
from kvbm.engines.launch_plan import KEY_VARIABLE, LaunchPlan, as_text, flag_of, flag_words, metrics_url, served_at
from kvbm.engines.vllm.flags import CONNECTOR, CONNECTOR_MODULE, OFFLOADING_CONNECTOR, TIER, TIER_MODULE
from kvbm.engines.vllm.versions import INSTALL, has_stable_hashes, is_cpu

SHUTDOWN_TIMEOUT_S = 10
SERVER_MODULE = "vllm.entrypoints.openai.api_server"

# Exceptions: flags without a `--no-` form, flags repeated per list item, and flags with a list as one JSON text.
ONLY_ON = frozenset({"disable_log_stats", "aggregate_engine_logging", "data_parallel_multi_port_external_lb"})
REPEATED = frozenset({"middleware"})
SECRET_FLAGS = {"api_key": KEY_VARIABLE, "hf_token": "HF_TOKEN"}
JSON_LISTS = frozenset({"allowed_origins", "allowed_methods", "allowed_headers"})


def plan(
    profile: Profile,
    *,
    connector: bool,
    port: int,
    installation: Installation | None = None,
    environment: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """Return how to start the engine of `profile` on `port`; without `connector`, without the block manager.

    `installation` describes vLLM in the interpreter; without it, the plan works with every known version.
    `environment` is the caller's environment, which the engine inherits.
    """
    engine, host = profile.engine, profile.server.host
    assert isinstance(engine, VllmEngine), f"the engine of the profile is of kind {engine.kind}"
    argv = [*_program(engine, installation), "--host", host, "--port", str(port), "--enable-prompt-tokens-details"]
    secrets, arguments = _secret_variables(engine.arguments)
    argv += _flags(arguments, profile.tiers.drain_s if connector else 0.0)
    transfer = transfer_config(profile, engine.arguments) if connector else other_connector(engine.arguments)
    if transfer is not None:
        argv += ["--kv-transfer-config", as_text(transfer)]
    defaults = _default_variables(engine.arguments, installation)
    added = {name: value for name, value in defaults.items() if name not in (environment or {})}
    return LaunchPlan(
        argv=tuple(argv),
        environment={**added, **engine.environment, **secrets},
        base_url=served_at(host, port),
        model=engine.served_name,
        libraries=("vllm",),
        install=INSTALL,
        metrics_url=metrics_url(profile) if connector and profile.tiers.are_below_engine else "",
    )


def transfer_config(profile: Profile, arguments: VllmArguments) -> dict[str, object]:
    """Return the connector, in `kvbm/vllm_integration/connector.py`, and its configuration. vLLM recomputes a block
    that could not be loaded.

    Below vLLM's own offloading, it is vLLM's connector, and kvbm is one of its tiers.
    """
    assert other_connector(arguments) is None, "the profile names another connector"
    added = dict(arguments.kv_transfer_config or {})
    given = added.pop("kv_connector_extra_config", None)
    extra = given if isinstance(given, dict) else {}
    contents: dict[str, object] = {"kvbm": profile.connector_config().model_dump(mode="json")}
    base: dict[str, object] = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    if profile.tiers.are_below_engine:
        host = profile.tiers.host
        assert host is not None, "vLLM has host memory"
        base = {"kv_connector": OFFLOADING_CONNECTOR, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        tier = {"type": TIER, "module_path": TIER_MODULE, **contents}
        contents = {"cpu_bytes_to_use": host.capacity_bytes, "eviction_policy": "lru", "secondary_tiers": [tier]}
        contents["offload_prompt_only"] = not profile.offload.generated
        extra = {"spec_name": "TieringOffloadingSpec", **extra}
    return {**base, **added, "kv_connector_extra_config": {**extra, **contents}}


def other_connector(arguments: VllmArguments) -> Mapping[str, object] | None:
    """Return the configuration of a connector that is not kvbm's, None if the profile names none."""
    given = arguments.kv_transfer_config or {}
    ours = {"kv_connector": CONNECTOR, "kv_connector_module_path": CONNECTOR_MODULE}
    return given if any(given.get(name, value) != value for name, value in ours.items()) else None


def _program(engine: VllmEngine, installation: Installation | None) -> list[str]:
    """Return `vllm serve MODEL`, or its module if the installation has no such command."""
    if installation is not None and installation.script is not None:
        return [installation.script, "serve", engine.model]
    return [engine.python or sys.executable, "-m", SERVER_MODULE, "--model", engine.model]


def _default_variables(arguments: VllmArguments, installation: Installation | None) -> dict[str, str]:
    variables = {}
    if installation is None or not has_stable_hashes(installation):
        variables["PYTHONHASHSEED"] = "0"
    if installation is not None and is_cpu(installation):
        ranks = (arguments.tensor_parallel_size or 1) * (arguments.pipeline_parallel_size or 1)
        variables["VLLM_CPU_NUM_OF_RESERVED_CPU"] = str(ranks)
    return variables


def _secret_variables(arguments: VllmArguments) -> tuple[dict[str, str], VllmArguments]:
    """Move secrets from the flags, which every user can read, to variables. vLLM reads one key from a variable."""
    given, moved = arguments.model_dump(mode="json", exclude_none=True), {}
    for name in SECRET_FLAGS:
        value = given.get(name)
        (value,) = value if isinstance(value, list) and len(value) == 1 else (value,)
        if isinstance(value, str):
            moved[name] = value
    rest = arguments.model_copy(update=dict.fromkeys(moved))
    return {SECRET_FLAGS[name]: value for name, value in moved.items()}, rest


def _flags(arguments: VllmArguments, drain_s: float) -> list[str]:
    """Return the flags. `drain_s` is the time for lower tiers at shutdown, in addition to vLLM's own."""
    timeout_s = min(MAX_SHUTDOWN_TIMEOUT_S, SHUTDOWN_TIMEOUT_S + ceil(drain_s))
    given = {"shutdown_timeout": timeout_s, **arguments.model_dump(mode="json", exclude_none=True)}
    given.pop("kv_transfer_config", None)
    return [word for name, value in given.items() for word in _flag(name, value)]


def _flag(name: str, value: object) -> Iterator[str]:
    if value is False:
        if name not in ONLY_ON:
            yield flag_of(f"no_{name}")
    elif isinstance(value, list) and name in REPEATED:
        for one in value:
            yield from flag_words(name, one)
    else:
        yield from flag_words(name, as_text(value) if name in JSON_LISTS else value)
