"""Ranks: what one rank of SGLang has of the configuration of all, and which data-parallel engine it belongs to."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvbm.errors import EnvironmentProblem

if TYPE_CHECKING:
    from kvbm.config.schema import ConnectorConfig


def for_rank(config: ConnectorConfig, storage: Any) -> ConnectorConfig:
    """Return the configuration of one rank, whose process has its own part of the disk tier.

    With MLA, all ranks have equal pages, and SGLang lets one of them write. The others read them from the shared tier.
    Raises EnvironmentProblem if the pages of this engine cannot be stored.
    """
    if getattr(storage, "should_split_heads", False):
        raise EnvironmentProblem(
            "kvbm does not split pages for engines with another number of ranks", hint="remove `tp_lcm_size`"
        )
    if getattr(storage, "dcp_size", 1) > 1:
        raise EnvironmentProblem("kvbm does not support decode context parallelism of SGLang (`--dcp-size`)")
    tiers = config.tiers
    is_shared = storage.is_mla_model and storage.tp_size > 1
    if is_shared and tiers.shared is None:
        raise EnvironmentProblem(
            f"the {storage.tp_size} ranks of a model with MLA have one copy of each page, which only a shared tier has "
            "for all of them",
            hint="add `tiers.shared`",
        )
    disk = tiers.disk
    if is_shared and not storage.is_storage_writer:
        disk = None
    elif disk is not None and disk.capacity_bytes is not None:
        ranks = storage.pp_size * (1 if is_shared else storage.tp_size)
        disk = disk.model_copy(update={"capacity": disk.capacity_bytes // ranks})
    offload = config.offload
    if is_shared:  # what only one rank has is no hit for the others
        offload = offload.model_copy(update={"to_shared": "always"})
    return config.model_copy(update={"tiers": tiers.model_copy(update={"disk": disk}), "offload": offload})


def replica() -> int:
    """Return the number of this data-parallel engine, which SGLang's configuration of the storage does not have."""
    try:
        parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
        return int(getattr(parallel, "dp_rank", None) or 0)
    except (ImportError, AttributeError, ValueError):
        return 0
