"""Disaggregated prefill with real engines: `kvbm serve` starts one that prefills, one that decodes, and their proxy.

The truth is what a single vLLM without any connector says. NIXL moves blocks between the two over shared memory and
TCP, as it does where there is no RDMA.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import traffic
import yaml
from fake_server import FakeServer
from kvbm_serve import PROGRAM
from model_runner import NEEDS_TOP_K
from prometheus_client.parser import text_string_to_metric_families
from vllm_server import BLOCK_TOKENS, Answer, VllmServer, host_blocks
from waiting import eventually

from kvbm.engines.make_model import materialise
from kvbm.errors import ProfileError
from kvbm_cli.engine.process import choose_port

MODULE = "kvbm.vllm_integration.connector"
PROMPT_TOKENS = 600
WHOLE_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
G1_BLOCKS = 20
OTHER_PROMPTS = 6  # more than G1 holds
TOKENS = 8
CLOSE = 1e-4
LONG_TOKENS = 1300
LONG_BEFORE_LEASE_S = 20
LEAVES = 12
START_TIMEOUT_S = 480
ASK_TIMEOUT_S = 120
SOURCE = "vllm:prompt_tokens_cached_by_source_total"

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # of torch, at vLLM's import
]
needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs nixl")


# -- PdConnector without an engine -------------------------------------------------------------------------------------


def children(*names: object) -> dict[str, object]:
    return {"connectors": [{"kv_connector": name, "kv_role": "kv_both"} for name in names]}


@pytest.mark.parametrize("second", ["NixlConnector", "NixlPullConnector"])
def test_our_connector_and_then_nixl_are_its_children(second: str) -> None:
    from kvbm.engines.vllm.pd import require_children

    require_children(children("DynamoConnector", second))


@pytest.mark.parametrize(
    ("extra_config", "message"),
    [
        ({}, "PdConnector requires a list `connectors` of its two children"),
        ({"connectors": "NixlConnector"}, "PdConnector requires a list `connectors` of its two children"),
        (children(), "not: none"),
        (children("DynamoConnector"), "not: DynamoConnector"),
        (children("NixlConnector", "DynamoConnector"), "not: NixlConnector, DynamoConnector"),
        (children("LMCacheConnectorV1", "NixlConnector"), "not: LMCacheConnectorV1, NixlConnector"),
        (children("DynamoConnector", "NixlConnector", "NixlConnector"), "NixlConnector, NixlConnector"),
        ({"connectors": ["DynamoConnector", None]}, "not: DynamoConnector, None"),
    ],
)
def test_other_children_are_refused_before_an_engine_starts(extra_config: dict[str, Any], message: str) -> None:
    from kvbm.engines.vllm.connector import PdConnector

    with pytest.raises(ProfileError) as caught:
        PdConnector.requires_piecewise_for_cudagraph(extra_config)
    assert message in caught.value.message
    assert "kv_connector_extra_config" in str(caught.value.hint)


def test_vllm_knows_our_names_however_often_the_module_is_loaded() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvbm.engines.vllm import connector

    connector._register()
    for name in ("DynamoConnector", "PdConnector"):
        assert KVConnectorFactory.get_connector_class_by_name(name) is getattr(connector, name)


def test_all_that_it_is_made_of_can_do_with_hybrid_models() -> None:
    from vllm.config import KVTransferConfig

    from kvbm.engines.vllm.pd import PdConnector

    extra_config = children("DynamoConnector", "NixlConnector")
    assert PdConnector.all_children_support_hma(
        KVTransferConfig(kv_connector="PdConnector", kv_role="kv_both", kv_connector_extra_config=extra_config)
    )


def test_configuration_in_the_guide_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbm.engines.vllm.pd import PdConnector

    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "100")  # as the guide says: without a tier it is refused
    guide = Path(__file__).parents[2] / "docs" / "guide" / "disaggregated.md"
    written = guide.read_text().partition("--kv-transfer-config '")[2].partition("'")[0]
    PdConnector.requires_piecewise_for_cudagraph(json.loads(written)["kv_connector_extra_config"])


class Child:
    """A connector of which only the match and the handshake are asked."""

    def __init__(self, tokens: int, handshake: str | None) -> None:
        self.tokens, self.handshake = tokens, handshake
        self.asked, self.told = 0, None

    def get_num_new_matched_tokens(self, request: object, num_computed_tokens: int) -> tuple[int, bool]:
        self.asked += 1
        return self.tokens, self.tokens > 0

    def get_handshake_metadata(self) -> str | None:
        return self.handshake

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], str]) -> None:
        self.told = metadata


class Request:
    def __init__(self, kv_transfer_params: dict[str, object] | None) -> None:
        self.request_id, self.kv_transfer_params = "r", kv_transfer_params


def pd_connector(*its_children: Child) -> Any:
    """Without an engine's configuration, of which these methods ask nothing."""
    from kvbm.engines.vllm.pd import PdConnector

    connector = PdConnector.__new__(PdConnector)
    connector._connectors, connector._requests_to_connector = list(its_children), {}
    return connector


