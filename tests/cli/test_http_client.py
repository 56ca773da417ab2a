"""The HTTP client never raises for what a server sends: another program may listen at the port of an engine."""

import asyncio
import gzip
import socket

import pytest
from certificates import server_tls
from fake_server import Connection, FakeServer, Request

from kvbm_cli.system import http_client
from kvbm_cli.system.http_client import get, request

OK = b"HTTP/1.1 200 OK\r\n"
UNTIL_CLOSE = OK + b"Connection: close\r\n\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
FAILURES = {
    "nothing": b"",
    "not HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "cut in the body": OK + b"Content-Length: 100\r\n\r\n{}",
    "cut in a chunk": CHUNKED + b"5\r\nab",
    "length of an exabyte": OK + b"Content-Length: 1000000000000000000\r\n\r\n{}",
    "length beyond 64 bits": OK + b"Content-Length: 999999999999999999999999999999\r\n\r\n{}",
    "negative chunk": CHUNKED + b"-5\r\n{}",
    "chunk of an exabyte": CHUNKED + b"fffffffffffffff\r\n{}",
    "chunk beyond 64 bits": CHUNKED + b"ffffffffffffffffffffffff\r\n{}",
    "headers without end": OK + b"X-Long: " + b"a" * 500_000,
}
NO_OBJECT = {
    "not JSON": b"<html>",
    "not UTF-8": b"\xff\x00",
    "nested arrays": b"[" * 100_000,
    "nested objects": b'{"error":' * 100_000,
}


TRICKLES = 250  # every 20 ms: longer than any time limit here, and not without end, so that a missing limit shows


class Raw(FakeServer):
    """Sends this to every request, goes on with `trickle` for some seconds, and closes. `has_sent_all`: the client has
    let it."""

    def __init__(self, payload: bytes, trickle: bytes = b"") -> None:
        super().__init__()
        self.payload, self.trickle, self.headers = payload, trickle, {}
        self.has_sent_all = False

    async def answer(self, request: Request, connection: Connection) -> None:
        self.headers = request.headers
        connection.write(self.payload)
        for _ in range(TRICKLES if self.trickle else 0):
            await asyncio.sleep(0.02)
            connection.write(self.trickle)
        self.has_sent_all = True
        connection.close()


def get_from(payload: bytes, ask=get):
    with Raw(payload) as server:
        return ask(f"{server.url}/health", timeout_s=60)


@pytest.mark.parametrize("payload", FAILURES.values(), ids=FAILURES)
def test_a_wrong_answer_is_a_failure_with_a_reason(payload):
    answer = get_from(payload)
    assert answer.status == 0
    assert answer.failure


@pytest.mark.parametrize("body", NO_OBJECT.values(), ids=NO_OBJECT)
def test_a_body_that_is_no_json_object_has_no_fields(body):
    answer = get_from(UNTIL_CLOSE + body)
    assert answer.is_ok
    assert answer.fields() == {}
    assert answer.error()


SLOW = {
    "status": b"HTTP/1.1 200 OK",
    "headers": OK + b"X-Long: " + b"a" * 50,
    "body": OK + b"Content-Length: 100000\r\n\r\n",
    "body until the end": UNTIL_CLOSE,
    "chunks": CHUNKED + b"1\r\na\r\n",
    "answers to wait for": b"HTTP/1.1 100 Continue\r\n\r\n",
}


@pytest.mark.parametrize("start", SLOW.values(), ids=SLOW)
@pytest.mark.parametrize(
    "trickle", [b"a", b"1\r\na\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"], ids=["byte", "chunk", "100"]
)
def test_server_that_sends_a_byte_now_and_then_does_not_extend_the_time(start, trickle):
    with Raw(start, trickle) as server:
        answer = get(f"{server.url}/health", timeout_s=0.3)
        assert not server.has_sent_all, "the client waited for the end"
    assert answer.status == 0
    assert answer.failure


@pytest.fixture
def https(tmp_path):
    """A server with TLS that sends one byte after the other, and the file with its certificate."""
    server = Raw(SLOW["body"], b"a")
    server.tls, ca_file = server_tls(tmp_path)
    with server:
        yield server, str(ca_file)


def test_server_with_tls_does_not_extend_the_time_either(https):
    server, ca_file = https
    assert request("GET", f"{server.url}/health", timeout_s=0.5, ca_file=ca_file).failure.startswith("no complete")
    assert not server.has_sent_all


