"""Stores for the tests of the shared tier: each server runs once per process of pytest."""

import itertools
from contextlib import ExitStack

import pytest
import servers
from storage_rig import opened

LOCAL = ["directory", "memory"]
SERVERS = [pytest.param(name, marks=() if name == "moto" else pytest.mark.servers, id=name) for name in servers.NAMES]
numbers = itertools.count(1)


@pytest.fixture(scope="session")
def server_of(tmp_path_factory):
    """Return a function that returns the running server of a name; skips the test if it is not installed."""
    with ExitStack() as stack:
        started = {}

        def server_of(name):
            if name not in started:
                try:
                    started[name] = stack.enter_context(servers.running(name, tmp_path_factory.mktemp(name)))
                except servers.NotInstalled as missing:
                    pytest.skip(f"needs {missing}")
            return started[name]

        yield server_of


@pytest.fixture
def server(request, server_of, monkeypatch):
    """A server, whose credentials are in the environment. Give its name as an indirect parameter."""
    server = server_of(request.param)
    set_environment(monkeypatch, server.environment)
    return server


@pytest.fixture
def place(server):
    """An empty place on the server, as a URL."""
    return fresh_place(server)


@pytest.fixture(params=[*LOCAL, *SERVERS])
def url(request, tmp_path, server_of, monkeypatch):
    """An empty place on each kind of store."""
    if request.param == "directory":
        return f"file://{tmp_path}/objects"
    if request.param == "memory":
        return "memory:///"
    server = server_of(request.param)
    set_environment(monkeypatch, server.environment)
    return fresh_place(server)


def fresh_place(server):
    return f"{server.url}-{next(numbers)}"


def set_environment(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def root(tmp_path):
    """The directory of `rig`."""
    return tmp_path / "objects"


@pytest.fixture
def rig(root):
    """A storage over a directory. Modules about other stores have a `rig` of their own."""
    with opened(f"file://{root}") as rig:
        yield rig
