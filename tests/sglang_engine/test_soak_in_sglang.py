"""Hundreds of requests, damages and faults of the disk, on one real SGLang: every answer is compared with that of an
SGLang without its hierarchical cache. 35 minutes; `nox -s sglang -- -m soak tests/sglang_engine`.

With KVBM_WRITE_RESULTS=1, the results are written to bench/results/<machine>-sglang-soak.json. KVBM_SOAK_PART=2/3 takes
the second third of the faults.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from chaos_damages import BELOW_ENGINES, Caches, instance_of, spoiled
from chaos_faults import kill, paused
from exchanges import save_twin
from kept_results import KeptResults, row_of
from sglang_server import PAGE, disk_at, plain, profile_of, serving
from traffic import TOLERANCE, Request, compare, conversations, hold, tokens

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(0)]

AT_ONCE = 4
DISK_BLOCKS = 160
DISK_FAULTS = Path(__file__).parents[1] / "embedded" / "disk_faults"
FAULT_CASES = 30
CASE_PROMPTS = 4
DAMAGE_CASES = 30  # test_sglang_damages.py has 270 more
DAMAGED_BLOCKS = 100
PROMPTS = [Request(tokens(random.Random(f"prompt {number}"), 300 + 20 * number), 8) for number in range(16)]
TALKS = conversations(40, turns=5, seed=3)
SHARED = tokens(random.Random("shared"), 6 * PAGE)
SINGLE = [
    *(Request(SHARED + tokens(random.Random(f"shared {number}"), 100), 8) for number in range(100)),
    *(Request(tokens(random.Random(f"churn {number}"), 500), 8) for number in range(100)),
]
SALTED = [Request(tokens(random.Random(f"salted {number}"), 5 * PAGE + 9), 8) for number in range(20)]
SALTS = ({"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"}, {"cache_salt": "a", "extra_key": "x" * 5000}, {})


def part(count: int) -> list[int]:
    number, _, of = os.environ.get("KVBM_SOAK_PART", "1/1").partition("/")
    return [case for case in range(count) if case % int(of) == int(number) - 1]


@pytest.fixture(scope="module")
def results():
    command = "nox -s sglang -- -m soak tests/sglang_engine"
    return KeptResults("sglang-soak", command, key="what", engine="sglang")


def ask_all(server, requests, found=None, **fields):
    """Return the answers; `found` counts the cached tokens by where they were."""

    def ask(request):
        reply = server.ask(request.prompt, request.max_tokens, **fields)
        if found is not None:
            found.update(reply.cached)
        return reply.answer

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(requests, pool.map(ask, requests), strict=True))


def assert_right(comparison):
    assert not comparison.wrong, f"{comparison}\n" + "\n".join(comparison.wrong)
    assert comparison.ties <= 1 + comparison.requests // 50, f"too many ties to believe: {comparison}"


def test_five_hundred_answers_are_those_of_sglang_without_its_cache(model, results, tmp_path):
    """Conversations, shared beginnings, prompts that come once, salts, and clients that leave."""
    with plain(model, tmp_path / "plain.log") as server:
        expected = hold(lambda request: server.ask(request.prompt, request.max_tokens).answer, TALKS, AT_ONCE)
        expected |= ask_all(server, [*SINGLE, *SALTED])
        own = Counter()
        repeated = random.Random("own").sample(list(expected), 100)
        again = {}
        for request in repeated:
            server.flush()
            again |= ask_all(server, [request])  # computed, alone
            own.update(server.ask(request.prompt, request.max_tokens).cached)
            again[request] = server.ask(request.prompt, request.max_tokens).answer  # from device memory
    assert own["device"] > 0
    of_sglang = compare(again, {one: expected[one] for one in repeated})
    profile = profile_of(model, disk_at(tmp_path / "disk", capacity="2GB"), arguments={"hicache_ratio": 1.5})
    found, answers = Counter(), {}
    with serving(profile, tmp_path / "log") as server:
        turns = len(TALKS[0].said)
        asked = list(expected)[: turns * len(TALKS)]
        singles = iter(SINGLE)
        with ThreadPoolExecutor(2) as leavers:
            for turn in range(turns):
                left = [leavers.submit(server.abort, tokens(random.Random(f"{turn} {n}"), 400)) for n in range(8)]
                batch = asked[turn * len(TALKS) : (turn + 1) * len(TALKS)]
                batch += [next(singles) for _ in range(len(SINGLE) // turns)]
                answers |= ask_all(server, random.Random(turn).sample(batch, len(batch)), found)
                for one in left:
                    one.result()
        count, salted = len(answers), []
        for salt in SALTS:
            first, second = Counter(), Counter()
            salted.append(compare(ask_all(server, SALTED, first, **salt), {one: expected[one] for one in SALTED}))
            salted.append(compare(ask_all(server, SALTED, second, **salt), {one: expected[one] for one in SALTED}))
            assert sum(first.values()) == 0, f"pages of another salt are found with {salt}: {first}"
            assert sum(second.values()) > 5 * PAGE * len(SALTED) // 2, second  # SGLang gives up slow loads
        server.wait_until_written()
        server.flush()
        from_storage = Counter()
        stored = random.Random("stored").sample(asked[-len(TALKS) :] + SINGLE[:60], 60)
        last = compare(ask_all(server, stored, from_storage), {one: expected[one] for one in stored})
        counters = server.counters()
    whole = compare(answers, {one: expected[one] for one in answers})
    results.add(
        {
            "what": "requests",
            **row_of(whole),
            "salted_requests": 2 * len(SALTS) * len(SALTED),
            "aborted_requests": 8 * turns,
            "after_a_flush": row_of(last),
            "cached_tokens": dict(found),
            "cached_tokens_after_a_flush": dict(from_storage),
            "blocks_from_disk": counters["kvbm_onboard_blocks_d2d"],
            "blocks_to_disk": counters["kvbm_offload_blocks_h2d"],
            "faults": counters["kvbm_faults"],
            "largest_logprob_difference_of_sglang_itself": of_sglang.worst,
        }
    )
    for one in (whole, last, *salted):
        assert_right(one)
    assert count + 2 * len(SALTS) * len(SALTED) >= 500
    assert max(one.worst for one in (whole, last, *salted)) <= 4 * max(of_sglang.worst, TOLERANCE / 100)
    assert found["storage"] > 1000
    assert from_storage["storage"] > 5000
    assert counters["kvbm_faults"] == 0


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    with plain(model, tmp_path_factory.mktemp("plain") / "log") as server:
        return ask_all(server, PROMPTS)


def _part_name() -> str:
    text = os.environ.get("KVBM_SOAK_PART")
    return f", part {text}" if text else ""


def raised(log: str) -> list[str]:
    """Tracebacks of kvbm and of SGLang's cache, SGLang has others of its own when it starts."""
    parts = [one.partition("\n[")[0] for one in log.split("Traceback (most recent call last):")[1:]]
    return [
        one for one in parts if re.search("kvbm|mem_cache|cache_controller", one) and "EnvironmentProblem" not in one
    ]