@pytest.mark.parametrize(
    ("params", "found", "chosen", "asked"),
    [
        (None, (128, True), 0, [1, 1]),
        ({"do_remote_decode": True}, (128, True), 0, [1, 1]),
        ({"do_remote_prefill": True}, (500, True), 1, [0, 1]),
        ({"do_remote_prefill": False}, (128, True), 0, [1, 1]),
    ],
)
def test_what_another_engine_has_prefilled_is_pulled_whole(
    params: dict[str, object] | None, found: tuple[int, bool], chosen: int, asked: list[int]
) -> None:
    ours, nixl = Child(128, None), Child(500, None)
    connector = pd_connector(ours, nixl)
    assert connector.get_num_new_matched_tokens(Request(params), 0) == found
    assert connector._requests_to_connector == {"r": chosen}
    assert [ours.asked, nixl.asked] == asked


def test_each_child_gets_its_own_handshakes() -> None:
    ranks = [pd_connector(Child(0, f"ours {rank}"), Child(0, f"nixl {rank}")) for rank in range(2)]
    told = {(0, rank): connector.get_handshake_metadata() for rank, connector in enumerate(ranks)}
    scheduler = pd_connector(Child(0, None), Child(0, None))
    scheduler.set_xfer_handshake_metadata_pp_aware(told)
    assert [child.told for child in scheduler._connectors] == [
        {(0, 0): "ours 0", (0, 1): "ours 1"},
        {(0, 0): "nixl 0", (0, 1): "nixl 1"},
    ]


def test_a_child_without_handshake_is_told_of_none() -> None:
    worker = pd_connector(Child(0, None), Child(0, "nixl"))
    scheduler = pd_connector(Child(0, None), Child(0, None))
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
    assert [child.told for child in scheduler._connectors] == [{}, {(0, 0): "nixl"}]


# -- real engines ------------------------------------------------------------------------------------------------------


def prompt(seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(10, 4000) for _ in range(PROMPT_TOKENS)]


class Disaggregated:
    """`kvbm serve` of a disaggregated profile, healthy."""

    def __init__(self, program: subprocess.Popen[str], error_path: Path) -> None:
        self.program, self._error_path = program, error_path
        ready = json.loads(self._object())
        self.url, self.model, self.engines, self.log = ready["url"], ready["model"], ready["engines"], ready["log"]
        self.http = httpx.Client(base_url=self.url, timeout=ASK_TIMEOUT_S, trust_env=False)

    def _object(self) -> str:
        """The JSON that says that all are healthy; its last line is the first that is a brace alone."""
        lines = [""]
        while lines[-1] != "}\n":
            lines.append(self.program.stdout.readline())
            assert lines[-1], f"kvbm serve has ended\n{self.errors()}"
        return "".join(lines)

    def errors(self) -> str:
        return self._error_path.read_text()

    def body(self, tokens: Any, max_tokens: int = TOKENS, **fields: object) -> dict[str, object]:
        return {
            "model": self.model,
            "prompt": tokens,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
            **fields,
        }

    def ask(self, tokens: Any, **fields: Any) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """Tokens and log-probabilities of each choice."""
        answer = self.http.post("/v1/completions", json=self.body(tokens, **fields))
        assert answer.status_code == 200, answer.text
        return [
            (tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))
            for choice in answer.json()["choices"]
        ]

    def metrics(self, engine: str) -> dict[str, float]:
        """Every sample of an engine by name, and those of a source of hits by that too."""
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(f"{self.engines[engine]}/metrics").text):
            for sample in family.samples:
                for name in {sample.name, f"{sample.name} {sample.labels.get('source', '')}".strip()}:
                    totals[name] = totals.get(name, 0.0) + sample.value
        return totals

    def moved(self, engine: str, before: Mapping[str, float], name: str) -> float:
        return self.metrics(engine).get(name, 0.0) - before.get(name, 0.0)


