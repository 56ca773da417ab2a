"""The file with the rates of an engine, which its disk process writes and that of the next engine reads."""

from __future__ import annotations

import os
import socket
import threading

import pytest
from disk_rig import HASTY, LIMIT_S, assembled, opened
from test_client import opened as process_opened

from kvbm.tiers.disk import index_thread
from kvbm.tiers.disk.known_rates import read_rates, write_rates
from kvbm.tiers.rates import KnownRates


@pytest.mark.slow
def test_rates_outlive_the_process_of_the_disk(tmp_path):
    with process_opened(tmp_path) as rig:
        assert rig.tier.earlier_rates is None
        rig.tier.keep_rates(KnownRates(150.0))
        rig.tier.keep_rates(KnownRates(160.0, 20.0))
    with process_opened(tmp_path) as rig:
        assert rig.tier.earlier_rates == KnownRates(160.0, 20.0)


def test_without_persistence_no_rates_are_kept(tmp_path):
    with opened(tmp_path, persist=False) as rig:
        rig.tier.keep_rates(KnownRates(160.0))
    assert not [*tmp_path.iterdir()]
    with opened(tmp_path, persist=False) as rig:
        assert rig.tier.earlier_rates() is None


def test_rates_whose_write_hangs_turn_the_disk_off(tmp_path, monkeypatch):
    is_over = threading.Event()
    monkeypatch.setattr(index_thread, "write_rates", lambda path, known: is_over.wait(LIMIT_S))
    with assembled(tmp_path, limits=HASTY) as rig:
        rig.tier.keep_rates(KnownRates(160.0))
        rig.wait_until(lambda: rig.tier.poll() or not rig.tier.health.is_on)
        is_over.set()
        rig.wait_until(lambda: rig.tier.poll() or rig.tier.health.is_on)


SPEED = '{"tokens_per_s": %s}'
RATE = '{"tokens_per_s": 100.0, "blocks_per_s": %s}'


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "[" * 4096, '{"a":' * 800, '{"tokens_per_s": 1', "null", "\0" * 100, "9" * 4096),
        *(SPEED % value for value in ("NaN", "-1.0", '"9"', "5e-324", "1e308", "Infinity", "[1.0]")),
        *(SPEED % value for value in ("1" + "0" * 400, "true", "null", "0.0", "{}")),
        *(RATE % value for value in ("NaN", "5e-324", "-0.1", "1e308", "-Infinity", '"a"', "true", "[[]]")),
        '{"tokens_per_s": 100.0}' + " " * (100 << 20),
    ],
    ids=lambda content: content[:40].strip() or "blank",
)
def test_a_file_that_holds_no_rates_says_nothing(tmp_path, content):
    path = tmp_path / "rates.json"
    path.write_text(content)
    path.chmod(0o600)
    assert read_rates(path) is None


@pytest.mark.parametrize("kind", ["directory", "FIFO", "link", "socket", "of somebody else", "readable by others"])
def test_something_else_in_place_of_the_file_is_neither_read_nor_written(tmp_path, kind):
    path, target = tmp_path / "rates.json", tmp_path / "target"
    target.write_text('{"tokens_per_s": 100.0}')
    target.chmod(0o600)
    listener = socket.socket(socket.AF_UNIX)
    if kind == "directory":
        path.mkdir(0o700)
    elif kind == "FIFO":
        os.mkfifo(path, 0o600)
    elif kind == "link":
        path.symlink_to(target)
    elif kind == "socket":
        listener.bind(str(path))
    else:
        target.rename(path)
        path.chmod(0o600 if kind == "of somebody else" else 0o604)
        if kind == "of somebody else":
            if os.geteuid():
                pytest.skip("only root can give files away")
            os.chown(path, 65534, -1)
    before = [(file.name, file.lstat().st_mode, file.lstat().st_size) for file in sorted(tmp_path.iterdir())]
    assert read_rates(path) is None
    write_rates(path, KnownRates(160.0))
    assert [(file.name, file.lstat().st_mode, file.lstat().st_size) for file in sorted(tmp_path.iterdir())] == before
    listener.close()
