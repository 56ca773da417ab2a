"""BodyRoom: limits the sum of the bodies that a server holds, so that many clients with long ones do not fill memory.

Bodies of up to SHORT_BYTES are not counted: the number of connections limits them, and no client with long bodies keeps
others from sending them.
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
        self._take(request.content_length or 0, most_bytes)
        async for piece in request.content.iter_any():
            content += piece
            self._take(len(content), most_bytes)
        return bytes(content)

    def _take(self, size: int, most_bytes: int) -> None:
        """Take room for a body of this size, or of this size so far."""
        if size > most_bytes:
            raise web.HTTPRequestEntityTooLarge(max_size=most_bytes, actual_size=size)
        more = size - self._bytes
        if size <= SHORT_BYTES or more <= 0:
            return
        if self._room.taken_bytes + more > self._room.limit_bytes:
            raise web.HTTPServiceUnavailable(
                text=f"other requests have long bodies, of {self._room.taken_bytes} bytes together, and with these "
                f"{size} bytes it would be more than {self._room.limit_bytes}: send the request again later"
            )
        self._room.taken_bytes += more
        self._bytes = size
