"""Weights, adapters and tokenizers that are exchanged between two starts of a real vLLM or during one.

Every answer must be that of the loaded weights. Each way runs two engines on one disk: before the exchange or during
it, and after it. Their answers are compared with those of engines without a cache, one for each of two models of equal
sizes and times.

    started        vLLM runs; kvbm has not looked at the files yet
    loading        kvbm has looked, and vLLM begins to read
    loaded         vLLM has read, and kvbm looks again
    digesting      kvbm has looked again, and a process digests files that are too large to be digested at once

With KVBM_WRITE_RESULTS=1 the counts are written to bench/results/<machine>-exchanged-weights.json.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

import numpy as np
import pytest
from exchanges import (
    WEIGHTS,
    bind,
    configuration,
    direct,
    directory,
    grandparent,
    hard_link,
    header,
    link,
    mapped,
    overlay,
    overwritten,
    parent,
    placed,
    replaced,
    save_twin,
    tokenizer,
)
from kept_results import KeptResults
from pairs import NO_CACHE, adapters_of
from traffic import assert_equal, tokens
from vllm_server import BLOCK_TOKENS, CONNECTOR, VllmServer

from kvbm.engines.make_model import materialise
from kvbm.identity.content import QUIET_NS
from kvbm.identity.digests import INLINE_BYTES

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(900)]
FILE = "tests/vllm/test_exchanged_in_vllm.py"
CACHED = 2 * BLOCK_TOKENS
PROMPTS = [tokens(Random(number), CACHED + 30) for number in range(16)]
LAST = tokens(Random("last"), 30)
WRITTEN = "kvbm_offload_blocks_h2d"
SIGNS = {  # in the log
    "started": "non-default args",
    "loading": "Starting to load model",
    "loaded": "Loading weights took",
}
DIGESTER = "kvbm.identity.digester"
DOUBT = "blocks will not stay on disk"
READING = "the files of the model are being read"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two models of equal sizes and times; the second differs in some rows of the embedding."""
    one = shutil.copytree(materialise("vllm-25m"), tmp_path_factory.mktemp("saved") / "v1")
    save_twin(one, sorted({token for prompt in PROMPTS for token in prompt[:5]}))
    return one.parent


@pytest.fixture(scope="module")
def truth(saved):
    """Answers of engines without a cache, by model."""
    found = {}
    for name in ("v1", "v2"):
        with VllmServer(saved / name, NO_CACHE) as server:
            found[name] = dict(enumerate(server.ask_all(PROMPTS, concurrency=1)))
    one, two = found["v1"], found["v2"]
    assert all(max(abs(a - b) for a, b in zip(one[i].logprobs, two[i].logprobs, strict=True)) > 0.01 for i in one)
    return found


@pytest.fixture
def keep(request):
    """Keeps what a test has compared."""
    results = KeptResults("exchanged-weights", f"python -m pytest -n 0 -m soak {FILE}", key="case")

    def add(compared, **facts):
        row = {"case": f"vLLM: {request.node.name}", "compared": compared, "wrong": 0, **facts}
        results.add(row)
        print(row)

    return add


@pytest.fixture
def home(saved, tmp_path):
    yield from placed(saved, tmp_path)


def connector_on(disk=None, store=None):
    tiers = {"host": {"blocks": 60}}
    if disk is not None:
        tiers["disk"] = {"blocks": 100, "directory": str(disk)}
    if store is not None:
        tiers["shared"] = {"url": f"file://{store}", "protection": "none"}
    always = {"to_disk": "always", "to_shared": "always"}
    contents = {"tiers": tiers, "offload": always, "onboard": {"policy": "always"}}
    return CONNECTOR | {"kv_connector_extra_config": {"kvbm": contents}}


def run(model, disk, when="", exchange=None, *, arguments=(), ask=None):
    """Answers of one engine, how many tokens it did not compute, and whether its blocks outlive it."""
    server = VllmServer(model, *arguments, blocks=40, connector=connector_on(disk), wait=False)
    with server, held_digester(server, exchange) if when == "digesting" else nullcontext() as release:
        if when in SIGNS:
            until(lambda: SIGNS[when] in server.log())
            exchange()
        server.wait_healthy()
        if release is None:
            until_ready(server)
        answers = (ask or answers_of)(server)
        if release is not None:
            assert server.metrics()["kvbm_disk_off"] == 1
            release()
            until(lambda: server.ask(LAST) and server.metrics()["kvbm_disk_off"] == 0)  # steps open it
            server.ask(LAST)
        blocks = sum(CACHED - answer.cached for answer in answers.values()) // BLOCK_TOKENS
        server.wait_until("written blocks", lambda metrics: metrics[WRITTEN] >= blocks)
        keeps = DOUBT not in server.log()
        os.killpg(server.process.pid, signal.SIGKILL)
    return answers, sum(answer.cached for answer in answers.values()), keeps


