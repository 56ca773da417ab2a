"""NVTX ranges around hooks and copies, for NVIDIA's profilers: with `metrics.nvtx` and the package `nvtx`.

    scheduler's process    kvbm.match  kvbm.allocated  kvbm.build_orders  kvbm.settle  kvbm.end_request
    rank's process         kvbm.bind  kvbm.start_load  kvbm.finish_step  kvbm.poll
    copying threads        kvbm.copy.device-host  kvbm.copy.host-device

The ranges are in the domain `kvbm`. Without `metrics.nvtx` no method is replaced, so nothing costs time.
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
    """Let each of these methods of an object open the range that is named. Does nothing without the package."""
    nvtx = _package()
    for method, name in ranges.items() if nvtx is not None else ():
        vars(target)[method] = _in_range(getattr(target, method), name, nvtx)


@functools.cache
def _package() -> Any | None:
    try:
        return importlib.import_module("nvtx")
    except ImportError:
        log.warning("kvbm: `metrics.nvtx` has no effect: `pip install nvtx`")
        return None


def _in_range(run: Callable[..., Any], name: str, nvtx: Any) -> Callable[..., Any]:
    @functools.wraps(run)
    def ranged(*arguments: Any, **keys: Any) -> Any:
        with nvtx.annotate(name, domain=DOMAIN):
            return run(*arguments, **keys)

    return ranged
