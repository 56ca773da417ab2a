"""Facts of runs as a launcher records them, for tests that need a run without an engine."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from kvbm_cli.runs.run_facts import RunFacts
from kvbm_cli.system.process_identity import ProcessIdentity

NOBODY = ProcessIdentity(2**22 + 1, 7, "another boot", "pid:[1]", "another host")


def own() -> ProcessIdentity:
    found = ProcessIdentity.of(os.getpid())
    assert found is not None
    return found


def facts(name: str, launcher: ProcessIdentity | None = None, **changes: object) -> RunFacts:
    made = RunFacts(
        name=name,
        profile=name.rpartition("-")[0],
        profile_path="/p.yaml",
        engine="embedded",
        model="m",
        url="http://127.0.0.1:8000",
        ports=(8000,),
        logs={"engine": f"/logs/{name}"},
        launcher=launcher or own(),
        memory_bytes=1 << 20,
        disk_directory=None,
        directory="/",
        command=("kvbm", "serve"),
        versions={"kvbm": "1"},
        stop_timeout_s=30.0,
        started_s=time.time(),
    )
    return replace(made, **changes)  # type: ignore[arg-type]