def answers_of(server, **fields):
    return dict(enumerate(server.ask_all(PROMPTS, concurrency=1, **fields)))


@contextmanager
def held_digester(server, exchange):
    """Stop the process that digests, before it reads. Yields what exchanges the files and lets it go on."""
    found = []

    def is_found():
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_digester = DIGESTER.encode() in (place / "cmdline").read_bytes()
                if is_digester and os.fsencode(server.log_path.parent) in (place / "environ").read_bytes():
                    found.append(int(place.name))
        return found

    until(is_found)
    os.kill(found[0], signal.SIGSTOP)

    def release():
        exchange()
        os.kill(found[0], signal.SIGCONT)

    yield release


def until_ready(server):
    """The disk tier may start after the engine."""
    server.wait_until("a disk", lambda metrics: metrics["kvbm_disk_off"] == 0)


def until(is_so, limit_s=300.0):
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


WAYS = [parent, grandparent, directory, link, hard_link, replaced, overwritten, mapped, direct, bind, overlay]
TIMES = [
    *(("between", way) for way in WAYS),
    *(("started", way) for way in (parent, replaced)),
    *(("loading", way) for way in (parent, directory, link, hard_link)),
    *(("loaded", way) for way in WAYS),
    *(("digesting", way) for way in (parent, overwritten, mapped)),
]


@pytest.mark.parametrize(("when", "way"), TIMES)
def test_every_answer_is_that_of_the_loaded_weights(home, truth, tmp_path, when, way, keep):
    if way in (bind, overlay) and os.geteuid() != 0:
        pytest.skip("needs root")
    model, disk = home / "models" / "current", tmp_path / "disk"
    if when == "digesting":
        more_than_is_digested_at_once(home)
    first, _, keeps = run(model, disk, when, lambda: way(home))
    if when == "between":
        way(home)
    loaded = min(truth, key=lambda name: distance(first, truth[name]))
    compared = assert_equal(first, truth[loaded]).requests
    second, cached, _ = run(model, disk)
    compared += assert_equal(second, truth["v2"]).requests
    assert loaded == {"between": "v1", "started": "v2", "loaded": "v1", "digesting": "v1"}.get(when, loaded)
    assert keeps == (when == "between") or when == "started"
    assert cached == 0 or (loaded == "v2" and keeps)
    keep(compared, loaded=loaded, cached_tokens_of_the_second_start=cached)


def distance(answers, others):
    return sum(abs(answers[number].logprobs[0] - others[number].logprobs[0]) for number in answers)


def more_than_is_digested_at_once(home):
    """A file that counts and that vLLM does not load."""
    for name in ("v1", "v2"):
        (home / "models" / name / "other.bin").write_bytes(bytes(INLINE_BYTES))


def test_blocks_that_are_computed_before_the_digest_is_there_get_to_the_disk(home, truth, tmp_path, keep):
    model, disk = home / "models" / "current", tmp_path / "disk"
    more_than_is_digested_at_once(home)
    first, _, keeps = run(model, disk, "digesting", lambda: None)
    assert keeps
    second, cached, _ = run(model, disk)
    compared = assert_equal(first, truth["v1"]).requests + assert_equal(second, truth["v1"]).requests
    assert cached == len(PROMPTS) * CACHED
    keep(compared, cached_tokens_of_the_second_start=cached)


def test_an_adapter_that_is_exchanged_between_two_starts_answers_for_itself(tmp_path, keep):
    adapters = {name: materialise(f"vllm-25m-lora-{name}") for name in "ab"}
    model, place = materialise("vllm-25m"), tmp_path / "adapter"
    with VllmServer(model, NO_CACHE, *adapters_of("ab")) as server:
        truth = {name: answers_with(server, name) for name in "ab"}
    compared = 0
    for name in "ab":
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(adapters[name], place)
        lora = (*adapters_of(""), f"mine={place}")
        answers, cached, _ = run(model, tmp_path / "disk", arguments=lora, ask=partial(answers_with, name="mine"))
        compared += assert_equal(answers, truth[name]).requests
        assert cached == 0
    keep(compared)


def answers_with(server, name):
    return {number: server.ask(prompt, model=name) for number, prompt in enumerate(PROMPTS[:8])}


@pytest.mark.parametrize("way", [tokenizer, header, configuration])
def test_a_tokenizer_a_header_or_a_configuration_alone_is_another_model(home, truth, tmp_path, way, keep):
    """Asked in words, whose token ids depend on the tokenizer."""
    model, disk = home / "models" / "current", tmp_path / "disk"
    first, _, keeps = run(model, disk, ask=answers_in_words)
    assert keeps
    way(home)
    second, cached, _ = run(model, disk, ask=answers_in_words)
    assert cached == 0
    with VllmServer(model, NO_CACHE) as server:
        expected = answers_in_words(server)
    compared = assert_equal(second, expected).requests
    assert distance(first, expected) > 0.01
    keep(compared)