@contextmanager
def serving(directory: Path, **changes: object) -> Iterator[Disaggregated]:
    profile = {
        "engine": {
            "kind": "vllm",
            "model": str(materialise("vllm-25m")),
            "arguments": {
                "dtype": "float32",
                "block_size": BLOCK_TOKENS,
                "max_model_len": 2048,
                "enforce_eager": True,
                "num_gpu_blocks_override": G1_BLOCKS,
                "served_model_name": "m",
            },
            "environment": {
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "0",
                "TORCH_COMPILE_DISABLE": "1",
                "UCX_MODULES": "^ib",
            },
        },
        "tiers": {"host": {"blocks": 200}},
        "server": {"port": 0},
        "transfer": {"init_timeout_s": START_TIMEOUT_S},
        "disaggregated": {"prefill": 1, "decode": 1, **changes},
    }
    path, error_path = directory / "pd.yaml", directory / "errors"
    path.write_text(yaml.safe_dump(profile))
    command = [*PROGRAM, "serve", "-p", str(path), "--json", "--log", str(directory / "serve.log")]
    with error_path.open("w") as errors:
        program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=directory)
    with program:
        try:
            server = Disaggregated(program, error_path)
            with server.http:
                yield server
        finally:
            if program.poll() is None:
                program.send_signal(signal.SIGTERM)
                program.wait(timeout=60)


@pytest.fixture(scope="module")
def truth(process: tuple[Any, object]) -> Mapping[int, Answer]:
    """What one vLLM without connector answers, by the seed of the prompt."""
    engine, _ = process
    engine.start("vllm-25m", dtype="float32", block_size=BLOCK_TOKENS, max_model_len=2048, enable_prefix_caching=False)
    seeds = range(1 + OTHER_PROMPTS)
    answers = engine.answer([traffic.Request(tuple(prompt(seed)), TOKENS) for seed in seeds])
    engine.stop()
    return dict(zip(seeds, answers, strict=True))


