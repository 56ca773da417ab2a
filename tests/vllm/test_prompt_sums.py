"""`kvbm_prompt_tokens_total` against the usage of every completed request: two API servers, failed loads, aborts."""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from prometheus_client.parser import text_string_to_metric_families
from traffic import tokens
from vllm_server import BLOCK_TOKENS, FAULTS_FILE, FAULTY_CONNECTOR, VllmServer, host_blocks

from kvbm_cli.make_model import materialise

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
    left = [tokens(random_, 2 * BLOCK_TOKENS + number) for number in range(LEFT)]
    for prompt in left:
        server.leave(prompt, 0.5)
    return [body["usage"] for body in bodies], sum(map(len, left))


@pytest.mark.parametrize("starts", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_tokens_by_source_are_the_usage_of_the_completed_requests(tmp_path, starts):
    """With several starts, the last scrapes before each end are summed."""
    random_, faults = Random(11), tmp_path / "faults"
    faults.write_text(json.dumps({"fail_every": 2}))
    environment = host_blocks(80) | {FAULTS_FILE: str(faults)}
    arguments = ("--api-server-count", "2")
    found: Counter[str] = Counter()
    usages: list[dict] = []
    aborted = 0
    for _ in range(starts):
        with VllmServer(
            materialise("vllm-25m"), *arguments, blocks=36, connector=FAULTY_CONNECTOR, environment=environment
        ) as server:
            answered, left = worked(server, random_)
            usages, aborted = usages + answered, aborted + left
            end_s = time.monotonic() + 60
            while (last := by_source(server))["aborted"] < left and time.monotonic() < end_s:
                time.sleep(0.2)
            found.update(last)
            assert server.metrics()["kvbm_onboard_failed_blocks"] > 0, "no load failed"
    total = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for usage in usages)
    assert found.pop("aborted") == aborted
    assert sum(found.values()) == total
    assert found["computed"] == total - cached
    assert found["host"] > 0
