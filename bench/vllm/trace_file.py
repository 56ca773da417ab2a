"""Starts a server with TracedConnector and reads its trace."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from server import Flags, Server

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class TracedServer:
    server: Server
    directory: Path

    @classmethod
    def start(
        cls,
        flags: Flags,
        *,
        host_bytes: int,
        metrics: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> TracedServer:
        """`metrics` is that section of the profile."""
        directory = Path(tempfile.mkdtemp(prefix="trace-", dir="/tmp"))
        config = {
            "kv_connector": "TracedConnector",
            "kv_connector_module_path": "traced_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "kvbm": {"tiers": {"host": {"capacity": f"{host_bytes >> 20}MiB"}}, "metrics": dict(metrics or {})}
            },
        }
        ours = {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent.parent}", "TRACE_DIRECTORY": str(directory)}
        started = Server.start("traced", flags, transfer_config=config, environment={**ours, **(environment or {})})
        return cls(started, directory)

    def events(self, side: str, kind: str) -> list[dict[str, Any]]:
        """All events of that kind so far, in order."""
        (path,) = self.directory.glob(f"{side}-*.jsonl")
        events = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [event for event in events if event["event"] == kind]


@dataclass(frozen=True, slots=True)
class Way:
    """The steps of the engine from a request's arrival to the one that computes the last of its prompt.

    `counted` steps compute something for any request or have orders of the connector; `polling` steps do neither.
    `waited_s` is the time from the arrival until the computing step was scheduled, `computing_s` the time of that step.
    """

    counted: int
    polling: int
    waited_s: float
    computing_s: float


def way(arrival: dict[str, Any], steps: Sequence[dict[str, Any]]) -> Way:
    until_first_token = []
    for step in steps:
        if step["built"] > arrival["at"]:
            until_first_token.append(step)
            if step["tokens"].get(arrival["id"]):
                break
    else:
        raise ValueError(f"{arrival['id']} was never computed")
    counted = sum(1 for step in until_first_token if step["tokens"] or has_orders(step))
    last = until_first_token[-1]
    return Way(
        counted=counted,
        polling=len(until_first_token) - counted,
        waited_s=last["built"] - arrival["at"],
        computing_s=last["ended"] - last["built"],
    )


def quiet_steps(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps that compute something without transfers: no orders, and nothing in flight before or after."""
    return [
        step
        for before, step in pairwise(steps)
        if step["tokens"] and not has_orders(step) and not step["is_pending"] and not before["is_pending"]
    ]


def ending_steps(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps in which the last transfer in flight ends."""
    return [
        step
        for before, step in pairwise(steps)
        if before["is_pending"] and not step["is_pending"] and not has_orders(step)
    ]


def moving_steps(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps that compute something and have orders, or a transfer in flight before or after."""
    return [
        step
        for before, step in pairwise(steps)
        if step["tokens"] and (has_orders(step) or step["is_pending"] or before["is_pending"])
    ]


def has_orders(step: dict[str, Any]) -> bool:
    return bool(step["onboard_blocks"] or step["offload_blocks"] or step["failed_loads"])


def percentile(values: Sequence[float], share: float) -> float:
    """The quantile `share`: the smallest value that at least this share of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]
