"""Control requests to an engine, and its counters."""

import json
import random

import pytest
from fake_server import FakeServer
from mock_engine import MockEngine, Model, Options

from kvbm.errors import EngineError
from kvbm_cli.bench.load import control
from kvbm_cli.bench.load.control import Control, served_model
from kvbm_cli.bench.workload.script import random_tokens
from kvbm_cli.system.http_client import HttpAnswer

PAGE = """
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{model_name="m",source="local_compute"} 100
vllm:prompt_tokens_by_source_total{model_name="m",source="external_kv_transfer"} 40
vllm:prompt_tokens_by_source_total{model_name="n",source="external_kv_transfer"} 8
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="416"} 1.0
kvbm_offload_blocks_d2h 5
"""


@pytest.mark.parametrize("is_like_vllm", [False, True])
def test_a_reset_waits_until_no_block_is_in_use(is_like_vllm):
    options = Options(resets_to_refuse=3, is_like_vllm=is_like_vllm)
    with MockEngine(options) as engine:
        client = Control(engine.url, "mock", headers={})
        client.reset_cache()
        assert engine.model.resets_to_refuse == 0
        assert client.tokenize("ab") == [97, 98]


@pytest.mark.parametrize("is_like_vllm", [False, True])
def test_a_reset_that_is_refused_for_too_long_is_an_error(monkeypatch, is_like_vllm):
    monkeypatch.setattr(control, "RESET_TIMEOUT_S", 0.1)
    with (
        MockEngine(Options(resets_to_refuse=10**6, is_like_vllm=is_like_vllm)) as engine,
        pytest.raises(EngineError, match=r"still in use 0\.1 s"),
    ):
        Control(engine.url, "mock", headers={}).reset_cache()


def test_nobody_there_is_an_error_that_names_the_question():
    with MockEngine(Options()) as engine:
        address = engine.url
    with pytest.raises(EngineError, match=r"did not answer POST /tokenize: .*refused"):
        Control(address, "mock", headers={}).tokenize("a")


def test_a_server_without_a_reset_or_a_tokenizer_is_known_as_such():
    with MockEngine(Options(resets_to_refuse=-1, has_tokenize=False)) as engine:
        client = Control(engine.url, "mock", headers={})
        assert client.try_reset() is False
        assert client.try_tokenize("ab") is None
    with MockEngine(Options(resets_to_refuse=2)) as engine:
        client = Control(engine.url, "mock", headers={})
        assert client.try_reset() is True
        assert engine.resets == 1
        assert client.try_tokenize("ab") == [97, 98]


def test_too_few_tokens_are_an_error_and_not_a_missing_tokenizer():
    with MockEngine(Options()) as engine:
        client = Control(engine.url, "mock", headers={})
        # No server answers so: the tokens are replaced where they arrive.
        client._token_ids = lambda text: [1]
        with pytest.raises(EngineError, match="returned 1 tokens for 1000 characters"):
            client.try_tokenize("a" * 1000)


class SglangCaches(FakeServer):
    """What empties the caches of SGLang 0.5.23: refused `refusals` times, as right after traffic."""

    def __init__(self, *, refusals=0, has_storage=True):
        super().__init__()
        self.refusals, self.has_storage, self.emptied = refusals, has_storage, []

    async def answer(self, request, connection):
        if request.path == "/flush_cache":
            self.refusals -= 1
            status = 400 if self.refusals >= 0 else 200
        elif request.path == "/hicache/storage-backend/clear":
            status = 200 if self.has_storage else 400
        else:
            status = 404
        if status == 200:
            self.emptied.append(request.path)
        connection.reply(status, "")


def test_the_caches_of_sglang_are_emptied_when_its_traffic_has_ended_and_its_storage_too():
    with SglangCaches(refusals=3) as server:
        assert Control(server.url, "m", headers={}).try_reset() is True
        assert server.emptied == ["/flush_cache", "/hicache/storage-backend/clear"]
    with SglangCaches(has_storage=False) as server:
        assert Control(server.url, "m", headers={}).try_reset() is True


def test_an_sglang_that_is_never_idle_is_not_empty(monkeypatch):
    monkeypatch.setattr(control, "RESET_TIMEOUT_S", 0.1)
    with SglangCaches(refusals=10**6) as server:
        assert Control(server.url, "m", headers={}).try_reset() is False
        assert server.emptied == []


@pytest.mark.parametrize(
    ("page", "tokens"),
    [
        (PAGE, 416 * 16),
        ("# TYPE sglang:max_total_num_tokens gauge\nsglang:max_total_num_tokens 5000.0\n", 5000),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n', None),
        ("", None),
    ],
)
def test_the_size_of_g1_is_read_from_the_metrics(page, tokens, monkeypatch):
    monkeypatch.setattr(Model, "metrics", lambda self: page)
    with MockEngine(Options()) as engine:
        assert Control(engine.url, "mock", headers={}).g1_tokens() == tokens


def test_the_model_of_a_server_is_the_first_that_it_lists():
    with MockEngine(Options(model="theirs")) as engine:
        assert served_model(engine.url, {}) == "theirs"
        with pytest.raises(EngineError, match=r"refused GET http.*/metrics/v1/models: HTTP 404"):
            served_model(engine.url + "/metrics", {})


@pytest.mark.parametrize("tokens", [[1] * 10, [], None, ["a"], "x" * 10_000, {"a": 1}])
def test_an_answer_that_is_not_of_a_tokenizer_is_an_error_that_names_server_and_value(monkeypatch, tokens):
    body = json.dumps({"tokens": tokens}).encode()
    monkeypatch.setattr(control, "request", lambda *_, **__: HttpAnswer(200, body))
    client = Control("http://there", "mock", headers={})
    with pytest.raises(EngineError, match="http://there/tokenize returned") as caught:
        random_tokens(random.Random(0), 8192, client.tokenize)
    assert len(str(caught.value)) < 500


def test_a_tokenizer_that_returns_too_few_tokens_ends_the_search():
    texts = []
    with pytest.raises(EngineError, match="makes 10 tokens of"):
        random_tokens(random.Random(0), 1000, lambda text: texts.append(len(text)) or [1] * 10)
    assert max(texts) < 100_000


def test_a_page_of_metrics_that_is_none_is_no_information(monkeypatch):
    client = Control("http://there", "mock", headers={})
    for page in (b"\xff{" * 1000, b"sglang:max_total_num_tokens inf\n", b"a" * (64 << 20)):
        monkeypatch.setattr(control, "request", lambda *_, page=page, **__: HttpAnswer(200, page))
        assert client.g1_tokens() is None
