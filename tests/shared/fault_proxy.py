"""FaultProxy: an HTTP proxy in front of an object store, which has one fault at a time.

    refuse          nobody listens
    hang            accepts, and never answers
    unavailable     answers 503
    stall           sends half of an object, and nothing more
    cut             sends half of an object, and closes the connection
    short           sends half of an object, with a Content-Length that fits
    flip            changes one byte of an object
    slow            sends an object at `bytes_per_s`

Requests go to the server unchanged but for `Connection`, so that signatures stay valid. One request per connection.
"""

import socket
import threading
import time
from collections import Counter
from contextlib import suppress

FAULTS = ("refuse", "hang", "unavailable", "stall", "cut", "short", "flip", "slow")
SLOW_BYTES_PER_S = 4000
LOOK_S = 0.02
SOCKET_LIMIT_S = 60.0


class FaultProxy:
    """Use as a context manager. Set `fault` to one of FAULTS or to None at any time."""

    def __init__(self, server_port):
        self._server = ("127.0.0.1", server_port)
        self._fault = None
        self._is_closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.faults_shown = 0
        self.objects_asked = Counter()  # by the line of the request
        self.bytes_per_s = SLOW_BYTES_PER_S
        self._accepting = self._start(self._accept, self._listener)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._is_closed = True
        self._stop_listening()

    @property
    def fault(self):
        return self._fault

    @fault.setter
    def fault(self, fault):
        assert fault is None or fault in FAULTS, fault
        was, self._fault = self._fault, fault
        if fault == "refuse":
            self._stop_listening()
        elif was == "refuse":
            self._listener = socket.create_server(("127.0.0.1", self.port))
            self._accepting = self._start(self._accept, self._listener)

    def _stop_listening(self):
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._accepting.join()
        self._listener.close()

    def _start(self, target, *arguments):
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        return thread

    def _accept(self, listener):
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                self._start(self._serve, client)

    def _serve(self, client):
        client.settimeout(SOCKET_LIMIT_S)
        with client, suppress(OSError):
            head, body = received(client)
            if not head:
                return
            is_object = head.startswith(b"GET ") and b"/v1/" in head.partition(b"?")[0].partition(b"\r")[0]
            if is_object:
                self.objects_asked[head.partition(b"\r")[0]] += 1
            fault = self._fault
            if fault == "hang":
                self._show(fault)
                return
            if fault == "unavailable":
                self.faults_shown += 1
                client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            head, content = self._asked(head, body)
            self._answer(client, content, fault if is_object else None)

    def _asked(self, head, body):
        """Send a request to the server; return its head and the whole answer."""
        lines = [line for line in head.split(b"\r\n") if line and not line.lower().startswith(b"connection:")]
        with socket.create_connection(self._server, SOCKET_LIMIT_S) as server:
            server.sendall(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
            parts = []
            while part := server.recv(1 << 20):
                parts.append(part)
        return head, b"".join(parts)

    def _answer(self, client, content, fault):
        head, _, body = content.partition(b"\r\n\r\n")
        head, half = head + b"\r\n\r\n", len(body) // 2
        if fault is None or not head.startswith(b"HTTP/1.1 200"):
            client.sendall(content)
            return
        self.faults_shown += 1
        if fault == "short":
            old, new = (b"%d" % size for size in (len(body), half))
            lines = [line.replace(old, new) if is_length(line) else line for line in head.split(b"\r\n")]
            client.sendall(b"\r\n".join(lines) + body[:half])
        elif fault == "flip":
            client.sendall(head + body[:-100] + bytes([body[-100] ^ 1]) + body[-99:])
        elif fault == "slow":
            client.sendall(head)
            step = int(self.bytes_per_s * LOOK_S)
            for at in range(0, len(body), step):
                client.sendall(body[at : at + step])
                time.sleep(LOOK_S)
        else:
            client.sendall(head + body[:half])
            if fault == "stall":
                self._show(fault, counted=False)

    def _show(self, fault, *, counted=True):
        """Keep a connection silent until the fault ends."""
        self.faults_shown += counted
        while self._fault == fault and not self._is_closed:
            time.sleep(LOOK_S)


def is_length(line):
    return line.lower().startswith(b"content-length:")


def received(client):
    """Return the head of a request and its body, as they came."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(1 << 16)
        if not part:
            return b"", b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line.partition(b":")[2]) for line in head.split(b"\r\n") if is_length(line)), 0)
    while len(body) < length:
        part = client.recv(1 << 20)
        if not part:
            return b"", b""
        body += part
    return head, body
