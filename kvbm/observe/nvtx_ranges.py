"""NVTX ranges around hooks and copies, for NVIDIA's profilers: with `metrics.nvtx` and the package `nvtx`.

    scheduler's process    kvbm.match  kvbm.allocated  kvbm.build_orders  kvbm.settle  kvbm.end_request
    rank's process         kvbm.bind  kvbm.start_load  kvbm.finish_step  kvbm.poll
    copying threads        kvbm.copy.device-host  kvbm.copy.host-device

The ranges are in the domain `kvbm`. A profiler is there from the start of a process, or not at all. Without one, and
without `metrics.nvtx`, no method is replaced, so nothing costs time.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

DOMAIN = "kvbm"
SCHEDULER_HOOKS = {name: f"kvbm.{name}" for name in ("match", "allocated", "build_orders", "settle", "end_request")}
RANK_HOOKS = {name: f"kvbm.{name}" for name in ("bind", "start_load", "finish_step", "poll")}
COPIES = {"offload": "kvbm.copy.device-host", "onboard": "kvbm.copy.host-device"}

log = logging.getLogger(__name__)


def annotate(target: object, ranges: Mapping[str, str]) -> None:
    """Let each of these methods of an object open the range that is named. Does nothing without package or profiler."""
    domain = _domain()
    if domain is None:
        return
    for method, name in ranges.items():
        attributes = domain.get_event_attributes(message=name)
        vars(target)[method] = _in_range(getattr(target, method), domain, attributes)


@functools.cache
def _domain() -> Any | None:
    try:
        nvtx = importlib.import_module("nvtx")
    except ImportError:
        log.warning("kvbm: `metrics.nvtx` has no effect: `pip install nvtx`")
        return None
    domain = nvtx.get_domain(DOMAIN)
    if isinstance(domain, nvtx.Domain):
        return domain
    log.info("kvbm: no profiler receives NVTX ranges, so kvbm opens none; start the engine under one, such as `nsys`")
    return None


def _in_range(run: Callable[..., Any], domain: Any, attributes: Any) -> Callable[..., Any]:
    @functools.wraps(run)
    def ranged(*arguments: Any, **keys: Any) -> Any:
        domain.push_range(attributes)
        try:
            return run(*arguments, **keys)
        finally:
            domain.pop_range()

    return ranged
