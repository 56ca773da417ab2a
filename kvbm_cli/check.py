"""What this machine knows of a profile before an engine starts: its model, interpreter, address, lengths and memory.

Asked by `kvbm profile check`, and by `kvbm serve` before anything else. A mistake is shown where its key was written.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from kvbm.errors import EnvironmentProblem, UsageError
from kvbm_cli.model_facts import model_facts
from kvbm_cli.process import OWN_ADDRESS, choose_port
from kvbm_cli.show_error import show_warning
from kvbm_cli.size import host_key, size_of

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.sizing import Sizing


def check(resolved: ResolvedProfile) -> Sizing:
    """Sizes of a profile that can be served here, else ProfileError. Prints a warning where memory is too scarce."""
    sizing = size_of(resolved)
    _require_program(resolved)
    _require_address(resolved)
    _require_length(resolved, sizing)
    _warn_of_memory(resolved, sizing)
    return sizing


def require_workload(resolved: ResolvedProfile) -> None:
    """ProfileError for a workload of `kvbm bench` that is absent or wrong."""
    from kvbm_cli.bench.workload import load_workload

    if (workload := resolved.profile.bench.workload) is not None:
        try:
            load_workload(workload)
        except UsageError as error:
            raise resolved.mistake("bench.workload", error.message, hint=error.hint) from None


def _require_program(resolved: ResolvedProfile) -> None:
    python = resolved.profile.engine.python
    if python is not None and shutil.which(python) is None:
        hint = "leave `engine.python` out to run the engine with the interpreter of `kvbm`"
        raise resolved.mistake("engine.python", f"`{python}` is not a program", hint=hint)


def _require_address(resolved: ResolvedProfile) -> None:
    try:
        choose_port(resolved.profile.server.host, 0)
    except EnvironmentProblem as error:
        raise resolved.mistake("server.host", error.message, hint=OWN_ADDRESS) from None


def _require_length(resolved: ResolvedProfile, sizing: Sizing) -> None:
    """A request runs wholly in G1, and no model takes more than its positions."""
    key, wanted = "engine.arguments.max_model_len", resolved.profile.engine.arguments.max_model_len
    positions = model_facts(resolved.profile.engine.model).get("max_position_embeddings")
    for limit, holder in ((positions, "the model takes"), (sizing.device.token_count, "G1 holds")):
        if wanted is not None and isinstance(limit, int) and wanted > limit:
            hint = f"lower `{key}`" + (", or raise `engine.arguments.num_blocks`" if holder == "G1 holds" else "")
            raise resolved.mistake(key, f"`max_model_len` is {wanted} tokens, but {holder} {limit}", hint=hint)


def _warn_of_memory(resolved: ResolvedProfile, sizing: Sizing) -> None:
    from kvbm.config.sizes import format_size
    from kvbm.host_memory import THIS_MACHINE

    room, key = THIS_MACHINE.room(), host_key(resolved)
    if sizing.host.total_bytes > room.available_bytes:
        taken, available = format_size(sizing.host.total_bytes), format_size(room.available_bytes)
        message = f"`{key}` takes {taken}, more than the {room.limit}, {available}"
        show_warning(resolved.mistake(key, message).message)
