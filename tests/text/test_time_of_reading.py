"""No text from outside takes more than linear time: each reader gets the worst text for it, at the size of its limit.

The CPU time for a text is compared with that for a quarter of it, in the thread of the test: about 4 times as much if
it is linear, 16 times if it is quadratic.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cpu_time import cpu_s

from kvbm.config.document import MAX_FILE_BYTES, parse_document
from kvbm.errors import ProfileError
from kvbm_cli.bench.metrics.engine_metrics import NAMES as BENCH_NAMES
from kvbm_cli.engine.engine_log import EngineLog
from kvbm_cli.engine.failure_reason import failure_reason_of
from kvbm_cli.plan import live
from kvbm_cli.profile import import_file
from kvbm_cli.profile.import_profile import imported
from kvbm_cli.runs import status
from kvbm_cli.system.http_client import MAX_METRICS_BYTES
from kvbm_cli.system.metrics_page import MetricsPage
from kvbm_cli.top import figures
from kvbm_cli.top.watched import TAIL_BYTES, MetricsTarget, last_warnings

METRICS_BYTES = MAX_METRICS_BYTES // 8  # the whole takes seconds, linear or not
MOST_TIMES = 9.0
SPARE_S = 0.5


def top(text: str) -> None:
    engines = figures.engines_of(MetricsPage.parse(text, figures.NAMES))
    figures.figures([(figures.Reading(0.0, page), figures.Reading(1.0, page)) for page in engines.values()])


def plan(text: str) -> None:
    found = live.plan_of("engine", MetricsPage.parse(text, figures.NAMES))
    if found is not None:
        found.text(None)


def of_status(text: str) -> None:
    # The reader itself: an engine that serves the page takes longer.
    status._off(MetricsPage.parse(text, status.NAMES))


def bench_sample(text: str) -> None:
    MetricsPage.parse(text, BENCH_NAMES)


def log(text: str) -> None:
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(text)
        file.flush()
        last_warnings(MetricsTarget("engine", "", logs=(Path(file.name),)))
        of_engine = EngineLog(Path(file.name), 0)
        of_engine.phase()
        of_engine.tail()
        failure_reason_of(of_engine.lines(), 1)


def profile(text: str) -> None:
    parse_document(text, label="mine.yaml")


def import_profile(text: str) -> None:
    with contextlib.suppress(ProfileError):
        launch, *others = import_file.launches_in(text, "file")
        assert imported(launch, "file", model=("m", "--model"), engine=("vllm", ""), others=others).text


def numbered(line: str, size: int, head: str = "") -> str:
    """Return so many characters of lines with a number each."""
    return head + "".join(line.format(number) for number in range(size // len(line.format(10_000))))


METRICS = {
    "a label without quotes": lambda size: f"kvbm_info{{{'a' * size}}} 1\n",
    "a label without its end": lambda size: "kvbm_info{" + 'a="\\"' * (size // 5) + "} 1\n",
    "labels without an end": lambda size: "kvbm_info{" + "} " * (size // 2) + "\n",
    "spaces": lambda size: "kvbm_info" + " " * size + "x y z\n",
    "states": lambda size: "kvbm_host_blocks{" + 'state="a"} 1 ' * (size // 13) + "\n",
    "engines": lambda size: numbered('kvbm_info{{engine="{0}"}} 1\nkvbm_disabled 1\n', size),
    "queues": lambda size: numbered('kvbm_queue_blocks{{queue="{0}"}} 1\n', size, 'kvbm_info{engine="0"} 1\n'),
    "capacities": lambda size: numbered(
        'kvbm_hit_rate_at{{capacity="{0}.5",eviction="lru"}} 1\n',
        size,
        'kvbm_tier_capacity_bytes{tier="host"} 1\n',
    ),
}
SERVE = "vllm serve m --x "
SCRIPTS = {
    "one word": lambda size: f"{SERVE}{'a' * size}",
    "words": lambda size: f"{SERVE}{'a-' * (size // 2)}",
    "names of secrets": lambda size: f"{SERVE}{'TOKEN' * (size // 5)}",
    "addresses": lambda size: f"{SERVE}{'http://a:b' * (size // 10)}",
    "tokens": lambda size: f"{SERVE}{'-eyJaaaaaaaa' * (size // 12)}",
    "the beginning of a key": lambda size: f"{SERVE}'-----BEGIN {'A' * size}'",
    "escapes": lambda size: SERVE + "\\a" * (size // 2),
    "pieces": lambda size: SERVE + "'a'" * (size // 3),
    "braces": lambda size: f"{SERVE}{'${a{}' * (size // 5)}",
    "commands": lambda size: f"{SERVE}{'$(a' * (size // 3)}",
    "short words": lambda size: f"{SERVE}{'a ' * (size // 12)}",
    "a growing array": lambda size: "a+=(x)\n" * (size // 7) + SERVE,
    "a growing variable": lambda size: "a+=x\n" * (size // 5) + SERVE,
    "a here document": lambda size: "cat <<A >f\n" + "x\n" * (size // 2) + "A\n" + SERVE,
    "a variable under conditions": lambda size: "if x\n" + "a=x\na+=x\n" * (size // 9) + SERVE,
    "commands in quotes": lambda size: "x 'vllm serve m' 'vllm serve m'\n" * 90 + "x 'a b'\n" * (size // 8) + SERVE,
    "instructions": lambda size: "FROM a\n" + "CMD a\nENV a b\n" * (size // 14) + 'CMD ["vllm", "serve", "m"]',
    "stages": lambda size: "".join(f"FROM s{one} AS s{one + 1}\nENV a{one} b\n" for one in range(size // 30)),
    "quotes of a unit": lambda size: f"ExecStart={SERVE}" + '\\"' * (size // 2) + "'",
    "programs with a here document": lambda size: "docker " * (size // 7) + f"<<A\nx\nA\n{SERVE}y",
    "blocks with variables": lambda size: numbered("```\nexport a{0}=b\n```\n", size) + f"```\n{SERVE}y\n```\n",
    "spaces of an instruction": lambda size: f"FROM a\nENV a{' ' * size}=\nCMD {SERVE}y",
    "options of a container": lambda size: f"singularity exec -{'e' * size}= x {SERVE}y",
    "blocks of code": lambda size: "```\nx\n```\n" * (size // 10) + f"```\n{SERVE}y\n```\n",
    "a list of Python": lambda size: "don't " + '["vllm", "serve", "m"' + ', "x", y(z)' * (size // 11) + "]",
    "lists without an end": lambda size: "don't " + '"vllm","serve",' * (size // 15),
    "documents of YAML": lambda size: "```yaml\na: 1\n```\n" * (size // 17) + f"```\n{SERVE}y\n```\n",
    "marks of the reader": lambda size: f"{SERVE}y\n" + "\ue000 " * (size // 4),
    "lines of prose": lambda size: "don't\n" + "A=b vllm serve m\n" * (size // 17),
    "a variable of spaces": lambda size: f"DYN_KVBM_CPU_CACHE_GB={' ' * size}x",
    "flags that are refused": lambda size: "vllm serve m" + "".join(f" --f{one} 1" for one in range(size // 80)),
}
PROFILES = {
    "empty lines": lambda size: "\n" * size + "a: b: c",
    "manifests without an end": lambda size: "apiVersion:\n" * (size // 12) + "a: b: c",
    "escaped quotes": lambda size: '"' + '\\"' * (size // 2),
    "quotes": lambda size: "engine: '" + '"' * size + "a'",
    "spaces": lambda size: "engine: '" + " " * size + "a'",
}
LOGS = {
    "warnings": lambda size: "WARNING " * (size // 8),
    "messages": lambda size: "kvbm: " * (size // 6),
    "errors": lambda size: "ERROR ] " * (size // 8),
    "names": lambda size: "a" * size,
    "calls": lambda size: "Aa b" + "0" * size,
}
Reader = Callable[[str], object]
CASES: list[tuple[str, Reader, Callable[[int], str], int]] = [
    (f"{reader.__name__}: {name}", reader, text, METRICS_BYTES)
    for reader in (top, plan, of_status, bench_sample)
    for name, text in METRICS.items()
]
CASES += [(f"profile: {name}", profile, text, MAX_FILE_BYTES) for name, text in PROFILES.items()]
CASES += [(f"log: {name}", log, text, TAIL_BYTES) for name, text in LOGS.items()]
CASES += [(f"import: {name}", import_profile, text, import_file.MAX_BYTES) for name, text in SCRIPTS.items()]


@pytest.mark.parametrize(("reader", "text", "size"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_reading_takes_linear_time(reader: Reader, text: Callable[[int], str], size: int) -> None:
    quarter, whole = text(size // 4), text(size)
    assert cpu_s(lambda: reader(whole)) < MOST_TIMES * cpu_s(lambda: reader(quarter)) + SPARE_S
