"""Messages between the client and its worker processes: pickled objects, each after its length."""

from __future__ import annotations

import asyncio
import pickle
import struct
from typing import Any

LENGTH = struct.Struct("<Q")


def encoded(message: object) -> bytes:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


async def read_message(reader: asyncio.StreamReader) -> Any:
    """Return the next message of a process that this one started, or of its parent. IncompleteReadError at the end."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return pickle.loads(await reader.readexactly(length))
