"""What `kvbm.sizing` and the connector both ask about a model in vLLM: sizing before a start, with the arguments of a
profile and the files of the model, the connector inside vLLM, with what vLLM made of them. One table for both.

States of models (Mamba, gated delta nets): what kvbm supports.
"""

from __future__ import annotations

KINDS_OF_STATES = {"GDN": "GDN_ATTN", "Mamba-2": "MAMBA2"}  # that have been run with kvbm; names of kvbm and of vLLM
MODE, ALIGN, NO_STATES = "mamba_cache_mode", "align", "none"  # without prefix caching, vLLM uses `none`


def disabled_by(*, mode: str, pipeline_parallel_size: int, speculates: bool, replays: bool) -> tuple[str, str] | None:
    """Return the argument of vLLM for which kvbm disables itself with a model that has states, and why; None without
    one. `mode` is the one that vLLM uses."""
    if speculates:
        return "speculative_config", "speculative decoding with states has never been run with kvbm"
    if mode == NO_STATES:
        return "enable_prefix_caching", "without prefix caching, vLLM keeps no states"
    if replays:
        return "use_replayssm", "`use_replayssm`, which delays the update of states, has never been run with kvbm"
    if pipeline_parallel_size > 1:
        return "pipeline_parallel_size", "pipeline parallelism with states has never been run with kvbm"
    if mode != ALIGN:
        return MODE, f"`{MODE}: {mode}` has never been run with kvbm; remove it, or use `{ALIGN}`"
    return None
