"""Shared by the tests of `kvbm bench`: a small workload, mock engines by arm, and limits for a busy machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvbm_cli.profile.workload import Schedule, Workload
from mock_engine import MockEngine, Options

from kvbm_cli.bench.records.request_record import RequestRecord
from kvbm_cli.bench.verdict import VerdictLimits

WORKLOAD = Workload(
    name="small",
    users=3,
    turns=2,
    system_tokens=32,
    history_tokens=400,
    question_tokens=16,
    answer_tokens=6,
    schedule=Schedule(arms="interleaved", interval_s=0.12),
    request_timeout_s=5.0,
)
# With steady engines, a busy machine changes no verdict: it adds some 50 ms to a request, and times differ by 200 ms.
STEADY_S = 0.75
STEADY_WORKLOAD = WORKLOAD.model_copy(update={"schedule": Schedule(arms="interleaved", interval_s=STEADY_S)})
STEADY_OPTIONS = {"base_ms": 100.0, "computed_token_ms": 0.5}
SLOW_G2_TOKEN_MS = 1.0
PATIENT = VerdictLimits(lateness_ms=2000.0, client_cpu_share=2.0, collapse_utilisation=1.1, collapse_queue_share=1.1)
SMALL_G1_BLOCKS = 60
COMPUTED_TOKEN_MS = 0.1


class MockEngines:
    """One mock engine per arm: G1 holds two of the three conversations, except where it has room for everything."""

    def __init__(self, **changes: Options) -> None:
        small = Options(g1_blocks=SMALL_G1_BLOCKS, computed_token_ms=COMPUTED_TOKEN_MS)
        roomy = Options(computed_token_ms=COMPUTED_TOKEN_MS)
        self.options = {
            "recording": roomy,
            "baseline": small,
            "kvbm": replace(small, g2_blocks=10_000),
            "floor": roomy,
            **changes,
        }
        self.started: list[str] = []
        self.running = self.most_at_once = 0

    @contextmanager
    def __call__(self, arm: str) -> Iterator[MockEngine]:
        self.started.append(arm)
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        with MockEngine(self.options[arm]) as engine:
            yield engine
        self.running -= 1

    def of_profiles(self, measured: str, reference: str, slower: dict[str, object] | None = None) -> MockEngines:
        """Engines of two profiles, both with a block manager; `slower` are options of the reference."""
        kvbm = self.options["kvbm"]
        return MockEngines(**{measured: kvbm, reference: replace(kvbm, **(slower or {}))})

    @classmethod
    def steady(cls) -> MockEngines:
        return cls(**{arm: replace(options, **STEADY_OPTIONS) for arm, options in cls().options.items()})

    def changed(self, arm: str, **changes: object) -> MockEngines:
        return MockEngines(**{**self.options, arm: replace(self.options[arm], **changes)})


class SilentProgress:
    """Collects what it receives."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.records: list[RequestRecord] = []

    def phase(self, text: str, *, expected_s: float | None = None, remaining_s: float | None = None) -> None:
        self.phases.append(text)

    def request_ended(self, record: RequestRecord) -> None:
        self.records.append(record)
