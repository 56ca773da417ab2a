"""Launch plan: turns a profile into the command line of `trtllm-serve` and the file of its options.

Imports no TensorRT-LLM and reads no environment. kvbm adds the following options to those of the profile, with and
without the connector:

    kv_cache_config.enable_block_reuse         true: the engine looks for cached prefixes
    kv_cache_config.enable_partial_reuse       false: after a hit of part of a block, kvbm loads nothing
    scheduler_config.capacity_scheduler_policy GUARANTEED_NO_EVICT: a request keeps its blocks until it ends

With the connector, the file also has `kv_connector_config`, and CONFIG_VARIABLE has the connector's configuration:
TensorRT-LLM passes only variables that start with `TLLM` or `TRTLLM` to the processes of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import yaml

from kvbm.config.engine import TrtllmArguments, TrtllmEngine
from kvbm.config.schema import Profile
from kvbm.engines.installation import Installation
from kvbm.engines.launch_plan import LaunchPlan, as_text, metrics_url, served_at
from kvbm.engines.trtllm.options import CONNECTOR
from kvbm.engines.trtllm.versions import INSTALL

CONFIG_VARIABLE = "TLLM_KVBM_CONFIG"
OPTIONS_FILE = "trtllm.yaml"
SERVER_FILE = "disaggregated.yaml"
PROGRAM = "trtllm-serve"
SERVER_MODULE = "tensorrt_llm.commands.serve"

NO_OPTIONS: Mapping[str, object] = MappingProxyType({})
_REQUIRED: Mapping[str, Mapping[str, object]] = {
    "kv_cache_config": {"enable_block_reuse": True, "enable_partial_reuse": False},
    "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
}


def plan(
    profile: Profile,
    *,
    connector: bool,
    port: int,
    installation: Installation | None = None,
    file: str = OPTIONS_FILE,
    defaults: Mapping[str, object] = NO_OPTIONS,
) -> LaunchPlan:
    """Return how to start the engine of `profile` on `port`; without `connector`, without the block manager.

    `installation` describes TensorRT-LLM in the interpreter. Without it, the command is searched in PATH, unless the
    profile names an interpreter. `file` is the name of the file of options, `defaults` are options that the profile may
    override.
    """
    engine, host = profile.engine, profile.server.host
    assert isinstance(engine, TrtllmEngine), f"the engine of the profile is of kind {engine.kind}"
    argv = [*_program(engine, installation), engine.model, "--backend", "pytorch"]
    argv += ["--host", host, "--port", str(port), "--extra_llm_api_options", file]
    config = {CONFIG_VARIABLE: as_text(profile.connector_config().model_dump(mode="json"))} if connector else {}
    return LaunchPlan(
        argv=tuple(argv),
        environment={**engine.environment, **config},
        base_url=served_at(host, port),
        model=engine.served_name,
        libraries=("tensorrt_llm",),
        install=INSTALL,
        files={file: as_yaml({**defaults, **options(engine.arguments, connector=connector)})},
        metrics_url=metrics_url(profile) if connector else "",
    )


def disaggregated_server(
    profile: Profile,
    *,
    port: int,
    prefill: Sequence[str],
    decode: Sequence[str],
    installation: Installation | None = None,
) -> LaunchPlan:
    """Return how to start TensorRT-LLM's server in front of engines at these addresses (`host:port`)."""
    engine, host = profile.engine, profile.server.host
    assert isinstance(engine, TrtllmEngine), f"the engine of the profile is of kind {engine.kind}"
    content = {
        "hostname": host,
        "port": port,
        "backend": "pytorch",
        "context_servers": {"num_instances": len(prefill), "urls": list(prefill)},
        "generation_servers": {"num_instances": len(decode), "urls": list(decode)},
    }
    return LaunchPlan(
        argv=(*_program(engine, installation), "disaggregated", "-c", SERVER_FILE),
        environment=dict(engine.environment),
        base_url=served_at(host, port),
        model=engine.served_name,
        libraries=("tensorrt_llm",),
        install=INSTALL,
        files={SERVER_FILE: as_yaml(content)},
    )


def options(arguments: TrtllmArguments, *, connector: bool) -> dict[str, object]:
    """Return the content of the file: the options of the profile, those that kvbm requires, and the connector."""
    given = arguments.model_dump(mode="json", exclude_none=True)
    required = {name: {**section, **(given.get(name) or {})} for name, section in _REQUIRED.items()}
    found = {**given, **required}
    return {**found, "kv_connector_config": dict(CONNECTOR)} if connector else found


def as_yaml(content: Mapping[str, object]) -> str:
    return yaml.safe_dump(dict(content), sort_keys=False)


def _program(engine: TrtllmEngine, installation: Installation | None) -> list[str]:
    """Return the command, or its module if the interpreter has no such command."""
    if installation is not None and installation.script is not None:
        return [installation.script]
    if engine.python is not None:
        return [engine.python, "-m", SERVER_MODULE]
    return [PROGRAM]