def test_tls_that_is_never_agreed_does_not_extend_the_time():
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = get(f"https://127.0.0.1:{server.getsockname()[1]}/health", timeout_s=0.1)
    assert answer.failure == "no complete answer within 0.1 s"


def test_a_server_whose_certificate_nobody_vouches_for_is_sent_nothing(https, tmp_path):
    server, ca_file = https
    assert "CERTIFICATE_VERIFY_FAILED" in get(f"{server.url}/health", timeout_s=60).failure
    (tmp_path / "other").mkdir()
    _, other = server_tls(tmp_path / "other")
    for url, trusted in ((server.url, str(other)), (server.url.replace("127.0.0.1", "localhost"), ca_file)):
        answer = request("GET", f"{url}/health", timeout_s=60, ca_file=trusted)
        assert "CERTIFICATE_VERIFY_FAILED" in answer.failure
    assert server.headers == {}


def test_server_that_never_answers_is_named_with_the_time():
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = get(f"http://127.0.0.1:{server.getsockname()[1]}/health", timeout_s=0.1)
    assert answer.failure == "no complete answer within 0.1 s"


@pytest.mark.parametrize("head", [UNTIL_CLOSE, OK + b"Content-Length: 5000\r\n\r\n", CHUNKED + b"1388\r\n"])
def test_answer_without_end_is_not_kept_in_memory(monkeypatch, head):
    monkeypatch.setattr(http_client, "MAX_BODY_BYTES", 1000)
    assert get_from(head + b"a" * 5000).failure == "the answer is longer than 1000 bytes"


def test_page_of_metrics_has_a_lower_limit(monkeypatch):
    monkeypatch.setattr(http_client, "MAX_METRICS_BYTES", 1000)
    answer = get_from(OK + b"Content-Length: 5000\r\n\r\n" + b"a" * 5000, ask=http_client.get_metrics)
    assert answer.failure == "the answer is longer than 1000 bytes"


@pytest.mark.parametrize("body", [b"", b"{}" * 500_000])
def test_whole_answer_is_returned(body):
    assert get_from(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body).body == body
    assert get_from(UNTIL_CLOSE + body).body == body


def test_redirect_is_an_answer_and_is_not_followed():
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0.2)
        location = b"Location: http://127.0.0.1:%d/\r\n" % other.getsockname()[1]
        answer = get_from(b"HTTP/1.1 307 Temporary Redirect\r\n" + location + b"Content-Length: 0\r\n\r\n")
        with pytest.raises(TimeoutError):
            other.accept()
    assert answer.status == 307


def test_compressed_body_is_not_decoded(monkeypatch):
    """A small body may decode to gigabytes."""
    monkeypatch.setattr(http_client, "MAX_BODY_BYTES", 10_000)
    body = gzip.compress(bytes(1_000_000))
    head = OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert get_from(head + body).body == body


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
def test_environment_names_no_proxy(monkeypatch, variable):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:1")
    assert get_from(OK + b"Content-Length: 2\r\n\r\n{}").is_ok


def test_netrc_of_the_user_is_not_sent(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with Raw(OK + b"Content-Length: 2\r\n\r\n{}") as server:
        assert get(server.url, timeout_s=60).is_ok
    assert "host" in server.headers
    assert "authorization" not in server.headers


def test_secret_in_a_header_is_not_in_the_reason():
    headers = {"Authorization": "Bearer secret\nkey"}
    answer = http_client.request("GET", "http://127.0.0.1:1/", headers=headers, timeout_s=1)
    assert answer.failure
    assert "secret" not in answer.failure


WRONG_ADDRESSES = [
    *("", "nonsense", "http://", "http://[::1/health", "http://127.0.0.1:port/", "http://127.0.0.1:0/"),
    *(
        "http://127.0.0.1:1/a b",
        "http://127.0.0.1:1/a\nb",
        "http://a\x00b/",
        "https://127.0.0.1:1/",
        "file:///etc/passwd",
    ),
    *("http://" + "a" * 300 + "/", "http://\ud800/", "http://user:secret@127.0.0.1:1/"),
]


@pytest.mark.parametrize("url", WRONG_ADDRESSES)
def test_address_that_is_none_is_a_failure_with_a_reason(url):
    answer = get(url, timeout_s=1)
    assert answer.status == 0
    assert answer.failure


def test_a_port_above_65535_is_none_although_the_system_would_use_its_lower_bits():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        answer = get(f"http://127.0.0.1:{server.getsockname()[1] + 65536}/", timeout_s=0.2)
        assert "Port out of range" in answer.failure
        with pytest.raises(TimeoutError):
            server.accept()