def answers_in_words(server):
    words = [" ".join(str(Random(f"{number} {at}").random()) for at in range(20)) for number in range(8)]
    return {number: server.ask(text) for number, text in enumerate(words)}


def test_unchanged_weights_find_their_blocks(home, truth, tmp_path, keep):
    model, disk, compared = home / "models" / "current", tmp_path / "disk", 0
    for expected in (0, len(PROMPTS) * CACHED):
        answers, cached, keeps = run(model, disk)
        compared += assert_equal(answers, truth["v1"]).requests
        assert (cached, keeps) == (expected, True)
        (home / "busy").write_text("")
    keep(compared, cached_tokens_of_the_second_start=cached)


def test_weights_on_tmpfs_leave_nothing_for_the_next_start(home, truth, tmp_path, keep):
    """A store through a mapping moves no time there."""
    place = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        model = shutil.copytree(home / "models" / "v1", place / "model")
        weights = np.memmap(model / WEIGHTS, mode="r+", dtype=np.uint8)
        weights[:] = np.array(weights)
        answers, _, keeps = run(model, tmp_path / "disk")
        assert not keeps
        compared = assert_equal(answers, truth["v1"]).requests
        weights[:] = np.fromfile(home / "models" / "v2" / WEIGHTS, np.uint8)
        answers, cached, _ = run(model, tmp_path / "disk")
        compared += assert_equal(answers, truth["v2"]).requests
        assert cached == 0
        keep(compared)
    finally:
        shutil.rmtree(place)


@pytest.mark.parametrize("way", [parent, overwritten])
def test_engines_on_one_store_of_which_one_gets_other_weights(home, truth, tmp_path, way, keep):
    connector = connector_on(store=tmp_path / "store")
    with VllmServer(home / "models" / "current", blocks=40, connector=connector) as first:
        one = dict(enumerate(first.ask_all(PROMPTS, concurrency=1)))
        until(lambda: first.metrics().get("kvbm_offload_blocks_d2o", 0) > 0)
        way(home)
        with VllmServer(home / "models" / "current", blocks=40, connector=connector) as second:
            two = dict(enumerate(second.ask_all(PROMPTS, concurrency=1)))
            assert sum(answer.cached for answer in two.values()) == 0
        again = dict(enumerate(first.ask_all(PROMPTS, concurrency=1)))
    compared = [assert_equal(answers, truth[name]) for answers, name in ((one, "v1"), (again, "v1"), (two, "v2"))]
    keep(sum(one.requests for one in compared))


STARTS = 3


def test_a_start_with_known_digests_reads_no_file_again(home, tmp_path, keep):
    """Starts with and without a disk, in turn; the times until the server is healthy are kept."""
    model = home / "models" / "current"
    more_than_is_digested_at_once(home)
    newest_ns = max(path.lstat().st_ctime_ns for path in (home / "models").rglob("*"))
    time.sleep(max(0.0, (newest_ns + QUIET_NS) / 1e9 - time.time()) + 1)  # else no digest is kept
    connectors = {"disk": connector_on(tmp_path / "disk"), "none": connector_on()}
    rows = {name: [] for name in connectors}
    environment = {"XDG_STATE_HOME": str(tmp_path / "state")}
    for name in ("disk", *(name for _ in range(STARTS) for name in connectors)):
        is_first = not (tmp_path / "state").exists()
        began_s = time.monotonic()
        with VllmServer(model, blocks=40, connector=connectors[name], environment=environment) as server:
            wall_s, cpu_s, load = time.monotonic() - began_s, cpu_s_below(server.process.pid), os.getloadavg()[0]
            if name == "disk":
                until_ready(server)
                assert (READING in server.log()) == is_first
            if not is_first:
                rows[name].append({"wall_s": round(wall_s, 1), "cpu_s": round(cpu_s, 2), "load": round(load, 1)})
    found = {name: median(row["cpu_s"] for row in some) for name, some in rows.items()}
    walls = {name: median(row["wall_s"] for row in some) for name, some in rows.items()}
    keep(0, starts=rows, median_cpu_s=found, median_wall_s=walls)


def cpu_s_below(pid):
    """CPU seconds of a process and of all that it has started, also of those that have ended and were waited for."""
    facts = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            facts[int(place.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    found = {pid}
    while more := {one for one, (parent, _) in facts.items() if parent in found} - found:
        found |= more
    return sum(facts[one][1] for one in found if one in facts) / os.sysconf("SC_CLK_TCK")
