"""A small S3 server for one bucket, which refuses what a test says, and whose clock may be wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from urllib.parse import parse_qs, unquote

from fake_server import Connection, FakeServer, Request

BUCKET = "kv-cache"


class StandIn(FakeServer):
    """`refused` are methods that get 403. `ahead` is added to its clock."""

    def __init__(self, *, refused: Sequence[str] = (), ahead: timedelta = timedelta()) -> None:
        super().__init__()
        self.refused, self.ahead = refused, ahead
        self.objects: dict[str, tuple[bytes, datetime]] = {}
        self.keys_put: set[str] = set()

    async def answer(self, request: Request, connection: Connection) -> None:
        key = unquote(request.path).removeprefix(f"/{BUCKET}").lstrip("/")
        does = {"PUT": self._put, "GET": self._get, "HEAD": self._get, "POST": self._delete, "DELETE": self._delete}
        means = {("GET", ""): "LIST", ("POST", ""): "DELETE"}.get((request.method, key), request.method)
        is_absent = request.method in ("GET", "HEAD") and key and key not in self.objects
        if means in self.refused and not is_absent:
            connection.reply(403, "<Error><Code>AccessDenied</Code></Error>")
        else:
            does[request.method](key, request, connection)

    def _put(self, key: str, request: Request, connection: Connection) -> None:
        self.objects[key] = request.body, datetime.now(UTC) + self.ahead
        self.keys_put.add(key)
        connection.reply(200, ETag='"x"')

    def _get(self, key: str, request: Request, connection: Connection) -> None:
        if not key:
            prefix = parse_qs(request.query).get("prefix", [""])[0]
            entries = "".join(
                f"<Contents><Key>{key}</Key><LastModified>{written.isoformat()}</LastModified><ETag>x</ETag>"
                f"<Size>{len(content)}</Size></Contents>"
                for key, (content, written) in sorted(self.objects.items())
                if key.startswith(prefix)
            )
            connection.reply(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>")
        elif key not in self.objects:
            connection.reply(404, "<Error><Code>NoSuchKey</Code></Error>")
        else:
            content, written = self.objects[key]
            connection.reply(200, content, ETag='"x"', Last_Modified=format_datetime(written, usegmt=True))

    def _delete(self, key: str, request: Request, connection: Connection) -> None:
        keys = [key] if key else re.findall("<Key>(.*?)</Key>", request.body.decode())
        for one in keys:
            self.objects.pop(one, None)
        deleted = "".join(f"<Deleted><Key>{one}</Key></Deleted>" for one in keys)
        connection.reply(204 if key else 200, "" if key else f"<DeleteResult>{deleted}</DeleteResult>")
