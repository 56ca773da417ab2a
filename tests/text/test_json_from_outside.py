"""JSON and YAML from outside: what is nested too deeply, or has a number that overflows, is an error with a name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm.config.document import parse_document
from kvbm.errors import KvbmError
from kvbm.observe import control_desk
from kvbm.text.outside import json_text
from kvbm.text.reading import MAX_LEVELS, parse_json
from kvbm_cli.bench.lmbenchmark.agentic import read_agent_trace
from kvbm_cli.bench.lmbenchmark.sharegpt import _json_in  # one of the readers of the table below
from kvbm_cli.bench.load.request import UNREADABLE, StreamedAnswer
from kvbm_cli.bench.metrics.summary import read_samples
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import RequestRecord
from kvbm_cli.bench.trace.reader import TraceReader
from kvbm_cli.bench.trace.request import TraceFormat
from kvbm_cli.bench.workload.files import load_workload
from kvbm_cli.profile.import_file import import_file
from kvbm_cli.runs.run_facts import RunFacts, UnreadableFacts
from kvbm_cli.size.measured_speeds import MeasuredSpeeds
from kvbm_cli.system.http_client import HttpAnswer

DEEP = [f'{{"checks": {opening * levels}' for opening in ("[", '{"a":') for levels in (100_000, 5000)]
DEEP += [f'{{"checks": {"[" * levels}{"]" * levels}}}' for levels in (MAX_LEVELS, 300, 900)]
NUMBERS = [f'{{"checks": {number}}}' for number in ("1.7e308", "-1.7e308", "1e400", "NaN", "Infinity", "1" * 5000)]


@pytest.mark.parametrize("text", [*DEEP, *NUMBERS], ids=lambda text: f"{text[-12:]} {len(text)}")
def test_json_that_overflows_is_refused(text: str) -> None:
    for content in (text, text.encode()):
        with pytest.raises(ValueError, match=r"levels|too large|Expecting|large"):
            parse_json(content)


@pytest.mark.parametrize("value", [1e30, -1e30, 10**30, 1.5e-300, "NaN 1e308", [[{"a": []}]], None, True, "[[" * 500])
def test_other_json_is_read_as_it_is(value: object) -> None:
    assert parse_json(json.dumps(value)) == value


def test_json_that_is_written_has_no_infinity() -> None:
    assert json_text({"a": [float("inf"), float("nan"), 1.5]}) == '{"a": [null, null, 1.5]}'


def directory(path: Path) -> BenchDirectory:
    return BenchDirectory(path.parent)


READERS: dict[str, Callable[[Path], object]] = {
    "summary.json": lambda path: directory(path).read_json(path.name),
    "runs.jsonl": lambda path: directory(path).runs(),
    "server-metrics.jsonl": read_samples,
    "agents.jsonl": read_agent_trace,
    "transcripts.json": _json_in,
    "trace.jsonl": lambda path: list(TraceReader(path, TraceFormat())),
    "doctor.json": MeasuredSpeeds.read,
    "workload.yaml": lambda path: load_workload(str(path)),
    "launch.yaml": lambda path: import_file(
        str(path), output=None, model=None, engine=None, select=None, as_json=False
    ),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("text", DEEP, ids=lambda text: f"{text[-12:]} {len(text)}")
def test_a_file_that_is_nested_too_deeply_is_named(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(f"{text}\n")
    with pytest.raises(KvbmError) as raised:
        READERS[name](path)
    assert name in str(raised.value)


@pytest.mark.parametrize("text", [*DEEP, *NUMBERS], ids=lambda text: f"{text[-12:]} {len(text)}")
def test_another_process_can_say_it_too(text: str) -> None:
    with pytest.raises(control_desk.Refused):
        control_desk.parsed(text.encode())
    with pytest.raises(UnreadableFacts):
        RunFacts.from_json(text)
    assert HttpAnswer(200, text.encode()).fields() == {}


@pytest.mark.parametrize(
    "text", [*DEEP[:5], '{"choices": [{"text": "a", "finish_reason": %s}]}' % ("[" * 900 + "]" * 900)]
)
def test_an_event_of_a_stream_that_is_nested_too_deeply_is_unreadable(text: str) -> None:
    record = RequestRecord(
        run="r", arm="a", cell="c", pair=1, index=0, session=0, turn=0, phase="measured", launched_ms=0.0
    )
    answer = StreamedAnswer(record, 0)
    try:
        answer.take(1, f"data: {text}\n\n".encode())
        answer.finish()
    except UNREADABLE:
        return
    parse_json(json.dumps(record.to_json()))


@pytest.mark.parametrize("text", [*DEEP[:4], DEEP[-1]], ids=lambda text: f"{text[-12:]} {len(text)}")
def test_a_profile_that_is_nested_too_deeply_is_a_mistake(text: str) -> None:
    assert parse_document(text, label="mine.yaml")[1]
