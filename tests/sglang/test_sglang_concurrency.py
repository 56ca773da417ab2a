"""SGLang's threads all at once on one storage, while its disk process is killed and its pages are cleared: a page that
was delivered has the bytes of its key, and a page that was not is untouched."""

import hashlib
import os
import random
import signal
import threading
import time
from contextlib import suppress

import pytest
import torch
from host_pools import SGLangHostPool, storage_config
from waiting import eventually

from kvbm.engines.sglang import storage

pytestmark = pytest.mark.usefixtures("identity")
PAGES, KEYS, THREADS, OPERATIONS = 120, 60, 4, 120
MARK = 77


@pytest.fixture
def backend(tmp_path):
    disk = {"directory": str(tmp_path / "disk"), "blocks": 40, "o_direct": False, "drain_s": 2.0}
    made = storage.KvbmHiCacheStorage(storage_config({"tiers": {"disk": disk}, "metrics": {"serve": False}}), {})
    made.pool = SGLangHostPool("page_first_direct", pages=PAGES * 4, dtype=torch.float16)
    made.register_mem_pool_host(made.pool)
    yield made
    made.close()


def key_of(number):
    return hashlib.sha256(str(number).encode()).hexdigest()


def write(pool, page, value):
    """Fill a page with one value, which stands for the key."""
    for part in pool.kv_buffer:
        part[page].fill_(value)


def values_of(pool, page):
    return set(torch.cat([part[page].flatten() for part in pool.kv_buffer]).tolist())


class Caller:
    """One of SGLang's threads, with pages of its own."""

    def __init__(self, backend, number):
        self.backend, self.random = backend, random.Random(number)
        self.first, self.delivered, self.failures = number * PAGES, 0, []

    def run(self):
        try:
            for _ in range(OPERATIONS):
                begin = self.random.randrange(KEYS)
                numbers = range(begin, min(KEYS, begin + self.random.randint(1, 12)))
                self.random.choice([self.store, self.load, self.load, self.look])(numbers)
        except BaseException as error:
            self.failures.append(error)

    def pages(self, count):
        return [self.first + page for page in self.random.sample(range(PAGES), count)]

    def store(self, numbers):
        pages = self.pages(len(numbers))
        for page, number in zip(pages, numbers, strict=True):
            write(self.backend.pool, page, number + 1)
        stored = self.backend.batch_set_v1([key_of(one) for one in numbers], self.backend.pool.indices(*pages))
        assert len(stored) == len(numbers)
        for page in pages:  # SGLang may reuse them at once
            write(self.backend.pool, page, MARK)

    def load(self, numbers):
        pages = self.pages(len(numbers))
        for page in pages:
            write(self.backend.pool, page, MARK)
        found = self.backend.batch_get_v1([key_of(one) for one in numbers], self.backend.pool.indices(*pages))
        assert len(found) == len(numbers)
        for page, number, is_there in zip(pages, numbers, found, strict=True):
            assert values_of(self.backend.pool, page) == {number + 1 if is_there else MARK}, (number, is_there)
        self.delivered += sum(found)

    def look(self, numbers):
        assert 0 <= self.backend.batch_exists([key_of(one) for one in numbers]) <= len(numbers)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_threads_get_the_bytes_of_their_keys_or_nothing(backend):
    callers = [Caller(backend, number) for number in range(THREADS)]
    threads = [threading.Thread(target=caller.run) for caller in callers]
    for thread in threads:
        thread.start()
    chosen, kills = random.Random(0), 0
    while any(thread.is_alive() for thread in threads):
        time.sleep(chosen.uniform(0.05, 0.5))
        process = backend._thread._leader.lower_tiers[0].disk.process
        if chosen.random() < 0.3:
            backend.clear()
        elif kills < 3 and process is not None and process.pid:
            with suppress(ProcessLookupError):  # it was killed a moment ago, and the next one is not there yet
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
    assert [one for caller in callers for one in caller.failures] == []
    assert sum(caller.delivered for caller in callers) > 50
    assert not backend.boundary.is_off
    assert kills


def test_a_directory_that_cannot_be_made_turns_the_tier_off(caplog):
    config = {"tiers": {"disk": {"directory": "/proc/kvbm", "blocks": 8}}, "metrics": {"serve": False}}
    backend = storage.KvbmHiCacheStorage(storage_config(config), {})
    backend.register_mem_pool_host(SGLangHostPool("page_first"))
    message = "the disk tier is off until it can be opened: cannot create directory /proc/kvbm"
    eventually(lambda: message in caplog.text)  # a busy machine starts the process after the engine
    assert backend.batch_exists([key_of(0)]) == 0
    backend.close()


def test_a_storage_that_was_closed_answers_with_misses(backend):
    keys = [key_of(0)]
    backend.close()
    assert backend.batch_exists(keys) == 0
    assert backend.batch_get_v1(keys, backend.pool.indices(0)) == [False]
    assert backend.batch_set_v1(keys, backend.pool.indices(0)) == [False]
    backend.clear()
    backend.close()


@pytest.mark.parametrize(
    ("keys", "indices"),
    [(None, None), ([], torch.arange(0)), (["0" * 64], None), (["0" * 64] * 3, torch.arange(4)), ("0" * 64, [1, 2])],
    ids=["nothing", "empty", "no indices", "too few indices", "a text"],
)
def test_bad_arguments_are_misses_and_reach_nobody(backend, keys, indices):
    assert backend.batch_exists(keys) == 0
    assert not any(backend.batch_get_v1(keys or [], indices))
    assert not any(backend.batch_set_v1(keys or [], indices))
    assert not backend.boundary.is_off
