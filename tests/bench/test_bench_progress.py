import io
import re
import sys

import pytest
from waiting import eventually

from kvbm_cli.bench.result.results import RequestRecord
from kvbm_cli.bench.show.terminal import BenchProgress, duration


def record(ttft_ms: float | None, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        "cell.1.kvbm", "kvbm", "cell", 1, 0, 0, 1, "steady", intended_ms=0.0, first_token_ms=ttft_ms, error=error
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, *, columns: int = 120) -> Terminal:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    return terminal


def wait_for_refreshes(terminal: Terminal) -> None:
    """Return when the live line has been drawn twice more."""
    for _ in range(2):
        length = len(terminal.getvalue())
        eventually(lambda length=length: len(terminal.getvalue()) > length)


def test_elsewhere_than_on_a_terminal_a_phase_is_a_line(capsys):
    with BenchProgress() as progress:
        progress.phase("recording: starting the engine")
        progress.phase("kvbm: 24 requests", expected_s=60.0, remaining_s=30.0)
        progress.request_ended(record(12.0))
    assert capsys.readouterr().err == "recording: starting the engine\nkvbm: 24 requests (1 min 30 s left)\n"


def test_on_a_terminal_a_live_line_shows_answers_failures_and_the_time_left(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    with BenchProgress() as progress:
        progress.phase("kvbm: 24 requests", expected_s=60.0, remaining_s=30.0)
        progress.request_ended(record(12.0))
        progress.request_ended(record(None, "HTTP 503"))
        wait_for_refreshes(terminal)
    text = terminal.getvalue()
    assert "━  kvbm: 24 requests · 1 answered, 1 failed · first token: kvbm 12 ms · 1 min" in text
    assert " left" in text


def test_the_bar_is_green_where_colours_are_wanted(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    monkeypatch.delenv("NO_COLOR")
    with BenchProgress() as progress:
        progress.phase("kvbm: 24 requests", expected_s=0.6, remaining_s=0.6)
        eventually(lambda: "\033[32m━" in terminal.getvalue())
    assert "\033[32m━" in terminal.getvalue()


@pytest.mark.parametrize("width", [30, 60, 80, 100])
def test_the_live_line_never_wraps(width, monkeypatch):
    terminal = on_a_terminal(monkeypatch, columns=width)
    with BenchProgress() as progress:
        progress.phase("baseline, kvbm, floor: 72 requests", expected_s=600.0, remaining_s=30.0)
        for _ in range(14):
            progress.request_ended(record(1234.0))
        progress.request_ended(record(None, "HTTP 503"))
        wait_for_refreshes(terminal)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\r", terminal.getvalue()).split("\r")
    assert max(len(line) for line in lines) < width
    last = next(line for line in reversed(lines) if line.strip())
    assert "baseline, kvbm" in last
    assert (" left" in last) == (width >= 60)
    assert ("15 answered" in last or "14 answered, 1 failed" in last) == (width >= 80)


def test_time_left_shrinks_and_never_falls_below_what_comes_after_the_phase():
    with BenchProgress() as progress:
        assert progress.left_s() is None
        progress.phase("x", expected_s=0.0, remaining_s=30.0)
        assert progress.left_s() == 30.0
        progress.phase("x", expected_s=100.0, remaining_s=30.0)
        assert 129.0 < progress.left_s() <= 130.0


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (60, "1 min 00 s"), (185, "3 min 05 s")])
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text
