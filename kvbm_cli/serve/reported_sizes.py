"""Compares the sizes that kvbm computed with those that the started engine reports in its log.

kvbm: rank 0 allocated 682 blocks of 1572864 bytes in host memory     the connector: blocks of G2, bytes of a block
GPU KV cache size: 87,296 tokens                                     vLLM: tokens in G1
max_total_num_tokens=87296, chunked_prefill_size=4096                SGLang: tokens in G1
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvbm.sizing import ESTIMATE, Sizing
from kvbm_cli.engine.engine_log import end_of

MAX_LOG_BYTES = 16 << 20  # of the end of a log
_HOST = re.compile(r"kvbm: rank (\d{1,6}) (?:allocated|shares) (\d{1,15}) blocks of (\d{1,15}) bytes")
_DEVICE = re.compile(r"(?:(?:GPU|CPU) KV cache size: |\bmax_total_num_tokens=)([\d,]{1,20})\b")


@dataclass(frozen=True, slots=True)
class ReportedSizes:
    """None if the log does not say. With several ranks, the largest block and the fewest blocks."""

    block_bytes: int | None
    host_blocks: int | None
    device_tokens: int | None

    @classmethod
    def of(cls, log: str) -> ReportedSizes:
        """Read a log. A later line replaces an earlier one: the file may have the log of an earlier engine."""
        ranks = {rank: (int(blocks), int(size)) for rank, blocks, size in _HOST.findall(log)}
        tokens = _DEVICE.findall(log)
        return cls(
            block_bytes=max((size for _, size in ranks.values()), default=None),
            host_blocks=min((blocks for blocks, _ in ranks.values()), default=None),
            device_tokens=int(tokens[-1].replace(",", "")) if tokens else None,
        )

    def differences(self, sizing: Sizing) -> list[str]:
        found = [("bytes in a block", self.block_bytes, sizing.block_bytes)]
        found.append(("blocks in G2", self.host_blocks, sizing.host.block_count))
        if sizing.device is not None and sizing.device.set_by != ESTIMATE:
            found.append(("tokens in G1", self.device_tokens, sizing.device.token_count))
        return [f"{seen:,} {what}, not {computed:,}" for what, seen, computed in found if seen not in (None, computed)]


def difference_text(sizing: Sizing | Exception, logs: Iterable[Path]) -> str | None:
    """Return one line about what the engines report in another way, None if nothing differs or nothing is known."""
    if isinstance(sizing, Exception):
        return None
    found = [one for log in logs for one in ReportedSizes.of(end_of(log, MAX_LOG_BYTES)).differences(sizing)]
    differences = "; ".join(dict.fromkeys(found))
    return f"the engine reports sizes that differ from the computed ones: {differences}" if found else None
