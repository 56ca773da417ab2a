"""The engine with its thread: what callers from other threads may rely on, up to its death."""

import threading
import time

import host_connector
import pytest
from engine_rig import prompts_of
from waiting import eventually

from kvbm.engines.embedded.engine.config import EngineConfig
from kvbm.engines.embedded.engine.engine import Engine
from kvbm.engines.embedded.engine.request import SamplingParams
from kvbm.errors import EngineError, ProfileError

WAIT_S = 60.0


class Client:
    """Receives one request's outputs, in the engine thread."""

    def __init__(self) -> None:
        self.token_ids = []
        self.last = None
        self.started = threading.Event()
        self.ended = threading.Event()

    def __call__(self, output) -> None:
        assert self.last is None, "an output after the last one"
        self.token_ids += output.new_token_ids
        self.started.set()
        if output.finish_reason is not None:
            self.last = output
            self.ended.set()

    def wait(self):
        assert self.ended.wait(WAIT_S)
        return self.last


class Served:
    """A started engine and clients for it."""

    def __init__(self, *, connector=None, **config) -> None:
        settings = {"model": "synthetic:tiny", "num_blocks": 64, "verify": False, "threads": 1}
        self.engine = Engine(EngineConfig(**(settings | config)), connector=connector)
        self.engine.start()
        self._count = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.stop()

    def submit(self, prompt, *, request_id=None, **params) -> Client:
        client = Client()
        self._count += 1
        self.engine.submit(request_id or f"r{self._count}", prompt, SamplingParams(**params), client)
        return client


PROMPT = prompts_of([50])[0]


def test_a_request_gets_its_tokens_and_one_last_output_with_the_counts():
    with Served() as served:
        last = served.submit(PROMPT, max_tokens=5, ignore_eos=True).wait()
        assert (last.finish_reason, last.num_prompt_tokens, last.num_output_tokens) == ("length", 50, 5)
        assert (last.num_cached_tokens, last.num_external_tokens) == (0, 0)
        assert last.queue_time_s >= 0
        assert last.prefill_time_s > 0
        assert served.submit(PROMPT, max_tokens=1).wait().num_cached_tokens == 48


