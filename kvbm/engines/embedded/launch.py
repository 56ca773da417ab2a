"""Launch plan: turns a profile into the command line of `python -m kvbm.engines.embedded`. Imports no engine."""

from __future__ import annotations

import sys

from kvbm.config.engine import EmbeddedArguments, EmbeddedEngine
from kvbm.config.schema import Profile
from kvbm.engines.launch_plan import LaunchPlan, flag_of, flag_words, served_at


def plan(profile: Profile, *, connector: bool, port: int) -> LaunchPlan:
    """Return how to start the engine of `profile` on `port`; without `connector`, without the block manager."""
    engine, host = profile.engine, profile.server.host
    assert isinstance(engine, EmbeddedEngine), f"the engine of the profile is of kind {engine.kind}"
    argv = [engine.python or sys.executable, "-m", "kvbm.engines.embedded", "--model", engine.model]
    argv += ["--host", host, "--port", str(port), *_flags(engine.arguments)]
    if connector:
        argv += ["--connector", _without_environment(profile).model_dump_json()]
    return LaunchPlan(
        argv=tuple(argv),
        environment=dict(engine.environment),
        base_url=served_at(host, port),
        model=engine.served_name,
        libraries=("torch", "transformers"),
        install="pip install 'kvbm-cli[embedded]'",
        has_admin_token=True,
    )


def _without_environment(profile: Profile) -> Profile:
    """Return what the connector reads. The engine's variables may hold secrets, and every user can read an argument."""
    engine = profile.engine.model_copy(update={"environment": {}})
    return profile.model_copy(update={"engine": engine})


def _flags(arguments: EmbeddedArguments) -> list[str]:
    """Return one flag per key with a value. A boolean has one only if it differs from the default."""
    flags: list[str] = []
    for name, value in arguments:
        if isinstance(value, bool):
            is_default = value == EmbeddedArguments.model_fields[name].default
            flags += [] if is_default else [flag_of(name if value else f"no_{name}")]
        elif value is not None:
            flags += flag_words(name, value)
    return flags
