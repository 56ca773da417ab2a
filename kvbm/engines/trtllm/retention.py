"""Retention of TensorRT-LLM: translates the `KvCacheRetentionConfig` of a request into a hint for kvbm.

It has a priority from 0 to 100 and a duration for ranges of the prompt. The range of the first token counts, because a
cached chain is of use from its beginning only. Requests are objects of C++ or of Python, and versions differ in what
can be read: what is missing is no hint.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

DEFAULT_PRIORITY = 35  # of blocks without a configuration


def hint_of(request: Any) -> dict[str, object] | None:
    """Return the hint in the words of kvbm, None if the request has the default priority or no configuration."""
    config = getattr(request, "kv_cache_retention_config", None)
    ranges = getattr(config, "token_range_retention_configs", None) or ()
    first = next((one for one in ranges if getattr(one, "token_start", None) == 0), None)
    priority = getattr(first, "priority", None)
    if not isinstance(priority, int) or priority == DEFAULT_PRIORITY:
        return None
    if priority < DEFAULT_PRIORITY:
        return {"priority": "low"}
    duration_s = _seconds(getattr(first, "duration_ms", None))
    return {"priority": "high"} if duration_s is None else {"retain_s": duration_s}


def _seconds(duration: object) -> float | None:
    """Return a duration, which bindings of C++ give as a timedelta and others in milliseconds; None for no end."""
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    return duration / 1000 if isinstance(duration, (int, float)) else None
