"""vLLM engines in one child process, one after the other, which a test drives step by step.

    with EngineProcess(tmp_path) as engine:
        engine.start("vllm-granite4", connector=FAULTY_CONNECTOR, cache=CACHE, dtype="float32", block_size=64)
        answers = engine.answer(requests, concurrency=4)
        engine.stop()

A server takes half a minute to start. Here vLLM is imported once and an engine starts in 3 s, without a server and with
the scheduler, the worker and the connector in one process. It has a process of its own, because vLLM changes the one it
runs in. The process ends with the test, and the kernel kills it when pytest dies.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from bookkeeping import tier_of
from model_runner import IS_V2, assert_in_config
from traffic import Request
from vllm_server import FAULTS_FILE, Answer, margin, minimal_environment

from kvbm.engines.make_model import materialise
from kvbm.types import Tier

CALL_TIMEOUT_S = 1200.0 if IS_V2 else 600.0  # for a busy machine
STOP_TIMEOUT_S = 20.0
TIERS_TIMEOUT_S = 120.0
IDLE_S = 0.0005
PR_SET_PDEATHSIG, SIGKILL = 1, 9
FOLLOWED_TOKENS = "followed_tokens:FollowedTokens"  # a logits processor, for `SteppedEngine.add`


class EngineProcess:
    """Methods of `SteppedEngine`, executed in the child process. `faults` gives orders to the copier."""

    def __init__(
        self,
        directory: Path,
        faults: Path,
        *,
        environment: Mapping[str, str] | None = None,
        kind: type[SteppedEngine] | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._log = directory / "log"
        self._pipe, theirs = context.Pipe()
        self._calls = 0
        variables = minimal_environment(str(directory)) | {
            FAULTS_FILE: str(faults),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **(environment or {}),
        }
        self._process = context.Process(target=_serve, args=(theirs, self._log, variables, os.getpid(), kind))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name)

    def _call(self, name: str, *arguments: object, **keywords: object) -> Any:
        self._calls += 1
        number = None
        try:
            self._pipe.send((self._calls, name, arguments, keywords))
            while number != self._calls:  # before it may come the result for a test that pytest has ended
                assert self._pipe.poll(CALL_TIMEOUT_S), f"`{name}` did not return\n{self._log_tail()}"
                number, result, error = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise AssertionError(f"vLLM ended in `{name}`\n{self._log_tail()}") from None
        assert error is None, f"{error}\n{self._log_tail()}"
        return result

    def _log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])


def _serve(
    pipe: Any, log: Path, variables: Mapping[str, str], parent: int, kind: type[SteppedEngine] | None = None
) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    assert os.getppid() == parent
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(variables)
    engine = (kind or SteppedEngine)()
    while True:
        try:
            number, name, arguments, keywords = pipe.recv()
        except EOFError:
            os._exit(0)  # threads of vLLM would delay the end of the interpreter
        try:
            pipe.send((number, getattr(engine, name)(*arguments, **keywords), None))
        except Exception:
            pipe.send((number, None, traceback.format_exc()))


class SteppedEngine:
    """At most one engine, and what its statistics add up to since its start."""

    _engine: Any = None

    def start(
        self, preset: str, *, connector: Mapping[str, object] | None = None, cache: Any = None, **arguments: Any
    ) -> None:
        """Starts a model with arguments of EngineArgs. `cache` configures the connector."""
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.stop()  # that of a test that failed, or of another fixture
        if connector is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**connector, kv_connector_extra_config={"kvbm": cache})
        settings = EngineArgs(
            model=str(self.model(preset)),
            enforce_eager=True,
            **{"skip_tokenizer_init": True} | arguments,
        )
        self._statistics: list[Any] = []
        self._engine = LLMEngine.from_engine_args(settings, stat_loggers=[self._watch])
        assert_in_config(self._engine.vllm_config)
        self._core = self._engine.engine_core.engine_core
        self._number = 0
        if connector is not None:
            self._await_tiers()

    def _await_tiers(self) -> None:
        """Wait for the lower tiers, which open when the files of the model have been read, after the engine's start."""
        lower_tiers = self._core.scheduler.connector._scheduler.blocks.leader.leader.lower_tiers
        deadline = time.monotonic() + TIERS_TIMEOUT_S
        while not all(tier.is_on for tier in lower_tiers):
            assert time.monotonic() < deadline, "a lower tier stays off"
            time.sleep(IDLE_S)
            for tier in lower_tiers:
                tier.settle()

    def model(self, preset: str) -> Path:
        return Path(preset) if os.path.isabs(preset) else materialise(preset)

    def prompt(self, request: Request) -> dict[str, Any]:
        return {"prompt_token_ids": list(request.prompt)}

    def _watch(self, vllm_config: Any, engine_index: int = 0) -> Any:
        self._statistics.append(_totals_class()(vllm_config, engine_index))
        return self._statistics[-1]

    def stop(self) -> None:
        """Does nothing if no engine runs."""
        if self._engine is None:
            return
        self._engine.engine_core.shutdown()
        del self._engine, self._core
        gc.collect()

    def answer(
        self, requests: Sequence[Request], concurrency: int = 4, follow: Sequence[tuple[int, ...]] | None = None
    ) -> list[Answer]:
        """Greedy answers of exactly `max_tokens` tokens, `concurrency` requests at a time. `follow`: see `add`."""
        waiting, live = deque(enumerate(requests)), {}
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + CALL_TIMEOUT_S / 2
        while waiting or live:
            while waiting and len(live) < concurrency:
                index, request = waiting.popleft()
                live[self.add(request, follow[index] if follow else ())] = index
            for request_id, answer in self._step():
                answers[live.pop(request_id)] = answer
            assert time.monotonic() < deadline, f"not answered: {self._states(live)}; {self.totals()}"
        return [answers[index] for index in range(len(requests))]

    def add(self, request: Request, follow: Sequence[int] = ()) -> str:
        """With `follow`, the request goes on with these tokens, for which the engine needs FOLLOWED_TOKENS. Its answer
        has the tokens that it would have chosen, and the log-probabilities of those that it followed."""
        from vllm import SamplingParams

        self._number += 1
        name = str(self._number)
        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=0,
            ignore_eos=True,
            logprobs=2,
            detokenize=False,
            extra_args={"follow": list(follow)} if follow else None,
        )
        self._engine.add_request(name, self.prompt(request), params)
        return name

    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    def abort(self, name: str) -> None:
        self._engine.abort_request([name])

    def rest(self) -> None:
        """Steps until no request is live and no copy is on its way."""
        deadline = time.monotonic() + CALL_TIMEOUT_S / 2
        while self._core.scheduler.has_requests():
            self._step()
            assert time.monotonic() < deadline, "the engine does not come to rest"

    def forget_g1(self) -> None:
        assert self._engine.reset_prefix_cache()

    def forget(self) -> None:
        assert self._engine.reset_prefix_cache(reset_connector=True)

    def totals(self) -> dict[str, float]:
        """Counters since the start: of kvbm, and `hits`, `local_hits`, `preemptions`, `usage`, `snapshots`, `guessed`,
        `right_guesses`."""
        import faulty_connector

        totals = self._statistics[0].totals
        return {**totals, "usage": self._core.scheduler.kv_cache_manager.usage, **faulty_connector.SNAPSHOTS}

    def present(self) -> dict[str, set[int]]:
        """The blocks that can be found, by tier, under the names of vLLM's KV events."""
        from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

        leader = self._core.scheduler.connector._scheduler.blocks.leader.leader
        device = self._core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
        found = {"gpu": [get_block_hash(key) for key in device]}
        for name, tier in (("host", leader.host), ("disk", tier_of(leader, Tier.DISK))):
            found[name] = [one for some in tier.store._index._dicts for one in some]
        return {tier: set(map(maybe_convert_block_hash, names)) for tier, names in found.items()}

    def _states(self, live: Mapping[str, int]) -> dict[int, str]:
        """Of live requests, by their position. vLLM appends to their names."""
        states = {name.rsplit("-", 1)[0]: str(one.status) for name, one in self._core.scheduler.requests.items()}
        return {index: states.get(name, "unknown to the scheduler") for name, index in live.items()}

    def _step(self) -> list[tuple[str, Answer]]:
        outputs = self._engine.step()
        if not outputs:
            time.sleep(IDLE_S)
        return [(output.request_id, _answer(output)) for output in outputs if output.finished]


