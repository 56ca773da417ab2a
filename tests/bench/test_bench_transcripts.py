"""What `kvbm bench` and `kvbm plan` say without starting anything: transcripts in `snapshots/bench/commands.txt`, and
the examples of the documentation."""

import gzip
import re
import shlex
import subprocess

import pytest
from terminal import assert_transcript, steps_of, stored_entries
from trace_pages import HEAD, ROOT

from kvbm_cli.bench.trace import command as trace
from kvbm_cli.plan import command as plan

FILE = "bench/commands"
NAMES = [name for name in stored_entries(FILE) if name != "files"]
PAGES = ("docs/reference/trace.md", "docs/guide/plan.md")
EXAMPLE = re.compile(r"^```console\n\$ kvbm (.*)\n((?:.*\n)*?)```$", re.MULTILINE)
EXAMPLES = [(line, shown) for page in PAGES for line, shown in EXAMPLE.findall((ROOT / page).read_text())]


@pytest.fixture(autouse=True)
def no_progress(monkeypatch):
    """It would appear on a busy machine only."""
    for module in (trace, plan):
        monkeypatch.setattr(module, "PROGRESS_AFTER_S", 3600.0)


@pytest.fixture
def nothing_starts(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError(f"started {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr("kvbm_cli.bench.command.make_model", refuse)
    monkeypatch.setattr("kvbm_cli.bench.command.measure", refuse)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("name", NAMES)
def test_transcript(name, tmp_path):
    assert_transcript(FILE, name, tmp_path)
    assert not list(tmp_path.glob("kvbm-runs")), "nothing was measured"


@pytest.mark.parametrize("name", NAMES)
def test_pages_are_at_most_80_wide(name):
    for line, shown in steps_of(stored_entries(FILE)[name]):
        if line.startswith("kvbm bench") and "--json" not in line:
            page = shown.partition("----- stdout -----\n")[2].partition("----- stderr -----\n")[0]
            assert max(map(len, page.splitlines()), default=0) <= 80


def test_the_pages_have_examples_and_a_line_of_the_trace():
    assert len(EXAMPLES) >= 3
    [line] = re.findall(r"^```json\n(.*)\n```$", (ROOT / PAGES[0]).read_text(), re.MULTILINE)
    assert line in gzip.decompress(HEAD.read_bytes()).decode().splitlines()


@pytest.mark.parametrize(("line", "shown"), EXAMPLES)
def test_an_example_prints_what_its_page_shows(kvbm, line, shown):
    _, out, err = kvbm(*shlex.split(line))
    lines, expected = ([one.rstrip() for one in text.strip().splitlines()] for text in (out + err, shown))
    assert lines == expected
    assert line.startswith("plan ") or max(map(len, out.splitlines()), default=0) <= 80