def test_requests_from_many_threads_are_answered_like_one_after_the_other():
    prompts = prompts_of([20, 33, 50, 64, 7, 90])
    with Served() as served:
        alone = []
        for prompt in prompts:
            client = served.submit(prompt, max_tokens=8, ignore_eos=True)
            client.wait()
            alone.append(client.token_ids)
        clients = [None] * len(prompts)

        def submit(index):
            clients[index] = served.submit(prompts[index], request_id=f"t{index}", max_tokens=8, ignore_eos=True)

        threads = [threading.Thread(target=submit, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for client in clients:
            client.wait()
        assert [client.token_ids for client in clients] == alone


def test_an_abort_ends_a_running_request():
    with Served() as served:
        client = served.submit(PROMPT, request_id="long", max_tokens=900, ignore_eos=True)
        assert client.started.wait(WAIT_S)
        served.engine.abort("long")
        assert client.wait().finish_reason == "abort"
        served.engine.abort("long")
        served.engine.abort("unknown")
        assert served.submit(PROMPT, max_tokens=1).wait().finish_reason == "length"
        assert served.engine.stats().kv_cache_usage == 0.0


def test_an_answer_ends_where_the_model_is_full():
    with Served(max_model_len=56) as served:
        last = served.submit(PROMPT, max_tokens=100, ignore_eos=True).wait()
        assert (last.finish_reason, last.num_output_tokens) == ("length", 6)


def test_a_reset_is_waited_for_and_reaches_the_connector():
    connector = host_connector.create(block_size=16)
    with Served(connector=connector) as served:
        served.submit(PROMPT, max_tokens=1).wait()
        assert served.engine.begin_reset().result() is True
        assert connector[0].resets == 1
        assert served.submit(PROMPT, max_tokens=1).wait().num_cached_tokens == 0


def test_a_request_is_served_while_others_order_without_a_pause():
    """Each abort orders the next one before it ends, like many callers who repeat it."""
    with Served() as served:
        engine, client = served.engine, served.submit(PROMPT, max_tokens=4)
        abort, limit_s = engine.core.abort, time.monotonic() + WAIT_S / 6

        def abort_again(request_id) -> bool:
            if not client.ended.is_set() and time.monotonic() < limit_s:
                engine.abort(request_id)
            return abort(request_id)

        engine.core.abort = abort_again
        engine.abort("unknown")
        client.wait()
        assert time.monotonic() < limit_s


def test_resets_that_wait_when_the_engine_dies_are_answered():
    with Served() as served:
        has_begun, may_end = threading.Event(), threading.Event()
        served.engine.core.scheduler.reset_prefix_cache = lambda: has_begun.set() or may_end.wait(WAIT_S)
        first = served.engine.begin_reset()
        assert has_begun.wait(WAIT_S)
        later = [served.engine.begin_reset() for _ in range(3)]
        served.engine.core.scheduler.reset_prefix_cache = lambda: 1 / 0
        may_end.set()
        assert first.result(WAIT_S)
        for one in later:
            with pytest.raises(EngineError, match="ZeroDivisionError"):
                one.result(WAIT_S)
        eventually(lambda: not served.engine.is_healthy)  # its thread ends after it has answered them
        with pytest.raises(EngineError, match="is not running"):
            served.engine.begin_reset()


def test_the_thread_keeps_stepping_until_the_connector_has_nothing_under_way():
    connector = host_connector.create(block_size=16)
    enough = threading.Event()
    left = iter(range(20))

    def has_pending_work() -> bool:
        if next(left, None) is None:
            enough.set()
        return not enough.is_set()

    connector[0].has_pending_work = has_pending_work
    with Served(connector=connector) as served:
        served.submit(PROMPT, max_tokens=1).wait()
        assert enough.wait(WAIT_S)


def test_stopping_aborts_what_is_in_flight_and_shuts_the_connector_down():
    connector = host_connector.create(block_size=16)
    served = Served(connector=connector)
    clients = [served.submit(PROMPT, max_tokens=900, ignore_eos=True) for _ in range(3)]
    assert clients[0].started.wait(WAIT_S)
    served.engine.stop()
    assert [client.wait().finish_reason for client in clients] == ["abort"] * 3
    assert connector[1].calls[-1] == "shutdown"
    assert not served.engine.is_healthy
    assert served.engine.failure is None
    with pytest.raises(EngineError, match="is not running"):
        served.submit(PROMPT)
    served.engine.stop()


def test_when_the_thread_dies_everything_in_flight_ends_with_an_error():
    connector = host_connector.create(block_size=16)
    with Served(connector=connector) as served:
        clients = [served.submit(PROMPT, max_tokens=900, ignore_eos=True) for _ in range(3)]
        for client in clients:
            assert client.started.wait(WAIT_S)

        def explode(meta) -> None:
            raise SystemExit("a connector that ends the process")

        connector[1].start_load_kv = explode
        for client in clients:
            last = client.wait()
            assert last.finish_reason == "error"
            assert "SystemExit: a connector that ends the process" in last.error
        assert not served.engine.is_healthy
        assert "SystemExit" in served.engine.failure
        assert not served.engine.stats().counters.preemptions
        with pytest.raises(EngineError, match="SystemExit"):
            served.submit(PROMPT)
        with pytest.raises(EngineError, match="SystemExit"):
            served.engine.begin_reset().result()


def test_an_order_that_kills_the_engine_is_answered():
    connector = host_connector.create(block_size=16)
    with Served(connector=connector) as served:
        connector[0].reset_cache = lambda: 1 // 0
        with pytest.raises(EngineError, match="failed while executing this order: ZeroDivisionError"):
            served.engine.begin_reset().result()
        assert "ZeroDivisionError" in eventually(lambda: served.engine.failure)


def test_a_dead_engine_can_be_stopped_and_then_shuts_its_connector_down_once():
    connector = host_connector.create(block_size=16)
    served = Served(connector=connector)
    connector[1].start_load_kv = lambda meta: 1 // 0
    served.submit(PROMPT).wait()
    served.engine.stop()
    served.engine.stop()
    assert connector[1].calls.count("shutdown") == 1


def test_a_callback_that_raises_ends_the_engine_and_the_others_hear_of_it():
    with Served() as served:
        other = served.submit(PROMPT, max_tokens=900, ignore_eos=True)
        assert other.started.wait(WAIT_S)

        def broken(output) -> None:
            raise RuntimeError("loop is closed")

        served.engine.submit("broken", PROMPT, SamplingParams(), broken)
        assert other.wait().finish_reason == "error"
        assert "loop is closed" in served.engine.failure


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_model_len": 65, "num_blocks": 4}, "G1 holds 64"),
        ({"max_model_len": 50000, "num_blocks": 4000}, "the model takes 40960"),
        ({"model": "synthetic:huge"}, "unknown model `synthetic:huge`"),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(config, message):
    settings = {"model": "synthetic:tiny", "verify": False}
    with pytest.raises(ProfileError, match=message):
        Engine(EngineConfig(**(settings | config)))
