"""What comes first when vLLM loads code of kvbm in one of its processes."""

from __future__ import annotations

import logging

from kvbm.errors import EnvironmentProblem
from kvbm.host.log_queue import queue_log
from kvbm.identity.machine import version_of


def refuse_rival() -> None:
    """Raise EnvironmentProblem if NVIDIA's distribution `kvbm` is installed: its modules overwrite ours."""
    if rival := version_of("kvbm"):
        raise EnvironmentProblem(
            f"NVIDIA's kvbm {rival} and kvbm-cli are both installed, and both provide the package `kvbm`",
            hint="`pip uninstall kvbm`, then install kvbm-cli again with `--force-reinstall --no-deps`",
        )


def log_as_vllm_does() -> None:
    """Use vLLM's log handlers and level for our messages. A log that is not read must not block a step."""
    ours, theirs = logging.getLogger("kvbm"), logging.getLogger("vllm")
    queue_log(ours, theirs)
    ours.setLevel(theirs.level)
