"""A small S3 server for one bucket, which refuses what a test says, and whose clock may be wrong."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "kv-cache"


class StandIn(http.server.ThreadingHTTPServer):
    """`refused` are methods that get 403, or 501 for a conditional put (`If-None-Match`) if `lacks_conditions`. With
    `overwrites`, the condition is ignored. `ahead` is added to its clock."""

    daemon_threads = True

    def __init__(self, *, refused: Sequence[str], overwrites: bool, lacks_conditions: bool, ahead: timedelta) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.refused, self.overwrites, self.lacks_conditions, self.ahead = refused, overwrites, lacks_conditions, ahead
        self.objects: dict[str, tuple[bytes, datetime]] = {}
        self.keys_put: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def log_message(self, *ignored: object) -> None:
        pass

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}").lstrip("/")

    def _answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _is_refused(self) -> bool:
        if self.command in self.server.refused:
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
            return True
        return False

    def do_PUT(self) -> None:
        content, key = self.rfile.read(int(self.headers["Content-Length"])), self._key()
        if self._is_refused():
            return
        if self.headers["If-None-Match"] and self.server.lacks_conditions:
            self._answer(501, b"<Error><Code>NotImplemented</Code></Error>")
        elif self.headers["If-None-Match"] and key in self.server.objects and not self.server.overwrites:
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        else:
            self.server.objects[key] = content, datetime.now(UTC) + self.server.ahead
            self.server.keys_put.add(key)
            self._answer(200, ETag='"x"')

    def do_GET(self) -> None:
        key = self._key()
        if not key:
            self._list(parse_qs(urlsplit(self.path).query).get("prefix", [""])[0])
        elif key not in self.server.objects:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif not self._is_refused():
            content, written = self.server.objects[key]
            self._answer(200, content, ETag='"x"', Last_Modified=format_datetime(written, usegmt=True))

    do_HEAD = do_GET

    def _list(self, prefix: str) -> None:
        if "LIST" in self.server.refused:
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
            return
        entries = "".join(
            f"<Contents><Key>{key}</Key><LastModified>{written.isoformat()}</LastModified><ETag>x</ETag>"
            f"<Size>{len(content)}</Size></Contents>"
            for key, (content, written) in sorted(self.server.objects.items())
            if key.startswith(prefix)
        )
        self._answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode())

    def do_POST(self) -> None:
        keys = re.findall("<Key>(.*?)</Key>", self.rfile.read(int(self.headers["Content-Length"])).decode())
        self._delete(keys)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        if "DELETE" in self.server.refused:
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        else:
            self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def do_DELETE(self) -> None:
        if not self._is_refused():
            self._delete([self._key()])
            self._answer(204)

    def _delete(self, keys: Sequence[str]) -> None:
        if "DELETE" not in self.server.refused:
            for key in keys:
                self.server.objects.pop(key, None)


@contextmanager
def s3_stand_in(
    *,
    refused: Sequence[str] = (),
    overwrites: bool = False,
    lacks_conditions: bool = False,
    ahead: timedelta = timedelta(),
) -> Iterator[StandIn]:
    with StandIn(refused=refused, overwrites=overwrites, lacks_conditions=lacks_conditions, ahead=ahead) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