def damaged_disk(directory):
    return {"disk": {"directory": str(directory), "blocks": DAMAGED_BLOCKS, "drain_s": 30.0}}


@pytest.fixture(scope="module")
def other(model, tmp_path_factory):
    """The disk of a model with other weights, which has the same prompts."""
    home = tmp_path_factory.mktemp("other")
    twin = save_twin(shutil.copytree(model, home / "v1"), rows=range(4000))
    with serving(profile_of(twin, damaged_disk(home / "disk")), home / "log") as server:
        ask_all(server, PROMPTS[:8])
        server.wait_until_written()
    return home / "disk"


def test_damages_at_rest_cost_misses_and_change_no_answer(model, expected, other, results, tmp_path):
    """The storage is detached, its disk is damaged, and a storage is attached to it."""
    written, new = PROMPTS[:8], PROMPTS[8:10]
    home, kinds, found, wrong, times_s = tmp_path, Counter(), Counter(), [], []
    arguments = {"hicache_storage_prefetch_policy": "wait_complete"}
    with serving(profile_of(model, damaged_disk(home / "ended"), arguments=arguments), home / "log") as server:
        ask_all(server, [Request(tokens(random.Random(f"old {n}"), 5 * PAGE), 4) for n in range(3)])
        ask_all(server, written[:4])
        server.wait_until_written()
        shutil.copytree(home / "ended", home / "older")
        ask_all(server, written)
        server.wait_until_written()
        shutil.copytree(home / "ended", home / "killed")
        server.detach()
        slot_bytes = (instance_of(home / "ended") / "arena").stat().st_size // DAMAGED_BLOCKS // 4096 * 4096
        caches = Caches(home / "ended", home / "killed", home / "older", other, slot_bytes)
        for number in range(DAMAGE_CASES):
            damage = BELOW_ENGINES[number * len(BELOW_ENGINES) // DAMAGE_CASES]
            chosen = random.Random(f"damage {number}")
            (case := home / f"{number}").mkdir()
            kinds[damage.area] += 1
            with spoiled(damage, caches, case / "disk", chosen) as site:
                status, text = server.try_attach(tiers=damaged_disk(site.directory))
                if status != 200:
                    assert site.may_refuse, (damage.name, text)
                    assert str(site.directory) in text
                    found["refused"] += 1
                    continue
                server.flush()
                asked = [*chosen.sample(written, CASE_PROMPTS), *new]
                wrong += [f"{number} {damage.name}: {one}" for one in _told(server, asked, expected, found, times_s)]
                counters = server.counters()
                assert counters["kvbm_faults"] == 0, (number, damage.name)
                is_used = bool(counters["kvbm_onboard_blocks_d2d"])
                assert is_used or not damage.keeps, f"{number} {damage.name}: nothing was found on disk"
                server.detach()
        log = server.log.read_text()
    results.add(
        {
            "what": "damages at rest",
            "damages": sum(kinds.values()),
            "kinds": dict(kinds),
            **found,
            "wrong": len(wrong),
            "longest_answer_s": round(max(times_s), 2),
        }
    )
    assert not wrong, "\n".join(wrong)
    assert not raised(log)
    assert max(times_s) < 60, "a request hangs"


def _told(server, asked, expected, found, times_s):
    """Yield what is wrong with the answers."""
    for request in asked:
        seconds, reply = _reply(server, request)
        times_s.append(seconds)
        found["answers"] += 1
        found["tokens_from_storage"] += reply.cached["storage"]
        yield from compare({request: reply.answer}, {request: expected[request]}).wrong


def _reply(server, request):
    """Return the seconds of a reply, and it."""
    began_s = time.monotonic()
    reply = server.ask(request.prompt, request.max_tokens)
    return time.monotonic() - began_s, reply


def test_live_faults_cost_misses_and_change_no_answer(model, expected, results, tmp_path):
    orders = tmp_path / "orders"
    orders.write_text("{}")
    environment = {"PYTHONPATH": str(DISK_FAULTS), "KVBM_TEST_DISK_FAULTS": str(orders)}
    tiers = {"disk": {"directory": str(tmp_path / "disk"), "blocks": 3 * DISK_BLOCKS}}
    with serving(profile_of(model, tiers, environment=environment), tmp_path / "log") as server:
        ask_all(server, PROMPTS)
        server.wait_until_written()
        server.flush()
        undisturbed_s = max(_timed(server, request, expected)[0] for request in PROMPTS)
        rows, wrong = Counter(), []
        longest_s = 0.0
        for number in part(FAULT_CASES):
            name = list(FAULTS)[number % len(FAULTS)]
            server.flush()
            before = server.counters()
            new = [Request(tokens(random.Random(f"{number} {n}"), 3 * PAGE + 5), 4) for n in range(2)]
            asked = [*random.Random(number).sample(PROMPTS, CASE_PROMPTS), *new]
            for request in FAULTS[name](server, orders, asked):
                seconds, told = _timed(server, request, expected)
                longest_s = max(longest_s, seconds)
                wrong += [f"{number} {name}: {one}" for one in told]
            _order(orders)
            _wait_until_on(server)
            server.flush()
            found = Counter()
            healed = compare(ask_all(server, asked[:2], found), {one: expected[one] for one in asked[:2]})
            wrong += [f"{number} {name}, afterwards: {one}" for one in healed.wrong]
            rows[name] += 1
            after = server.counters()
            assert after["kvbm_faults"] == before["kvbm_faults"], (number, name)
            assert found["storage"], f"{number} {name}: the disk is not used again"
        log = server.log.read_text()
    results.add(
        {
            "what": f"live faults{_part_name()}",
            "faults": sum(rows.values()),
            "kinds": dict(rows),
            "wrong": len(wrong),
            "longest_answer_s": round(longest_s, 2),
            "longest_answer_undisturbed_s": round(undisturbed_s, 2),
        }
    )
    assert not wrong, "\n".join(wrong)
    assert not raised(log)
    assert longest_s < 60, "a request hangs"


def _timed(server, request, expected):
    """Return the seconds of an answer, and what is wrong with it, if that is known."""
    seconds, reply = _reply(server, request)
    known = request in expected
    return seconds, compare({request: reply.answer}, {request: expected[request]}).wrong if known else ()


def _order(orders: Path, **faults: object) -> None:
    """See tests/embedded/disk_faults."""
    new = orders.with_suffix(".new")
    new.write_text(json.dumps(faults))
    new.replace(orders)


def _wait_until_on(server):
    end_s = time.monotonic() + 90
    while server.counters()["kvbm_disk_off"]:
        assert time.monotonic() < end_s, "the disk stays off"
        time.sleep(0.2)


def _killed(server, orders, asked):
    kill(server.disk_process())
    yield from asked


def _killed_between(server, orders, asked):
    for request in asked:
        yield request
        with suppress(AssertionError, ProcessLookupError):  # it is not up again yet
            kill(server.disk_process())


def _stopped(server, orders, asked):
    with paused(server.disk_process()):
        yield from asked


def _stopped_at_times(server, orders, asked):
    for request in asked:
        with paused(server.disk_process()):
            time.sleep(0.3)
            yield request


def _killed_while_stopped(server, orders, asked):
    pid = server.disk_process()
    with paused(pid):
        yield from asked[:2]
        kill(pid)
    yield from asked[2:]


def _ordered(**faults):
    def disturb(server, orders, asked):
        _order(orders, **faults)
        yield from asked

    return disturb


FAULTS = {
    "kill -9": _killed,
    "kill -9 again and again": _killed_between,
    "SIGSTOP": _stopped,
    "SIGSTOP at times": _stopped_at_times,
    "kill -9 while stopped": _killed_while_stopped,
    "read errors": _ordered(error="EIO", **{"for": "read"}),
    "some read errors": _ordered(error="EIO", chance=0.3, **{"for": "read"}),
    "full disk": _ordered(error="ENOSPC", **{"for": "write"}),
    "read-only file system": _ordered(error="EROFS", **{"for": "write"}),
    "short reads and writes": _ordered(error="short", chance=0.5),
    "wrong bytes": _ordered(lie=True, **{"for": "read"}),
    "disk hangs": _ordered(hold=True),
    "calls take 0.5 s": _ordered(delay_s=0.5),
    "calls take 3 s": _ordered(delay_s=3.0),
    "1 MB/s": _ordered(bytes_per_s=1e6),
}
