"""`kvbm_prompt_tokens_total` against the usage of every completed request: two API servers, failed loads, aborts."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from prometheus_client.parser import text_string_to_metric_families
from traffic import tokens
from vllm_server import BLOCK_TOKENS, FAULTS_FILE, FAULTY_CONNECTOR, VllmServer, host_blocks

from kvbm.engines.make_model import materialise
from kvbm_cli.bench import preparation
from kvbm_cli.bench.command import BenchRequest, bench
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import RequestRecord, Results

WORKLOAD = """
name: talk
users: 14
turns: 3
system_tokens: 128
history_tokens: 400
question_tokens: 48
answer_tokens: 8
history: canned
schedule: {arms: in_turn, pairs: 2, concurrency: 14}
"""
REQUESTS, LEFT, CONCURRENCY, MOST_ROUNDS = 60, 4, 6, 5


def prompts(random_: Random) -> list[list[int]]:
    """Prompts that begin with one of a few prefixes, more than device memory holds."""
    prefixes = [tokens(random_, 3 * BLOCK_TOKENS) for _ in range(8)]
    return [random_.choice(prefixes) + tokens(random_, random_.randrange(5, 2 * BLOCK_TOKENS)) for _ in range(REQUESTS)]


def by_source(server: VllmServer) -> dict[str, float]:
    """Of one scrape: tokens by source, and those of aborted requests."""
    found = {"aborted": 0.0}
    for family in text_string_to_metric_families(server.http.get("/metrics").raise_for_status().text):
        for sample in family.samples:
            if sample.name == "kvbm_prompt_tokens_total":
                found[sample.labels["source"]] = found.get(sample.labels["source"], 0.0) + sample.value
            elif sample.name == "kvbm_aborted_prompt_tokens_total":
                found["aborted"] += sample.value
    return found


def worked(server: VllmServer, random_: Random) -> tuple[list[dict], int]:
    """Answer requests, some of whose loads fail, and leave some; return the usages of those that were answered, and
    the prompt tokens of the others."""
    bodies: list[dict] = []
    for _ in range(MOST_ROUNDS):
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            bodies += pool.map(lambda prompt: server.completion(prompt, 4), prompts(random_))
        if server.metrics()["kvbm_onboard_failed_blocks"]:
            break
    return [body["usage"] for body in bodies], left_alone(server, random_)


@contextmanager
def started(faults: Path) -> Iterator[VllmServer]:
    """A vLLM with two API servers, half of whose loads fail."""
    faults.write_text(json.dumps({"fail_every": 2}))
    environment = host_blocks(120) | {FAULTS_FILE: str(faults)}
    arguments = ("--api-server-count", "2")
    with VllmServer(
        materialise("vllm-25m"), *arguments, blocks=36, connector=FAULTY_CONNECTOR, environment=environment
    ) as server:
        yield server


def last_scrape(server: VllmServer, aborted: int) -> dict[str, float]:
    """A scrape that has the tokens of all aborted requests, whose end vLLM notes late."""
    end_s = time.monotonic() + 60
    while (last := by_source(server))["aborted"] < aborted and time.monotonic() < end_s:
        time.sleep(0.2)
    return last


def left_alone(server: VllmServer, random_: Random) -> int:
    """Leave some requests; return the tokens of their prompts."""
    left = [tokens(random_, 2 * BLOCK_TOKENS + number) for number in range(LEFT)]
    for prompt in left:
        server.leave(prompt, 0.5)
    return sum(map(len, left))


@pytest.mark.parametrize("starts", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_tokens_by_source_are_the_usage_of_the_completed_requests(tmp_path, starts):
    """With several starts, the last scrapes before each end are summed."""
    random_ = Random(11)
    found: Counter[str] = Counter()
    usages: list[dict] = []
    aborted = 0
    for _ in range(starts):
        with started(tmp_path / "faults") as server:
            answered, left = worked(server, random_)
            usages, aborted = usages + answered, aborted + left
            found.update(last_scrape(server, left))
            assert server.metrics()["kvbm_onboard_failed_blocks"] > 0, "no load failed"
    total = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for usage in usages)
    require_sums(found, total=total, cached=cached, aborted=aborted)


def require_sums(found: Counter[str], *, total: int, cached: int, aborted: int) -> None:
    assert found.pop("aborted") == aborted
    assert sum(found.values()) == total
    assert found["computed"] == total - cached
    assert found["host"] > 0


@pytest.fixture
def unmeasured(monkeypatch) -> list[RequestRecord]:
    """The requests with which `kvbm bench` prepares a run, and which it does not record."""
    records: list[RequestRecord] = []
    send_all = preparation._send_all

    async def noted(*arguments) -> list[RequestRecord]:
        sent = await send_all(*arguments)
        records.extend(sent)
        return sent

    monkeypatch.setattr(preparation, "_send_all", noted)
    return records


@pytest.mark.soak
def test_tokens_by_source_are_the_usage_that_kvbm_bench_records(tmp_path, unmeasured):
    """Over two starts: what it recorded and its own requests before; clients that leave are in no record."""
    (workload := tmp_path / "talk.yaml").write_text(WORKLOAD)
    random_, aborted = Random(13), 0
    found: Counter[str] = Counter()
    recorded: list[RequestRecord] = []
    for start in range(2):
        with started(tmp_path / "faults") as server:
            output = tmp_path / f"run-{start}"
            bench(BenchRequest(compare=(server.url,), workloads=(str(workload),), output=output, as_json=True))
            recorded += [record for run in Results.read(BenchDirectory.open(output)).runs for record in run.records]
            left = left_alone(server, random_)
            found.update(last_scrape(server, left))
            aborted += left
            assert server.metrics()["kvbm_onboard_failed_blocks"] > 0, "no load failed"
    assert [record.error for record in recorded] == [None] * (2 * 2 * 14 * 3)
    answered = [record for record in (*recorded, *unmeasured) if record.is_ok]
    total = sum(record.prompt_tokens for record in answered)
    require_sums(found, total=total, cached=sum(record.cached_tokens for record in answered), aborted=aborted)
