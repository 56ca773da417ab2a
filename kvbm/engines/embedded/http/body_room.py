"""BodyRoom: limits the sum of the bodies that a server holds, so that many clients with long ones do not fill memory.

Bodies of up to SHORT_BYTES are not counted: the number of descriptors limits them, and no client with long bodies keeps
others from sending them. A body takes room as it arrives, not when it is announced.
"""

from __future__ import annotations

from contextlib import ExitStack

from aiohttp import web

SHORT_BYTES = 64 * 2**10


class BodyRoom:
    """Room for `limit_bytes` of bodies. Only the event loop uses it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0

    async def read(self, request: web.Request, most_bytes: int, held: ExitStack) -> bytes:
        """Read a body, whose room is free again at the end of `held`. Raises HTTPRequestEntityTooLarge, and
        HTTPServiceUnavailable if there is no room for it."""
        content, counted = bytearray(), 0

        def give_back() -> None:
            self.taken_bytes -= counted

        held.callback(give_back)
        self._require_room(request.content_length or 0, counted, most_bytes)
        async for piece in request.content.iter_any():
            content += piece
            self._require_room(len(content), counted, most_bytes)
            if len(content) > SHORT_BYTES:
                self.taken_bytes += len(content) - counted
                counted = len(content)
        return bytes(content)

    def _require_room(self, size: int, counted: int, most_bytes: int) -> None:
        """Raise unless a body of this size, or of this size so far, may be held."""
        if size > most_bytes:
            raise web.HTTPRequestEntityTooLarge(max_size=most_bytes, actual_size=size)
        if size > SHORT_BYTES and self.taken_bytes + size - counted > self.limit_bytes:
            raise web.HTTPServiceUnavailable(
                text=f"other requests have long bodies, of {self.taken_bytes} bytes together, and with these "
                f"{size} bytes it would be more than {self.limit_bytes}: send the request again later"
            )
