"""Caveats that follow from profiles and the machine."""

import os
from collections.abc import Sequence

import pytest
from bench_rig import WORKLOAD

from kvbm_cli.bench import command
from kvbm_cli.bench.arms import comparison_of
from kvbm_cli.bench.cells import Cell
from kvbm_cli.bench.setup import caveats_of
from kvbm_cli.system.machine import usable_cpu_count

EMBEDDED = "the embedded engine is a reference implementation: compare the arms with each other only"
CACHE_OFF = "the engine's own prefix cache is off, so the baseline computes the whole of every prompt"
URL = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def load(monkeypatch):
    """Sets the load of the machine; it is idle before."""

    def set_load(average: float) -> None:
        monkeypatch.setattr(os, "getloadavg", lambda: (average, 0.0, 0.0))

    set_load(0.0)
    return set_load


def caveats(profile: str | None = "demo", *compare: str, overrides: Sequence[str] = ()) -> list[str]:
    return caveats_of(
        command._setup(
            comparison_of(() if profile is None else (profile,), overrides, compare), (Cell("small", WORKLOAD),)
        )
    )


def test_the_embedded_engine_is_a_reference_implementation():
    assert caveats() == [EMBEDDED]


def test_vllm_on_a_cpu_is_no_gpu(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert caveats("vllm-cpu-demo") == ["vLLM computes on a CPU: the speed-up on a GPU is different"]


def test_an_engine_without_a_prefix_cache_has_a_slow_baseline():
    assert caveats(overrides=["engine.arguments.prefix_caching=false"]) == [EMBEDDED, CACHE_OFF]


def test_servers_have_no_profile_to_judge():
    assert caveats(None, URL, "http://127.0.0.1:10") == []


def test_a_reference_with_another_engine_is_not_judged(tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text("extends: demo\nengine: {arguments: {num_blocks: 99}}\n")
    found = caveats("demo", str(path), "baseline", "demo-disk")
    (caveat,) = [one for one in found if "differs" in one]
    assert caveat.startswith("the engine of other differs in `engine.arguments.num_blocks`")
    assert caveat.endswith("; its answers were not judged")


def test_a_busy_machine_is_named_above_one_thread_per_core(load):
    cores = usable_cpu_count()
    load(float(cores))
    assert caveats() == [EMBEDDED]
    load(cores + 0.5)
    assert caveats() == [EMBEDDED, f"the machine was busy: load {cores + 0.5:.1f} on {cores} cores"]