def _totals_class() -> type:
    """A class that requires vLLM, which this module imports only in the child process."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Totals(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self.totals: Counter[str] = Counter()

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: object, **__: object) -> None:
            if scheduler_stats is not None:
                self.totals["local_hits"] += scheduler_stats.prefix_cache_stats.hits
                if (external := scheduler_stats.connector_prefix_cache_stats) is not None:
                    self.totals["hits"] += external.hits
                if (guesses := scheduler_stats.spec_decoding_stats) is not None:
                    self.totals["guessed"] += guesses.num_draft_tokens
                    self.totals["right_guesses"] += guesses.num_accepted_tokens
                for name, value in (scheduler_stats.kv_connector_stats or {}).items():
                    if isinstance(value, int):
                        self.totals[name] = value
            if iteration_stats is not None:
                self.totals["preemptions"] += iteration_stats.num_preempted_reqs

        def log_engine_initialized(self) -> None:
            pass

    return Totals


def _answer(output: Any) -> Answer:
    (completion,) = output.outputs
    steps = [{token: entry.logprob for token, entry in step.items()} for step in completion.logprobs]
    chosen = tuple(
        max(step, key=step.__getitem__) for step in steps
    )  # the first of equal ones, which is the sampled one
    return Answer(
        chosen,
        tuple(step[token] for step, token in zip(steps, completion.token_ids, strict=True)),
        tuple(margin(step.values()) for step in steps),
        output.num_cached_tokens or 0,
    )
