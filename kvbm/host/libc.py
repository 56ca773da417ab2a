"""LIBC: the C library, for what Python does not offer; a call that fails leaves its error number behind."""

from __future__ import annotations

import ctypes
import os

LIBC = ctypes.CDLL(None, use_errno=True)


def last_error() -> OSError:
    """What went wrong in this thread's last call."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