@pytest.fixture(scope="module")
def disaggregated(truth: Mapping[int, Answer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disaggregated]:
    """Starts when the single engine has ended."""
    with serving(tmp_path_factory.mktemp("pd")) as server:
        yield server


def assert_is(answer: tuple[tuple[int, ...], tuple[float, ...]], truth: Answer) -> None:
    tokens, logprobs = answer
    assert tokens == truth.tokens
    assert logprobs == pytest.approx(truth.logprobs, abs=CLOSE)


@needs_nixl
def test_answers_are_those_of_one_engine_and_prompts_come_back_from_host_memory(
    disaggregated: Disaggregated, truth: Mapping[int, Answer]
) -> None:
    decode = disaggregated.metrics("decode 0")  # which has had the token that says that all are ready
    for seed, expected in truth.items():
        assert_is(*disaggregated.ask(prompt(seed)), truth=expected)
    pulled = disaggregated.moved("decode 0", decode, f"{SOURCE} p2p")
    assert pulled == len(truth) * PROMPT_TOKENS, "every prompt was pulled, none was computed"
    prefill, decode = (disaggregated.metrics(name) for name in ("prefill 0", "decode 0"))
    assert prefill["kvbm_offload_blocks_d2h"] >= len(truth) * WHOLE_BLOCKS

    assert_is(*disaggregated.ask(prompt(0)), truth=truth[0])
    assert disaggregated.moved("prefill 0", prefill, "kvbm_onboard_blocks_h2d") == WHOLE_BLOCKS
    assert disaggregated.moved("prefill 0", prefill, f"{SOURCE} host") == WHOLE_BLOCKS * BLOCK_TOKENS
    assert disaggregated.moved("decode 0", decode, f"{SOURCE} p2p") > 0


@needs_nixl
def test_streamed_answer_is_the_same(disaggregated: Disaggregated, truth: Mapping[int, Answer]) -> None:
    tokens: list[int] = []
    body = disaggregated.body(prompt(1), stream=True, stream_options={"include_usage": True})
    with disaggregated.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    for event in map(json.loads, lines):
        tokens += [token for choice in event["choices"] for token in choice["token_ids"]]
    assert tuple(tokens) == truth[1].tokens
    assert json.loads(lines[-1])["usage"]["prompt_tokens"] == PROMPT_TOKENS


@needs_nixl
@NEEDS_TOP_K
def test_several_prompts_or_answers_in_one_request_are_right_too(
    disaggregated: Disaggregated, truth: Mapping[int, Answer]
) -> None:
    before = disaggregated.metrics("prefill 0")
    first, second = disaggregated.ask([prompt(2), prompt(3)])
    assert_is(first, truth[2])
    assert_is(second, truth[3])
    answers = disaggregated.ask(prompt(4), n=2, temperature=1.0, top_k=1)  # vLLM refuses two greedy ones
    assert len(answers) == 2
    for answer in answers:
        assert_is(answer, truth[4])
    assert disaggregated.moved("prefill 0", before, "vllm:request_success_total") == 0


@needs_nixl
def test_chat_goes_the_same_way(disaggregated: Disaggregated) -> None:
    before = disaggregated.metrics("decode 0")
    messages = [{"role": "user", "content": "What is a block? " * 40}]
    body = {"model": disaggregated.model, "messages": messages, "max_completion_tokens": 5, "ignore_eos": True}
    answer = disaggregated.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 5
    assert disaggregated.moved("decode 0", before, f"{SOURCE} p2p") > 0


@needs_nixl
def test_requests_at_the_same_time_are_right(disaggregated: Disaggregated, truth: Mapping[int, Answer]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        for seed, answers in zip(truth, pool.map(lambda seed: disaggregated.ask(prompt(seed)), truth), strict=True):
            assert_is(*answers, truth=truth[seed])


@needs_nixl
def test_an_engine_refuses_for_the_whole(disaggregated: Disaggregated) -> None:
    answer = disaggregated.http.post("/v1/completions", json=disaggregated.body([5] * 4000))
    assert answer.status_code == 400
    assert "2048" in answer.json()["error"]["message"]


class Refuses(FakeServer):
    """A decode engine that answers with this status, or closes the connection."""

    def __init__(self, status: int | None) -> None:
        super().__init__()
        self.status = status

    async def answer(self, request: Any, connection: Any) -> None:
        if self.status is None:
            connection.close()
        else:
            connection.reply(self.status, b"{}")


@contextmanager
def router(prefill: str, decode: str) -> Iterator[str]:
    """The URL of a router in front of these engines. Any other one that speaks HTTP can take its place."""
    port = choose_port("127.0.0.1", 0)
    command = [sys.executable, "-m", "kvbm_cli.disaggregated.proxy", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen([*command, "--prefill", prefill, "--decode", decode]) as process:
        try:
            eventually(lambda: answers(f"http://127.0.0.1:{port}/health"))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(url).status_code == 200
    return False


def long_prompt(seed: int) -> list[int]:
    """More than half of G1."""
    return (prompt(seed) * 3)[:LONG_TOKENS]


def assert_rests(disaggregated: Disaggregated) -> None:
    """Prefill has ended its step, and holds no block long before a lease of 30 seconds ends."""
    body = disaggregated.body([5], max_tokens=1)
    httpx.post(f"{disaggregated.engines['prefill 0']}/v1/completions", json=body, timeout=ASK_TIMEOUT_S)
    deadline = time.monotonic() + LONG_BEFORE_LEASE_S
    while usage := disaggregated.metrics("prefill 0")["vllm:kv_cache_usage_perc"]:
        assert time.monotonic() < deadline, f"{usage:.0%} of the blocks are held"
        time.sleep(0.1)


UNUSUAL = [{"stream_options": {"include_usage": True}}, {"stream": "maybe"}, {"max_tokens": "x"}, {"min_tokens": "x"}]


@needs_nixl
@pytest.mark.parametrize("more", UNUSUAL, ids=str)
def test_request_that_only_the_decode_engine_refuses_costs_no_prefill(
    disaggregated: Disaggregated, more: dict[str, Any]
) -> None:
    before = disaggregated.metrics("prefill 0")
    for seed in range(3):
        body = {**disaggregated.body(long_prompt(seed)), **more}
        assert disaggregated.http.post("/v1/completions", json=body).status_code == 400
    assert disaggregated.moved("prefill 0", before, "vllm:prompt_tokens_total") == 0


@needs_nixl
@pytest.mark.parametrize("status", [400, 503, None, "unreachable", "serving"], ids=str)
def test_prefill_holds_no_blocks_if_no_decode_engine_admits_the_request(
    disaggregated: Disaggregated, status: Any
) -> None:
    more = {"min_tokens": 50} if status == "serving" else {}  # vLLM refuses these after its schema
    with Refuses(None if status in ("serving", "unreachable") else status) as refusing:
        decode = {"serving": disaggregated.engines["decode 0"], "unreachable": "http://127.0.0.1:9"}
        with router(disaggregated.engines["prefill 0"], decode.get(status, refusing.url)) as url:
            for seed in range(3):
                body = disaggregated.body(long_prompt(seed), **more)
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=ASK_TIMEOUT_S)
                assert answer.status_code in (status, 400, 502)
                assert_rests(disaggregated)


@needs_nixl
@pytest.mark.parametrize("is_streamed", [False, True])
def test_prefill_holds_no_blocks_of_clients_that_left(disaggregated: Disaggregated, is_streamed: bool) -> None:
    """At any moment of the request."""
    before = time.monotonic()
    disaggregated.ask(long_prompt(10), max_tokens=1)
    duration_s = time.monotonic() - before
    for step in range(LEAVES):
        body = json.dumps(disaggregated.body(long_prompt(11 + step), max_tokens=200, stream=is_streamed)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", httpx.URL(disaggregated.url).port)) as client:
            client.sendall(head + body)
            time.sleep(duration_s * 1.2 * step / LEAVES)
        assert_rests(disaggregated)
    disaggregated.ask(prompt(0))


@needs_nixl
def test_the_death_of_one_engine_ends_the_whole_and_is_reported(disaggregated: Disaggregated) -> None:
    """Last of this file that uses this server."""
    port = httpx.URL(disaggregated.engines["decode 0"]).port
    processes = psutil.Process(disaggregated.program.pid).children(recursive=True)
    engine = next(one for one in processes if str(port) in one.cmdline() and "--kv-transfer-config" in one.cmdline())
    os.kill(engine.pid, signal.SIGKILL)
    assert disaggregated.program.wait(timeout=60) == 128 + signal.SIGKILL
    assert "decode 0: the engine exited unexpectedly, with exit code 137" in disaggregated.errors()
    deadline = time.monotonic() + 10
    while alive := [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)


# -- engines that are asked by hand, as another orchestrator does ------------------------------------------------------


def pd_server(nixl_role: str, preset: str = "vllm-25m", *arguments: str, blocks: int = G1_BLOCKS) -> VllmServer:
    """Not healthy yet. DynamoConnector is configured by variables, as under an engine's own command line."""
    side_channel = str(choose_port("127.0.0.1", 0))
    ours = {"kv_connector": "DynamoConnector", "kv_connector_module_path": MODULE, "kv_role": "kv_both"}
    both = [ours, {"kv_connector": "NixlConnector", "kv_role": nixl_role}]
    return VllmServer(
        materialise(preset),
        *arguments,
        blocks=blocks,
        max_model_len=2048,
        connector={
            "kv_connector": "PdConnector",
            "kv_connector_module_path": MODULE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": both},
        },
        environment={
            **host_blocks(200),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": side_channel,
            "UCX_MODULES": "^ib",
            "VLLM_SSM_CONV_STATE_LAYOUT": "DS",  # NIXL requires it, for models with states
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        },
        wait=False,
    )


def hand_over(prefill: VllmServer, decode: VllmServer, tokens: Sequence[int], **changes: object) -> tuple[Any, Any]:
    asked = prefill.completion(tokens, 1, kv_transfer_params={"do_remote_decode": True})
    answer = decode.ask(tokens, TOKENS, kv_transfer_params={**asked["kv_transfer_params"], **changes})
    return answer.tokens, answer.logprobs


@pytest.mark.soak
@needs_nixl
def test_an_engine_that_decodes_may_have_host_memory_too(truth: Mapping[int, Answer]) -> None:
    """And computes what it cannot pull."""
    onboarded = "kvbm_onboard_blocks_h2d"
    with pd_server("kv_producer") as prefill, pd_server("kv_consumer") as decode:
        prefill.wait_healthy()
        decode.wait_healthy()
        for seed, expected in truth.items():
            assert_is(hand_over(prefill, decode, prompt(seed)), expected)
        assert decode.metrics()[onboarded] == 0

        alone = decode.ask(prompt(0), TOKENS)  # no longer in its G1
        assert_is((alone.tokens, alone.logprobs), truth[0])
        assert decode.metrics()[onboarded] == WHOLE_BLOCKS

        assert_is(hand_over(prefill, decode, prompt(1)), truth[1])
        assert decode.metrics()[onboarded] == WHOLE_BLOCKS, "pulled whole, though its beginning is in host memory"

        decode.wait_until("rest", lambda metrics: metrics["vllm:kv_cache_usage_perc"] == 0)
        assert decode.reset_prefix_cache(external=True)
        nobody = {"remote_engine_id": "nobody", "remote_port": 9}
        assert_is(hand_over(prefill, decode, prompt(2), **nobody), truth[2])
        assert decode.metrics()[onboarded] == WHOLE_BLOCKS, "computed"


@pytest.mark.soak
@needs_nixl
def test_a_model_with_states_is_handed_over_and_comes_back_from_host_memory() -> None:
    """NIXL lets the first engine leave out the last token of a prompt, so that a boundary can move behind the end."""
    onboarded, external = "kvbm_onboard_blocks_h2d", "vllm:external_prefix_cache_hits_total"
    one_block = ("--block-size", str(BLOCK_TOKENS), "--max-num-batched-tokens", str(BLOCK_TOKENS))
    lengths = [4 * BLOCK_TOKENS + more for more in (0, 1, 2, 88)]
    prompts = [prompt(seed)[:length] for seed, length in enumerate(lengths)]
    with VllmServer(materialise("vllm-granite4"), *one_block, blocks=60, max_model_len=2048) as single:
        truth = [single.ask(tokens, TOKENS) for tokens in prompts]
    with (
        pd_server("kv_producer", "vllm-granite4", *one_block, blocks=40) as prefill,
        pd_server("kv_consumer", "vllm-granite4", *one_block, blocks=40) as decode,
    ):
        prefill.wait_healthy()
        decode.wait_healthy()
        for _ in range(2):
            for tokens, expected in zip(prompts, truth, strict=True):
                assert_is(hand_over(prefill, decode, tokens), expected)
            prefill.wait_until("rest", lambda metrics: metrics["vllm:kv_cache_usage_perc"] == 0)
            assert prefill.reset_prefix_cache(external=False)
        hits = [3, 3, 4, 4]  # of whole blocks, the state at the end of the last one is needed
        assert prefill.metrics()[external] == sum(hits) * BLOCK_TOKENS
        assert prefill.metrics()[onboarded] == sum(hits) + 3 * len(hits)
        assert decode.metrics()[onboarded] == 0, "pulled whole"

        for tokens, expected in zip(prompts, truth, strict=True):
            alone = decode.ask(tokens, TOKENS)
            assert_is((alone.tokens, alone.logprobs), expected)
