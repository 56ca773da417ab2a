"""LIBC: the C library, for calls that Python lacks. After a failed call, `last_error` returns its error."""

from __future__ import annotations

import ctypes
import os

LIBC = ctypes.CDLL(None, use_errno=True)


def last_error() -> OSError:
    """Return the error of this thread's last call."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
