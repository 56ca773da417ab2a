"""A small S3 server in this process, for environments without moto: a bucket in memory, without check of signatures."""

import hashlib
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "kv-cache"
DATE = "2026-01-01T00:00:00.000Z"


@dataclass
class SmallS3:
    port: int
    objects: dict[str, bytes] = field(default_factory=dict)
    url: str = f"s3://{BUCKET}/team"

    @property
    def environment(self):
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def key(self):
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}").lstrip("/")

    def answer(self, status, content=b"", **headers):
        self.send_response(status)
        self.close_connection = True
        for name, value in {"Content-Length": len(content), "Connection": "close", **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        objects = self.server.kept.objects
        if self.headers["If-None-Match"] == "*" and self.key in objects:
            self.answer(412)
        else:
            objects[self.key] = content
            self.answer(200, ETag=etag(content))

    def do_GET(self):
        query, objects = parse_qs(urlsplit(self.path).query), self.server.kept.objects
        if not self.key:
            self.answer(200, listing(objects, query.get("prefix", [""])[0]).encode(), Content_Type="application/xml")
        elif self.key not in objects:
            self.answer(404)
        else:
            self.send_object(objects[self.key])

    do_HEAD = do_GET

    def send_object(self, content):
        facts = {"ETag": etag(content), "Last_Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        wanted = self.headers["Range"]
        if wanted is None:
            self.answer(200, content, **facts)
            return
        begin, end = wanted.removeprefix("bytes=").split("-")
        part = content[int(begin) : int(end) + 1] if begin and end else content[int(begin) :]
        last = int(begin) + len(part) - 1
        self.answer(206, part, Content_Range=f"bytes {begin}-{last}/{len(content)}", **facts)

    def do_DELETE(self):
        self.server.kept.objects.pop(self.key, None)
        self.answer(204)

    def log_message(self, *_):
        pass


def etag(content):
    return f'"{hashlib.md5(content).hexdigest()}"'


def listing(objects, prefix):
    found = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>{DATE}</LastModified><ETag>{escape(etag(content))}</ETag>"
        f"<Size>{len(content)}</Size></Contents>"
        for key, content in sorted(objects.items())
        if key.startswith(prefix)
    )
    return f"<ListBucketResult><Name>{BUCKET}</Name><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"


@contextmanager
def running():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.kept = SmallS3(server.server_port)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.kept
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
