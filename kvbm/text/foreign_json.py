"""What a JSON text from outside costs to parse, before and while it is parsed.

Python's parser lets no other thread of its process run. Its time depends on the number of values, and on digits: an
integer of d digits takes d².
"""

from __future__ import annotations

MAX_DIGITS = 400  # the longest float without an exponent has 309; `sys.set_int_max_str_digits` allows no less than 640


def has_more_values(content: bytes, limit: int) -> bool:
    """Return True if the text may hold more than `limit` values. Text within strings counts as well."""
    left = limit
    for mark in (b",", b"[", b"{"):
        left -= content.count(mark)
        if left < 0:
            return True
    return False


def bounded_int(text: str) -> int:
    """Return the integer: `parse_int` for `json.loads`. ValueError for more than MAX_DIGITS characters."""
    if len(text) > MAX_DIGITS:
        raise ValueError(f"it has a number of {len(text)} digits: at most {MAX_DIGITS} are allowed")
    return int(text)
