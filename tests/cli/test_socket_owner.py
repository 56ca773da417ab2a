"""Who listens at an address is read from the kernel; a socket of somebody else never passes for the engine's."""

import os
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from kvbm_cli.system.socket_owner import is_served_by

US = [os.getpid()]
NOBODY = [2**22 + 1]


def listener(address: str, port: int = 0, *, shares_port: bool = False) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    if shares_port:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((address, port))
    made.listen()
    return made


@pytest.mark.parametrize(
    ("bound", "asked"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "::1"), ("::", "::1"), ("::", "127.0.0.1")],
)
def test_a_listening_process_is_found_by_the_address_that_reaches_it(bound, asked):
    with closing(listener(bound)) as made:
        port = made.getsockname()[1]
        assert is_served_by(US, address=asked, port=port)
        assert not is_served_by(NOBODY, address=asked, port=port)
    assert not is_served_by(US, address=asked, port=port)


def test_another_address_of_the_same_port_is_somebody_else():
    with closing(listener("127.0.0.2")) as made:
        assert not is_served_by(US, address="127.0.0.1", port=made.getsockname()[1])


def test_the_socket_of_this_very_address_gets_the_connections():
    script = "import socket, sys; s = socket.create_server(('127.0.0.1', 0), reuse_port=True)\n"
    script += "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        port = int(other.stdout.readline())
        with closing(listener("0.0.0.0", port, shares_port=True)):
            assert is_served_by([other.pid], address="127.0.0.1", port=port)
            assert not is_served_by(US, address="127.0.0.1", port=port)
            assert is_served_by(US, address="127.0.0.3", port=port)
        with closing(listener("127.0.0.1", port, shares_port=True)):
            assert not is_served_by(US, address="127.0.0.1", port=port), "it gets only a part of the connections"
            assert is_served_by([*US, other.pid], address="127.0.0.1", port=port)
        other.communicate()


def test_a_connection_is_no_listener():
    with closing(listener("127.0.0.1")) as made, socket.create_connection(made.getsockname()) as connection:
        assert not is_served_by(US, address="127.0.0.1", port=connection.getsockname()[1])
