"""Launch plan: turns a profile into the command line of SGLang's server.

Imports no SGLang and reads no environment. kvbm adds the following flags to those of the profile, with and without the
storage, so that it is the only difference:

    --enable-metrics                the server's counters
    --enable-cache-report           the number of cached tokens in each answer

SGLang's own host memory, below which kvbm stores pages, is on unless the profile turns it off to compare.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from kvbm.config.engine import SglangArguments, SglangEngine
from kvbm.config.schema import Profile
from kvbm.engines.launch_plan import LaunchPlan, as_text, flag_words, metrics_url, served_at
from kvbm.engines.sglang.options import STORAGE
from kvbm.engines.sglang.versions import INSTALL

SERVER_MODULE = "sglang.launch_server"
CPU_MODULE = "kvbm.engines.sglang.cpu_server"
STAND_INS_VARIABLE = "KVBM_SGLANG_STAND_INS"  # set in processes of CPU_MODULE
DEFAULT_RATIO = 2.0  # of SGLang's own host memory to G1
RESERVE_BYTES = 10 << 30  # that SGLang leaves free: it refuses to start if its own host memory would take them
CPU_RESERVE_BYTES = 1 << 30  # the same with stand-ins for its kernels
# Otherwise each request to /health generates a token, and is answered after a second or more.
QUICK_HEALTH = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
ALWAYS = ("--enable-metrics", "--enable-cache-report")


def plan(profile: Profile, *, connector: bool, port: int) -> LaunchPlan:
    """Return how to start the engine of `profile` on `port`; without `connector`, without a storage below SGLang's host
    memory."""
    engine, host = profile.engine, profile.server.host
    assert isinstance(engine, SglangEngine), f"the engine of the profile is of kind {engine.kind}"
    module = CPU_MODULE if engine.cpu_stand_ins else SERVER_MODULE
    argv = [engine.python or sys.executable, "-m", module, "--model-path", engine.model]
    argv += ["--host", host, "--port", str(port), *ALWAYS, *_flags(engine.arguments)]
    if connector:
        argv += ["--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config", _extra(profile)]
    return LaunchPlan(
        argv=tuple(argv),
        environment=QUICK_HEALTH | engine.environment,
        base_url=served_at(host, port),
        model=engine.served_name,
        libraries=("sglang",),
        install=INSTALL,
        metrics_url=metrics_url(profile) if connector else "",
    )


def _extra(profile: Profile) -> str:
    """Return the configuration of the storage: entries of the profile, what makes SGLang load kvbm, and of kvbm."""
    arguments = profile.engine.arguments
    assert isinstance(arguments, SglangArguments)
    added = arguments.hicache_storage_backend_extra_config or {}
    return as_text({**added, **STORAGE, "kvbm": profile.connector_config().model_dump(mode="json")})


def _flags(arguments: SglangArguments) -> Iterator[str]:
    """Yield the flags. SGLang has no negated forms: a flag that is false is left out."""
    given = arguments.model_dump(mode="json", exclude_none=True)
    given.pop("hicache_storage_backend_extra_config", None)
    for name, value in given.items():
        if value is not False:
            yield from flag_words(name, value)
