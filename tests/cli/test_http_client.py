"""The HTTP client never raises for what a server sends: another program may listen at the port of an engine."""

from __future__ import annotations

import socket
import threading

import pytest

from kvbm_cli.system.http_client import get

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
}
NO_OBJECT = {
    "not JSON": b"<html>",
    "not UTF-8": b"\xff\x00",
    "nested arrays": b"[" * 100_000,
    "nested objects": b'{"error":' * 100_000,
}


def get_from(payload: bytes):
    """The answer of `get` to a server that sends this once and closes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(payload)

        thread = threading.Thread(target=serve)
        thread.start()
        answer = get(f"http://127.0.0.1:{server.getsockname()[1]}/health", timeout_s=10)
        thread.join()
        return answer


@pytest.mark.parametrize("payload", FAILURES.values(), ids=FAILURES)
def test_a_wrong_answer_is_a_failure_with_a_reason(payload: bytes) -> None:
    answer = get_from(payload)
    assert answer.status == 0
    assert answer.failure


@pytest.mark.parametrize("body", NO_OBJECT.values(), ids=NO_OBJECT)
def test_a_body_that_is_no_json_object_has_no_fields(body: bytes) -> None:
    answer = get_from(UNTIL_CLOSE + body)
    assert answer.is_ok
    assert answer.fields() == {}
    assert answer.error()
