"""BodyRoom: limits the sum of the bodies that a server holds, so that many clients with long ones do not fill memory.

Bodies of up to SHORT_BYTES are not counted: the number of connections limits them, and no client with long bodies keeps
others from sending them. A body takes room as it arrives, not when it is announced.
"""

from __future__ import annotations

from aiohttp import web

SHORT_BYTES = 64 * 2**10


class BodyRoom:
    """Room for `limit_bytes` of bodies. Only the event loop uses it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0

    def share(self) -> BodyShare:
        return BodyShare(self)


class BodyShare:
    """Room of one request. As a context manager, it gives the room back at the end."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._bytes = 0

    def __enter__(self) -> BodyShare:
        return self

    def __exit__(self, *ended: object) -> None:
        self._room.taken_bytes -= self._bytes

    async def read(self, request: web.Request, most_bytes: int) -> bytes:
        """Read a body. Raises HTTPRequestEntityTooLarge, and HTTPServiceUnavailable if there is no room for it."""
        content = bytearray()
        self._require_room(request.content_length or 0, most_bytes)
        async for piece in request.content.iter_any():
            content += piece
            self._require_room(len(content), most_bytes)
            if len(content) > SHORT_BYTES:
                self._room.taken_bytes += len(content) - self._bytes
                self._bytes = len(content)
        return bytes(content)

    def _require_room(self, size: int, most_bytes: int) -> None:
        """Raise unless a body of this size, or of this size so far, may be held."""
        if size > most_bytes:
            raise web.HTTPRequestEntityTooLarge(max_size=most_bytes, actual_size=size)
        if size > SHORT_BYTES and self._room.taken_bytes + size - self._bytes > self._room.limit_bytes:
            raise web.HTTPServiceUnavailable(
                text=f"other requests have long bodies, of {self._room.taken_bytes} bytes together, and with these "
                f"{size} bytes it would be more than {self._room.limit_bytes}: send the request again later"
            )
