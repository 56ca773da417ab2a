"""The socket and the route of live control: who is answered, in which time, and what hostile clients cannot do."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from rig import Rig, chain
from slow_clients import slow_clients
from waiting import eventually

from kvbm.config.schema import MetricsSection
from kvbm.errors import EnvironmentProblem
from kvbm.observe import bounded_server, control_desk
from kvbm.observe.bounded_server import MAX_CLIENTS
from kvbm.observe.control_desk import MAX_BYTES, ControlDesk
from kvbm.observe.control_server import opened
from kvbm.observe.telemetry import Telemetry

TOKEN = "0123456789abcdef" * 4


class SteppedLeader:
    """A leader whose thread sleeps until it is woken, like that of an idle engine."""

    def __init__(self) -> None:
        self.rig = Rig(slots=8)
        self.hashes = self.rig.fill("a", 4)
        self.control = self.rig.leader.control
        self._wake = threading.Event()
        self._is_ending = self.is_stuck = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def _run(self) -> None:
        while not self._is_ending:
            self._wake.wait()
            self._wake.clear()
            while self.control.has_work() and not self.is_stuck:
                self.control.advance()
                self.rig.step()

    def close(self) -> None:
        self._is_ending = True
        self.wake()
        self._thread.join()
        self.rig.close()


@pytest.fixture
def leader():
    made = SteppedLeader()
    yield made
    made.close()


@pytest.fixture
def directory(tmp_path):
    return tmp_path


@pytest.fixture
def served(leader, directory):
    server = opened(str(directory), ControlDesk(leader.control, leader.wake, engine=3), engine=3)
    assert server is not None
    yield path_in(directory)
    server.close()
    assert list(directory.glob("*.sock")) == []


def path_in(directory: Path) -> Path:
    (path,) = directory.glob("control-*.sock")
    return path


def connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    fd = os.open(path.parent, os.O_PATH)
    try:
        connection.connect(f"/proc/self/fd/{fd}/{path.name}")
    finally:
        os.close(fd)
    return connection


def sent(path: Path, message: bytes) -> bytes:
    """Everything that comes back; nothing if the server hangs up."""
    with connected(path) as connection:
        connection.settimeout(30)
        try:
            connection.sendall(message)
            received = b""
            while more := connection.recv(1 << 16):
                received += more
        except (BrokenPipeError, ConnectionResetError):
            return b""
    return received


def reply(path: Path, message: object) -> dict:
    return json.loads(sent(path, json.dumps(message).encode() + b"\n"))


def test_an_idle_engine_answers_and_says_which_it_is(served):
    answer = reply(served, {"verb": "ls"})
    assert answer["engine"] == 3
    assert answer["answer"]["tiers"][0]["states"]["evictable"] == 4
    assert reply(served, {"verb": "clear"})["answer"]["forgotten"] == {"G2": 4}
    assert reply(served, {"verb": "ls"})["answer"]["tiers"][0]["states"]["evictable"] == 0


def test_the_socket_belongs_to_its_user_alone(served):
    assert stat.S_IMODE(served.stat().st_mode) == 0o600


@pytest.mark.parametrize("length", [10, 300])
def test_a_directory_may_be_longer_than_the_path_of_a_socket(leader, tmp_path, length):
    directory = tmp_path / ("d" * 200) / ("e" * length)[:200]
    directory.mkdir(parents=True)
    server = opened(str(directory), ControlDesk(leader.control, leader.wake, engine=0), engine=0)
    assert server is not None
    assert "answer" in reply(path_in(directory), {"verb": "ls"})
    server.close()


def test_what_an_earlier_process_has_left_is_replaced(leader, directory):
    desk = ControlDesk(leader.control, leader.wake, engine=0)
    (directory / f"control-0-{os.getpid()}.sock").write_text("left")
    server = opened(str(directory), desk, engine=0)
    assert server is not None
    assert "answer" in reply(path_in(directory), {"verb": "ls"})
    server.close()


def test_an_engine_serves_without_control_if_its_directory_is_missing(leader, tmp_path, caplog):
    desk = ControlDesk(leader.control, leader.wake, engine=0)
    assert opened(None, desk, engine=0) is None
    assert caplog.messages == []
    assert opened(str(tmp_path / "missing"), desk, engine=0) is None
    assert "cannot reach this engine, because its socket cannot be made" in caplog.text


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"nothing", "not JSON"),
        (b"[" * 3000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"verb": "load"}', 'unknown verb "load"; known are clear, limit, ls, pin, prefetch, release'),
        (b'{"verb": ["ls"]}', 'unknown verb ["ls"]'),
        (b'{"verb": "ls", "tier": "G2"}', "`ls` has no argument `tier`"),
        (b'{"verb": "clear", "tier": "G4"}', '`tier` cannot be "G4"'),
        (b'{"verb": "clear", "tier": ["G2"]}', "`tier` cannot be"),
        (b'{"verb": "clear", "tenant": "alice"}', '`tenant` cannot be "alice"'),
        (b'{"verb": "pin"}', "`pin` requires `tokens`"),
        (b'{"verb": "pin", "tokens": "1  2"}', "`tokens` cannot be"),
        (b'{"verb": "pin", "tokens": "1 -2"}', "`tokens` cannot be"),
        (b'{"verb": "prefetch", "tokens": "2147483648"}', "`tokens` cannot be"),
        (b'{"verb": "pin", "tokens": "1", "seconds": "nan"}', "`seconds` cannot be"),
        (b'{"verb": "pin", "tokens": "1", "seconds": "9999999"}', "`seconds` cannot be"),
        (b'{"verb": "release", "pin": "all"}', '`pin` cannot be "all"'),
        (b'{"verb": "limit", "percent": "101"}', "`percent` cannot be"),
        (b'{"verb": "limit", "percent": "1e3"}', "`percent` cannot be"),
    ],
)
def test_a_wrong_message_is_refused_with_the_reason(served, message, why):
    assert why in json.loads(sent(served, message + b"\n"))["refused"]


def test_a_message_that_is_too_long_or_never_ends_is_cut_off(served, monkeypatch):
    monkeypatch.setattr(bounded_server, "CLIENT_TIMEOUT_S", 0.2)
    assert sent(served, b"x" * (MAX_BYTES + 1) + b"\n") == b""
    assert sent(served, b"{") == b""
    assert "answer" in reply(served, {"verb": "ls"})


def test_an_engine_that_takes_no_step_refuses_in_time_and_does_nothing(leader, served, monkeypatch):
    monkeypatch.setattr(control_desk, "LIMIT_S", 0.1)
    leader.is_stuck = True
    assert reply(served, {"verb": "clear"})["refused"].startswith("the engine takes no step, so that nothing was done")
    leader.is_stuck = False
    assert reply(served, {"verb": "ls"})["answer"]["tiers"][0]["states"]["evictable"] == 4


def fuzzed(random_: random.Random) -> bytes:
    """A message that is almost one, or none at all. It never clears: then every block must still be there."""
    good = json.dumps({"verb": "ls"}).encode()
    match random_.randrange(5):
        case 0:
            return random_.randbytes(random_.randrange(200))
        case 1:
            at = random_.randrange(len(good))
            return good[:at] + random_.randbytes(random_.randrange(4)) + good[at + random_.randrange(3) :]
        case 2:
            return json.dumps(
                {random_.choice(("verb", "tier", "x")): random_.choice((1, None, [], {}, "ls", "é"))}
            ).encode()
        case 3:
            return json.dumps({"verb": "clear", "tenant": "0" * random_.choice((31, 33, 4000))}).encode()
        case _:
            return b"[" * random_.randrange(1, 4000) + random_.randbytes(3)


def test_ten_thousand_fuzzed_messages_do_no_harm(leader, served):
    random_ = random.Random(7)
    desk = ControlDesk(leader.control, leader.wake, engine=0)
    for _ in range(10_000):
        answer = json.loads(desk.reply(fuzzed(random_), "a fuzzer"))
        assert ("answer" in answer) != ("refused" in answer)
    for _ in range(300):
        received = sent(served, fuzzed(random_) + random_.choice((b"\n", b"\n\n", b"\n{}")))
        assert received == b"" or "engine" in json.loads(received)
    assert leader.rig.leader.match("r", chain("a", 4), 0) == 4
    assert not leader.control.has_work()


def test_every_message_is_logged_with_its_sender_and_its_result(served, caplog):
    caplog.set_level("INFO")
    reply(served, {"verb": "ls"})
    reply(served, {"verb": "nonsense" * 400})
    ours = [line for line in caplog.messages if "control:" in line]
    assert len(ours) == 2
    assert f"process {os.getpid()} of user {os.geteuid()} sent" in ours[0]
    assert "done" in ours[0]
    assert "refused, unknown verb" in ours[1]
    assert len(ours[1]) < 1000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_neither_a_salt_nor_a_prompt_is_logged(served, caplog):
    caplog.set_level("INFO")
    for tokens in ("1234567 7654321", "wrong"):
        sent(served, json.dumps({"verb": "pin", "tokens": tokens, "salt": "secret"}).encode() + b"\n")
    assert len(caplog.messages) == 2
    assert not any(word in caplog.text for word in ("1234567", "secret"))


def test_another_user_is_refused_although_the_modes_let_it_in(leader, caplog):
    import tempfile

    script = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX)\n"
        "s.connect(sys.argv[1])\n"
        'try: s.sendall(b\'{"verb": "clear"}\\n\'); print(s.recv(100))\n'
        "except (BrokenPipeError, ConnectionResetError): print(b'')"  # closed before or after it was sent
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        directory = Path(name)
        directory.chmod(0o755)
        server = opened(name, ControlDesk(leader.control, leader.wake, engine=0), engine=0)
        assert server is not None
        path = path_in(directory)
        command = [sys.executable, "-c", script, str(path)]
        closed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "PermissionError" in closed.stderr
        path.chmod(0o666)
        opened_up = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (opened_up.stdout.strip(), opened_up.returncode) == ("b''", 0)
        server.close()
    assert "of user 65534 was refused" in caplog.text
    assert leader.rig.leader.match("r", leader.hashes, 0) == 4


# -- the metrics port --------------------------------------------------------------------------------------------------


@pytest.fixture
def url(leader, tmp_path):
    (tmp_path / "token").write_text(TOKEN + "\n")
    settings = MetricsSection(serve=True, port=0, log_interval_s=0, control_token_file=str(tmp_path / "token"))
    telemetry = Telemetry(settings)
    telemetry.watch(leader.rig.leader, leader.wake)
    assert telemetry.server is not None
    yield f"http://127.0.0.1:{telemetry.server.port}"
    telemetry.close()


def posted(url: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(f"{url}/control", data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_who_has_the_token_controls_over_the_metrics_port(url):
    status, body = posted(url, b'{"verb": "clear", "tier": "G2"}', Authorization=f"Bearer {TOKEN}")
    assert (status, json.loads(body)["answer"]["forgotten"]) == (200, {"G2": 4})
    assert posted(url, b"x" * (MAX_BYTES + 1), Authorization=f"Bearer {TOKEN}")[0] == 413
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:
        assert b"kvbm_info" in page.read()


@pytest.mark.parametrize("given", ["", TOKEN, f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", "Bearer é"])
def test_a_wrong_token_is_refused_and_learns_nothing(url, leader, given):
    assert posted(url, b'{"verb": "clear"}', Authorization=given.encode().decode("latin-1")) == (401, b"")
    assert leader.rig.leader.match("r", leader.hashes, 0) == 4


def test_without_a_token_file_the_port_controls_nothing(leader):
    telemetry = Telemetry(MetricsSection(serve=True, port=0, log_interval_s=0))
    telemetry.watch(leader.rig.leader, leader.wake)
    assert telemetry.server is not None
    status, body = posted(f"http://127.0.0.1:{telemetry.server.port}", b'{"verb": "clear"}')
    assert (status, b"forgotten" in body) == (405, False)
    telemetry.close()
    assert leader.rig.leader.match("r", leader.hashes, 0) == 4


@pytest.mark.parametrize(
    ("content", "why"), [(None, "no such file"), ("short\n", "fewer than 32 characters"), ("é" * 40, "it is not ASCII")]
)
def test_a_token_that_cannot_be_used_fails_the_start(tmp_path, content, why):
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(EnvironmentProblem, match=why):
        Telemetry(MetricsSection(serve=True, port=0, control_token_file=str(path)))


# -- slow clients ------------------------------------------------------------------------------------------------------

SCRAPES = 50
TO_CONTROL = b"POST /control HTTP/1.1\r\nAuthorization: Bearer %b\r\nContent-Length: 20000\r\n\r\n"
WAYS = {
    "silent": (b"", b"", False),
    "headers": (b"GET /metrics HTTP/1.1\r\n", b"X: y\r\n", False),
    "one_endless_header": (b"GET /metrics HTTP/1.1\r\nX: ", b"y", False),
    "body": (TO_CONTROL % TOKEN.encode(), b" ", False),
    "body_without_token": (TO_CONTROL % b"?", b" ", False),
    "answer": (b"GET /metrics HTTP/1.1\r\n\r\n", b"", True),
    "answer_never_read": (b"GET /metrics HTTP/1.1\r\n\r\n", b"", False),
}


def took_s(answer: bytes, expected: bytes, began_s: float) -> float:
    assert expected in answer
    return time.monotonic() - began_s


@pytest.mark.parametrize("way", WAYS)
def test_every_scrape_and_message_is_answered_beside_slow_clients(url, way):
    begin, drip, reads = WAYS[way]
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    times_s = []
    with slow_clients(100, lambda: socket.create_connection(address), begin, drip, reads=reads):
        for number in range(SCRAPES):
            began_s = time.monotonic()
            message = urllib.request.Request(f"{url}/control", data=b'{"verb": "ls"}', headers=headers)
            with urllib.request.urlopen(message if number % 5 == 4 else f"{url}/metrics", timeout=30) as answer:
                times_s.append(took_s(answer.read(), b"engine", began_s))
    assert statistics.median(times_s) < 1, times_s


@pytest.mark.parametrize("drip", [b"", b" "])
def test_every_message_on_the_socket_is_answered_beside_slow_clients(served, drip):
    times_s = []
    with slow_clients(100, lambda: connected(served), b"{", drip):
        for _ in range(SCRAPES):
            began_s = time.monotonic()
            times_s.append(took_s(sent(served, b'{"verb": "ls"}\n'), b"engine", began_s))
    assert statistics.median(times_s) < 1, times_s


def test_a_client_that_drips_is_closed_after_its_time(url, monkeypatch):
    monkeypatch.setattr(bounded_server, "CLIENT_TIMEOUT_S", 0.3)

    def is_closed() -> bool:
        try:
            client.sendall(b"X: y\r\n")
            return client.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.setblocking(False)
        client.sendall(b"GET /metrics HTTP/1.1\r\n")
        eventually(is_closed)


def test_the_oldest_unfinished_client_goes_first_and_no_client_takes_a_thread(served):
    threads = threading.active_count()
    silent = [connected(served) for _ in range(MAX_CLIENTS)]
    assert "answer" in json.loads(sent(served, b'{"verb": "ls"}\n'))
    assert threading.active_count() <= threads + 1
    for client in silent:
        client.setblocking(False)
    assert silent[0].recv(1) == b""
    for client in silent[1:]:
        with pytest.raises(BlockingIOError):
            client.recv(1)
    for client in silent:
        client.close()


def test_clients_that_connect_without_a_pause_take_few_descriptors(served):
    code = "import socket, sys; kept = []\nfor _ in range(900):\n    one = socket.socket(socket.AF_UNIX)\n"
    code += "    one.connect(sys.argv[1])\n    kept.append(one)\n"
    before, most = len(os.listdir("/proc/self/fd")), 0
    with subprocess.Popen([sys.executable, "-I", "-c", code, str(served)]) as clients:
        while clients.poll() is None:
            most = max(most, len(os.listdir("/proc/self/fd")) - before)
    assert clients.returncode == 0
    assert 0 < most < 2 * MAX_CLIENTS
