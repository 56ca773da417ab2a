"""Service level objectives: the limits of a good request, which goodput counts.

ttft:500,tpot:50   first token within 500 ms, and 50 ms per further token
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LIMIT = re.compile(r"(ttft|tpot|e2e):(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in ms; `None` sets no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read `ttft:500,tpot:50,e2e:3000`, in any order. ValueError for anything else."""
        found = [_LIMIT.fullmatch(part) for part in text.split(",")]
        if None in found:
            raise ValueError("must be limits of `ttft`, `tpot` or `e2e` in ms, such as `ttft:500,tpot:50`")
        limits = {f"{one[1]}_ms": float(one[2]) for one in found if one}
        if len(limits) < len(found) or not all(limits.values()):
            raise ValueError("must have each limit once, and above 0 ms")
        return cls(**limits)

    def is_met(self, ttft_ms: float | None, tpot_ms: float | None, e2e_ms: float | None) -> bool:
        """Return whether a request with these times is good. A failed one, without TTFT or end, never is. An answer of
        one token has no TPOT and meets any limit of it."""
        if ttft_ms is None or e2e_ms is None:
            return False
        times = ((self.ttft_ms, ttft_ms), (self.tpot_ms, tpot_ms or 0.0), (self.e2e_ms, e2e_ms))
        return all(limit is None or time_ms <= limit for limit, time_ms in times)
